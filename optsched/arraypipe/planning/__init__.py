"""Parts of a plan: checks, liveness, messages, segments, repair, seats, other schedules."""
