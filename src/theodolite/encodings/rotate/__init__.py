"""Positions that turn queries and keys."""
