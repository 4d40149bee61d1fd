"""Context parallel: tokens split over ranks, in training and prefill."""
