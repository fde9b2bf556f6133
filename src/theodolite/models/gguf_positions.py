"""What a GGUF file says about positions, put into the config that transformers made of it.

transformers 5.24 reads `rope.scaling` for gpt-oss only and drops it, and the tensors of divisors, for every other
family: Llama 3.1 from GGUF would run with unscaled frequencies, without a word.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from theodolite.models.errors import LoadError
from theodolite.plan import LayerPlan, PlanError
from theodolite.plan.gguf import DIVISOR_TENSORS, read_file
from theodolite.plan.gguf_header import Header, read_header
from theodolite.plan.huggingface import read_config, write_config


def restate(path: Path, config_file: Path) -> None:
    """Write the scaling that a GGUF file states into the config.json made from it.

    Raises:
        LoadError: the two differ in anything else about the rotation, or the file's scaling cannot be read.
    """
    header = read_header(path)
    config = json.loads(config_file.read_text(encoding="utf-8"))
    own = read_config(config, source=f"what transformers reads in {path.name}")
    try:
        stated = read_file(path)
    except PlanError as error:
        if _scales(header):
            raise LoadError(f"{path} scales its rotary positions in a way that is not read: {error}") from None
        if error.field != "general.architecture":
            raise LoadError(f"{path} contradicts itself or leaves something out: {error}") from None
        # An architecture that transformers knows and `plan.gguf` does not, with nothing to get wrong.
        return
    if len(stated.layers) != len(own.layers):
        raise LoadError(f"{path} states {len(stated.layers)} layers, and transformers reads {len(own.layers)}")
    layers = tuple(_scaled(path, *pair) for pair in zip(own.layers, stated.layers, strict=True))
    config_file.write_text(json.dumps(write_config(replace(own, layers=layers), config), indent=2), encoding="utf-8")


def _scales(header: Header) -> bool:
    kind = header.stated("rope.scaling.type") or "none"
    return kind != "none" or any(name in header.shapes for name in DIVISOR_TENSORS)


def _scaled(path: Path, own: LayerPlan, stated: LayerPlan) -> LayerPlan:
    if own.rotate is None or stated.rotate is None:
        fits, scaled = own.rotate is stated.rotate, own
    else:
        scaled = replace(own, rotate=replace(own.rotate, scaling=stated.rotate.scaling))
        # transformers undoes the order of rows that GGUF has, so the layout of pairs is its own.
        fits = replace(stated.rotate, interleaved=own.rotate.interleaved) == scaled.rotate
    if not fits:
        raise LoadError(f"{path} states {stated.rotate}, and transformers reads {own.rotate}: one of them is wrong")
    return scaled
