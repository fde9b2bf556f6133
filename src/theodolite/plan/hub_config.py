"""The config of a model on the hub: that file alone, without the weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PATIENCE_SECONDS = 10.0


def fetch_config(name: str, files: Sequence[str]) -> Path:
    """The first of `files` that a model on the hub has; without network the copy that was fetched before.

    Args:
        name: "owner/model".

    Raises:
        ValueError: one sentence that says why there is none.
    """
    try:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HFValidationError,
            RepositoryNotFoundError,
        )
    except ImportError:
        raise ValueError(
            f"model: {name!r} is no file or folder here; for a name on the hub: pip install huggingface_hub"
        ) from None
    try:
        # A download tries again for half a minute where there is no network, and this call does not.
        HfApi().model_info(name, timeout=_PATIENCE_SECONDS)
        reached = True
    except GatedRepoError:
        raise ValueError(_gated(name)) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ValueError(f"model: {name!r} is no file or folder here and no model on the hub") from None
    except Exception:
        reached = False
    with _quiet():
        for file in files:
            try:
                return Path(hf_hub_download(name, file, local_files_only=not reached))
            except GatedRepoError:
                raise ValueError(_gated(name)) from None
            except EntryNotFoundError:
                # It is not there, or, without network, not among the copies.
                continue
            except Exception as error:
                raise ValueError(f"model: {name!r} cannot be fetched from the hub ({type(error).__name__})") from None
    if not reached:
        raise ValueError(f"model: {name!r} is no file or folder here, and the hub cannot be reached; give a local file")
    raise ValueError(f"model: {name!r} on the hub has neither {' nor '.join(files)}")


def _gated(name: str) -> str:
    return f"model: {name!r} is gated on the hub; accept its terms there and log in with `hf auth login`"


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no log lines inside the block; both as before after it."""
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    verbosity, bars = hub_logging.get_verbosity(), not are_progress_bars_disabled()
    hub_logging.set_verbosity(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)
        if bars:
            enable_progress_bars()
