"""What a rotation must give: the formula, bit for bit; its oracle in float64; calls of every kind; and who computes."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from theodolite.kernels import native
from theodolite.kernels.choice import use

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STORED = ("float16", "bfloat16", "int8")
# Two products and a sum, each off by a unit roundoff of the arithmetic.
ROUNDINGS = 2.1


class Watching(TorchDispatchMode):
    """A mode that changes nothing: with it, the rotation runs as plain operations of torch."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def implementations() -> list[str]:
    """Native, once for each instruction set that runs here; block by block in torch; and as operations of torch."""
    library = native.load()
    sets = library.sets if library else []
    return [*(f"native {name}" for name in sets), "eager", "traced"]


@contextlib.contextmanager
def running(name: str) -> Iterator[None]:
    """Within it `rotate` turns by one of `implementations()`, or by "triton"."""
    kind, _, instructions = name.partition(" ")
    with contextlib.ExitStack() as stack:
        if kind == "traced":
            stack.enter_context(Watching())
        else:
            stack.enter_context(use(kind))
        if instructions:
            library = native.load()
            stack.callback(library.choose_set, library.chosen_set)
            library.choose_set(instructions)
        yield


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def heads_first(x: Tensor, options: dict[str, Any]) -> Tensor:
    """(B, H, S, D), whatever the caller has."""
    x = x if options.get("heads_first", True) else x.transpose(-3, -2)
    return x if x.dim() == 4 else x[None]


class Pairs(NamedTuple):
    """The two channels of each pair (B, H, S, R/2), the four entries of a table that turn them, and where they are."""

    x1: Tensor
    x2: Tensor
    c1: Tensor
    c2: Tensor
    s1: Tensor
    s2: Tensor
    first: list[int]
    second: list[int]


def pairs(x: Tensor, cos: Tensor, sin: Tensor, options: dict[str, Any]) -> Pairs:
    """Of `x` (B, H, S, D): every entry in the dtype of the arithmetic, every row picked."""
    width = options.get("rotary_dim") or x.shape[-1]
    interleaved, start = options.get("interleaved", False), x.shape[-1] - width if options.get("trailing") else 0
    first = [2 * pair if interleaved else pair for pair in range(width // 2)]
    second = [channel + 1 if interleaved else channel + width // 2 for channel in first]
    arithmetic = torch.float64 if x.dtype == torch.float64 else torch.float32

    def entries(table: Tensor, channels: list[int]) -> Tensor:
        table = {2: lambda: table[None, None], 3: lambda: table[:, None], 4: lambda: table}[table.dim()]()
        if table.dtype == torch.int8:
            table = table.float() * torch.tensor(1 / 127)
        table = table.to(arithmetic).expand(x.shape[0], -1, -1, -1)
        positions = options.get("positions")
        rows = torch.arange(x.shape[2]) if positions is None else positions.long()
        table = table[torch.arange(x.shape[0])[:, None], :, rows.expand(x.shape[0], -1)].transpose(1, 2)
        table = table.repeat_interleave(x.shape[1] // table.shape[1], 1)
        return table[..., channels] if table.shape[-1] == width else table

    one, two = [start + channel for channel in first], [start + channel for channel in second]
    return Pairs(
        *(x[..., channels].to(arithmetic) for channels in (one, two)),
        *(entries(table, channels) for table in (cos, sin) for channels in (first, second)),
        one,
        two,
    )


def formula(x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
    """The bits that a call `rotate(x, None, cos, sin, **options)` must give, contiguous."""
    view = heads_first(x, options)
    x1, x2, c1, c2, s1, s2, first, second = pairs(view, cos, sin, options)
    a, b = x1 * c1, x2 * c2
    out = view.clone(memory_format=torch.contiguous_format)
    if options.get("conjugate"):
        out[..., first], out[..., second] = (a + x2 * s2).to(x.dtype), (b - x1 * s1).to(x.dtype)
    else:
        out[..., first], out[..., second] = (a - x2 * s1).to(x.dtype), (b + x1 * s2).to(x.dtype)
    out = out if options.get("heads_first", True) else out.transpose(1, 2)
    return out.reshape(x.shape)


def exact(x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The result in float64, each pair turned by a matrix of two by two; and how far off a right one may be."""
    view = heads_first(x, options)
    x1, x2, c1, c2, s1, s2, first, second = pairs(view, cos, sin, options)
    matrix = torch.stack([torch.stack([c1, -s1], -1), torch.stack([s2, c2], -1)], -2).double()
    matrix = matrix.mT if options.get("conjugate") else matrix
    pair = torch.stack([x1, x2], -1).double()[..., None, :]
    turned, sums = (matrix * pair).sum(-1), (matrix * pair).abs().sum(-1)
    out, bound = view.double(), torch.zeros_like(view, dtype=torch.float64)
    out = out.clone() if out is view else out
    out[..., first], out[..., second] = turned.unbind(-1)
    # For float64 the oracle itself is as far from the truth.
    unit = 2 * 2.0**-53 if x.dtype == torch.float64 else 2.0**-24
    bound[..., first], bound[..., second] = (ROUNDINGS * unit * sums).unbind(-1)
    if x.dtype in (torch.bfloat16, torch.float16):
        info = torch.finfo(x.dtype)
        bound += info.eps / 2 * (out.abs() + bound) + info.smallest_normal * info.eps / 2
    return out, bound


def same_bits(given: Tensor, expected: Tensor) -> bool:
    """Whether every number is the same, its sign of zero too; a NaN is like any other."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[given.element_size()]
    if given.shape != expected.shape or given.dtype != expected.dtype:
        return False
    given, expected = given.contiguous(), expected.contiguous()
    like = given.view(integers) == expected.view(integers)
    return bool((like | (given.isnan() & expected.isnan())).all())


class Call(NamedTuple):
    """The arguments of a call, and beside which numbers in memory they lie."""

    q: Tensor | None
    k: Tensor | None
    cos: Tensor
    sin: Tensor
    options: dict[str, Any]

    def given(self) -> dict[str, Tensor]:
        return {name: x for name, x in (("q", self.q), ("k", self.k)) if x is not None}


class Case(NamedTuple):
    """A call in words."""

    dtype: torch.dtype
    tokens: int
    heads: tuple[int, int]
    batch: int
    head_dim: int
    rotary: str
    trailing: bool
    interleaved: bool
    conjugate: bool
    by_channel: bool
    table: str
    entries: str
    positions: str
    index: torch.dtype
    memory: str
    which: str
    out: str


FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": DTYPES,
    "tokens": (1, 63, 100, 1025),
    "heads": ((1, 1), (3, 3), (6, 2)),
    "batch": (1, 3),
    "head_dim": (2, 6, 64, 80, 96, 128, 256, 512),
    "rotary": ("all", "a quarter", "most"),
    "trailing": (False, True),
    "interleaved": (False, True),
    "conjugate": (False, True),
    "by_channel": (False, True),
    "table": ("(S, P)", "(1, S, P)", "(B, S, P)", "(1, Ht, S, P)", "(B, Ht, S, P)"),
    "entries": ("float32", "float64", "few", "slice", "gaps", "other strides", "expanded", *STORED),
    "positions": ("none", "(S,)", "(1, S)", "(B, S)", "every second", "expanded"),
    "index": (torch.int64, torch.int32),
    "memory": (
        "heads first",
        "tokens first",
        "heads first, seen tokens first",
        "tokens first, seen heads first",
        "packed (H, T, D)",
        "packed (T, H, D)",
        "fused",
        "fused by head",
        "expanded heads",
        "expanded",
        "gaps",
        "unaligned rows",
    ),
    "which": ("both", "q", "k", "dtypes", "batches", "widths"),
    "out": ("contiguous", "a cache", "tokens first", "gaps"),
}
# Elements of a call, so that all of them take seconds.
_MOST = 1_200_000


@functools.cache
def cases() -> list[Case]:
    """Calls such that any two values of any two factors meet in one of them."""
    generator = random.Random(0)
    names = list(FACTORS)
    wanted = [
        ((one, a), (two, b)) for one, two in combinations(names, 2) for a, b in product(FACTORS[one], FACTORS[two])
    ]
    missing = set(wanted)

    def covered(row: dict[str, Any]) -> set[Any]:
        return {((one, row[one]), (two, row[two])) for one, two in combinations(names, 2)} & missing

    found = []
    for pair in wanted:
        if pair not in missing:
            continue
        best: tuple[dict[str, Any], set[Any]] = {}, set()
        while not best[1]:
            for _ in range(16):
                row = {name: generator.choice(FACTORS[name]) for name in names} | dict(pair)
                if row["batch"] * sum(row["heads"]) * row["tokens"] * row["head_dim"] <= _MOST:
                    best = max(best, (row, covered(row)), key=lambda found: len(found[1]))
        missing -= best[1]
        found.append(Case(**best[0]))
    return found


def call(case: Case) -> Call:
    """Its arguments: the same numbers, in new memory, every time."""
    packed, fewer = case.memory.startswith("packed"), case.which == "batches"
    batches = {"q": 1 if packed else case.batch, "k": 1 if packed or fewer else case.batch}
    batch = min(batches.values())
    dtypes = {"q": case.dtype, "k": DTYPES[DTYPES.index(case.dtype) - 1] if case.which == "dtypes" else case.dtype}
    widths = {"q": case.head_dim, "k": case.head_dim + (10 if case.which == "widths" else 0)}
    xs = {
        name: randn(batches[name], heads, case.tokens, widths[name], dtype=dtypes[name], seed=seed)
        for seed, (name, heads) in enumerate(zip("qk", case.heads, strict=True))
        if case.which != {"q": "k", "k": "q"}[name]
    }
    laid, first = lay(xs, case.memory)
    width = {"all": case.head_dim, "a quarter": case.head_dim // 4, "most": case.head_dim * 7 // 8}[case.rotary]
    width = max(2, width - width % 2)
    positions = positions_of(case, batch)
    rows, columns = case.tokens + (9 if positions is not None else 0), width if case.by_channel else width // 2
    shape = {
        "(S, P)": (rows, columns),
        "(1, S, P)": (1, rows, columns),
        "(B, S, P)": (batch, rows, columns),
        "(1, Ht, S, P)": (1, min(case.heads), rows, columns),
        "(B, Ht, S, P)": (batch, min(case.heads), rows, columns),
    }[case.table]
    cos, sin = (table_of(shape, case.entries, seed) for seed in (11, 12))
    options = {
        "positions": positions,
        "interleaved": case.interleaved,
        "rotary_dim": width,
        "trailing": case.trailing,
        "conjugate": case.conjugate,
        "heads_first": first,
        "stored_tables": case.entries in STORED,
    }
    return Call(laid.get("q"), laid.get("k"), cos, sin, options)


def nan(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def beside_nan(x: Tensor, shape: tuple[int, ...], index: Any) -> Tensor:
    """`x` as a part of memory that is otherwise NaN."""
    part = nan(*shape, dtype=x.dtype)[index]
    return part.copy_(x)


def lay(xs: dict[str, Tensor], memory: str) -> tuple[dict[str, Tensor], bool]:
    """Each of (B, H, S, D) as a call gets it, and whether heads are first."""
    if memory.startswith("fused"):
        return fused(xs, by_head=memory == "fused by head"), False
    return {name: _LAID[memory](x) for name, x in xs.items()}, memory not in (
        "tokens first",
        "heads first, seen tokens first",
        "packed (T, H, D)",
    )


_LAID = {
    "heads first": lambda x: x,
    "tokens first": lambda x: x.transpose(1, 2).contiguous(),
    "heads first, seen tokens first": lambda x: x.transpose(1, 2),
    "tokens first, seen heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "packed (H, T, D)": lambda x: x[0],
    "packed (T, H, D)": lambda x: x[0].transpose(0, 1).contiguous(),
    "expanded heads": lambda x: x[:, :1].expand_as(x),
    "expanded": lambda x: x[:1, :1, :1, :1].expand_as(x),
    "gaps": lambda x: beside_nan(x, (*x.shape[:3], 2 * x.shape[3]), (..., slice(0, None, 2))),
    "unaligned rows": lambda x: beside_nan(x, (*x.shape[:3], x.shape[3] + 7), (..., slice(3, 3 + x.shape[3]))),
}


def fused(xs: dict[str, Tensor], by_head: bool) -> dict[str, Tensor]:
    """Slices (B, S, H, D) of one projection, with values beside; or, where heads allow, head by head."""
    one = next(iter(xs.values()))
    alike = all((x.shape[0], x.shape[3], x.dtype) == (one.shape[0], one.shape[3], one.dtype) for x in xs.values())
    if not alike:
        return {name: fused({name: x}, by_head)[name] for name, x in xs.items()}
    batch, _, tokens, head_dim = one.shape
    if by_head and len({x.shape[1] for x in xs.values()}) == 1:
        whole = nan(batch, tokens, one.shape[1], 3 * head_dim, dtype=one.dtype)
        parts = dict(zip("qk", (whole[..., :head_dim], whole[..., head_dim : 2 * head_dim]), strict=True))
    else:
        heads = [x.shape[1] for x in xs.values()]
        whole = nan(batch, tokens, sum(heads) + 2, head_dim, dtype=one.dtype)
        parts = dict(zip(xs, whole[:, :, :-2].split(heads, 2), strict=True))
    return {name: parts[name].copy_(x.transpose(1, 2)) for name, x in xs.items()}


def table_of(shape: tuple[int, ...], entries: str, seed: int) -> Tensor:
    numbers = randn(*shape, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    if entries in ("float64", "float16", "bfloat16"):
        return randn(*shape, dtype=torch.float64, seed=seed).to(getattr(torch, entries))
    if entries == "int8":
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    if entries == "few":
        # Sums that lie in the middle between two numbers, and zeros of either sign.
        return torch.tensor([-1.0, -0.5, -0.0, 0.0, 0.5, 1.0])[torch.randint(6, shape, generator=generator)]
    wide = (*shape[:-1], 2 * shape[-1] + 3)
    if entries == "slice":
        return beside_nan(numbers, wide, (..., slice(2, 2 + shape[-1])))
    if entries == "gaps" or (entries == "other strides" and seed % 2):
        return beside_nan(numbers, wide, (..., slice(1, 1 + 2 * shape[-1], 2)))
    if entries == "expanded":
        return numbers[..., :1, :].expand(shape)
    return numbers


def positions_of(case: Case, batch: int) -> Tensor | None:
    if case.positions == "none":
        return None
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(case.tokens + 9, (batch, case.tokens), generator=generator, dtype=case.index)
    if case.positions == "every second":
        return torch.full((batch, 2 * case.tokens), -99, dtype=case.index)[:, ::2].copy_(rows)
    if case.positions == "expanded":
        return rows[:1].expand(batch, -1) if batch > 1 else rows[0, :1].expand(case.tokens)
    return {"(S,)": rows[0], "(1, S)": rows[:1], "(B, S)": rows}[case.positions]


def out_of(x: Tensor, out: str) -> Tensor:
    """A place for a result like `x`, in memory full of NaN."""
    *rest, tokens, head_dim = x.shape
    return {
        "contiguous": lambda: nan(*x.shape, dtype=x.dtype),
        "a cache": lambda: nan(*rest, tokens + 5, head_dim, dtype=x.dtype)[..., 2 : 2 + tokens, :],
        "tokens first": lambda: nan(*rest[:-1], tokens, rest[-1] + 2, head_dim, dtype=x.dtype).transpose(-3, -2)[
            ..., 1 : 1 + rest[-1], :, :
        ],
        "gaps": lambda: nan(*rest, tokens, 2 * head_dim, dtype=x.dtype)[..., 1::2],
    }[out]()


def memory_of(x: Tensor) -> Tensor:
    """All bytes of the memory that it is a view of."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
