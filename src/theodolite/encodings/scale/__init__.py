"""Positions that multiply the attention scores."""
