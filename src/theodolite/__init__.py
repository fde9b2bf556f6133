"""Theodolite: position encodings for Transformers, read, applied, measured and carried further.

Names are imported when first used: `theodolite.plan` needs numpy only.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Rotary": "theodolite.plan",
    "ModelPlan": "theodolite.plan",
    "LayerPlan": "theodolite.plan",
    "PlanError": "theodolite.plan",
    "RotaryEmbedding": "theodolite.encodings",
    "rotary_tables": "theodolite.encodings",
    "Policy": "theodolite.encodings",
    "build": "theodolite.encodings",
    "rotate": "theodolite.kernels",
    "load": "theodolite.models",
    "patch": "theodolite.models",
    "unpatch": "theodolite.models",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'theodolite' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
