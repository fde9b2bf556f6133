"""Which encoding a model should have: the same small model, trained under each on the same data, then measured."""
