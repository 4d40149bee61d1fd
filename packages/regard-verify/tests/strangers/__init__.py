"""Attentions as strangers write them: source text, drawn at random, right or with one fault."""
