"""Asking a subject about the laws, here or in a process of its own."""
