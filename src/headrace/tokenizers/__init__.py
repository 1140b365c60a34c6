"""Text -> token ids: definitions that travel with the dataset, and the encoders that carry them out."""
