"""Whole checkpoints put in order for the other pair layout: what is queries and keys is found by its name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from torch import Tensor

from theodolite.encodings.layout.tensors import (
    FUSED,
    Heads,
    Layout,
    Part,
    convert_rows,
    known,
    order_of,
    require_counts,
)

_NAMES: dict[str, Part] = {
    **dict.fromkeys(("q_proj", "wq", "query", "q_b_proj", "wq_b"), "q"),
    **dict.fromkeys(("k_proj", "wk", "key"), "k"),
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "q_norm"),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), "k_norm"),
    **dict.fromkeys(("kv_a_proj_with_mqa", "wkv_a"), "latent_k"),
    # Latents have no heads yet, and kv_b makes the channels that do not turn, and the values.
    **dict.fromkeys(("q_a_proj", "wq_a", "q_a_layernorm", "kv_a_layernorm", "kv_norm", "kv_b_proj", "wkv_b"), "keep"),
}
# No name of a fused projection is above: `query_key_value` alone stands for two orders of rows, `qkv_proj` for three.
_QK = r"(?:(?=v?[qk])[qkv]{1,3}z?|(?:query|queries)(?:keys?)?(?:values?)?|keys?(?:values?)?)"
_PROJECTION = r"(?:proj(?:ection)?s?|lin(?:ear)?|dense|layer|weights?|mat(?:rix)?|(?:layer)?norm|ln)"
_LOOKS_LIKE_QK = re.compile(
    # A prefix before a lone k would make words: token, link.
    rf"(?<![a-z])(?:w?{_QK}{_PROJECTION}?|(?:to|proj|lin|linear|attn)(?:q[kv]*|kv|quer(?:y|ies)|keys?))(?![a-z])"
    # An `in_proj` that is not of an attention is a state-space layer's.
    r"|c_attn|w_pack|in_proj_(weight|bias)|(?<=attn\.)in_proj(?![a-z])|(?<=attention\.)in_proj(?![a-z])"
)
_WEIGHTS = ("weight", "weight_packed")
_BY_ROW = (*_WEIGHTS, "bias", "SCB", "lora_B", "lora_magnitude_vector")
_SCALES = ("weight_scale", "weight_scale_inv", "weight_zero_point")
_NOT_BY_ROW = ("lora_A", "weight_shape", "weight_g_idx")


class Converted(NamedTuple):
    """A state dict in the other layout, and the keys whose rows moved, in its order."""

    state_dict: dict[str, Any]
    changed: tuple[str, ...]


def convert_state_dict(
    state_dict: Mapping[str, Any],
    *,
    num_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    rotary_dim: int | None = None,
    trailing: bool = False,
    v_head_dim: int | None = None,
    to: Layout,
    names: Mapping[str, Part] | None = None,
    sites: Iterable[str] | None = None,
    rows_per_scale: int | None = None,
    shard: bool = False,
) -> Converted:
    """A whole checkpoint, or a LoRA adapter alone, in the other layout.

    Projections, biases, norms of queries and keys, factors of LoRA and DoRA, and the scales and zero points of weights
    quantised by rows are found by their names; everything else is passed on as the same object. What looks like
    queries or keys and is not understood is an error, because a row left behind shows in no shape. The config is not
    touched: tell the model afterwards (`interleaved`, `rope_interleave`).

    Args:
        num_heads, num_key_value_heads, head_dim, rotary_dim, trailing, v_head_dim, to: as for `convert_tensor`.
        names: what modules with these names are, before the usual ones: `{"query_key_value": "qkv_grouped"}`.
        sites: where the attention to convert is, with * for the number of a layer: `["model.layers.*.self_attn"]`. Not
            needed where queries and keys have one home; cross attention, a vision tower or an indexer is another.
        rows_per_scale: rows that share a scale, for weights quantised in blocks (128 in DeepSeek's float8).
        shard: this is a part of a checkpoint: queries need not come with their keys, and there may be neither. Needs
            `sites`, for what else the checkpoint holds cannot be seen.

    Raises:
        ValueError: a name, a site or a shape does not fit, or a row would leave the block that it shares a scale with;
            or, unless `shard`, a name or a site is nowhere, a layer's queries are here and its keys are not, or there
            is nothing to convert.
    """
    heads = Heads(num_heads, num_key_value_heads, head_dim, rotary_dim, trailing, v_head_dim, to)
    moves = row_moves(state_dict, heads, names=names, sites=sites, rows_per_scale=rows_per_scale, shard=shard)
    converted = dict(state_dict)
    for key, part in moves.items():
        converted[key] = convert_rows(key, state_dict[key], part, heads)
    return Converted(converted, tuple(moves))


def row_moves(
    state_dict: Mapping[str, Any],
    heads: Heads,
    *,
    names: Mapping[str, Part] | None = None,
    sites: Iterable[str] | None = None,
    rows_per_scale: int | None = None,
    shard: bool = False,
) -> dict[str, Part]:
    """The keys whose rows `convert_state_dict` moves, and what each holds; nothing is moved, so meta tensors do.

    Arguments and errors are those of `convert_state_dict`, but for shapes: `convert_rows` looks at those.
    """
    if rows_per_scale is not None:
        require_counts(rows_per_scale=rows_per_scale)
    given = {name: known(part) for name, part in (names or {}).items()}
    if not shard:
        _require_there(given, state_dict)
    found = _found(state_dict, given)
    # Iterables may be gone through once only.
    chosen = _at_sites(found, sites if sites is None or isinstance(sites, str) else list(sites), shard)
    moves = {tensor.key: tensor.part for tensor in chosen if not _stays(tensor, state_dict, heads, rows_per_scale)}
    if not shard:
        _require_both(chosen)
        if not moves:
            raise ValueError("state_dict: no queries or keys were found in it; give their `names`, or shard=True")
    return moves


def attention_sites(state_dict: Mapping[str, Any], names: Mapping[str, Part] | None = None) -> tuple[str, ...]:
    """Where queries and keys are, as `sites` of `convert_state_dict` names it; meta tensors do."""
    return tuple(sorted({tensor.site for tensor in _found(state_dict, names or {})}))


class _Found(NamedTuple):
    key: str
    path: str  # of the module that holds the projection
    part: Part
    leaf: str  # what of the projection it is
    unexplained: str = ""  # the word that looks like queries or keys, where none is known

    @property
    def site(self) -> str:
        return ".".join("*" if word.isdigit() else word for word in self.path.split("."))


def _found(state_dict: Mapping[str, Any], given: Mapping[str, Part]) -> list[_Found]:
    named = {**_NAMES, **given}
    return [found for key in state_dict if (found := _find(key, state_dict[key], named))]


def _find(key: str, tensor: object, named: Mapping[str, Part]) -> _Found | None:
    words = key.split(".")
    # One number, say the scale of a whole tensor or of a key-value cache, is the same in any order.
    single = isinstance(tensor, Tensor) and tensor.numel() == 1
    places = [place for place, word in enumerate(words) if word in named]
    if not places:
        # `qProj` and `toQ` as `q_proj` and `to_q`: an underscore more moves no dot.
        apart = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()
        looking = [apart.count(".", 0, match.end()) for match in _LOOKS_LIKE_QK.finditer(apart)]
        if single or not looking:
            return None
        return _Found(key, ".".join(words[: looking[-1]]), "keep", "", unexplained=words[looking[-1]])
    path, part = ".".join(words[: places[-1]]), named[words[places[-1]]]
    rest = [word for word in words[places[-1] + 1 :] if word not in ("base_layer", "norms") and not word.isdigit()]
    # The names of adapters follow these.
    leaf = rest[0] if rest and rest[0].startswith("lora_") else ".".join(rest or ["weight"])
    return None if part == "keep" or (single and leaf not in _BY_ROW) else _Found(key, path, part, leaf)


def _require_there(names: Iterable[str], state_dict: Mapping[str, Any]) -> None:
    words = {word for key in state_dict for word in key.split(".")}
    for name in names:
        if name not in words:
            near = [key for key in state_dict if name in key][:1]
            hint = f": it is a part of {near[0]!r} that no dots enclose" if near else ""
            raise ValueError(f"names: got {name!r}, and no key has that name between its dots{hint}")


def _at_sites(found: Sequence[_Found], sites: Collection[str] | None, shard: bool) -> list[_Found]:
    """What is to be converted; refuses a choice that nobody made, and what is not understood."""
    there = sorted({tensor.site for tensor in found})
    if sites is None and (shard or len(there) > 1):
        more = ", and other shards may have more" if shard else ""
        raise ValueError(f"sites: queries and keys are in {there}{more}; give a list of those to convert")
    if isinstance(sites, str) or not (shard or set(sites or ()) <= set(there)):
        raise ValueError(f"sites: got {sites!r}; it must be a list, and queries and keys are in {there}")
    chosen = [tensor for tensor in found if sites is None or tensor.site in sites]
    for key, _, _, leaf, unexplained in chosen:
        if unexplained:
            raise ValueError(
                f"{key}: {unexplained!r} looks like queries or keys, and the name does not say how the rows stand; "
                f"give names={{{unexplained!r}: part}}, where part is one of {list(get_args(Part))}"
            )
        if leaf not in (*_BY_ROW, *_SCALES, *_NOT_BY_ROW):
            raise ValueError(
                f"{key}: {leaf!r} is not known here, and may hold rows of queries or keys; "
                "convert the checkpoint before it is quantised or adapted in this way"
            )
    return chosen


def _stays(found: _Found, state_dict: Mapping[str, Any], heads: Heads, rows_per_scale: int | None) -> bool:
    """Whether a tensor is the same in both layouts: a scale of a block of rows is, if no row leaves its block."""
    key, part, leaf = found.key, found.part, found.leaf
    if leaf not in _SCALES:
        return leaf in _NOT_BY_ROW
    weight = state_dict.get(key[: -len(leaf)] + "weight")
    if rows_per_scale is None and (weight is None or len(state_dict[key]) == len(weight)):
        return False
    if rows_per_scale is None or weight is None:
        lacking = "weight, of the same part of the checkpoint" if weight is None else "rows_per_scale"
        raise ValueError(f"{key}: got shape {tuple(state_dict[key].shape)}; scales of blocks need the {lacking}")
    order = order_of(key, part, heads, len(weight))
    blocks = -(-len(order) // rows_per_scale)
    if len(state_dict[key]) != blocks:
        raise ValueError(
            f"{key}: got shape {tuple(state_dict[key].shape)}; as {part!r} with rows_per_scale {rows_per_scale} "
            f"it must have {blocks} rows"
        )
    if any(row // rows_per_scale != source // rows_per_scale for row, source in enumerate(order)):
        raise ValueError(f"{key}: rows would leave their blocks of {rows_per_scale}; dequantise the weight first")
    return True


def _require_both(found: Iterable[_Found]) -> None:
    parts: dict[str, set[str]] = {}
    for tensor in found:
        if tensor.leaf in _WEIGHTS:
            parts.setdefault(tensor.path, set()).add(tensor.part)
    for path, there in parts.items():
        if not there & {"q", "q_gated", *FUSED} or not there & {"k", "latent_k", *FUSED}:
            raise ValueError(
                f"{path}: got weights for {sorted(there)}; queries and keys turn together, so both must be here "
                "under known names (give `names`); shard=True if the checkpoint is in parts"
            )
