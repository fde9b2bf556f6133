"""What a search is asked to do, and the pieces of text that it is done on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from theodolite.plan import ModelPlan
from theodolite.plan.errors import PlanError, require_whole
from theodolite.search.space import trained_length
from theodolite.survey.passages import LENGTH
from theodolite.survey.texts import Document, tokens_digest

SPACES = ("yarn", "pairs")
_LEAST_EVALUATIONS = 4
_LEAST_READ = 512
_CHOICES, _MORE_CONFIRMATIONS = 2, 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A search's settings; lengths are in tokens of the model.

    Args:
        out: the folder of results.
        to: how far the model shall copy from.
        texts: UTF-8 files, or books of the package.
        evaluations: how many frequency maps are tried, over all spaces.
        spaces: which spaces are searched, one after the other, the later beginning where the earlier ended.
        against: named scalings to beat, as a survey takes them; by default YaRN and NTK at several factors.
        tokens: how many are read for a trial, of the length, in chunks spread over it; half of it by default. The more,
            the more competes for attention, and the closer a trial comes to a full pass.
        finalists: how many of the best are measured again, on text that the search did not see.
        seed: of the optimiser.
        join: one document of all texts.
    """

    out: Path
    to: int
    texts: tuple[str, ...] = ("moby-dick",)
    evaluations: int = 120
    spaces: tuple[str, ...] = SPACES
    against: str | None = None
    tokens: int | None = None
    finalists: int = 4
    seed: int = 0
    join: bool = False

    def __post_init__(self) -> None:
        require_whole(to=self.to, finalists=self.finalists)
        require_whole(seed=self.seed, least=0)
        require_whole(tokens=self.tokens, least=_LEAST_READ)
        require_whole(evaluations=self.evaluations, least=_LEAST_EVALUATIONS)
        if not self.spaces or len(set(self.spaces)) < len(self.spaces) or not set(self.spaces) <= set(SPACES):
            raise PlanError("spaces", ",".join(self.spaces), f"one or more of {', '.join(SPACES)}, each once")

    @property
    def read(self) -> int:
        """How many tokens are read for a trial."""
        return min(self.to, self.to // 2 if self.tokens is None else self.tokens)


def checked_length(settings: Settings, plan: ModelPlan) -> int:
    """The trained length, where the settings fit the model.

    Raises:
        PlanError: the model does not say its length, or the one asked for is not longer.
    """
    trained = trained_length(plan)
    if trained < 8 * LENGTH:
        raise PlanError("max_position_embeddings", trained, f"a search needs a trained length of {8 * LENGTH} or more")
    if settings.to <= trained:
        raise PlanError("to", settings.to, f"the model is trained for {trained} tokens; give more")
    return trained


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Stretches of text that do not overlap, each for one purpose; all of them (T,) with T at least `to` + 1 tokens.

    Args:
        search: what candidates are tried on.
        choice: what the finalists are chosen on.
        confirm: what the winner is confirmed on, and the others with it.
    """

    search: Document
    choice: tuple[Document, ...]
    confirm: tuple[Document, ...]


def shared_out(documents: list[Document], to: int) -> Texts:
    """Documents cut into stretches of `to` + 1 tokens, and those given their purposes.

    Raises:
        ValueError: they have not two such stretches; the message says how many tokens each has and how many are needed.
    """
    size = to + 1
    stretches = [
        _stretch(document, first, size)
        for document in documents
        for first in range(0, len(document.tokens) - size + 1, size)
    ]
    if len(stretches) < 2:
        have = "; ".join(f"{document.name} has {len(document.tokens):,}" for document in documents)
        raise ValueError(
            f"text: a search to {to:,} tokens needs {2 * size:,}, half of them to confirm what it finds, and {have}"
        )
    # In the order of what is missed most where a text is short.
    first, searched, *more = stretches
    return Texts(
        search=searched,
        choice=tuple(more[:_CHOICES]),
        confirm=(first, *more[_CHOICES : _CHOICES + _MORE_CONFIRMATIONS]),
    )


def _stretch(document: Document, first: int, size: int) -> Document:
    tokens = document.tokens[first : first + size].contiguous()
    name = f"{document.name} from token {first:,}" if first else document.name
    return Document(name=name, tokens=tokens, sha256=tokens_digest(tokens))


def wanted_tokens(to: int) -> int:
    """How many tokens of a text a search has a use for."""
    return (2 + _CHOICES + _MORE_CONFIRMATIONS) * (to + 1)
