"""Loading models from folders and GGUF files: checked first, nothing fetched or executed."""
