"""What every function here does with the tensors it is given: their integers may be of any width, and the device on
which a program makes its tensors by default has no say."""

from __future__ import annotations

import pytest
import torch

from theodolite.plan import Mask
from theodolite.positions import (
    AttentionSinks,
    DualChunk,
    LeakyReRoPE,
    LMInfinite,
    ReRoPE,
    SelfExtend,
    centred_patch_positions,
    chunk,
    chunks,
    cu_seqlens_of_documents,
    cu_seqlens_of_lengths,
    document_ids,
    from_attention_mask,
    from_cu_seqlens,
    from_document_ids,
    mrope_next_positions,
    mrope_positions,
    next_positions,
    patches_of_grids,
    pose_positions,
    randomized_positions,
    resized_patch_positions,
    seen_after_draft,
    segment_positions,
    shard,
    split_frames,
    starts_after,
    temporal_interval,
    token_types,
    tokens_seen,
    tree_positions,
    unshard,
    visible_by_position,
    visible_in_documents,
    visible_keys,
    with_special_tokens,
    zigzag_packed,
)

VIDEO = {"spatial_merge_size": 2, "after_video": "end"}

# Each takes `t`, which makes a tensor of a list. Results keep to their dtype, or to that of what was given.
CASES = {
    "chunk": lambda t: chunk(t([[5, 1, 2, 3], [7, 8, 9, 9]]), start=t([1, 0]), length=2),
    "chunk, axes": lambda t: chunk(t([[[5, 1, 2, 3]]] * 3), start=t([1]), length=2),
    "chunk at a number": lambda t: chunk(t([5, 1, 2, 3]), start=1, length=2),
    "chunks": lambda t: [piece.positions for piece in chunks(t([5, 1, 2, 3]), sizes=3)],
    "tokens_seen": lambda t: tokens_seen(t([[0, 1, 1]])),
    "next_positions": lambda t: next_positions(t([1, 2]), new_tokens=2, delta=t([1, 3])),
    "next_positions, mask": lambda t: next_positions(t([1, 2]), new_mask=t([[1, 0], [1, 1]])),
    "seen_after_draft": lambda t: seen_after_draft(t([1, 5]), accepted=t([1, 0]), drafted=2),
    "tree_positions": lambda t: tree_positions(torch.tensor([-1, 0, 0, 2], device="cpu"), seen=t([1])),
    "from_attention_mask": lambda t: from_attention_mask(t([[0, 0, 1, 1]])),
    "from_cu_seqlens": lambda t: from_cu_seqlens(t([0, 3, 7]), total=9, trailing_padding=True),
    "document_ids": lambda t: document_ids(t([0, 3, 7])),
    "from_document_ids": lambda t: from_document_ids(t([0, 0, 1])),
    "cu_seqlens_of_lengths": lambda t: cu_seqlens_of_lengths(t([3, 4])),
    "cu_seqlens_of_documents": lambda t: cu_seqlens_of_documents(t([0, 0, 1])),
    "segment_positions": lambda t: segment_positions(
        starts=starts_after(t([1, 2, 1, 3]), separators=[1]), document_ids=t([0, 0, 1, 1]), attention_mask=t([1] * 4)
    ),
    "segment_positions, ends": lambda t: segment_positions(ends=t([0, 1, 0])),
    "zigzag_packed": lambda t: zigzag_packed(t([0, 4, 8]), ranks=2),
    "shard": lambda t: shard(t([4, 5, 6, 7]), t([0, 3]), dim=-1),
    "unshard": lambda t: unshard([t([1, 2]), t([3, 4])], t([[0, 3], [1, 2]]), dim=-1),
    "visible_by_position": lambda t: visible_by_position(
        Mask(causal=True, sliding_window=3), t([0, 1, 4, 5]), t([0, 1, 2, 5])
    ),
    "visible_in_documents": lambda t: visible_in_documents(t([0, 0, 1])),
    "visible_keys": lambda t: visible_keys(t([[1, 1, 0]])),
    "with_special_tokens": lambda t: with_special_tokens(t([[4, 5], [6, 7]]), before=1, after=1),
    "patches_of_grids": lambda t: patches_of_grids(t([[1, 4, 2], [2, 2, 2]]), spatial_merge_size=2, time=True),
    "split_frames": lambda t: split_frames(t([[2, 2, 4]])),
    "token_types": lambda t: token_types(t([[5, 6, 7]]), image_token_id=5, video_token_id=6),
    "mrope, text": lambda t: mrope_positions(t([[0, 0]]), spatial_merge_size=2),
    "mrope, image": lambda t: mrope_positions(
        t([[0, 1, 1, 0]]), spatial_merge_size=2, image_grid_thw=t([[1, 4, 2]]), attention_mask=t([[1] * 4])
    ),
    "mrope, video": lambda t: mrope_positions(
        t([[0, 2, 2, 0]]), video_grid_thw=t([[2, 2, 2]]), video_interval=t([3]), document_ids=t([[1] * 4]), **VIDEO
    ),
    "mrope_next_positions": lambda t: mrope_next_positions(t([4]), delta=t([1]), new_tokens=2),
    **{
        type(one).__name__: lambda t, one=one: (
            one.relative(t([0, 1, 30]), t([0, 1, 2, 29])),
            one.seen(t([0, 30]), t([29])),
        )
        for one in (
            ReRoPE(window=3),
            LeakyReRoPE(window=3, factor=2),
            SelfExtend(window=3, group_size=2),
            LMInfinite(window=3, sinks=1),
            AttentionSinks(window=3, sinks=1),
            DualChunk(chunk_size=8, local_size=2),
        )
    },
}

# Numbers of Python, read on the CPU.
FROM_NUMBERS = {
    "patches_of_grids": lambda: patches_of_grids([(1, 4, 2), (2, 2, 2)], spatial_merge_size=2),
    "patches_of_no_grids": lambda: patches_of_grids([], spatial_merge_size=2),
    "split_frames": lambda: split_frames([(2, 2, 4)]),
    "temporal_interval": lambda: temporal_interval([0.5], tokens_per_second=2),
    "mrope": lambda: mrope_positions(
        torch.tensor([[0, 2, 2, 0]], device="cpu"), video_grid_thw=[(2, 2, 2)], video_interval=1, **VIDEO
    ),
    "mrope, one interval each": lambda: mrope_positions(
        torch.tensor([[0, 2, 2, 0]], device="cpu"), video_grid_thw=[(2, 2, 2)], video_interval=[2.0], **VIDEO
    ),
    "mrope, seconds": lambda: mrope_positions(
        torch.tensor([[0, 2, 2, 0]], device="cpu"),
        video_grid_thw=[(2, 2, 2)],
        video_interval=temporal_interval([0.5], tokens_per_second=2),
        **VIDEO,
    ),
    "centred": lambda: centred_patch_positions(2, 3, normalize_coords="max"),
    "resized": lambda: resized_patch_positions(2, 3, trained_rows=4, trained_columns=4),
    "randomized": lambda: randomized_positions(2, 3, max_position_embeddings=90, generator=generator()),
    "pose": lambda: pose_positions(2, 3, max_position_embeddings=90, generator=generator()),
    "lists": lambda: (
        next_positions([3, 4]),
        tokens_seen([[0, 1, 1]]),
        from_cu_seqlens([0, 3, 7]),
        cu_seqlens_of_lengths([3, 4]),
        tree_positions([-1, 0, 0], seen=3),
        from_attention_mask([[0, 1]]),
    ),
}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def tensors(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [one for part in result for one in tensors(part)]


def maker(dtype: torch.dtype):
    return lambda numbers: torch.tensor(numbers, dtype=dtype, device="cpu")


class TestIntegersOfAnyWidth:
    """Unsigned integers wrap where they are subtracted, and torch can neither compare nor gather the wide ones."""

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int32])
    @pytest.mark.parametrize("name", CASES)
    def test_the_same_numbers(self, name, dtype):
        plain, found = tensors(CASES[name](maker(torch.int64))), tensors(CASES[name](maker(dtype)))
        for one, other in zip(found, plain, strict=True):
            assert one.dtype in (other.dtype, dtype)
            assert torch.equal(one.to(other.dtype), other)

    def test_what_is_cut_keeps_its_dtype(self):
        large = torch.tensor([[2**64 - 1, 2**63, 1]], dtype=torch.uint64)
        piece = chunk(large, start=torch.tensor([1], dtype=torch.uint64), length=2)
        assert piece.dtype == torch.uint64
        assert piece.tolist() == [[2**63, 1]]
        assert shard(large[0], torch.tensor([2, 0]), dim=0).tolist() == [1, 2**64 - 1]


class TestAnyDefaultDevice:
    """Models are made with `torch.device("meta")` around them, and positions made there still have values."""

    @pytest.mark.parametrize("name", CASES)
    def test_of_tensors(self, name):
        plain = tensors(CASES[name](maker(torch.int64)))
        with torch.device("meta"):
            found = tensors(CASES[name](maker(torch.int64)))
        assert all(map(torch.equal, found, plain))

    @pytest.mark.parametrize("name", FROM_NUMBERS)
    def test_of_numbers(self, name):
        plain = tensors(FROM_NUMBERS[name]())
        with torch.device("meta"):
            found = tensors(FROM_NUMBERS[name]())
        assert all(one.device.type == "cpu" for one in found)
        assert all(map(torch.equal, found, plain))

    @pytest.mark.parametrize(
        ("call", "name"),
        [
            (lambda t: mrope_positions(t([[0, 0]]), spatial_merge_size=2), "token_types"),
            (lambda t: patches_of_grids(t([[1, 2, 2]]), spatial_merge_size=2), "grid_thw"),
            (lambda t: split_frames(t([[1, 2, 2]])), "video_grid_thw"),
        ],
    )
    def test_what_has_no_values_is_said(self, call, name):
        with pytest.raises(ValueError, match=f"{name}: got a tensor on the meta device, which has no values, and they"):
            call(lambda numbers: torch.tensor(numbers, device="meta"))


class TestNumbersOfPython:
    """Lengths come out of a tokenizer as lists."""

    def test_equal_to_tensors(self):
        assert cu_seqlens_of_lengths([3, 4]).tolist() == [0, 3, 7]
        assert cu_seqlens_of_lengths([]).tolist() == [0]
        assert from_cu_seqlens((0, 3, 7)).tolist() == [0, 1, 2, 0, 1, 2, 3]
        assert document_ids([0, 3, 5]).tolist() == [0, 0, 0, 1, 1]
        assert zigzag_packed([0, 4, 8], ranks=2).tolist() == [[0, 3, 4, 7], [1, 2, 5, 6]]
        assert tokens_seen([[0, 1, 1], [1, 1, 1]]).tolist() == [2, 3]
        assert from_attention_mask([[False, True, True]]).tolist() == [[0, 0, 1]]
        assert next_positions(7).tolist() == [7]
        assert next_positions([2, 4], delta=[1, 0], new_tokens=2).tolist() == [[3, 4], [4, 5]]
        assert seen_after_draft([2, 4], accepted=[1, 0], drafted=1).tolist() == [3, 4]
        assert tree_positions([-1, 0, 0], seen=[5]).tolist() == [[5, 6, 6]]
        assert mrope_next_positions([4], delta=[2]).tolist() == [[[6]]] * 3
        rows = torch.tensor([[5, 1, 2, 3], [7, 8, 9, 9]])
        assert chunk(rows, start=[1, 0], length=2).tolist() == [[1, 2], [7, 8]]

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: cu_seqlens_of_lengths([3.0, 4]), "lengths: got torch.float32; give integers"),
            (lambda: cu_seqlens_of_lengths([True, True]), "lengths: got torch.bool; give integers"),
            (lambda: cu_seqlens_of_lengths([3, [4]]), r"lengths: got \[3, \[4\]\]; give one for each document"),
            (lambda: cu_seqlens_of_lengths("34"), "lengths: got '34'; give one for each document"),
            (lambda: from_cu_seqlens(None), "cu_seqlens: got None; give where each document begins"),
            (lambda: next_positions([1, 2.5]), "seen: got torch.float32; give integers"),
            (lambda: next_positions([[1]]), r"seen: got shape \(1, 1\); it must be \(B,\), or \(\) for one row"),
            (lambda: tokens_seen([[1.0]]), "attention_mask: got torch.float32; give booleans or integers"),
            (lambda: tokens_seen([[1], [1, 1]]), r"attention_mask: got \[\[1\], \[1, 1\]\]; give one for each token"),
            (lambda: chunk(torch.zeros(2, 3).long(), start=[0], length=1), r"start: got shape \(1,\) for positions"),
            (lambda: chunk(torch.arange(3), start=1.0, length=1), "start: got a float; give a Python int"),
        ],
    )
    def test_refusals(self, call, message):
        with pytest.raises(ValueError, match=message):
            call()
