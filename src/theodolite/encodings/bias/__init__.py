"""Positions added to the attention scores."""
