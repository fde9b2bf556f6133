"""The report: one HTML file that needs nothing beside it, the answer first."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from theodolite.report import pictures, schema, sentences, tables
from theodolite.report.figures import (
    Summary,
    cost,
    distance_reached,
    inside_and_last,
    length_held,
    percent,
    perplexity,
    plain,
    recall_at,
    recall_columns,
    recommended,
    shipped,
    tokens,
)
from theodolite.report.files import needs, resource, write_whole


class Picture(NamedTuple):
    """A picture drawn for a wide and for a narrow page, as data addresses."""

    wide: str
    narrow: str
    title: str
    caption: str


class Fact(NamedTuple):
    """One number of the answer: what it is, for the recommendation, for the model as shipped."""

    what: str
    best: str
    own: str


_TITLES = {
    "perplexity": sentences.perplexity_title,
    "recall": sentences.recall_title,
    "reach": sentences.reach_title,
    "wavelengths": sentences.wavelengths_title,
}


def write(summary: Summary, folder: str | Path) -> Path:
    """Write `report.html` into `folder` and return its path.

    Raises:
        ValueError: the summary does not follow its schema.
        ImportError: jinja2 or matplotlib is missing.
    """
    schema.validate(summary)
    with needs("jinja2", "to write the report"):
        from jinja2 import Environment, StrictUndefined
    # Every name comes from a file or a command line: all of it is escaped.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["plain"] = plain
    template = environment.from_string(resource("report.html.j2"))
    html = template.render(
        summary=summary,
        css=resource("report.css"),
        tokens=tokens,
        best=recommended(summary),
        best_name=tables.name_of(summary["recommendation"]["name"] or ""),
        facts=_facts(summary),
        settings=_settings(summary),
        pictures=list(_pictures(summary)),
        glance=tables.at_a_glance(summary),
        numbers=[
            *tables.by_band(summary),
            *tables.recall(summary),
            *tables.reach(summary),
            *tables.passkey(summary),
            tables.parameters(summary),
        ],
        details=_details(summary),
    )
    # A lone surrogate from a file name cannot be written in UTF-8; `plain` has replaced those that are shown.
    return write_whole(Path(folder) / "report.html", html.encode("utf-8", "replace"))


def _facts(summary: Summary) -> list[Fact]:
    """What the recommendation gives and costs, beside the model as shipped."""
    best, own = recommended(summary), shipped(summary)
    if best is None:
        return []

    def fact(what: str, value: Any) -> Fact:
        return Fact(what, value(best), value(own) if own is not None and own is not best else "")

    facts = [fact("reaches, tokens", distance_reached), fact("holds to, tokens", length_held)]
    facts.append(fact("perplexity, last band", lambda scaling: perplexity(inside_and_last(summary, scaling)[1])))
    longest = max(recall_columns(summary), default=None)
    if longest is not None:
        facts.append(fact(f"recall at {tokens(longest)}", lambda scaling: percent(recall_at(scaling, longest))))
    facts.append(fact("cost on short text", lambda s: cost(s["short_cost"] and s["short_cost"]["ratio"])))
    return [one for one in facts if one.best != "–"]


def _settings(summary: Summary) -> list[tuple[str, str]]:
    return [
        (engine, setting if isinstance(setting, str) else json.dumps(setting, indent=2, ensure_ascii=False))
        for engine, setting in summary["settings"].items()
    ]


def _details(summary: Summary) -> list[tuple[str, str]]:
    made = summary["model_details"]
    said = [
        ("architecture", f"{made['model_type']}, {made['layers']} layers"),
        ("parameters", tokens(made["parameters"])),
        ("run in", f"{made['dtype']} on {made['device']}"),
        *([("fingerprint", made["fingerprint"])] if "fingerprint" in made else []),
    ]
    if made["head_dim"] is not None:
        said.append(("head_dim", str(made["head_dim"])))
    if made["rope_theta"] is not None:
        said.append(("rope_theta", f"{made['rope_theta']:,.10g}"))
    return [*said, ("positions", made["positions"])]


def _pictures(summary: Summary) -> Iterator[Picture]:
    for name, title in _TITLES.items():
        drawn = [pictures.render(summary, name, kind="svg", narrow=narrow) for narrow in (False, True)]
        wide, narrow = (None if svg is None else _address(svg) for svg in drawn)
        if wide is not None and narrow is not None:
            yield Picture(wide, narrow, title(summary), sentences.CAPTIONS[name])


def _address(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")
