"""How a DataLoader's batches come about beside the loop that uses them: in threads, or in processes."""
