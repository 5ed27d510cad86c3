"""Pictures of schedules and of benchmarks: `gantt`, `html`, `anytime`, one module each."""
