"""Where the images and videos of a batch of prompts stand among its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from theodolite.positions.checks import LARGEST_POSITION, require_positions, require_values, tensor_of
from theodolite.positions.grids import Grids, grids_tensor

TEXT, IMAGE, VIDEO = 0, 1, 2
_NAMES = {IMAGE: "image", VIDEO: "video"}

AfterVideo = Literal["side", "end"]


class Tokens(NamedTuple):
    """The tokens of a batch without its padding, row by row: (T,) int64 each.

    `rows` and `columns` say where a token was, `kinds` what it is, `documents` which it is in, counted over the batch.
    """

    rows: Tensor
    columns: Tensor
    kinds: Tensor
    documents: Tensor


class VisionSpans(NamedTuple):
    """The images or videos of a batch: (N,) each, int64 but for `interval`.

    `begin` is a span's first token among `Tokens`, `counts` its tokens; `frames`, `height` and `width` are its grid in
    tokens; `advance` is how far text moves on after it; `interval` (float32) is how far apart its frames stand.
    """

    begin: Tensor
    counts: Tensor
    frames: Tensor
    height: Tensor
    width: Tensor
    advance: Tensor
    interval: Tensor

    def time_of(self, frame: Tensor, owner: Tensor | None = None) -> Tensor:
        """floor(frame * interval), of the span `owner` of each frame: positions, int64."""
        interval = self.interval if owner is None else self.interval[owner]
        # Frames count in float32 as the models' own code has them; floor, for none is negative.
        return (frame.to(torch.float32) * interval).to(torch.int64)


def vision_spans(tokens: Tokens, kind: int, grid_thw: Grids | None, spatial_merge_size: int) -> VisionSpans:
    """The spans of one kind: its tokens dealt out to its grids in order.

    Raises:
        ValueError: tokens without grids, another number of tokens than the grids ask for, or a grid whose tokens are
            interrupted by others or by the end of a row or document.
    """
    name = f"{_NAMES[kind]}_grid_thw"
    where = (tokens.kinds == kind).nonzero().squeeze(1)
    if grid_thw is None:
        if len(where):
            raise ValueError(
                f"{name}: not given, and the prompt has {len(where)} {_NAMES[kind]} tokens; "
                "without their grids they have no positions"
            )
        grid_thw = ()
    grids = grids_tensor(name, grid_thw, spatial_merge_size=spatial_merge_size, device=where.device)
    frames, height, width = grids[:, 0], grids[:, 1] // spatial_merge_size, grids[:, 2] // spatial_merge_size
    counts = frames * height * width
    if int(counts.sum()) != len(where):
        raise ValueError(
            f"{name}: {len(grids)} grids ask for {int(counts.sum())} tokens at spatial_merge_size "
            f"{spatial_merge_size}; the prompt has {len(where)} {_NAMES[kind]} tokens"
        )
    ends = counts.cumsum(0)
    begin, end = where[ends - counts], where[ends - 1]
    apart = (end - begin != counts - 1) | (tokens.documents[begin] != tokens.documents[end])
    if apart.any():
        number = int(apart.nonzero()[0])
        row, column = int(tokens.rows[begin[number]]), int(tokens.columns[begin[number]])
        hint = "; where text stands between frames, give split_frames(video_grid_thw)" if kind == VIDEO else ""
        raise ValueError(
            f"{name}: grid {number} asks for {int(counts[number])} tokens together from row {row}, token {column} on, "
            f"and they do not stand together{hint}"
        )
    interval = torch.ones(len(grids), dtype=torch.float32, device=where.device)
    return VisionSpans(begin, counts, frames, height, width, torch.maximum(height, width), interval)


def timed(videos: VisionSpans, interval: float | Sequence[float] | Tensor | None, after: str | None) -> VisionSpans:
    """The videos with their frames apart, and with where text goes on after them."""
    if after is not None and after not in get_args(AfterVideo):
        raise ValueError(f"after_video: got {after!r}; allowed: 'side', 'end'")
    numbers = None if interval is None else _intervals(interval)
    if not (videos.frames > 1).any():
        return videos
    if numbers is None:
        raise ValueError(
            "video_interval: not given, and a video has more than one frame; give 1 (Qwen2-VL), or "
            "temporal_interval(second_per_grid_ts, tokens_per_second=...) (Qwen2.5-VL)"
        )
    numbers = numbers.to(videos.frames.device)
    if numbers.dim() == 1 and len(numbers) != len(videos.frames):
        raise ValueError(
            f"video_interval: got shape {tuple(numbers.shape)}; give one number, or one for each of the "
            f"{len(videos.frames)} videos"
        )
    apart = videos._replace(interval=numbers.expand(len(videos.frames)))
    # Past the range of int64 a product would come out negative.
    far = (apart.frames - 1) * apart.interval > LARGEST_POSITION
    if far.any():
        number = int(far.nonzero()[0])
        raise ValueError(
            f"video_interval: got {float(apart.interval[number]):g} for the {int(apart.frames[number])} frames of "
            f"video {number}, whose last would stand past 2**24 = {LARGEST_POSITION}, where rotary tables end"
        )
    last = apart.time_of(apart.frames - 1) + 1
    if after is None and (last > apart.advance).any():
        number = int((last > apart.advance).nonzero()[0])
        raise ValueError(
            f"after_video: not given, and video {number} lasts {int(last[number])} positions on a side of "
            f"{int(apart.advance[number])}; 'side' goes on after {int(apart.advance[number])} (transformers 5), "
            f"'end' after {int(last[number])} (Qwen's own code, vLLM)"
        )
    return apart._replace(advance=torch.maximum(apart.advance, last)) if after == "end" else apart


def _intervals(given: float | Sequence[float] | Tensor) -> Tensor:
    """float32, checked by themselves."""
    numbers = tensor_of("video_interval", given, of="one number, or one for each video", dtype=torch.float32)
    require_positions("video_interval", numbers, dims=(0, 1))
    require_values("video_interval", numbers)
    numbers = numbers.to(torch.float32)
    if not bool(((numbers >= 0) & (numbers < math.inf)).all()):
        raise ValueError(f"video_interval: got {numbers.tolist()}; give finite numbers of at least 0")
    return numbers
