"""Models by name, fetched from the Hugging Face hub: config, tokenizer and safetensors, nothing that runs."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from theodolite.models.errors import LoadError
from theodolite.models.quiet import quiet

_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
# Subfolders hold other formats, consolidated files a second copy of the same weights.
_UNWANTED = ("*/*", "consolidated*")
_PATIENCE_SECONDS = 20.0


def fetch(name: str) -> tuple[Path, str]:
    """The folder of a model from the hub, and its commit; without network the copy that was fetched before.

    Args:
        name: "owner/model".

    Raises:
        LoadError: there is no such model, no access, no safetensors in it, or no network and no copy.
    """
    with quiet():
        commit = _commit(name)
        try:
            folder = snapshot_download(
                name,
                revision=commit,
                allow_patterns=list(_WANTED),
                ignore_patterns=list(_UNWANTED),
                local_files_only=commit is None,
            )
        except GatedRepoError:
            raise LoadError(_gated(name)) from None
        except LocalEntryNotFoundError:
            raise LoadError(_unreachable(name)) from None
        except Exception as error:
            raise LoadError(f"{name} could not be fetched from the hub ({type(error).__name__}: {error})") from None
    return Path(folder), commit or Path(folder).name


def _commit(name: str) -> str | None:
    """The newest commit of a model; None if the hub does not answer."""
    try:
        # This call does not try again for half a minute when there is no network.
        info = HfApi().model_info(name, timeout=_PATIENCE_SECONDS)
    except GatedRepoError:
        raise LoadError(_gated(name)) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise LoadError(f"{name} is no file or folder here and no model on the hub") from None
    except Exception:
        return None
    files = [sibling.rfilename for sibling in info.siblings or ()]
    if not any(file.endswith(".safetensors") for file in files):
        raise LoadError(f"{name} has no safetensors on the hub; pickled weights are never opened")
    return info.sha


def count_hub_parameters(name: str) -> int:
    """Numbers in all weights of a model on the hub, without fetching them.

    Raises:
        LoadError: the hub does not answer, or does not know.
    """
    try:
        info = HfApi().model_info(name, timeout=_PATIENCE_SECONDS, expand=["safetensors"])
    except GatedRepoError:
        raise LoadError(_gated(name)) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise LoadError(f"{name} is no file or folder here and no model on the hub") from None
    except Exception:
        raise LoadError(_unreachable(name)) from None
    if info.safetensors is None:
        raise LoadError(f"{name} has no safetensors on the hub; pickled weights are never opened")
    return info.safetensors.total


def _gated(name: str) -> str:
    return f"{name} is gated on the hub; accept its terms there and log in with `hf auth login`"


def _unreachable(name: str) -> str:
    return f"{name} is no file or folder here, and the model hub cannot be reached; give a local folder or a .gguf file"
