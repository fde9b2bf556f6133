"""What each model family says in its own way: pair layouts, layer patterns, names of keys, documented defaults."""

from theodolite.plan.families.family import Family
from theodolite.plan.families.layers import layer_bases, layer_plan, layer_types, turns
from theodolite.plan.families.strangers import refuse_misread
from theodolite.plan.families.table import family_of, known, unreadable
from theodolite.plan.families.unrotated import read_unrotated

__all__ = [
    "Family",
    "family_of",
    "known",
    "layer_bases",
    "layer_plan",
    "layer_types",
    "read_unrotated",
    "refuse_misread",
    "turns",
    "unreadable",
]
