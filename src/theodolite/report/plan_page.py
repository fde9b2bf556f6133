"""A page on which a model's rotations can be moved: base, factor and length are sliders. One file, no network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theodolite import __version__
from theodolite.plan.derived import derive, settled_inv_freq, workable
from theodolite.plan.describe import describe
from theodolite.plan.errors import LONGEST
from theodolite.plan.layer_json import seen_by, usual_length
from theodolite.plan.model import ModelPlan
from theodolite.plan.rotary import Rotary
from theodolite.plan.scaling import Llama3, LongRoPE, Scaling, YaRN, YaRNByLength
from theodolite.report.alibi_figure import alibi_figure
from theodolite.report.figures import plain
from theodolite.report.files import needs, resource, write_whole
from theodolite.report.inspection import lines, ranges

if TYPE_CHECKING:
    from theodolite.plan.findings import Finding
    from theodolite.plan.open import Opened

_SUFFIXES = (".html", ".htm")
_UNSTATED = 8192
_MOST_ROTATIONS, _WIDTH = 64, 100
_SLIDERS = (
    ("base", "Base", "rope_theta, log scale"),
    ("factor", "Factor", "divides positions, log scale"),
    ("length", "Length", "tokens of the sequence, log scale"),
)
_ALL = "rotation scaling base-slider base-number factor-slider factor-number original-number"
_OUTPUTS = (
    ("base", "base", "base-slider base-number"),
    ("factor", "factor", "factor-slider factor-number"),
    ("length", "length, tokens", "length-slider length-number"),
    ("unturned", "pairs that never turn", f"{_ALL} length-slider length-number"),
    ("live", "longest wavelength within it, tokens", f"{_ALL} length-slider length-number"),
    ("longest", "longest wavelength, tokens", _ALL),
    ("first", "mean cosine first negative, tokens", _ALL),
)


def write(opened: Opened, findings: Sequence[Finding], path: Path) -> Path:
    """Write the page to `path`, whole or not at all, and return it.

    Raises:
        ValueError: the name does not end in `.html` or `.htm`.
        ImportError: jinja2 is missing.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"html: got {str(path)!r}; the name must end in {' or '.join(_SUFFIXES)}")
    return write_whole(path, page(opened, findings).encode("utf-8", "replace"))


def page(opened: Opened, findings: Sequence[Finding]) -> str:
    """The page as text; every name from a file is escaped, in the text and in the data of the script."""
    with needs("jinja2", "to write the page"):
        from jinja2 import Environment, StrictUndefined
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["plain"] = plain
    data, script = page_data(opened.plan), resource("plan.js")
    return environment.from_string(resource("plan.html.j2")).render(
        name=opened.name,
        location=opened.location,
        told=describe(opened.plan),
        css=resource("report.css") + resource("plan.css"),
        script=script,
        # The one script that may run: nothing that a name could smuggle in.
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=embedded(data) if data["rotations"] else "",
        alibi=alibi_figure(opened.plan),
        findings=findings,
        # Without its last paragraph, the findings, which have a part of their own.
        lines="\n".join(map(plain, lines(opened, (), width=_WIDTH)[:-2])),
        sliders=_SLIDERS,
        outputs=_OUTPUTS,
        version=__version__,
    )


def page_data(plan: ModelPlan) -> dict[str, Any]:
    """What the script starts from: each distinct rotation, and the length that its numbers are of (tokens).

    Those of layers that see every distance stand first, for the length says most of them.
    """
    length = usual_length(plan) or _UNSTATED
    layers: dict[Rotary, list[int]] = {}
    for number, layer in enumerate(plan.layers):
        if layer.rotate is not None:
            layers.setdefault(layer.rotate, []).append(number)
    seen = {rotary: seen_by(plan.layers[number] for number in numbers) for rotary, numbers in layers.items()}
    order = sorted(layers, key=lambda rotary: -(seen[rotary] or LONGEST))[:_MOST_ROTATIONS]
    worked = frozenset(workable(order))
    return {
        "longest": LONGEST,
        "rotations": [
            {
                **_rotation(layers[rotary], rotary, length),
                "seen": seen[rotary],
                # The search takes the browser a while, and a picture of the page may not wait for it.
                "first": {"at": derive(rotary, length).first_negative} if rotary in worked else None,
            }
            for rotary in order
        ],
    }


def embedded(data: Any) -> str:
    """JSON that can stand inside a script element: no tag, no comment and no line separator is in it."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _rotation(layers: Sequence[int], rotary: Rotary, length: int) -> dict[str, Any]:
    scaling = rotary.scaling.yarn if isinstance(rotary.scaling, YaRNByLength) else rotary.scaling
    return {
        "name": f"layers {ranges(layers)}",
        "rotary_dim": rotary.rotary_dim,
        "live_pairs": rotary.live_pairs,
        "scaling": "none" if type(scaling) is Scaling else scaling.rope_type,
        "inv_freq": settled_inv_freq(rotary, length).tolist(),
        "start": {
            "base": rotary.rope_theta,
            "factor": getattr(scaling, "factor", None) or 4.0,
            "length": length,
            "original": getattr(scaling, "original_max_position_embeddings", None) or length,
        },
        "settings": _settings(scaling, length),
    }


def _settings(own: Scaling, length: int) -> dict[str, Any]:
    """What each scaling has besides a factor: the model's own where it has that one, else what is usual."""
    yarn = own if isinstance(own, YaRN) else YaRN(factor=1, original_max_position_embeddings=length)
    usual = Llama3(factor=1, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=length)
    chosen = {
        "yarn": (yarn, ("beta_fast", "beta_slow", "truncate", "ramp")),
        "llama3": (own if isinstance(own, Llama3) else usual, ("low_freq_factor", "high_freq_factor")),
    }
    made: dict[str, Any] = {kind: _fields(scaling, names) for kind, (scaling, names) in chosen.items()}
    if isinstance(own, LongRoPE):
        made["longrope"] = _fields(own, ("short_factor", "long_factor"))
    return made


def _fields(scaling: Scaling, names: Sequence[str]) -> dict[str, Any]:
    return {field.name: getattr(scaling, field.name) for field in fields(scaling) if field.name in names}
