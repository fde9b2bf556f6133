"""What large operands and strides of their own do in the native rotation: the bits of the eager one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from theodolite.kernels import choice, native, rotate

pytestmark = pytest.mark.skipif(native.load() is None, reason=f"there is no library: {native.why_not()}")


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])


def every_set_is_eager(q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, **options: object) -> None:
    given = [x for x in (q, k) if x is not None]
    with choice.use("eager"):
        right = [x for x in rotate(q, k, cos, sin, **options) if x is not None]
    library = native.load()
    before = library.chosen_set
    try:
        for name in library.sets:
            library.choose_set(name)
            with choice.use("native"):
                outs = [torch.full(x.shape, torch.nan, dtype=x.dtype) for x in given]
                named = dict(zip([n for n, x in (("out_q", q), ("out_k", k)) if x is not None], outs, strict=True))
                rotate(q, k, cos, sin, **named, **options)
            for out, expected in zip(outs, right, strict=True):
                assert torch.equal(bits(out), bits(expected)), name
    finally:
        library.choose_set(before)


@pytest.mark.parametrize("picked", [False, True])
@pytest.mark.parametrize("pairs", [16, 20, 32, 64])
@pytest.mark.parametrize("heads", [1, 2, 3, 5])
def test_far_operands_with_tokens_inside_heads(heads, pairs, picked):
    # A cache of more than 32 MiB, of which the first tokens are seen: memory that is not touched costs nothing.
    long = (40 << 20) // 8 // pairs
    cache = torch.empty(1, heads + 1, long, 2 * pairs)[:, :heads]
    x = cache[:, :, :37].copy_(randn(1, heads, 37, 2 * pairs)) if heads > 1 else None
    if x is None:  # one head is as far as its batch
        x = torch.empty(2, 1, long, 2 * pairs)[:, :, :37].copy_(randn(2, 1, 37, 2 * pairs))
    assert x.stride(1) >= x.stride(2)
    options = {"positions": torch.arange(36, -1, -1)} if picked else {}
    every_set_is_eager(x, None, randn(37, pairs, seed=1), randn(37, pairs, seed=2), **options)
    every_set_is_eager(None, x, randn(37, pairs, seed=1), randn(37, pairs, seed=2), interleaved=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("swapped", [False, True])
def test_rows_of_cos_and_of_sin_in_other_strides(swapped, dtype):
    # Several tokens at once, each table stepping by its own stride.
    wide = randn(40, 3 * 32, seed=3)[:, 5:37]
    own = randn(40, 32, seed=4)
    tables = (own, wide) if swapped else (wide, own)
    every_set_is_eager(randn(1, 3, 40, 64, dtype=dtype), None, *tables)


@pytest.mark.parametrize("streamed", ["q", "k"])
def test_only_one_of_two_outputs_can_pass_the_caches(streamed):
    # More than 16 MiB; the other output begins beside a line of the cache, where such stores fault.
    q, k = (randn(1, 4, 9000, 128, seed=seed) for seed in (1, 2))
    cos, sin = randn(9000, 64, seed=3), randn(9000, 64, seed=4)
    with choice.use("eager"):
        right = rotate(q, k, cos, sin)

    def place(aligned: bool) -> Tensor:
        memory = torch.full((q.numel() + 32,), torch.nan)
        start = (-memory.data_ptr() // 4) % 16 + (0 if aligned else 1)
        return memory[start : start + q.numel()].view(q.shape)

    with choice.use("native"):
        outs = place(streamed == "q"), place(streamed == "k")
        assert [out.data_ptr() % 64 == 0 for out in outs] == [streamed == "q", streamed == "k"]
        rotate(q, k, cos, sin, out_q=outs[0], out_k=outs[1])
    for out, expected in zip(outs, right, strict=True):
        assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["tokens inside", "heads inside"])
def test_heads_that_begin_beside_a_line_of_the_cache(order, dtype):
    # More than 16 MiB, and every stride but that of heads is whole lines: stores past the caches would fault.
    heads, tokens, size = 4, 18000, 64 // dtype.itemsize
    strides = (0, tokens * 128 + 1, 128) if order == "tokens inside" else (0, 129, 4 * 128 + size)
    x, cos, sin = randn(1, heads, tokens, 128, dtype=dtype), randn(tokens, 64, seed=3), randn(tokens, 64, seed=4)
    with choice.use("eager"):
        right = rotate(x, None, cos, sin)[0]
    memory = torch.full((heads * tokens * 160 + 64,), torch.nan, dtype=dtype)
    start = (-memory.data_ptr() % 64) // dtype.itemsize
    out = memory[start:].as_strided(x.shape, (*strides, 1), memory.storage_offset() + start)
    assert out.data_ptr() % 64 == 0
    with choice.use("native"):
        rotate(x, None, cos, sin, out_q=out)
    assert torch.equal(bits(out), bits(right))


@pytest.mark.parametrize("picked", [False, True])
def test_a_row_of_sin_by_its_own_stride(picked):
    # Heads inside, or rows by position: each row is looked up, not stepped to.
    options = {"positions": torch.arange(39, -1, -1)} if picked else {}
    tables = randn(40, 96, seed=3)[:, 5:37], randn(40, 32, seed=4)
    x = randn(1, 40, 3, 64).transpose(1, 2)
    every_set_is_eager(x, None, *tables, **options)
    every_set_is_eager(x, None, *tables[::-1], **options)


def test_only_the_heads_of_q_begin_at_lines_of_the_cache():
    # Whether k may be written past the caches is asked of its own strides, not of those of q.
    heads, tokens = 4, 5000
    q, k = (randn(1, heads, tokens, 128, seed=seed) for seed in (1, 2))
    cos, sin = randn(tokens, 64, seed=3), randn(tokens, 64, seed=4)
    with choice.use("eager"):
        right = rotate(q, k, cos, sin)
    memory = torch.full((2 * heads * tokens * 128 + 64,), torch.nan)
    start = (-memory.data_ptr() % 64) // 4
    out_q = memory[start : start + q.numel()].view(q.shape)
    out_k = memory.as_strided(k.shape, (0, tokens * 128 + 1, 128, 1), start + q.numel())
    assert out_q.data_ptr() % 64 == out_k.data_ptr() % 64 == 0
    with choice.use("native"):
        rotate(q, k, cos, sin, out_q=out_q, out_k=out_k)
    for out, expected in zip((out_q, out_k), right, strict=True):
        assert torch.equal(bits(out), bits(expected))
