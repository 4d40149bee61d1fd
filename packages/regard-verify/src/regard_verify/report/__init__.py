"""What was found: as values, as a page, and as pictures of what is visible."""
