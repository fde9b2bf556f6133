"""Why a rotary table is not the one that its plan asks for: known faults, each tried on the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from theodolite.conformance.measured import Float64, Table, rounded
from theodolite.conformance.verdict import Cause
from theodolite.plan import NTK, Linear, Llama3, LongRoPE, Rotary, Scaling, YaRN
from theodolite.plan.describe import describe_scaling
from theodolite.plan.scaling import plain_inv_freq

_HALVES = ("bfloat16", "float16")


def cause_of(table: Table, rotary: Rotary, others: Iterable[Rotary] = ()) -> Cause | None:
    """The known fault that explains a table; None where none does.

    Args:
        table: what was found.
        rotary: what was asked for, settled for its length.
        others: rotary encodings of the model's other layers.
    """
    for search in (
        _nothing_there,
        _low_precision,
        _positions,
        _amplitude,
        _of_other_layers,
        _scaling,
        _base,
        _no_encoding,
    ):
        found = search(table, rotary, tuple(others))
        if found is not None:
            return found
    return None


Others = tuple[Rotary, ...]


def _nothing_there(table: Table, rotary: Rotary, others: Others) -> Cause | None:
    if not (np.isfinite(table.cos).all() and np.isfinite(table.sin).all()):
        return Cause(
            words="the frequencies are not finite: they were never filled in (meta initialisation and "
            "to_empty leave what the memory held)",
            reference="huggingface/transformers#45902",
        )
    if (table.cos == 0).all() and (table.sin == 0).all():
        return Cause(words="cos and sin are all zero", reference="pytorch/executorch#19627")
    if table.matches(np.zeros_like(table.inv_freq)):
        return Cause(words="all frequencies are zero, so that nothing turns", reference="pytorch/executorch#19627")
    return None


def _low_precision(table: Table, rotary: Rotary, others: Others) -> Cause | None:
    w, p = table.inv_freq, table.positions
    for dtype in _HALVES:
        low_w, low_p = rounded(w, dtype), rounded(p, dtype)
        if table.matches(low_w):
            return Cause(words=f"inv_freq was rounded to {dtype}", reference="NVIDIA-NeMo/Automodel#2549")
        if table.matches(w, positions=low_p):
            return Cause(words=f"positions were rounded to {dtype}", reference="EleutherAI/gpt-neox#1016")
        for name, frequencies, positions in (
            ("", w, p),
            ("positions, ", w, low_p),
            ("positions, inv_freq, ", low_w, low_p),
        ):
            angles = rounded(positions[:, None] * frequencies, dtype)
            exact = table.amplitude * np.cos(angles), table.amplitude * np.sin(angles)
            for rounds, tables in (("", exact), (" and tables", tuple(rounded(x, dtype) for x in exact))):
                off = np.maximum(np.abs(tables[0] - table.cos), np.abs(tables[1] - table.sin))
                # float32 may round an angle to the neighbour of where float64 does.
                spacing = np.exp2(np.floor(np.log2(np.maximum(angles, 2.0**-20)))) * (
                    2.0**-7 if dtype == "bfloat16" else 2.0**-10
                )
                if (off <= 2 * table.allowed(frequencies)).mean() > 0.98 and (off <= 2 * spacing + 2**-7).all():
                    return Cause(
                        words=f"{name}angles{rounds} were computed in {dtype} (as autocast does to a matrix product)",
                        reference="huggingface/transformers#29285",
                    )
        exact = table.amplitude * np.cos(p[:, None] * w), table.amplitude * np.sin(p[:, None] * w)
        representable = all(np.array_equal(rounded(x, dtype), x) for x in (table.cos, table.sin))
        if representable and all(
            (
                np.abs(e - x) <= table.allowed() + np.abs(x) * (2.0**-8 if dtype == "bfloat16" else 2.0**-11) + 2.0**-24
            ).all()
            for e, x in zip(exact, (table.cos, table.sin), strict=True)
        ):
            return Cause(words=f"cos and sin were rounded to {dtype}", reference="NVIDIA/TransformerEngine#1245")
    # Rows within the first length are exact and those added later are not.
    for dtype in _HALVES:
        right = (table.error(w, table.amplitude) <= table.allowed()).all(-1)
        later = (table.error(rounded(w, dtype), table.amplitude) <= 2 * table.allowed()).all(-1)
        if (right | later).all() and right.any():
            last = int(p[right].max())
            words = f"rows past position {last:,} or so were added from an inv_freq that had been rounded to {dtype}"
            return Cause(words=words, reference="huggingface/transformers#29496")
    return None


def _positions(table: Table, rotary: Rotary, others: Others) -> Cause | None:
    found = table.found_positions()
    if found is None:
        return None
    asked, given = table.positions, np.asarray(found)
    off = given != asked
    if not off.any():
        return None
    apart = set((given - asked)[off].tolist())
    wrapped = "karpathy/nanochat#520"
    if len(apart) == 1 and off.all():
        return Cause(words=f"every position is counted {apart.pop():+,}", reference="mlx-node/mlx-node#33")
    if np.array_equal(given, np.arange(len(given))):
        words = "positions are counted from the shape, and position_ids are ignored"
        return Cause(words=words, reference="unslothai/unsloth#3795")
    if np.array_equal(given, 2 * asked):
        return Cause(words="every token is turned twice", reference="NVIDIA/TensorRT-LLM#16378")
    if len(set(given[off].tolist())) == 1 and int(given[off][0]) < int(asked[off].min()):
        words = (
            f"every position past {int(given[off][0]):,} gets the row of {int(given[off][0]):,}: the table ends there"
        )
        return Cause(words=words, reference=wrapped)
    if all(step < 0 for step in apart):
        return Cause(words="positions past the end of the table start again", reference=wrapped)
    return Cause(words="rows are those of other positions", reference=wrapped)


def _amplitude(table: Table, rotary: Rotary, others: Others) -> Cause | None:
    found = table.found_amplitude()
    if found is None or abs(found - table.amplitude) <= 8 * table.table_eps * table.amplitude:
        return None
    wrong = f"cos and sin are multiplied by {found:.6g}, and should be by {table.amplitude:.6g}"
    scaling = rotary.scaling
    reference = "vllm-project/vllm#48621"
    if isinstance(scaling, YaRN):
        generic = scaling.magnitude(1.0)
        if math.isclose(found, generic, rel_tol=1e-5):
            wrong += ": 0.1 ln(factor) + 1, where the config says otherwise"
        elif math.isclose(found, table.amplitude**2, rel_tol=1e-5):
            wrong += ": it is there twice"
        elif math.isclose(found, 1.0, rel_tol=1e-6):
            wrong += ": the attention factor is dropped"
    other = _scaling(replace(table, amplitude=found), rotary, others)
    return Cause(words=f"{wrong}; {other.words}" if other else wrong, reference=other.reference if other else reference)


def _scaling(table: Table, rotary: Rotary, others: Others) -> Cause | None:
    plain, w = plain_inv_freq(rotary.rope_theta, rotary.rotary_dim), table.inv_freq
    if rotary.live_pairs is None and np.array_equal(plain, w):
        found = table.found_frequencies()
        ratio = w / np.where(found > 0, found, np.nan)
        if np.nanmax(ratio) / np.nanmin(ratio) < 1.001 and abs(np.nanmedian(ratio) - 1) > 1e-3:
            words = f"all frequencies are divided by {np.nanmedian(ratio):.4g}, where no scaling is asked for"
            return Cause(words=words, reference="Blaizzy/mlx-vlm#1709")
        return None
    for told, frequencies, reference in _other_scalings(table, rotary, plain):
        if not np.array_equal(frequencies, w) and table.matches(frequencies):
            return Cause(words=told, reference=reference)
    return None


def _other_scalings(table: Table, rotary: Rotary, plain: Float64) -> Iterator[tuple[str, Float64, str]]:
    scaling, dim = rotary.scaling, rotary.rotary_dim
    yield f"{describe_scaling(scaling)} is dropped", plain, "huggingface/transformers#32166"
    found = table.found_frequencies()
    factor = float(plain[-1] / found[-1]) if found[-1] > 0 else 1.0
    asked = getattr(scaling, "factor", None)
    wrong = f"the factor is {factor:.4g}, and {asked:g} is asked for" if asked else ""

    def tried(make: Callable[[], Scaling]) -> Float64:
        try:
            return make().inv_freq(rotary.rope_theta, dim)
        except ValueError:
            return np.zeros_like(plain)

    if isinstance(scaling, (Linear, Llama3, YaRN)) and factor >= 1:
        reference = "huggingface/transformers#38224" if isinstance(scaling, YaRN) else "unslothai/unsloth#6197"
        yield wrong, tried(lambda: replace(scaling, factor=factor)), reference
    yield (
        f"all frequencies are divided by {factor:.4g} (linear), in place of {describe_scaling(scaling)}",
        plain / factor,
        "unslothai/unsloth#7028",
    )
    if factor >= 1:
        yield (
            f"NTK by {factor:.4g} stands in place of {describe_scaling(scaling)}",
            tried(lambda: NTK(factor=factor)),
            "unslothai/unsloth#7028",
        )
    if isinstance(scaling, YaRN):
        ends = "the ends of YaRN's ramp are rounded" if not scaling.truncate else "YaRN's ramp is not truncated"
        yield ends, tried(lambda: replace(scaling, truncate=not scaling.truncate)), "vllm-project/vllm#27722"
        low, high = scaling.ramp_ends(rotary.rope_theta, dim)
        low, high = (high, low) if high > low else (low, high)
        swapped = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
        yield (
            "YaRN's beta_fast and beta_slow are swapped: slow pairs are kept and fast ones divided",
            plain * (1 - swapped) + plain / scaling.factor * swapped,
            "pytorch/torchtitan#3787",
        )
        g = 1 - swapped
        yield "YaRN blends wavelengths, not frequencies", plain / (1 - g + g * scaling.factor), "jquesnelle/yarn#24"
        inside = plain * scaling.factor ** (-g)
        yield "YaRN's factor stands inside the power", inside, "apache/tvm#18576"


def long_list_cause(table: Table, rotary: Rotary, length: int) -> Cause | None:
    """Whether a LongRoPE table follows the list of the other lengths."""
    scaling = rotary.scaling
    if not isinstance(scaling, LongRoPE):
        return None
    limit = scaling.original_max_position_embeddings
    other = limit + 1 if length <= limit else limit
    if not table.matches(rotary.inv_freq(length=other)):
        return None
    names = ("long", "short") if length <= limit else ("short", "long")
    words = f"the {names[0]} list of factors is used for {length:,} tokens, for which the {names[1]} one is meant"
    return Cause(words=words, reference="ggml-org/llama.cpp#24823")


def _base(table: Table, rotary: Rotary, others: Others) -> Cause | None:
    dim = rotary.rotary_dim
    if dim < rotary.head_dim:
        over = rotary.rope_theta ** (-np.arange(0, dim, 2) / rotary.head_dim)
        if table.matches(over):
            words = f"the exponents run over head_dim ({rotary.head_dim}) and not over the {dim} channels that turn"
            return Cause(words=words, reference="labscommunity/cascadia#69")
    if rotary.live_pairs is not None:
        partial = plain_inv_freq(rotary.rope_theta, 2 * rotary.live_pairs)
        padded = np.concatenate((partial, np.zeros(dim // 2 - rotary.live_pairs)))
        if table.matches(padded):
            words = "a proportional rotation is taken for a partial one: exponents run over the pairs that turn"
            return Cause(words=words, reference="NVIDIA-NeMo/Megatron-Bridge#4195")
    found = table.found_frequencies()
    usable = (found > 0) & (np.arange(dim // 2) > 0)
    if not usable.any():
        return None
    slopes = -np.log(found[usable]) * dim / (2 * np.arange(dim // 2)[usable])
    base = float(np.exp(np.median(slopes)))
    for near in (float(f"{base:.3g}"), base):
        for scaling in (rotary.scaling, Scaling()):
            try:
                other = replace(rotary, rope_theta=near, scaling=scaling)
                frequencies = other.inv_freq()
            except ValueError:
                continue
            if abs(near - rotary.rope_theta) > 1e-3 * rotary.rope_theta and table.matches(frequencies):
                words = f"the base is {near:,.6g}, and {rotary.rope_theta:,.6g} is asked for"
                return Cause(words=words, reference="deepspeedai/DeepSpeed#8345")
    return None


def _of_other_layers(table: Table, rotary: Rotary, others: Others) -> Cause | None:
    for other in others:
        if other == rotary or other.depends_on_length or other.rotary_dim != rotary.rotary_dim:
            continue
        if table.matches(other.inv_freq(), other.attention_factor()):
            words = f"the layer has the rotation of other layers (base {other.rope_theta:,.6g})"
            return Cause(words=words, reference="Blaizzy/mlx-vlm#1709")
    return None


def _no_encoding(table: Table, rotary: Rotary, others: Others) -> Cause | None:
    found = table.found_frequencies()
    if (np.abs(found[np.isfinite(found)]) > 1.5).any() or (found < -1e-6).any():
        words = "the frequencies are those of no rotary encoding: memory that was never filled in, or other bytes"
        return Cause(words=words, reference="huggingface/transformers#45902")
    if abs(found[0] - table.inv_freq[0]) > 1e-3:
        words = f"the first pair turns by {found[0]:.3g} radians a token in place of {table.inv_freq[0]:.3g}"
        return Cause(words=f"{words}: numbers read from other bytes", reference="NovaSky-AI/SkyRL#1709")
    falling = np.diff(table.inv_freq) <= 0
    if falling.all() and (np.diff(found) > 1e-6).any():
        words = "the frequencies do not fall from pair to pair: memory that was never filled in, or other bytes"
        return Cause(words=words, reference="NovaSky-AI/SkyRL#1709")
    return None
