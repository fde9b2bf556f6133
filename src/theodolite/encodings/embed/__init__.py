"""Positions added to token embeddings, before the first layer."""
