"""Analysis of schedules: report, critical path, use of resources, unrolling."""
