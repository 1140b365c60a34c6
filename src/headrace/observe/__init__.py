"""What each stage spends, counted where it happens, and what follows from it: statistics and advice."""
