"""The subject: found, understood and called in one canonical way."""
