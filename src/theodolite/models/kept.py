"""Tensors in a file that says what they are of: written whole or not at all, read by their owner alone, no pickle."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from theodolite.models.errors import LoadError
from theodolite.models.feed import Prefix

_FORMAT = 2
_ENTRY = "theodolite"


def write_kept(path: str | Path, what: str, tensors: dict[str, Tensor], identity: dict[str, Any], **state: Any) -> None:
    """Write tensors with what they depend on and a little plain data beside them, as JSON has it.

    Args:
        what: the kind of thing, in a few words: "a saved stream".
    """
    # Where a link leads to, which is not replaced itself.
    path = Path(os.path.realpath(path))
    # Of their own: a view would be refused, or written with the whole buffer that it looks at.
    whole = {name: x.contiguous() for name, x in tensors.items()}
    entry = {"format": _FORMAT, "what": what, "identity": identity, "state": state}
    said = json.dumps({**entry, "digest": _digest(entry, whole)})
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        try:
            save_file(whole, partial, metadata={_ENTRY: said})
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_kept(path: str | Path, what: str, identity: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_kept` wrote: the tensors, on the CPU, and the plain data.

    Raises:
        LoadError: no such file, one of another kind or version, or one that depends on something else than `identity`.
    """
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            said = json.loads((file.metadata() or {})[_ENTRY])
            if said["format"] != _FORMAT or said["what"] != what:
                raise LoadError(f"{path}: it is no {what.removeprefix('a ')} of this version")
            for name, mine in identity.items():
                theirs = said["identity"].get(name)
                if theirs != mine:
                    shown = f": {theirs!r}, and what is asked for has {mine!r}" if _is_short(theirs, mine) else ""
                    raise LoadError(f"{path}: it is of another {name}{shown}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            digest = said.pop("digest")
            if digest != _digest(said, tensors):
                raise LoadError(f"{path}: it is not as it was written; delete it")
            return tensors, dict(said["state"])
    except FileNotFoundError:
        raise LoadError(f"{path}: there is no such file") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{path}: it cannot be read as {what}: {error}") from error


def kept_state(path: str | Path) -> dict[str, Any]:
    """The plain data alone, unchecked; empty where there is none: who reads the file is told what is wrong with it."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return dict(json.loads((file.metadata() or {})[_ENTRY])["state"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def prefix_tensors(prefix: Prefix, layers: int, length: int | None = None) -> dict[str, Tensor]:
    """The first `length` tokens of what was read, all by default, by names."""
    length = prefix.length if length is None else length
    if not length:
        return {}
    pairs = [prefix.read(layer, end=length) for layer in range(layers)]
    return {f"{kind}.{layer}": x for layer, pair in enumerate(pairs) for kind, x in zip("kv", pair, strict=True)}


def fill_prefix(
    prefix: Prefix, tensors: dict[str, Tensor], positions: Tensor, layers: int, path: str | Path, like: Any
) -> None:
    """Put them back, at `positions` (n,), into an empty prefix of a model with `layers` layers.

    Args:
        like: the model; keys and values go to its device, and must have its dtype.

    Raises:
        LoadError: the file lacks a layer, or has it in another shape than it was written in.
    """
    tokens = len(positions)
    if not tokens:
        return
    prefix.make_room(tokens)
    for layer in range(layers):
        k, v = (tensors.get(f"{kind}.{layer}") for kind in "kv")
        for x in (k, v):
            if x is None or x.dim() != 4 or (x.shape[0], x.shape[2]) != (1, tokens) or x.dtype != like.dtype:
                raise LoadError(f"{path}: layer {layer} is not as it was written")
        assert k is not None
        assert v is not None
        prefix.write(layer, k.to(like.device), v.to(like.device))
    prefix.advance(positions)


def _digest(entry: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Of all that a file holds."""
    digest = hashlib.sha256(json.dumps(entry, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _is_short(*values: Any) -> bool:
    """Whether a reader can make something of them: a hash and a whole plan say nothing."""
    return not any(len(repr(value)) > 60 or re.fullmatch("[0-9a-f]{16,}", str(value)) for value in values)
