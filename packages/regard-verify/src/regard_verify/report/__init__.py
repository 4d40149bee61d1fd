"""The report: as values and as a page."""
