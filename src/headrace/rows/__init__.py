"""(data, settings, seed, position) -> arrays: the pure function, evaluated. Starts no thread or process."""
