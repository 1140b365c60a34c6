"""What slows a loader down, found by rules: one rule a file, in `rules/`."""
