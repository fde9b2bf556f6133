"""The arithmetic of the plain rotation, a block at a time.

Heads are (B, H, S, R), or (B, Ht, H/Ht, S, R) where they have tables of their own, and tables broadcast against them.

Each product and each sum is a call of its own: torch's addcmul rounds once less on some processors, so its bits differ.
Torch's complex product is the exception, where it is seen to round as it should.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

# Bytes of one scratch tensor. In smaller ones calls cost more than arithmetic, in far larger ones the cache is lost.
SCRATCH = 3 * 2**19
# Complex numbers in one step of torch's vector loop, at most: two registers of 512 bits. What is left over goes through
# a scalar loop, in which compilers fuse products and sums.
STEP = 16
# Elements that torch gives to a thread, at least.
GRAIN = 2**15

Block = tuple[Tensor, ...]


def steps(row: int, batch: int, tokens: int) -> tuple[int, int]:
    """How much of the batch and how many tokens, of `row` bytes each, fill the scratch; one of each at least."""
    most = max(1, SCRATCH // row)
    # Parts of one size, so that the last is not a small one.
    token_step = -(-tokens // -(-tokens // most))
    return max(1, min(batch, most // token_step)), token_step


def split(tensors: Block, dim: int, step: int) -> Iterable[Block]:
    """Cut them alike, in parts of at most `step` along `dim` of the first; what has size 1 there serves every part."""
    size = tensors[0].shape[dim]
    if size <= step:
        return (tensors,)
    return zip(*(t.split(step, dim) if t.shape[dim] == size else itertools.repeat(t) for t in tensors), strict=False)


def blocks(tensors: Block, itemsize: int) -> Iterable[Block]:
    """Cut them alike, so that the first of each, in elements of `itemsize` bytes, fills no more than the scratch."""
    whole = tensors[0].numel() * itemsize
    return (tensors,) if whole <= SCRATCH else _cut(tensors, whole)


def _cut(tensors: Block, whole: int) -> Iterator[Block]:
    batch, tokens = tensors[0].shape[0], tensors[0].shape[-2]
    batch_step, token_step = steps(whole // (batch * tokens), batch, tokens)
    for part in split(tensors, 0, batch_step):
        yield from split(part, -2, token_step)


def channels(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second channel of every pair, as views."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def joined(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    """The reverse of `channels`, as a new tensor."""
    return torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)


def turn(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, conjugate: bool) -> None:
    """Turn by tables (..., R): `cos` multiplies each channel for itself, `sin` each for its partner."""
    products = wide = None
    for source, target, c, s in blocks((x, out, cos, sin), cos.element_size()):
        fresh = products is None or products.shape != source.shape
        turned = target
        if target.dtype != c.dtype:
            source = turned = wide = source.to(c.dtype) if wide is None or fresh else wide.copy_(source)
        # The partner's products come first: what follows overwrites x, if it is turned in place.
        products = source * s if products is None or fresh else torch.mul(source, s, out=products)
        torch.mul(source, c, out=turned)
        first, second = channels(turned, interleaved)
        of_first, of_second = channels(products, interleaved)
        if conjugate:
            first.add_(of_second)
            second.sub_(of_first)
        else:
            first.sub_(of_second)
            second.add_(of_first)
        if turned is not target:
            target.copy_(turned)


def multiply(out: Tensor, x: Tensor, table: Tensor) -> None:
    """Turn neighbours as complex numbers, by those of the table, (..., R/2)."""
    source, turned = _as_numbers(x, table.dtype), _as_numbers(out, table.dtype)
    if source is not None and turned is not None:
        _product(turned, source, table)
        return
    wide = None
    for given, target, here in blocks((x, out, table), table.element_size() // 2):
        if wide is None or wide.shape != given.shape:
            wide = torch.empty_like(given, dtype=table.dtype.to_real())
            wide = wide if wide.stride(-1) == 1 else wide.contiguous()
            numbers = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
        wide.copy_(given)
        _product(numbers, numbers, here)
        target.copy_(wide)


def _as_numbers(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Each pair of neighbours as one number, where memory allows."""
    *outer, last = x.stride()
    if last != 1 or x.storage_offset() % 2 or any(stride % 2 for stride in outer) or x.dtype != dtype.to_real():
        return None
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _product(out: Tensor, x: Tensor, table: Tensor) -> None:
    """The complex product, cut so that no thread is left with part of a vector."""
    dim = -2 if x.shape[-2] > 1 else 0
    size, start = x.shape[dim], 0
    while start < size:
        count = _shared_evenly(size - start, x.numel() // size)
        if count == size:
            torch.mul(x, table, out=out)
            return
        part = [
            tensor.narrow(dim, start, count or 1) if tensor.shape[dim] == size else tensor for tensor in (out, x, table)
        ]
        if count:
            torch.mul(part[1], part[2], out=part[0])
        else:
            turned, source, here = (torch.view_as_real(numbers) for numbers in part)
            cos, sin = (joined(entry, entry, interleaved=True) for entry in here.unbind(-1))
            turn(turned.flatten(-2), source.flatten(-2), cos, sin, interleaved=True, conjugate=False)
        start += count or 1


def _shared_evenly(size: int, row: int) -> int:
    """The most of `size` rows of `row` numbers that torch's threads share in whole vectors; 0 if none are."""
    for count in range(size, 0, -1):
        threads = min(torch.get_num_threads(), -(-count * row // GRAIN))
        if -(-count * row // threads) % STEP == 0:
            return count
    return 0


def product_is_exact(device: torch.device, pairs: int, dtype: torch.dtype) -> bool:
    """Whether complex products of rows of so many pairs round each product and each sum, as the rotation does."""
    return device.type == "cpu" and pairs % STEP == 0 and _whole_vectors_are_exact(dtype)


@functools.cache
def _whole_vectors_are_exact(dtype: torch.dtype) -> bool:
    # Compilers choose per processor, so it is tried, once.
    a, b, c, s = torch.arange(1, 64 * STEP + 1, dtype=dtype, device="cpu").sin().chunk(4)
    given = torch.view_as_real(torch.complex(a, b) * torch.complex(c, s))
    return torch.equal(given, torch.stack((a * c - b * s, a * s + b * c), -1))
