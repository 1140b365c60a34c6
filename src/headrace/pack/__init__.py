"""Lengths -> rows, in closed form. Pure: NumPy and `errors` only."""
