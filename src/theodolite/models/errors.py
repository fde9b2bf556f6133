"""The one exception of loading."""


class LoadError(RuntimeError):
    """A model cannot be loaded; the message is one sentence that says why and what would help."""
