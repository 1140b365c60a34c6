"""PyTorch: tensors, device placement, masks."""
