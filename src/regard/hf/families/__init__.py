"""Model families as data, and what regard knows of their attention modules."""
