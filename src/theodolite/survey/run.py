"""The survey itself: what is measured, in what order, from cheap to dear."""

from __future__ import annotations

from typing import Any

from theodolite.models.load import LoadedModel
from theodolite.runs import Store, write_json
from theodolite.survey import verdict
from theodolite.survey.bench import Bench, Cells, Listener
from theodolite.survey.instruments import Instruments
from theodolite.survey.passes import Nats
from theodolite.survey.scalings import Candidate, parse_scalings
from theodolite.survey.settings import DEFAULT_SCALINGS, Settings, checked_length
from theodolite.survey.summary import Findings, summarize
from theodolite.survey.texts import read_documents


def survey(loaded: LoadedModel, settings: Settings, listener: Listener) -> dict[str, Any]:
    """Measure how far the positions of a loaded model hold, under each scaling; write and return the summary.

    Finished cells go to `settings.out` as they come, and are not measured again by another run with the same folder.

    Raises:
        PlanError: a setting or a scaling that does not fit the model.
        ValueError: no text is long enough.
        BlockingIOError: another run writes to the folder.
    """
    to = checked_length(settings, loaded.plan)
    # The default list is for all models; what a user names is an error where it cannot be had.
    strict = settings.scalings != DEFAULT_SCALINGS
    candidates = parse_scalings(settings.scalings, loaded.plan, to=to, strict=strict, tell=listener.finished)
    documents = read_documents(
        list(settings.texts), loaded.tokenizer, tokens=to + 1, join=settings.join, tell=listener.finished
    )
    with Store(settings.out) as store:
        bench = Bench(loaded, store, listener)
        instruments = Instruments(bench, loaded.plan, documents, settings, to)
        summary = summarize(instruments, candidates, _measure(instruments, candidates, settings))
        write_json(settings.out / "summary.json", summary)
    return summary


def _measure(instruments: Instruments, candidates: list[Candidate], settings: Settings) -> Findings:
    listener = instruments.bench.listener
    listener.expect(_work(instruments, candidates, settings))
    spread: dict[str, Cells] = {}
    for candidate in candidates:
        spread[candidate.name] = instruments.spread(candidate)
        if len(spread) == 1:
            listener.finished(f"reach  {'tokens back':<12} {_heads(spread[candidate.name])}")
        listener.finished(f"reach  {candidate.name:<12} {_line(spread[candidate.name])}")
    far: dict[str, Cells] = {}
    for candidate in candidates if settings.far else ():
        far[candidate.name] = instruments.far(candidate)
        if len(far) == 1:
            listener.finished(f"far    {'tokens back':<12} {_heads(far[candidate.name])}")
        listener.finished(f"far    {candidate.name:<12} {_line(far[candidate.name])}")
    chosen = _best(candidates, spread, settings.passes)
    read = {}
    for candidate in chosen:
        read[candidate.name] = instruments.read(candidate)
        listener.finished(f"pass   {candidate.name:<12} {_pass_line(read[candidate.name].nll, instruments)}")
    window = instruments.window() if instruments.to > instruments.trained else None
    short = {
        # A pass has read the short text already, unless its frequencies were those of a longer one.
        candidate.name: [row[: instruments.short] for row in read[candidate.name].nll]
        if candidate.name in read and not candidate.plan.depends_on_length
        else instruments.short_text(candidate)
        for candidate in candidates
    }
    passkey = [cell for candidate in chosen for cell in instruments.passkey(candidate)] if settings.passkey else None
    return Findings(
        spread=spread,
        far=far,
        threshold=instruments.threshold(),
        read=read,
        window=window,
        short=short,
        passkey=passkey,
    )


def _best(candidates: list[Candidate], spread: dict[str, Cells], passes: int) -> list[Candidate]:
    """The model as shipped, and those others that copy best over all distances."""
    others = sorted(candidates[1:], key=lambda candidate: -verdict.mean_accuracy(spread[candidate.name]))
    return [candidates[0], *others[:passes]]


def _line(cells: Cells) -> str:
    return " ".join(f"{cell['accuracy']:5.2f}" for cell in cells)


def _heads(cells: Cells) -> str:
    return " ".join(f"{cell['distance']:5d}" for cell in cells)


def _pass_line(nll: list[Nats], instruments: Instruments) -> str:
    parts = verdict.bands(nll, length=instruments.to, width=instruments.band, window=None, trained=instruments.trained)
    return "perplexity " + " ".join(f"{band['perplexity']:.1f}" for band in parts)


def _work(instruments: Instruments, candidates: list[Candidate], settings: Settings) -> float:
    """What all cells take together, as the bench counts it; an estimate where passes depend on the length."""
    bench, count = instruments.bench, len(instruments.documents)
    others = candidates[1:]
    read = min(settings.passes, len(others)) / max(len(others), 1)
    work = count * bench.reading(instruments.to)
    for candidate in candidates:
        work += count * bench.reading(settings.spread.tokens, candidate.relative)
        work += bench.reading(instruments.far_read, candidate.relative) if settings.far else 0.0
    for candidate in others:
        # Which of them are read in full is known only when all have been tried.
        work += read * count * bench.reading(instruments.to, candidate.relative)
        work += (1 - read) * count * bench.reading(instruments.short, candidate.relative)
    return work + (count * instruments.window_work if instruments.to > instruments.trained else 0.0)
