"""What people read of a schedule: report, critical path, occupancy, iterations."""
