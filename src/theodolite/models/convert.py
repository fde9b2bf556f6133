"""A checkpoint written anew in the other pair layout: tensor by tensor, complete or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from theodolite.encodings.layout import Heads, Layout, Part, attention_sites, convert_rows, row_moves
from theodolite.models.appearing import appearing, appearing_file
from theodolite.models.detect import Detection, detect_in, given_heads
from theodolite.models.errors import LoadError
from theodolite.models.layer_heads import LayerHeads, find_config, layer_of, read_raw
from theodolite.models.layout_card import remark
from theodolite.models.rewritten import beside, require_new, write_moved
from theodolite.models.tensor_files import TensorFile, require_readable, tensor_files
from theodolite.plan.pair_layout import FILE as PAIR_LAYOUT
from theodolite.plan.pair_layout import read_layout, write_layout

_NO_GGUF = ": llama.cpp reads one layout of each architecture; convert the safetensors that it was made from"
_ADAPTER = "It fits a base model that is converted alike, and no other."


@dataclass(frozen=True)
class Conversion:
    """What a conversion does, or did.

    Args:
        to: the layout that the output is in.
        source_layout: the one that the input is in.
        why: how that is known.
        moved: the tensors whose rows move, with what each holds.
        left_out: files with other weights, which are not copied: they would be in the old layout.
        fits: whether the family's own code reads the output as it is; None without a config.
        note: one sentence about that.
    """

    to: Layout
    source_layout: Layout
    why: str
    moved: Mapping[str, Part]
    left_out: tuple[str, ...]
    fits: bool | None
    note: str


def convert_layout(
    source: str | Path,
    out: str | Path,
    *,
    to: Layout,
    source_layout: Layout | None = None,
    config: str | Path | None = None,
    num_heads: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    rotary_dim: int | None = None,
    trailing: bool = False,
    sites: Iterable[str] | None = None,
    dry_run: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Conversion:
    """Write a checkpoint in the other layout: rows of queries and keys move, and no number changes.

    One tensor is in memory at a time, beside its new self. The output appears whole or not at all.

    Args:
        source: a folder with safetensors (a model's or a LoRA adapter's), or one safetensors file.
        out: a folder, or a file for a file; it must not exist.
        to: "halves" or "interleaved".
        source_layout: what the input is in, where you know it. Else its weights are asked (`detect_layout`), else its
            note from an earlier conversion, else what its config says; and it is refused if that is `to` already.
        config: the base model's config, for an adapter or a lone file; the folder's own by default.
        num_heads, num_key_value_heads, head_dim, rotary_dim, trailing: as for `convert_tensor`, in place of a config.
        sites: as for `convert_state_dict`, where queries and keys are in several places.
        dry_run: write nothing.

    Raises:
        LoadError: files are missing or damaged.
        ValueError: it is in that layout already; `out` exists; names, shapes or scales do not fit.
    """
    source, out = Path(source), Path(out)
    require_readable(source, instead=_NO_GGUF)
    heads = given_heads(
        source, config, head_dim=head_dim, rotary_dim=rotary_dim, trailing=trailing,
        num_heads=num_heads, num_key_value_heads=num_key_value_heads,
    )  # fmt: skip
    require_new(source, out)
    files = tensor_files(source)
    chosen = None if sites is None else tuple(sites)
    moves = plan_moves(files, heads, to, chosen, adapter=is_adapter(source))
    found, why = _layout_of(source, heads, to, source_layout, lambda: detect_in(files, heads, chosen))
    others, left_out = beside(source, files) if source.is_dir() else ((), ())
    fits, note = (False, _ADAPTER) if is_adapter(source) else _fit(heads, to)
    conversion = Conversion(to, found, why, {k: part for k, (part, _) in moves.items()}, left_out, fits, note)
    if dry_run:
        return conversion
    tell = progress or (lambda line: None)
    if source.is_file():
        with appearing_file(out) as partial:
            write_moved(files[0], partial, moves)
        return conversion
    with appearing(out) as folder:
        for name in others:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
        for number, file in enumerate(files, start=1):
            tell(f"writing {file.path.name} ({number} of {len(files)})")
            write_moved(file, folder / file.path.name, moves)
        _state(source, folder, conversion, heads)
    return conversion


def is_adapter(source: Path) -> bool:
    """Whether it is the folder of a LoRA adapter."""
    return (source / "adapter_model.safetensors").is_file()


def plan_moves(
    files: Sequence[TensorFile], heads: LayerHeads, to: Layout, sites: Sequence[str] | None, *, adapter: bool = False
) -> dict[str, tuple[Part, Heads]]:
    """The tensors whose rows move, with what each holds and the heads of its layer; names and shapes are checked."""
    shapes = {entry.name: entry.meta() for file in files for entry in file.entries}
    turning = {key: x for key, x in shapes.items() if layer_of(key) is None or heads.width_of(key) is not None}
    if sites is None:
        sites = _only_site(attention_sites(turning, heads.names))
    moves: dict[str, tuple[Part, Heads]] = {}
    groups: dict[Any, dict[str, Tensor]] = {}
    for key, x in turning.items():
        width = heads.width_of(key)
        if width is not None:
            groups.setdefault(width, {})[key] = x
    for width, tensors in groups.items():
        of_width = _heads(heads, width, to, tensors)
        here = set(attention_sites(tensors, heads.names))
        found = row_moves(
            tensors,
            of_width,
            # One that no tensor of this group has is no error.
            names={name: part for name, part in heads.names.items() if any(f".{name}." in key for key in tensors)},
            sites=[site for site in sites if site in here],
            rows_per_scale=heads.rows_per_scale,
            # Of an adapter queries may come without keys, which then move in the base model alone.
            shard=adapter,
        )
        for key, part in found.items():
            convert_rows(key, tensors[key], part, of_width)
            moves[key] = (part, of_width)
    if not moves:
        raise ValueError("no queries or keys were found to convert")
    return moves


def _only_site(there: Sequence[str]) -> Sequence[str]:
    if len(there) > 1:
        raise ValueError(f"sites: queries and keys are in {list(there)}; say which are meant")
    return there


def _heads(heads: LayerHeads, width: Any, to: Layout, tensors: Mapping[str, Tensor]) -> Heads:
    query, keys = heads.num_heads, heads.num_key_value_heads
    if query is None:
        query = _counted(tensors, ("q_proj", "wq", "query"), width.head_dim)
    if keys is None:
        keys = _counted(tensors, ("k_proj", "wk", "key"), width.head_dim) if heads.num_heads is None else query
    return Heads(query, keys, width.head_dim, width.rotary_dim, width.trailing, heads.v_head_dim, to)


def _counted(tensors: Mapping[str, Tensor], names: Sequence[str], head_dim: int) -> int:
    for key, x in tensors.items():
        words = key.split(".")
        if len(words) > 1 and words[-2] in names and words[-1] == "weight" and x.dim() == 2 and len(x) % head_dim == 0:
            return max(1, len(x) // head_dim)
    raise ValueError("num_heads: it does not follow from the names and shapes; give num_heads and num_key_value_heads")


def _layout_of(
    source: Path, heads: LayerHeads, to: Layout, given: Layout | None, ask: Callable[[], Detection]
) -> tuple[Layout, str]:
    """What layout the input is in, and how that is known."""
    other: Layout = "interleaved" if to == "halves" else "halves"
    if given is not None:
        if given == to:
            raise ValueError(
                f"source_layout: got {given!r}, which is the layout asked for; there is nothing to convert"
            )
        return given, "you said so"
    detection = None if is_adapter(source) else _asked(ask)
    note = _noted(source)
    if detection is not None and detection.layout is not None:
        found, why = detection.layout, "its weights show it"
    elif note is not None:
        found, why = note, f"its {PAIR_LAYOUT} says so"
    elif heads.stated is not None:
        found, why = heads.stated, "its config and its family's code say so, and its weights do not tell"
    else:
        found, why = other, "you ask for the other one, and its weights do not tell"
    if found == to:
        raise ValueError(
            f"{source} is {found} already: {why}. Converting it again would spoil it; if it is {other}, say so "
            f"(--from {'half' if other == 'halves' else other}; source_layout in Python)"
        )
    return found, why


def _asked(ask: Callable[[], Detection]) -> Detection | None:
    try:
        return ask()
    except LoadError:
        # Packed weights, say, whose rows can be moved and not be looked at.
        return None


def _noted(source: Path) -> Layout | None:
    layout = read_layout(source) if source.is_dir() else None
    return None if layout is None else "interleaved" if layout == "interleaved" else "halves"


def _fit(heads: LayerHeads, to: Layout) -> tuple[bool | None, str]:
    """Whether the family's own code reads what is written, and a sentence about it."""
    if heads.stated is None:
        return None, f"Run it with {to} pairs: Rotary(..., interleaved={to == 'interleaved'})."
    family = heads.model_type
    if heads.told:
        return True, f"The config says so now: rope_interleave={str(to == 'interleaved').lower()}."
    if heads.stated == to:
        return True, f"It is what the code of {family} reads."
    return False, (
        f"The code of {family} reads {heads.stated}: in plain transformers this checkpoint gives nonsense. Patch "
        f"the model with a plan of interleaved={to == 'interleaved'}, or run it in code that has {to} pairs."
    )


def _state(source: Path, folder: Path, conversion: Conversion, heads: LayerHeads) -> None:
    """Say the layout in the folder: in the config where the family's code looks there, else in a note if it must be.

    And in its card, whose own words on how to run it are of the checkpoint as it was.
    """
    remark(folder, conversion.to, conversion.note)
    (folder / PAIR_LAYOUT).unlink(missing_ok=True)
    file = find_config(source)
    if heads.told and file is not None and not is_adapter(source):
        config = read_raw(file)
        part = next((config[name] for name in ("text_config",) if isinstance(config.get(name), dict)), config)
        part["rope_interleave"] = conversion.to == "interleaved"
        (folder / file.name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    elif not conversion.fits:
        write_layout(folder, conversion.to, conversion.note)
