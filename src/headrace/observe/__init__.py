"""What a stage spends, counted where it happens; what that tells, as numbers and as advice."""
