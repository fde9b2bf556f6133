"""A question over long documents, answered by a local model."""
