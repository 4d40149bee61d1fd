"""What is verified: found, understood and called in one canonical way."""
