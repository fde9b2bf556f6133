"""The rotation in numpy, where products and sums are rounded apart: what an implementation has to give, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from theodolite.kernels.layout import Layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Channels of a head, those that turn, and whether they are the last. An odd head leaves no pair where a complex number
# may lie; 12 pairs are no whole vector.
WIDTHS = ((32, 32, False), (40, 32, True), (33, 32, True), (27, 24, False))


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tables(batch: int, heads: int, rows: int, width: int, dtype: torch.dtype = torch.float32):
    if dtype == torch.int8:
        both = torch.randint(-127, 128, (2, batch, heads, rows, width), generator=torch.Generator().manual_seed(3))
        return both.to(dtype).unbind()
    return randn(2, batch, heads, rows, width, dtype=dtype, seed=3).unbind()


def entries(table: torch.Tensor, real: type) -> np.ndarray:
    if table.dtype == torch.int8:
        return (table.numpy().astype(np.float32) * np.float32(1 / 127)).astype(real)
    return table.double().numpy().astype(np.float32 if real == np.float32 else real)


def formula(x, cos, sin, positions, layout: Layout, real=None):
    """The whole head and, in float64, the magnitudes that were summed; in the arithmetic of x, or in `real`."""
    batch, heads, tokens, channels = x.shape
    real = real or (np.float64 if x.dtype == torch.float64 else np.float32)
    rows = np.arange(tokens)[None] if positions is None else positions.numpy()
    rows = np.broadcast_to(rows, (batch, tokens))[:, None]
    of_batch = np.arange(batch) if cos.shape[0] > 1 else np.zeros(batch, int)
    of_head = np.arange(heads) * cos.shape[1] // heads
    c, s = (entries(table, real)[of_batch[:, None, None], of_head[:, None], rows] for table in (cos, sin))
    half = layout.rotary_dim // 2
    first = np.arange(half) * (2 if layout.interleaved else 1)
    second = first + (1 if layout.interleaved else half)
    (c1, c2), (s1, s2) = ((t, t) if t.shape[-1] == half else (t[..., first], t[..., second]) for t in (c, s))
    start = channels - layout.rotary_dim if layout.trailing else 0
    first, second = first + start, second + start
    numbers = x.double().numpy().astype(real)
    x1, x2 = numbers[..., first], numbers[..., second]
    with np.errstate(all="ignore"):
        sums = (x1 * c1 + x2 * s2, x2 * c2 - x1 * s1) if layout.conjugate else (x1 * c1 - x2 * s1, x2 * c2 + x1 * s2)
        sizes = np.abs(x1 * c1) + np.abs(x2 * (s2 if layout.conjugate else s1)), None
        sizes = sizes[0], np.abs(x2 * c2) + np.abs(x1 * (s1 if layout.conjugate else s2))
    out = x.double().clone() if real == np.float64 else x.clone()
    size = torch.zeros(x.shape, dtype=torch.float64)
    for channel, turned, summed in zip((first, second), sums, sizes, strict=True):
        out[..., channel] = torch.from_numpy(turned).to(out.dtype)
        size[..., channel] = torch.from_numpy(summed).double()
    return out, size


def same_bits(given: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal to the sign of a zero; a NaN is a NaN."""
    assert given.dtype == expected.dtype
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[given.element_size()]
    bits = given.contiguous().view(integer) == expected.contiguous().view(integer)
    return bool((bits | (given.isnan() & expected.isnan())).all())
