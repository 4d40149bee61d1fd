"""What PyTorch users wrap around a call of `attend` or of a layer, and what must hold there."""
