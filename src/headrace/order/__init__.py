"""Position -> row ids, in closed form. Pure: NumPy and `errors` only."""
