"""Positions of multimodal prompts on three axes (time, height, width): M-RoPE of the Qwen-VL family.

Text stands at the same number on all three axes. An image or video starts where text would go on; its tokens add their
frame, row and column to that. Nothing is remembered: a row's `delta` is returned, and given back for decoding.

| model | call |
|---|---|
| Qwen2-VL | `mrope_positions(types, ..., video_interval=1)` |
| Qwen2.5-VL | `video_interval=temporal_interval(second_per_grid_ts, tokens_per_second=...)` |
| Qwen3-VL, Qwen3.5, GLM-4V | `video_grid_thw=split_frames(video_grid_thw)`: timestamps stand between frames |
| Ernie-4.5-VL | time of the videos' grids divided by `temporal_merge_size` first, `video_interval=1` |

Not these: Qwen-Omni (time in fractions, audio between frames), HunYuan-VL and MiniCPM-V (other axes or layouts).

Shapes: B rows, S tokens, N images or videos of the whole batch, row by row and in the order of their tokens. Values are
read to be checked, so call it where a prompt is made, not inside what `torch.compile` traces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from theodolite.positions.checks import (
    LARGEST_POSITION,
    require_integers,
    require_mask,
    require_positions,
    require_values,
)
from theodolite.positions.decoding import Counts, next_positions
from theodolite.positions.grids import Grids, grids_tensor
from theodolite.positions.spans import (
    IMAGE,
    TEXT,
    VIDEO,
    AfterVideo,
    Tokens,
    VisionSpans,
    timed,
    vision_spans,
)


class MRopePositions(NamedTuple):
    """`positions` (3, B, S) int64, 0 at padding; `delta` (B,) int64: a row's next position less its tokens so far."""

    positions: Tensor
    delta: Tensor


def token_types(input_ids: Tensor, *, image_token_id: int, video_token_id: int | None = None) -> Tensor:
    """0 for text, 1 for image and 2 for video tokens: (B, S) int64, as `mm_token_type_ids` of transformers has it.

    For models whose placeholders tell by themselves what they stand for. GLM-4V writes the frames of its videos with
    the image's token: take its processor's `mm_token_type_ids`.
    """
    require_integers("input_ids", input_ids, dims=(2,))
    types = torch.zeros_like(input_ids, dtype=torch.int64)
    types[input_ids == image_token_id] = IMAGE
    if video_token_id is not None:
        types[input_ids == video_token_id] = VIDEO
    return types


def split_frames(video_grid_thw: Grids) -> Tensor:
    """Each frame of each video as a grid of its own, for models that write timestamps between frames: (frames, 3)."""
    grids = grids_tensor("video_grid_thw", video_grid_thw, spatial_merge_size=1)
    frames = torch.repeat_interleave(grids, grids[:, 0], dim=0)
    frames[:, 0] = 1
    return frames


def temporal_interval(second_per_grid: Tensor | Sequence[float], *, tokens_per_second: float) -> Tensor:
    """How far apart the frames of each video stand, in positions: (N,) float32, as transformers computes it.

    Args:
        second_per_grid: seconds between two frames after patches were made, one for each video. A list is put on the
            CPU.
        tokens_per_second: the vision config's (2 in Qwen2.5-VL).

    Raises:
        ValueError: a tensor in half precision: seconds must not take the dtype of the activations; or a list with what
            is no finite number.
    """
    if isinstance(second_per_grid, Tensor):
        require_positions("second_per_grid", second_per_grid, dims=(1,))
        return tokens_per_second * second_per_grid.to(torch.float32)
    products = [tokens_per_second * float(seconds) for seconds in second_per_grid]
    if not all(map(math.isfinite, products)):
        raise ValueError(
            f"second_per_grid: got {list(second_per_grid)} at tokens_per_second {tokens_per_second}; "
            "the products must be finite"
        )
    return torch.tensor(products, dtype=torch.float32, device="cpu")


def mrope_positions(
    token_types: Tensor,
    *,
    spatial_merge_size: int,
    image_grid_thw: Grids | None = None,
    video_grid_thw: Grids | None = None,
    video_interval: float | Sequence[float] | Tensor | None = None,
    after_video: AfterVideo | None = None,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> MRopePositions:
    """Positions on three axes, and what decoding adds to the number of tokens.

    Args:
        token_types: (B, S), 0 text, 1 image, 2 video.
        spatial_merge_size: patches on a side of the block that becomes one token.
        image_grid_thw: (N, 3): 1, height and width in patches of each image.
        video_grid_thw: (N, 3): frames, height and width in patches of each video.
        video_interval: positions from one frame to the next, for all videos or one each; frame k is at
            floor(k * interval), in float32 as in transformers. Needed where a video has more than one frame.
        after_video: where text goes on after a video: "side", at its start + max(height, width) // merge (transformers
            5.24); "end", at its largest position + 1 (Qwen's own code, transformers 4, vLLM). They differ where a video
            lasts longer than its sides, and there it is needed. After an image both are the same.
        attention_mask: (B, S), 0 at padding, on either side; padding stands at 0.
        document_ids: (B, S), for rows of several documents: each starts again at 0, as it would alone. Negative ids
            are padding, as from `theodolite.positions.packing.document_ids`.

    Returns:
        On the device of `token_types`. A row's `delta` is its last document's largest position + 1 less the row's
        tokens without padding (0 for a row of padding alone).

    Raises:
        ValueError: image or video tokens without grids, grids that ask for another number of tokens or for tokens that
            do not stand together, `video_interval` or `after_video` missing where they matter, unknown token types;
            positions past 2**24, where rotary tables end.
    """
    tokens = _real_tokens(token_types, attention_mask, document_ids)
    images = vision_spans(tokens, IMAGE, image_grid_thw, spatial_merge_size)
    videos = vision_spans(tokens, VIDEO, video_grid_thw, spatial_merge_size)
    if (images.frames > 1).any():
        number = int((images.frames > 1).nonzero()[0])
        raise ValueError(f"image_grid_thw: grid {number} has {int(images.frames[number])} frames; an image has one")
    videos = timed(videos, video_interval, after_video)
    flat = _flat_positions(tokens, (images, videos))
    if flat.numel() and int(flat.max()) > LARGEST_POSITION:
        raise ValueError(
            f"positions: they reach {int(flat.max())}, past 2**24 = {LARGEST_POSITION}, where rotary tables end; "
            "a row is too long, or video_interval too large"
        )
    positions = flat.new_zeros(3, *token_types.shape)
    positions[:, tokens.rows, tokens.columns] = flat
    return MRopePositions(positions, _delta(tokens, flat, len(token_types)))


def mrope_next_positions(
    seen: Counts, *, delta: Counts, new_tokens: int | None = None, new_mask: Tensor | None = None
) -> Tensor:
    """Positions of the tokens that each row takes next, the same on all axes: (3, B, n), int64.

    Args:
        seen: (B,), the tokens each row has had so far, prompt and answer, padding not counted.
        delta: (B,), as `mrope_positions` returned it for these rows; it belongs to the sequence.
        new_tokens, new_mask: as for `theodolite.positions.decoding.next_positions`.
    """
    positions = next_positions(seen, new_tokens=new_tokens, new_mask=new_mask, delta=delta)
    return positions.expand(3, *positions.shape)


def _real_tokens(types: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None) -> Tokens:
    """The tokens that are no padding, row by row, with the document that each is in."""
    require_integers("token_types", types, dims=(2,))
    require_values("token_types", types)
    real = torch.ones_like(types, dtype=torch.bool)
    if attention_mask is not None:
        require_mask("attention_mask", attention_mask, dims=(2,))
        _require_shape("attention_mask", attention_mask, types)
        real = attention_mask != 0
    if document_ids is not None:
        require_integers("document_ids", document_ids, dims=(2,))
        _require_shape("document_ids", document_ids, types)
        document_ids = document_ids.to(torch.int64)
        real = real & (document_ids >= 0)
    rows, columns = real.nonzero(as_tuple=True)
    kinds = types[rows, columns].to(torch.int64)
    unknown = (kinds < TEXT) | (kinds > VIDEO)
    if unknown.any():
        raise ValueError(
            f"token_types: got {int(kinds[unknown][0])}; 0 is text (audio counts as text), 1 image, 2 video"
        )
    starts = torch.ones_like(rows, dtype=torch.bool)
    starts[1:] = rows[1:] != rows[:-1]
    if document_ids is not None:
        documents = document_ids[rows, columns]
        starts[1:] |= documents[1:] != documents[:-1]
    return Tokens(rows=rows, columns=columns, kinds=kinds, documents=starts.cumsum(0) - 1)


def _flat_positions(tokens: Tokens, kinds: tuple[VisionSpans, ...]) -> Tensor:
    """Positions of the real tokens one after the other: (3, real tokens)."""
    # Text moves on by 1 with each token; an image or video by its advance, at its last token.
    advance = (tokens.kinds == TEXT).to(torch.int64)
    for spans in kinds:
        advance[spans.begin + spans.counts - 1] = spans.advance
    before = advance.cumsum(0) - advance
    first = torch.ones_like(tokens.documents, dtype=torch.bool)
    first[1:] = tokens.documents[1:] != tokens.documents[:-1]
    flat = (before - before[first][tokens.documents]).repeat(3, 1)
    for spans in kinds:
        owner = torch.repeat_interleave(torch.arange(len(spans.counts), device=flat.device), spans.counts)
        within = torch.arange(len(owner), device=flat.device) - (spans.counts.cumsum(0) - spans.counts)[owner]
        at, area, width = spans.begin[owner] + within, (spans.height * spans.width)[owner], spans.width[owner]
        flat[0, at] += spans.time_of(within // area, owner)
        flat[1, at] += within % area // width
        flat[2, at] += within % width
    return flat


def _delta(tokens: Tokens, flat: Tensor, rows: int) -> Tensor:
    lengths = torch.zeros(rows, dtype=torch.int64, device=flat.device).index_add_(
        0, tokens.rows, torch.ones_like(tokens.rows)
    )
    filled = lengths > 0
    last_document = tokens.documents[(lengths.cumsum(0) - 1)[filled]]
    count = int(tokens.documents[-1]) + 1 if len(tokens.documents) else 0
    largest = flat.new_zeros(count).scatter_reduce_(0, tokens.documents, flat.amax(0), "amax")
    delta = torch.zeros_like(lengths)
    delta[filled] = largest[last_document] + 1 - lengths[filled]
    return delta


def _require_shape(name: str, given: Tensor, types: Tensor) -> None:
    if given.shape != types.shape:
        raise ValueError(f"{name}: got shape {tuple(given.shape)}; token_types has {tuple(types.shape)}")
