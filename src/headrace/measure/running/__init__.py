"""The loop of a training script, run and timed: targets, steps, child processes, sweeps."""
