"""Other people's models: load them, and put a plan's positions into them in place."""

try:
    import safetensors as _safetensors  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"theodolite.models needs {error.name}, which is not installed: pip install 'theodolite[survey]'"
    ) from error

from theodolite.models.errors import LoadError
from theodolite.models.load import LoadedModel, load
from theodolite.models.patch import current_plan, patch, patched, unpatch
from theodolite.models.source import Source, resolve, weights_bytes
from theodolite.models.stream import Stream, Streamed, stream
from theodolite.plan.open import DEFAULT_MODEL

__all__ = [
    "DEFAULT_MODEL",
    "LoadError",
    "LoadedModel",
    "Source",
    "Stream",
    "Streamed",
    "current_plan",
    "load",
    "patch",
    "patched",
    "resolve",
    "stream",
    "unpatch",
    "weights_bytes",
]
