"""Kernels that PyTorch lacks, compiled where they run: they need numba, and no compiler."""
