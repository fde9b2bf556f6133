"""DeBERTa's keys: which terms there are, over which distances, and what the vectors of distances go through."""

from __future__ import annotations

from theodolite.plan.bias import DEBERTA_TERMS, Bias
from theodolite.plan.errors import PlanError, require_one_of
from theodolite.plan.families.family import Config, flag, listed, positive, whole


def read_deberta(config: Config) -> Bias | None:
    """The bias of `deberta` and `deberta-v2`; None where its code adds nothing to the scores."""
    terms = _terms(config)
    if not flag(config, "relative_attention") or not terms:
        return None
    # -1 is the length that the config states.
    furthest = whole({"max_relative_positions": -1, **config}, "max_relative_positions", least=-1)
    if furthest < 1:
        furthest = whole(config, "max_position_embeddings")
    if config["model_type"] == "deberta":
        return Bias(kind="deberta", buckets=2 * furthest, max_distance=furthest, terms=terms)
    span = whole({"position_buckets": -1, **config}, "position_buckets", least=-1)
    if span == furthest:
        raise PlanError("position_buckets", span, f"it must not equal the furthest distance ({furthest})")
    return Bias(
        kind="deberta",
        buckets=2 * (span if span > 0 else furthest),
        max_distance=furthest,
        terms=terms,
        layer_norm_eps=_layer_norm_eps(config),
        share_att_key=flag(config, "share_att_key"),
    )


def _terms(config: Config) -> tuple[str, ...]:
    """`pos_att_type`, a list or the older "c2p|p2c"; without it the code computes neither."""
    given = config.get("pos_att_type")
    if isinstance(given, str):
        given = [name.strip() for name in given.lower().split("|")]
    terms = listed({"pos_att_type": given}, "pos_att_type", str) or []
    for term in terms:
        require_one_of("pos_att_type", term, DEBERTA_TERMS)
    if len(set(terms)) != len(terms):
        raise PlanError("pos_att_type", terms, "each term once")
    return tuple(terms)


def _layer_norm_eps(config: Config) -> float | None:
    given = config.get("norm_rel_ebd")
    if given is not None and not isinstance(given, str):
        raise PlanError("norm_rel_ebd", given, "it must be a name")
    names = [name.strip() for name in (given or "none").lower().split("|")]
    for name in names:
        require_one_of("norm_rel_ebd", name, ("none", "layer_norm"))
    # The number is that of transformers' config class, which files may leave out.
    return positive({"layer_norm_eps": 1e-7, **config}, "layer_norm_eps") if "layer_norm" in names else None
