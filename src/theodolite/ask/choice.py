"""How a model is to read more than it was trained on: as it was asked for, as a survey found, or as the text shows."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from theodolite.models.gguf_cache import cache_folder
from theodolite.models.load import LoadedModel
from theodolite.plan import PlanError
from theodolite.runs import Store
from theodolite.survey import Settings, verdict
from theodolite.survey.bench import Bench, Listener
from theodolite.survey.instruments import Instruments
from theodolite.survey.maps import spelled
from theodolite.survey.scalings import (
    AS_SHIPPED,
    Candidate,
    candidate_of,
    default_factor,
    parse_scalings,
    with_factor,
)
from theodolite.survey.settings import checked_length
from theodolite.survey.summary import SCHEMA
from theodolite.survey.texts import Document, tokens_digest

# Those that copied best where they were compared (docs/survey.md), scalings before maps.
_TRIED = "none,ntk,yarn,rerope,self-extend"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is taken, and why, in a sentence for who asked."""

    candidate: Candidate
    why: str


def as_asked(loaded: LoadedModel, scaling: str, tokens: int) -> Choice:
    """The scaling or map that the user names.

    Raises:
        PlanError: an unknown one, several, or one that this model cannot take.
    """
    candidate = _exactly(candidate_of(scaling, loaded.plan, to=tokens), loaded, tokens)
    return Choice(candidate=candidate, why=f"{_said(candidate.name)}, as asked")


def by_length(loaded: LoadedModel, tokens: int) -> Choice | None:
    """The model as shipped where it needs nothing else, or says nothing of its length; else None."""
    trained = loaded.plan.max_position_embeddings
    if trained is not None and tokens > trained:
        return None
    known = "its config does not say its trained length" if trained is None else f"within the {trained:,} of training"
    return Choice(candidate=Candidate(name=AS_SHIPPED, plan=loaded.plan), why=f"as shipped: {known}")


def read_survey(loaded: LoadedModel, folder: Path) -> dict[str, Any]:
    """The summary of a survey of this model.

    Raises:
        ValueError: none there, one that cannot be read, or one of another model.
    """
    path = folder if folder.suffix == ".json" else folder / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"survey: {path} cannot be read ({error}); give the folder of a finished survey") from None
    if not isinstance(summary, dict) or summary.get("schema") != SCHEMA:
        raise ValueError(f"survey: {path} is no summary of a survey ({SCHEMA})")
    try:
        theirs = summary["model_details"].get("fingerprint")
        _require_fields(summary)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"survey: {path} is not as a survey writes it ({error!r})") from None
    if theirs != loaded.fingerprint:
        raise ValueError(f"survey: {path} is of another model ({summary.get('model')}), or of other weights of it")
    return summary


def from_survey(loaded: LoadedModel, summary: dict[str, Any], tokens: int) -> Choice | None:
    """What a survey recommends, or what of it holds to `tokens`; None where nothing was measured that far."""
    if summary["to"] < tokens:
        return None
    holding = [s for s in summary["scalings"] if (s["holds_to"] or 0) >= tokens]
    if not holding:
        return None
    named = {s["name"]: s for s in holding}
    best = max(holding, key=lambda s: verdict.recall_at(s, summary["to"]) or 0.0)
    chosen = named.get(summary["recommendation"]["name"], best)
    recall = verdict.recall_at(chosen, summary["to"])
    recalled = "" if recall is None else f", recalls {recall:.0%} at {summary['to']:,}"
    candidate = _exactly(candidate_of(chosen["name"], loaded.plan, to=summary["to"]), loaded, summary["to"])
    why = f"{_said(candidate.name)}, which the survey found to hold to {chosen['holds_to']:,}{recalled}"
    return Choice(candidate=candidate, why=why)


def holds(summary: dict[str, Any]) -> str:
    """What a survey found, in a line: up to where each that was read in full holds."""
    read = [s for s in summary["scalings"] if s["bands"]]
    parts = [f"{_said(s['name'])} {'to ' + format(s['holds_to'], ',') if s['holds_to'] else 'nowhere'}" for s in read]
    return f"holds, by the survey to {summary['to']:,}: {', '.join(parts) or 'nothing was read in full'}"


def by_reach(loaded: LoadedModel, document: Tensor, room: int, listener: Listener) -> Choice:
    """The scaling for `room` tokens that copies best from all over these (n,), by a survey's spread reach.

    It reads 4,096 of them for each scaling. What was measured is kept in the cache folder.
    """
    to = len(document)
    settings = Settings(out=cache_folder() / "ask" / loaded.fingerprint[:16], to=to, far=False)
    try:
        checked_length(settings, loaded.plan)
    except PlanError:
        shipped = Candidate(name=AS_SHIPPED, plan=loaded.plan)
        return Choice(candidate=shipped, why=f"as shipped: {to:,} tokens are too few to try scalings on")
    found = parse_scalings(_TRIED, loaded.plan, to=room, strict=False)
    candidates = [_exactly(candidate, loaded, room) for candidate in found]
    text = Document(name="", tokens=document, sha256=tokens_digest(document))
    with TemporaryDirectory() as scratch:
        store = _opened(settings.out, Path(scratch))
        try:
            instruments = Instruments(Bench(loaded, store, listener), loaded.plan, [text], settings, to)
            listener.expect(len(candidates) * instruments.bench.reading(instruments.form.tokens))
            accuracy = {}
            for candidate in candidates:
                accuracy[candidate.name] = verdict.mean_accuracy(instruments.spread(candidate))
        finally:
            store.__exit__(None, None, None)
    best = max(accuracy.values())
    # The first of those that are as good: the model as shipped comes before all.
    chosen = next(c for c in candidates if accuracy[c.name] >= best - verdict.SAME_WITHIN)
    figures = ", ".join(f"{_said(name)} {value:.0%}" for name, value in accuracy.items())
    return Choice(candidate=chosen, why=f"{_said(chosen.name)}: copied from all over this text, {figures}")


def _opened(folder: Path, scratch: Path) -> Store:
    """The store of what was measured before; where it cannot be had, one that is thrown away."""
    try:
        return Store(folder).__enter__()
    except OSError:
        # Another question is being asked, or there is no home to write to.
        return Store(scratch).__enter__()
    except ValueError:
        # It is damaged, and holds nothing that cannot be measured again.
        (folder / "results.jsonl").unlink()
        return Store(folder).__enter__()


def _exactly(candidate: Candidate, loaded: LoadedModel, to: int) -> Candidate:
    """The same by a name that means it for any length."""
    trained = loaded.plan.max_position_embeddings
    if candidate.relative is not None:
        return replace(candidate, name=spelled(candidate.relative))
    return (
        candidate if trained is None else replace(candidate, name=with_factor(candidate, default_factor(trained, to)))
    )


def _require_fields(summary: dict[str, Any]) -> None:
    """Raise TypeError, KeyError or the like where what is asked for further on is not there, or of another kind."""
    to, scalings = summary["to"], summary["scalings"]
    said = summary["recommendation"]["name"], *(scaling["name"] for scaling in scalings)
    lengths = to, *(s["holds_to"] for s in scalings if s["holds_to"] is not None)
    if not all(isinstance(name, str) for name in said):
        raise TypeError("a name is no text")
    if not all(isinstance(length, int) and not isinstance(length, bool) for length in lengths):
        raise TypeError("a length is no whole number")
    for scaling in scalings:
        len(scaling["bands"]), verdict.recall_at(scaling, to)


def _said(name: str) -> str:
    return "as shipped" if name == AS_SHIPPED else name
