"""Which scaling a model is extended by, and what of a survey stands behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theodolite.models.source import Source
    from theodolite.plan import ModelPlan
    from theodolite.survey.found import Confirmation
    from theodolite.survey.scalings import Candidate

_TRIED = ("yarn", "linear", "ntk", "dynamic", "llama3")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What is extended: the folder or the .gguf file, and what it says."""

    source: Source
    path: Path
    plan: ModelPlan
    fingerprint: str
    part: str | None


def read_survey(folder: Path, origin: Origin) -> dict[str, Any]:
    from theodolite.ask.choice import read_survey
    from theodolite.models.load import LoadedModel
    from theodolite.report import schema

    known = LoadedModel(
        model=None,
        tokenizer=None,
        plan=origin.plan,
        name=origin.source.name,
        revision=None,
        fingerprint=origin.fingerprint,
        config={},
    )
    summary = read_survey(known, folder)
    schema.validate(summary)
    return summary


def read_search(name: str | None, origin: Origin) -> Confirmation | None:
    """What the search says that a scaling `search:DIR` names; None where another scaling is named.

    Raises:
        ValueError: it is of other files, or damaged.
    """
    from theodolite.survey.found import folder_of, read_confirmation

    folder = None if name is None else folder_of(name)
    if folder is None:
        return None
    search = read_confirmation(folder)
    if search.fingerprint != origin.fingerprint:
        raise ValueError(f"scaling: the search in {folder!r} was of other files than those of {origin.source.name}")
    return search


def searched_to(search: Confirmation | None) -> int:
    """The tokens to which a search has confirmed what it found; 0 where it did not win."""
    return search.lengths[-1] if search is not None and search.won else 0


def choose(name: str | None, to: int | None, plan: ModelPlan, summary: dict[str, Any] | None) -> tuple[Candidate, int]:
    """The scaling that is meant, and to how many tokens."""
    from theodolite.plan import PlanError
    from theodolite.plan.errors import require_whole
    from theodolite.report.figures import plain
    from theodolite.survey.scalings import AS_SHIPPED, candidate_of, default_factor, with_factor

    if to is not None:
        require_whole(to=to)
    if summary is not None:
        if name is None and summary["recommendation"]["name"] in (None, AS_SHIPPED):
            why = plain(summary["recommendation"]["why"])
            raise ValueError(f"scaling: the survey recommends none ({why}); name one that it found to hold")
        name, to = name or summary["recommendation"]["name"], to or summary["to"]
    if name is None or to is None:
        missing = "scaling" if name is None else "to"
        raise ValueError(f"{missing}: it is needed where no --survey says it")
    # A name without a factor means what it meant in the survey.
    surveyed = summary is not None and to <= summary["to"] and any(s["name"] == name for s in summary["scalings"])
    length = summary["to"] if summary is not None and surveyed else to
    try:
        candidate = _widened(name, plan, length) or candidate_of(name, plan, to=length)
    except PlanError as error:
        raise PlanError(error.field, error.given, f"{error.allowed}{_alternatives(name, plan, to)}") from None
    if candidate.relative is not None:
        allowed = (
            "no config can say a map of distances; theodolite ask --scaling reads with it, and scalings are written"
        )
        raise PlanError("scaling", name, f"{allowed}{_alternatives(name, plan, to)}")
    if candidate.name == AS_SHIPPED:
        raise PlanError("scaling", name, f"it changes nothing but the length{_alternatives(name, plan, to)}")
    trained = plan.max_position_embeddings
    if trained is not None:
        candidate = replace(candidate, name=with_factor(candidate, default_factor(trained, length)))
    return candidate, to


def _widened(name: str, plan: ModelPlan, to: int) -> Candidate | None:
    """`llama3` over a native llama3; None for all else."""
    from theodolite.models.extend import over_llama3
    from theodolite.survey.scalings import Candidate, default_factor

    kind, *rest = name.strip().split(":")
    if kind != "llama3" or len(rest) > 1 or plan.max_position_embeddings is None:
        return None
    try:
        factor = float(rest[0]) if rest else default_factor(plan.max_position_embeddings, to)
    except ValueError:
        return None
    found = over_llama3(plan, factor)
    return None if found is None else Candidate(name=name.strip(), plan=found)


def _alternatives(name: str, plan: ModelPlan, to: int) -> str:
    """The scalings that this model takes for that length, as the end of a sentence."""
    from theodolite.models.extend import stretched
    from theodolite.plan import LongRoPE, PlanError
    from theodolite.survey.scalings import candidate_of

    found = []
    for kind in _TRIED:
        try:
            candidate = _widened(kind, plan, to) or candidate_of(kind, plan, to=to)
            stretched(plan, candidate.plan, to, name=kind)
        except PlanError:
            continue
        found.append(kind)
    others = [kind for kind in found if kind != name.strip()]
    if others:
        return f"; this model takes {', '.join(others)}"
    divided = any(isinstance(rotary.scaling, LongRoPE) for rotary in plan.rotaries)
    return "; no named scaling goes over divisors, as which a GGUF file has Llama 3.1's too" if divided else ""


def entry_of(summary: dict[str, Any], plan: ModelPlan, candidate: Candidate) -> dict[str, Any] | None:
    """What the survey found of a scaling, by whatever name; None where it did not try it."""
    from theodolite.plan import PlanError
    from theodolite.survey.scalings import candidate_of

    for scaling in summary["scalings"]:
        try:
            tried = candidate_of(scaling["name"], plan, to=summary["to"])
        except (PlanError, ValueError, OSError):
            continue
        if (tried.plan, tried.relative) == (candidate.plan, None):
            return dict(scaling)
    return None


def measured_to(entry: dict[str, Any] | None) -> int:
    """The tokens to which a scaling was found to hold where it was read in full, else to copy; 0 for nowhere."""
    if entry is None:
        return 0
    return int((entry["holds_to"] if entry["bands"] else entry["reaches"]) or 0)


def unconfirmed(name: str, to: int, search: Confirmation) -> str:
    from theodolite.report.figures import plain

    if not search.won:
        return f"scaling: {name}: {plain(search.why)} Take the named scaling, search further, or say --unmeasured"
    return (
        f"to: {name} to {to:,} tokens is not measured: the search confirmed it to {searched_to(search):,}; give a "
        "length within that, a search that goes further, or --unmeasured"
    )


def unreached(name: str, to: int, entry: dict[str, Any] | None, summary: dict[str, Any]) -> str:
    from theodolite.report.figures import plain

    reached = {s["name"]: measured_to(s) for s in summary["scalings"] if s["relative"] is None}
    others = ", ".join(f"{plain(other)} {length:,}" for other, length in reached.items() if length) or "nothing"
    found = "did not try it" if entry is None else f"found it to hold to {measured_to(entry):,}"
    return (
        f"to: {name} to {to:,} tokens is not measured: the survey, to {summary['to']:,}, {found}; it reached: {others}"
        "; give a length within that, a survey that goes further, or --unmeasured"
    )
