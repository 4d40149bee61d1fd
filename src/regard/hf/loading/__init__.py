"""Models from files that are not trusted: checked, then read by transformers, without network."""
