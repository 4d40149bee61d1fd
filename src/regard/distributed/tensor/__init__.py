"""Tensor parallel: the heads of a layer, and the weights that belong to them, split over ranks."""
