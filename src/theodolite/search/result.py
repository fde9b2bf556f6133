"""From what was searched to `search.json`: plain data, with nothing in it that depends on when or how fast."""

from __future__ import annotations

from typing import Any

import numpy as np

import theodolite
from theodolite.models.load import LoadedModel
from theodolite.plan import PlanError
from theodolite.plan.describe import describe_scaling
from theodolite.plan.huggingface import rope_parameters
from theodolite.search.confirm import bands, gain
from theodolite.search.searched import Searched, Trial
from theodolite.search.settings import Settings
from theodolite.search.trials import SHORT_WEIGHT
from theodolite.survey.apply import settings_of
from theodolite.survey.found import FOUND, NAME, SCHEMA, recorded
from theodolite.survey.scalings import Candidate
from theodolite.survey.texts import Document

NO_COPYING = (
    "this model does not continue passages even from near by, inside its trained length, so what is searched for says "
    "nothing about its positions"
)

DEFINITIONS = {
    "copying": (
        "Mean nats a token of passages that are begun again with 12 tokens at the end of the length, each 32 tokens "
        "scored, over all distances: the spread reach of a survey. `accuracy` is the share that was the most likely."
    ),
    "short": "Mean nats a token of short texts, each read alone from position 0.",
    "rivals": "The named scaling of each kind that copies best, two at most; the model as shipped is none.",
    "cost": (
        f"copying + {SHORT_WEIGHT:g} x what `short` lies above the least of the rivals': what the search makes small."
    ),
    "recall": (
        "In a full pass over text that the search did not see, the share of tokens copied right from passages of each "
        "of twelve equal bands of what was read."
    ),
    "gain": "The winner's recall less a rival's, over all bands and texts; 95 % interval by drawing its cells anew.",
    "won": (
        "At every length confirmed the gain over each rival lies above 0 with its whole interval, and `short`, on the "
        "text of the passes, is above no rival's."
    ),
}


def summarize(loaded: LoadedModel, settings: Settings, searched: Searched) -> dict[str, Any]:
    """The result of a search; its fields are documented in docs/search.md."""
    rivals = [rival.name for rival in searched.rivals]
    lengths = [_confirmed(searched, rivals, length) for length in searched.lengths]
    short = {name: _rounded(one.short) for name, one in searched.confirmed.items()}
    won = searched.copies and is_better(lengths, short, rivals)
    name = f"{NAME}:{settings.out}"
    candidate = Candidate(name=name, plan=searched.winner.plan)
    return {
        "schema": SCHEMA,
        "theodolite": theodolite.__version__,
        "model": loaded.name,
        "model_details": {
            "model_type": loaded.plan.model_type,
            "fingerprint": loaded.fingerprint,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
        },
        "trained_length": searched.trained,
        "to": settings.to,
        "seed": settings.seed,
        "evaluations": settings.evaluations,
        "tokens": settings.read,
        "left_out": searched.left_out,
        "texts": {
            "search": _text(searched.texts.search),
            "choice": [_text(text) for text in searched.texts.choice],
            "confirm": [_text(text) for text in searched.texts.confirm],
        },
        "definitions": DEFINITIONS,
        "trials": [_trial(trial, settings.to) for trial in searched.trials],
        "finalists": [{"name": trial.name, "cost": _rounded(cost)} for trial, cost in searched.finalists],
        "rivals": rivals,
        "winner": _winner(loaded, searched),
        "confirmed": {"short": short, "lengths": lengths},
        "won": won,
        "why": _why(won, lengths, short, rivals) if searched.copies else f"It did not win: {NO_COPYING}.",
        "settings": settings_of(candidate, model=loaded.name, length=settings.to),
    }


def is_better(lengths: list[dict[str, Any]], short: dict[str, float], rivals: list[str]) -> bool:
    """Whether what was found wins over each rival, as DEFINITIONS has it."""
    gains = all(entry["gain"][rival]["low"] > 0 for entry in lengths for rival in rivals)
    return gains and all(short[FOUND] <= short[rival] for rival in rivals)


def _winner(loaded: LoadedModel, searched: Searched) -> dict[str, Any]:
    shipped, found = loaded.plan.scalable[0], searched.winner.plan.scalable[0]
    try:
        said: dict[str, Any] = rope_parameters(searched.winner.plan)
    except PlanError as error:
        said = {"unsaid": str(error)}
    return {
        "name": searched.winner.name,
        "space": searched.winner.space,
        "means": f"base {found.rope_theta:g}, {describe_scaling(found.scaling)}",
        **recorded(shipped, found),
        "rope_parameters": said,
    }


def _trial(trial: Trial, to: int) -> dict[str, Any]:
    rotary, measure = trial.plan.scalable[0], trial.measure
    return {
        "name": trial.name,
        "space": trial.space,
        "point": [_rounded(x) for x in trial.point],
        "copying": _rounded(measure.copying),
        "accuracy": _rounded(measure.accuracy),
        "short": _rounded(measure.short),
        "cost": _rounded(trial.cost),
        "attention_factor": _rounded(rotary.attention_factor()),
        "inv_freq": [float(x) for x in rotary.inv_freq(length=to)],
    }


def _confirmed(searched: Searched, rivals: list[str], length: int) -> dict[str, Any]:
    found = searched.confirmed
    return {
        "length": length,
        "recall": {name: _rounded(np.mean(one.recall[length])) for name, one in found.items()},
        "perplexity": {name: _rounded(one.perplexity[length]) for name, one in found.items()},
        "gain": {rival: gain(found[FOUND], found[rival], length) for rival in rivals},
        "bands": bands(length, found),
    }


def _why(won: bool, lengths: list[dict[str, Any]], short: dict[str, float], rivals: list[str]) -> str:
    last = lengths[-1]
    best = max(rivals, key=lambda rival: last["recall"][rival])
    ahead = sum(band["accuracy"][FOUND] > max(band["accuracy"][rival] for rival in rivals) for band in last["bands"])
    interval = last["gain"][best]
    told = (
        f"At {last['length']:,} tokens of text that the search did not see, it recalls {last['recall'][FOUND]:.1%}, "
        f"and {best} {last['recall'][best]:.1%}: {interval['mean']:+.1%} ({interval['low']:+.1%} to "
        f"{interval['high']:+.1%}); it is ahead of all named scalings in {ahead} of {len(last['bands'])} bands. On "
        f"short text it has {short[FOUND]:.4f} nats a token, {', '.join(f'{r} {short[r]:.4f}' for r in rivals)}."
    )
    return f"{'It won.' if won else 'It did not win.'} {told}"


def _text(document: Document) -> dict[str, Any]:
    return {"name": document.name, "tokens": len(document.tokens), "sha256": document.sha256}


def _rounded(value: Any) -> float:
    return round(float(value), 6)
