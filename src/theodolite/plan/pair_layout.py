"""`pair_layout.json`: the pair layout of a checkpoint whose config has no word for it, beside its config.json.

`theodolite convert layout` writes it where a family's own code turns pairs of the other layout.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from theodolite.plan.json_object import read_object
from theodolite.plan.model import ModelPlan

FILE = "pair_layout.json"
_LARGEST = 2**16
_LAYOUTS = ("halves", "interleaved")


def write_layout(folder: Path, layout: str, note: str) -> None:
    """State the layout of the checkpoint in `folder`."""
    (folder / FILE).write_text(json.dumps({"layout": layout, "note": note}, indent=2) + "\n", encoding="utf-8")


def read_layout(folder: Path) -> str | None:
    """The layout that a folder states besides its config, "halves" or "interleaved"; None where it states none.

    Raises:
        ValueError: the file is there, and says no layout.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        layout = read_object(path, largest=_LARGEST).get("layout")
    except ValueError as error:
        raise ValueError(f"{path}: it cannot be read: {error}") from None
    if layout not in _LAYOUTS:
        raise ValueError(f"{path}: layout: got {str(layout)!r:.80}; it must be one of {', '.join(_LAYOUTS)}")
    return str(layout)


def with_layout(plan: ModelPlan, layout: str) -> ModelPlan:
    """The plan with all its pairs in one layout."""
    return replace(
        plan,
        layers=tuple(
            layer if layer.rotate is None else replace(layer, rotate=replace(layer.rotate, interleaved=_apart(layout)))
            for layer in plan.layers
        ),
    )


def differs(plan: ModelPlan, layout: str | None) -> bool:
    """Whether a stated layout is another than the plan's."""
    return layout is not None and any(rotary.interleaved != _apart(layout) for rotary in plan.rotaries)


def _apart(layout: str) -> bool:
    return layout == "interleaved"
