"""An extended model as a folder: config, weights, tokenizer, limits and a card, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from theodolite.models.appearing import appearing, umask
from theodolite.models.errors import LoadError
from theodolite.models.extend.card import Card, write_card
from theodolite.models.extend.configs import (
    config_for,
    raised_limits,
    require_read_by_transformers,
    require_turned_so,
)
from theodolite.models.extend.markdown import escaped
from theodolite.models.source import read_config_dict, safetensors_files
from theodolite.models.tensor_files import INDEX, checked_files, is_stale
from theodolite.plan.json_object import parse_object
from theodolite.plan.pair_layout import differs, read_layout

_LIMITS = ("tokenizer_config.json", "generation_config.json")
_CARD, _ORIGINAL_CARD = "README.md", "README.original.md"
# What transformers and other engines read beside the weights; nothing that runs, no pickles.
_WANTED = ("*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja")
_LICENCES = ("LICEN*", "NOTICE*", "USE_POLICY*")


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written: the path, and the files in it by how they came there, sorted."""

    path: Path
    linked: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    left_out: tuple[str, ...] = field(default=())


def extend_folder(
    folder: Path,
    out: Path,
    card: Card,
    *,
    copy: bool = False,
    progress: Callable[[str], object] = lambda line: None,
) -> Written:
    """Write a model folder that says `card.after`; the one that it comes from is not changed.

    Args:
        folder: with config.json, safetensors and a tokenizer.
        out: a folder that is not there yet.
        copy: the weights, also where a hard link would do.
        progress: called with a line before each step that takes long.

    Raises:
        PlanError: a config has no words for the plan, or the family's code turns other channels than it says.
        LoadError: weights or config cannot be read or are damaged, or the installed transformers reads another plan.
        FileExistsError: `out` is there.
        ValueError: `out` is inside `folder`.
        OSError: it cannot be written.
    """
    require_outside(out, folder)
    config = read_config_dict(folder)
    require_turned_so(config, card.before)
    layout = read_layout(folder)
    layout = layout if differs(card.after, layout) else None
    written, legacy = config_for(config, card.after)
    weights = safetensors_files(folder)
    checked_files(weights)
    with appearing(out) as scratch:
        _write_json(scratch / "config.json", written)
        made = ["config.json", _CARD]
        if legacy is not None:
            _write_json(scratch / "config.legacy.json", legacy)
            made.append("config.legacy.json")
        require_read_by_transformers(scratch, card.after)
        stale = {INDEX} if is_stale(folder / INDEX, [file.name for file in weights]) else set()
        beside = _copy_beside(folder, scratch, card.to, {"config.json", "config.legacy.json", _CARD, *stale})
        progress(f"{'copying' if copy else 'linking'} {len(weights)} weight file{'s' * (len(weights) > 1)}")
        linked = [file.name for file in weights if _place(file, scratch / file.name, copy)]
        if card.gguf is not None:
            # Links to the cache of conversions, which some writers keep to themselves.
            for name in linked:
                _make_readable(scratch / name)
        here = {path.relative_to(scratch).as_posix() for path in scratch.rglob("*") if path.is_file()}
        left = sorted(path.name for path in folder.iterdir() if path.name not in here | {_CARD} and _is_known(path))
        made += beside
        copied = sorted(here - {*linked, *made})
        result = Written(
            path=out, linked=tuple(linked), copied=tuple(copied), made=tuple(sorted(made)), left_out=tuple(left)
        )
        about = _about(card, result, legacy is not None, _ORIGINAL_CARD in here)
        text = write_card(card, name=out.name, files=about, layout=layout)
        (scratch / _CARD).write_text(text, encoding="utf-8", errors="replace")
    return result


def _is_known(path: Path) -> bool:
    return not path.name.startswith(".") and path.name != "additional_chat_templates"


def _copy_beside(folder: Path, scratch: Path, to: int, without: Collection[str]) -> list[str]:
    """Copy what stands beside config and weights; the names of those that were changed."""
    changed = []
    for pattern in (*_WANTED, *_LICENCES):
        for file in sorted(folder.glob(pattern)):
            target = scratch / file.relative_to(folder)
            if file.name in without or target.exists() or not file.is_file() or file.suffix == ".safetensors":
                continue
            target.parent.mkdir(exist_ok=True)
            content = _content(file) if file.name in _LIMITS else None
            raised = None if content is None else raised_limits(file.name, content, to)
            if raised is None or raised == content:
                shutil.copyfile(file, target)
            else:
                _write_json(target, raised)
                changed.append(file.name)
    if (folder / _CARD).is_file():
        shutil.copyfile(folder / _CARD, scratch / _ORIGINAL_CARD)
    return changed


def _content(file: Path) -> dict[str, Any]:
    try:
        return parse_object(file.read_bytes())
    except ValueError as error:
        raise LoadError(f"{file} cannot be read: {error}") from None


def _place(file: Path, target: Path, copy: bool) -> bool:
    """Put a weight file there, linked where that can be done and is wanted; whether it was linked."""
    # A cache of the hub has links to its blobs.
    source = file.resolve()
    if not copy:
        try:
            os.link(source, target)
        except OSError:
            # Another file system, or one without links.
            pass
        else:
            return True
    shutil.copyfile(source, target)
    return False


def _make_readable(file: Path) -> None:
    # In another user's cache the permissions are theirs to give.
    with suppress(OSError):
        file.chmod(0o666 & ~umask())


def _about(card: Card, written: Written, legacy: bool, original_card: bool) -> str:
    """The sentence of the card on its files."""
    whose = "the original's" if card.gguf is None else f"theodolite's conversion of {escaped(card.gguf)} to float32"
    told = [f"The weight files are {'hard links to' if written.linked else 'copies of'} {whose}."]
    if legacy:
        told.append(
            "`config.json` has `rope_parameters` by kind of layer, as transformers 5 has it; `config.legacy.json` says "
            "the same in the keys of older readers, which take it under the name `config.json`."
        )
    elif "config.json" in written.made:
        told.append(
            "`config.json` has `rope_parameters` for transformers 5, and `rope_theta` and `rope_scaling` beside it for "
            "older readers."
        )
    if original_card:
        told.append(f"The card of the original is `{_ORIGINAL_CARD}`, as it was.")
    return " ".join(told)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=True) + "\n", encoding="utf-8")


def require_outside(out: Path, folder: Path) -> None:
    """Raise where something would be written into the folder that it is made from."""
    if folder.resolve() in out.resolve().parents:
        raise ValueError(f"out: {str(out)!r} is inside {str(folder)!r}, which is not changed; give another place")
