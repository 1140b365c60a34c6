"""Whether the step waits for data, which stage is to blame, and what to set instead."""
