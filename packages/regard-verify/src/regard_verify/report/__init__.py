"""What was found: as values and as a page."""
