"""Model families as data: how the attention of each projects, rotates, masks and outputs."""
