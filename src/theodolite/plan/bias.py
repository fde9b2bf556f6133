"""What enters attention other than by rotation, described: enough to name it and to say how far it goes."""

from __future__ import annotations

from dataclasses import dataclass

from theodolite.plan.errors import (
    PlanError,
    require_bool,
    require_given,
    require_list,
    require_one_of,
    require_positive,
    require_whole,
)

DEBERTA_TERMS = ("c2p", "p2c")


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Positions added to the token embeddings, once, before the first layer.

    Args:
        kind: "learned" (a table with an end) or "sinusoidal" (computed, no end of its own).
        rows: rows of a learned table that a token can use; None where there is no end.
        offset: the row of position 0 (2 in OPT, padding_idx + 1 in RoBERTa).
        layout: how sinusoidal channels stand: "interleaved" sin, cos, sin, cos; "halves" all sines, then all cosines.
        spacing: of sinusoidal frequencies: the "paper"'s, or "tensor2tensor"'s, the slowest of which is 1/10000.
    """

    kind: str
    rows: int | None = None
    offset: int = 0
    layout: str = "interleaved"
    spacing: str = "paper"

    def __post_init__(self) -> None:
        require_one_of("kind", self.kind, ("learned", "sinusoidal"))
        require_one_of("layout", self.layout, ("interleaved", "halves"))
        require_one_of("spacing", self.spacing, ("paper", "tensor2tensor"))
        require_whole(rows=self.rows)
        require_whole(offset=self.offset, least=0)


@dataclass(frozen=True, kw_only=True)
class Bias:
    """Positions added to the attention scores.

    Args:
        kind: "alibi", "t5", "transformer-xl" or "deberta".
        buckets: how many learned values there are (T5, DeBERTa); None where nothing is learned.
        max_distance: distance (tokens) past which all distances share one value (`clamp_len` of Transformer-XL).
        bias_max: the exponent of ALiBi's smallest slope, `2 ** -bias_max` (MPT's `alibi_bias_max`).
        heads: of ALiBi, whose slopes depend on their number; None where the model does not state it.
        slope_factor: multiplies ALiBi's slopes (Falcon scales them with the scores, by `head_dim ** -0.5`).
        terms: of DeBERTa, "c2p" (content to position), "p2c", or both: its `pos_att_type`. Their number is in the
            scale of the scores, `(head_dim * (1 + terms)) ** -0.5`.
        layer_norm_eps: of DeBERTa, the vectors of distances go through a layer norm with this (`norm_rel_ebd`).
        share_att_key: of DeBERTa, the vectors of distances go through attention's own projections.
    """

    kind: str
    buckets: int | None = None
    max_distance: int | None = None
    bias_max: float = 8.0
    slope_factor: float = 1.0
    heads: int | None = None
    terms: tuple[str, ...] = DEBERTA_TERMS
    layer_norm_eps: float | None = None
    share_att_key: bool = False

    def __post_init__(self) -> None:
        require_one_of("kind", self.kind, ("alibi", "t5", "transformer-xl", "deberta"))
        require_whole(buckets=self.buckets, max_distance=self.max_distance, heads=self.heads)
        require_given(bias_max=self.bias_max, slope_factor=self.slope_factor)
        require_positive(bias_max=self.bias_max, slope_factor=self.slope_factor, layer_norm_eps=self.layer_norm_eps)
        require_bool(share_att_key=self.share_att_key)
        self._settle_terms()

    def _settle_terms(self) -> None:
        require_given(terms=self.terms)
        require_list(terms=self.terms)
        ordered = tuple(term for term in DEBERTA_TERMS if term in self.terms)
        if not ordered or len(ordered) != len(self.terms):
            raise PlanError("terms", list(self.terms), "'c2p', 'p2c' or both, each once")
        object.__setattr__(self, "terms", ordered)


def alibi_slopes(heads: int, bias_max: float) -> list[float]:
    """ALiBi's published slopes, as `theodolite.encodings.alibi_slopes` has them, without torch."""

    def geometric(count: int) -> list[float]:
        return [2.0 ** (-bias_max * number / count) for number in range(1, count + 1)]

    below = 1 << (heads.bit_length() - 1)
    return geometric(below) + geometric(2 * below)[::2][: heads - below]
