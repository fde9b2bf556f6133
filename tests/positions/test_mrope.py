import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.encodings import rotary_tables
from theodolite.kernels import rotate
from theodolite.plan import Rotary
from theodolite.positions.checks import LARGEST_POSITION
from theodolite.positions.chunks import chunks
from theodolite.positions.mrope import (
    mrope_next_positions,
    mrope_positions,
    split_frames,
    temporal_interval,
    token_types,
)

MERGE = 2
IMAGE_ID, VIDEO_ID = 90, 91


def oracle(parts, interval=1.0, after="side"):
    """Positions of one document, token by token. Parts: a number of text tokens, or (frames, height, width)."""
    out, at = [], 0
    for part in parts:
        if isinstance(part, int):
            out += [(at + i,) * 3 for i in range(part)]
            at += part
            continue
        frames, height, width = part[0], part[1] // MERGE, part[2] // MERGE
        tokens = [
            (at + math.floor(t * interval), at + row, at + column)
            for t in range(frames)
            for row in range(height)
            for column in range(width)
        ]
        out += tokens
        at = at + max(height, width) if after == "side" or frames == 1 else max(map(max, tokens)) + 1
    return out


def types_of(parts):
    out = []
    for part in parts:
        if isinstance(part, int):
            out += [0] * part
        else:
            out += [1 if part[0] == 1 else 2] * (math.prod(part) // MERGE**2)
    return out


def grids_of(rows, kind):
    """The grids of one kind in the batch, or None."""
    return [part for parts in rows for part in parts if not isinstance(part, int) and (part[0] == 1) == (kind == 1)]


def batch_of(rows, left):
    """Token types and mask, padded on one side to the longest row."""
    types = [types_of(parts) for parts in rows]
    width = max(map(len, types))
    pads = [[0] * (width - len(row)) for row in types]
    ones = [[1] * len(row) for row in types]
    padded = [pad + row if left else row + pad for pad, row in zip(pads, types, strict=True)]
    mask = [pad + row if left else row + pad for pad, row in zip(pads, ones, strict=True)]
    return torch.tensor(padded), torch.tensor(mask)


def place(rows, *, left=True, **settings):
    types, mask = batch_of(rows, left)
    return mrope_positions(
        types,
        spatial_merge_size=MERGE,
        image_grid_thw=grids_of(rows, 1),
        video_grid_thw=grids_of(rows, 2),
        attention_mask=mask,
        **settings,
    )


side = st.integers(1, 4).map(lambda n: n * MERGE)
image = st.tuples(st.just(1), side, side)
video = st.tuples(st.integers(2, 4), side, side)
prompt = st.lists(st.one_of(st.integers(1, 5), image, video), min_size=1, max_size=6)
PROMPT = [3, (1, 4, 6), 2, (3, 4, 2), (1, 2, 2), 4]


class TestPositions:
    """A wrong position moves a whole picture against the question about it, and nothing raises."""

    def test_by_hand(self):
        positions, delta = mrope_positions(
            torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0, 0]]), spatial_merge_size=2, image_grid_thw=[(1, 4, 6)]
        )
        assert positions[:, 0].tolist() == [
            [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
            [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
            [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
        ]
        assert positions.dtype == torch.int64
        assert delta.tolist() == [7 - 10]

    def test_frames_of_a_video_stand_apart_by_its_interval(self):
        types = torch.tensor([[0] + [2] * 6 + [0]])
        call = {"spatial_merge_size": 2, "video_grid_thw": [(3, 4, 2)], "video_interval": 1.5}
        positions, delta = mrope_positions(types, after_video="side", **call)
        assert positions[0, 0].tolist() == [0, 1, 1, 2, 2, 4, 4, 3]
        assert positions[1, 0].tolist() == [0, 1, 2, 1, 2, 1, 2, 3]
        assert delta.tolist() == [5 - 8]
        positions, delta = mrope_positions(types, after_video="end", **call)
        assert positions[:, 0, -1].tolist() == [5, 5, 5]
        assert delta.tolist() == [6 - 8]

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(prompt, min_size=1, max_size=4),
        st.booleans(),
        st.sampled_from([1.0, 0.5, 2.0, 0.25, 3.5]),
        st.sampled_from(["side", "end"]),
    )
    def test_any_prompts_padded_on_either_side(self, rows, left, interval, after):
        positions, delta = place(rows, left=left, video_interval=interval, after_video=after)
        for row, parts in enumerate(rows):
            expected = torch.tensor(oracle(parts, interval, after)).T
            pads = positions.shape[2] - expected.shape[1]
            real = slice(pads, None) if left else slice(0, expected.shape[1])
            assert torch.equal(positions[:, row, real], expected)
            assert not positions[:, row].sum() - expected.sum()
            assert delta[row] == expected.max() + 1 - expected.shape[1]

    def test_text_alone_is_a_plain_count_on_all_axes(self):
        positions, delta = mrope_positions(torch.zeros(2, 5, dtype=torch.int64), spatial_merge_size=2)
        assert torch.equal(positions, torch.arange(5).expand(3, 2, 5))
        assert delta.tolist() == [0, 0]

    def test_after_an_image_text_goes_on_at_its_largest_position_plus_one(self):
        for grid in [(1, 2, 8), (1, 8, 2), (1, 4, 4)]:
            positions, _ = place([[2, grid, 1]])
            assert (positions[:, 0, -1] == positions[:, 0, :-1].max() + 1).all()

    def test_each_video_has_an_interval_of_its_own(self):
        rows = [[1, (2, 2, 4), 1], [(3, 2, 2), 2]]
        positions, _ = place(rows, video_interval=[3.0, 0.5], after_video="end")
        assert positions[:, 0].T[: len(types_of(rows[0]))].tolist() == [list(p) for p in oracle(rows[0], 3.0, "end")]
        assert positions[:, 1].T[-len(types_of(rows[1])) :].tolist() == [list(p) for p in oracle(rows[1], 0.5, "end")]

    def test_pictures_side_by_side_are_told_apart_by_their_grids(self):
        positions, _ = place([[1, (1, 2, 4), (1, 4, 2), 1]])
        assert positions[:, 0].T.tolist() == [list(p) for p in oracle([1, (1, 2, 4), (1, 4, 2), 1])]

    def test_a_row_of_padding_alone(self):
        positions, delta = mrope_positions(
            torch.zeros(2, 3, dtype=torch.int64),
            spatial_merge_size=2,
            attention_mask=torch.tensor([[0, 0, 0], [0, 1, 1]]),
        )
        assert positions[0].tolist() == [[0, 0, 0], [0, 0, 1]]
        assert delta.tolist() == [0, 0]

    def test_boolean_masks_and_small_integers(self):
        types, mask = batch_of([PROMPT, [2]], True)
        call = {"spatial_merge_size": MERGE, "image_grid_thw": torch.tensor(grids_of([PROMPT], 1), dtype=torch.int32)}
        call |= {"video_grid_thw": grids_of([PROMPT], 2), "video_interval": 1, "after_video": "side"}
        expected = mrope_positions(types, attention_mask=mask, **call)
        given = mrope_positions(types.to(torch.int8), attention_mask=mask.bool(), **call)
        assert torch.equal(given.positions, expected.positions)
        assert torch.equal(given.delta, expected.delta)


class TestSplitVideos:
    """Where timestamps stand between the frames, each frame is a picture of its own, and time is in the text."""

    def test_frames(self):
        assert split_frames([(2, 4, 6), (1, 2, 2), (3, 2, 4)]).tolist() == [
            [1, 4, 6], [1, 4, 6], [1, 2, 2], [1, 2, 4], [1, 2, 4], [1, 2, 4],
        ]  # fmt: skip

    def test_the_grids_given_are_left_alone(self):
        grids = torch.tensor([[2, 4, 6]])
        split_frames(grids)
        assert grids.tolist() == [[2, 4, 6]]

    def test_they_need_no_interval(self):
        types = torch.tensor([[0, 2, 2, 0, 0, 2, 2, 0]])
        positions, delta = mrope_positions(types, spatial_merge_size=2, video_grid_thw=split_frames([(2, 2, 4)]))
        assert positions[:, 0].T.tolist() == [list(p) for p in oracle([1, (1, 2, 4), 2, (1, 2, 4), 1])]
        assert delta.tolist() == [0]


class TestIntervals:
    """Frame k stands at floor(k * interval) in float32, which is how the models' own code counts."""

    def test_seconds_as_a_tensor_or_a_list(self):
        seconds = [0.5, 0.08, 1.0]
        assert temporal_interval(seconds, tokens_per_second=2).tolist() == pytest.approx([1.0, 0.16, 2.0], rel=2**-24)
        assert torch.equal(
            temporal_interval(torch.tensor(seconds), tokens_per_second=2),
            temporal_interval(seconds, tokens_per_second=2),
        )

    def test_a_whole_product_is_not_floored_to_the_number_before(self):
        # 0.16 in float32 is a little low: 25 times it is 4 in float32, and 3.9999999 in float64.
        interval = temporal_interval(torch.tensor([0.08]), tokens_per_second=2)
        positions, _ = mrope_positions(
            torch.full((1, 26), 2), spatial_merge_size=1, video_grid_thw=[(26, 1, 1)], video_interval=interval,
            after_video="end",
        )  # fmt: skip
        assert positions[0, 0, 25] == 4

    def test_half_precision_is_refused(self):
        with pytest.raises(ValueError, match=r"second_per_grid: got torch.bfloat16"):
            temporal_interval(torch.tensor([0.08]).bfloat16(), tokens_per_second=2)


class TestNothingIsRemembered:
    """The delta of one request has reached another: here it is returned, and given back by whoever decodes."""

    def test_decoding_goes_on_as_the_prompt_would(self):
        rows = [PROMPT, [2, (1, 6, 2)], [4]]
        settings = {"video_interval": 1, "after_video": "end"}
        positions, delta = place([[*parts, 3] for parts in rows], **settings)
        seen = torch.tensor([len(types_of(parts)) for parts in rows])
        decoded = mrope_next_positions(seen, delta=place(rows, **settings).delta, new_tokens=3)
        assert torch.equal(decoded, positions[..., -3:])
        one = mrope_next_positions(seen + 2, delta=delta, new_tokens=1)
        assert torch.equal(one, positions[..., -1:])

    def test_two_requests_in_turn(self):
        first, second = place([[2, (1, 8, 8), 1]] * 4), place([[5]])
        seen = torch.tensor([19] * 4)
        expected = mrope_next_positions(seen, delta=first.delta, new_tokens=1)
        other = mrope_next_positions(torch.tensor([5]), delta=second.delta, new_tokens=1)
        assert torch.equal(other, torch.full((3, 1, 1), 5))
        assert torch.equal(place([[2, (1, 8, 8), 1]] * 4).delta, first.delta)
        assert torch.equal(mrope_next_positions(seen, delta=first.delta, new_tokens=1), expected)

    def test_chunks_of_the_prompt_are_slices_of_its_positions(self):
        positions, delta = place([PROMPT, [2, (1, 6, 2)]], video_interval=1, after_video="side")
        pieces = [piece.positions for piece in chunks(positions, sizes=4)]
        assert torch.equal(torch.cat(pieces, dim=-1), positions)
        assert pieces[0].shape == (3, 2, 4)
        assert delta.shape == (2,)


class TestPacked:
    """Equal documents give equal positions, whatever they are packed with."""

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.lists(prompt, min_size=1, max_size=3), min_size=1, max_size=3), st.booleans())
    def test_packed_equals_separate(self, packs, left):
        rows = [[part for document in pack for part in document] for pack in packs]
        types, mask = batch_of(rows, left)
        ids = torch.full_like(types, -1)
        for row, pack in enumerate(packs):
            of_row = [number for number, document in enumerate(pack) for _ in types_of(document)]
            ids[row, mask[row].bool()] = torch.tensor(of_row)
        call = {"spatial_merge_size": MERGE, "video_interval": 1.5, "after_video": "end"}
        call |= {"image_grid_thw": grids_of(rows, 1), "video_grid_thw": grids_of(rows, 2)}
        positions, delta = mrope_positions(types, attention_mask=mask, document_ids=ids, **call)
        for row, pack in enumerate(packs):
            apart = [oracle(document, 1.5, "end") for document in pack]
            expected = torch.tensor([position for document in apart for position in document]).T
            assert torch.equal(positions[:, row, mask[row].bool()], expected)
            assert delta[row] == max(map(max, apart[-1])) + 1 - expected.shape[1]
        without_mask = mrope_positions(types, document_ids=ids, **call)
        assert torch.equal(without_mask.positions, positions)
        assert torch.equal(without_mask.delta, delta)

    def test_a_picture_does_not_reach_into_the_next_document(self):
        with pytest.raises(ValueError, match="image_grid_thw: grid 0 asks for 4 tokens together from row 0, token 1"):
            mrope_positions(
                torch.tensor([[0, 1, 1, 1, 1]]),
                spatial_merge_size=2,
                image_grid_thw=[(1, 4, 4)],
                document_ids=torch.tensor([[0, 0, 0, 1, 1]]),
            )


class TestShift:
    """Cached keys move by one number on all axes, as they would on one."""

    ROTARY = Rotary(head_dim=24, rope_theta=1e4, mrope_section=(4, 4, 4))

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_moving_all_axes_is_a_plain_shift(self, interleaved):
        rotary = Rotary(head_dim=24, rope_theta=1e4, mrope_section=(4, 4, 4), mrope_interleaved=interleaved)
        one_axis = Rotary(head_dim=24, rope_theta=1e4)
        positions, _ = place([PROMPT, [2, (1, 6, 2)]], video_interval=1, after_video="side")
        torch.manual_seed(0)
        keys = torch.randn(2, 2, positions.shape[2], 24, dtype=torch.float64)
        distance = torch.full(positions.shape[1:], 17)
        turned = rotate(keys, None, *rotary_tables(rotary, positions))[0]
        moved = rotate(turned, None, *rotary_tables(one_axis, distance))[0]
        expected = rotate(keys, None, *rotary_tables(rotary, positions + 17))[0]
        # Three tables, each entry within 6e-8, and two products of them.
        assert ((moved - expected).abs() <= 6 * 6e-8 * keys.norm(dim=-1, keepdim=True)).all()

    def test_text_is_one_axis(self):
        positions, _ = place([[7]])
        tables = rotary_tables(self.ROTARY, positions)
        plain = rotary_tables(Rotary(head_dim=24, rope_theta=1e4), torch.arange(7)[None])
        assert torch.equal(tables.cos, plain.cos)
        assert torch.equal(tables.sin, plain.sin)


class TestTokenTypes:
    """Which placeholder stands for what is the model's; nothing is found by position."""

    def test_ids(self):
        ids = torch.tensor([[1, IMAGE_ID, IMAGE_ID, 2], [VIDEO_ID, 0, 5, IMAGE_ID]])
        types = token_types(ids, image_token_id=IMAGE_ID, video_token_id=VIDEO_ID)
        assert types.tolist() == [[0, 1, 1, 0], [2, 0, 0, 1]]
        assert token_types(ids.int(), image_token_id=IMAGE_ID).tolist() == [[0, 1, 1, 0], [0, 0, 0, 1]]


class TestErrors:
    """Pictures without grids must not fall back to a plain count: the answer's boxes would be off, silently."""

    TYPES = torch.tensor([[0, 1, 1, 1, 1, 0, 2, 2, 2, 2, 0]])

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({}, "image_grid_thw: not given, and the prompt has 4 image tokens"),
            ({"image_grid_thw": [(1, 4, 4)]}, "video_grid_thw: not given, and the prompt has 4 video tokens"),
            ({"image_grid_thw": [(1, 4, 4), (1, 2, 2)]}, "image_grid_thw: 2 grids ask for 5 tokens at spatial_merge_s"),
            ({"image_grid_thw": [(1, 4, 3)]}, r"image_grid_thw: grid 0 is \[1, 4, 3\]; .* must divide"),
            ({"image_grid_thw": [(2, 4, 2)]}, "image_grid_thw: grid 0 has 2 frames; an image has one"),
        ],
    )
    def test_images(self, given, words):
        if "2 frames" in words:
            given = given | {"video_grid_thw": [(2, 2, 4)]}
        with pytest.raises(ValueError, match=words):
            mrope_positions(self.TYPES, spatial_merge_size=2, **given)

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({}, r"video_interval: not given, and a video has more than one frame; give 1 \(Qwen2-VL\)"),
            ({"video_interval": [1.0, 1.0]}, r"video_interval: got shape \(2,\); give one number, or one for each of"),
            ({"video_interval": -1.0}, "video_interval: got -1.0; give finite numbers of at least 0"),
            ({"video_interval": math.nan}, "video_interval: got nan"),
            ({"video_interval": torch.tensor(1.0).half()}, "video_interval: got torch.float16"),
            (
                {"video_interval": 2},
                "after_video: not given, and video 0 lasts 3 positions on a side of 2; 'side' goes on after 2",
            ),
            ({"video_interval": 1, "after_video": "last"}, "after_video: got 'last'; allowed: 'side', 'end'"),
        ],
    )
    def test_videos(self, given, words):
        with pytest.raises(ValueError, match=words):
            mrope_positions(
                self.TYPES, spatial_merge_size=2, image_grid_thw=[(1, 4, 4)], video_grid_thw=[(2, 2, 4)], **given
            )

    @pytest.mark.parametrize("interval", [1e30, 2.0**24 + 2, [0.0, 3e9], torch.tensor(1e30), torch.tensor(2**40)])
    def test_frames_past_the_tables(self, interval):
        with pytest.raises(
            ValueError,
            match=r"video_interval: got .* for the 2 frames of video [01], whose last would stand past 2\*\*24 = 16777",
        ):
            mrope_positions(
                torch.tensor([[2, 2, 2, 2]]),
                spatial_merge_size=2,
                video_grid_thw=[(2, 2, 2)] * 2,
                video_interval=interval,
                after_video="end",
            )

    def test_where_the_tables_end(self):
        def last(interval):
            given = {"spatial_merge_size": 2, "video_grid_thw": [(2, 2, 2)] * 2, "after_video": "end"}
            return int(mrope_positions(torch.tensor([[2, 2, 2, 2]]), video_interval=interval, **given).positions.max())

        assert last([3.0, LARGEST_POSITION - 4]) == LARGEST_POSITION
        with pytest.raises(ValueError, match=r"positions: they reach 16777217, past 2\*\*24 = 16777216"):
            last([3.0, LARGEST_POSITION - 3])

    @pytest.mark.parametrize("interval", [math.inf, -1.0, math.nan, [1.0, math.inf], 10**400, "1", [[1.0], [2.0, 3.0]]])
    def test_no_interval_even_where_none_is_needed(self, interval):
        with pytest.raises(ValueError, match=r"^video_interval: got "):
            mrope_positions(torch.zeros(1, 2).long(), spatial_merge_size=2, video_interval=interval)

    @pytest.mark.parametrize("seconds", [math.inf, math.nan])
    def test_seconds_that_are_none(self, seconds):
        with pytest.raises(ValueError, match=rf"second_per_grid: got \[0.5, {seconds}\] at tokens_per_second 2"):
            temporal_interval([0.5, seconds], tokens_per_second=2)

    def test_the_default_dtype_has_no_say(self):
        torch.set_default_dtype(torch.bfloat16)
        try:
            positions, _ = mrope_positions(
                torch.tensor([[2, 2, 2]]),
                spatial_merge_size=2,
                video_grid_thw=[(3, 2, 2)],
                video_interval=257.5,
                after_video="end",
            )
        finally:
            torch.set_default_dtype(torch.float32)
        assert positions[0].tolist() == [[0, 257, 515]]

    def test_a_short_video_needs_no_choice(self):
        mrope_positions(
            self.TYPES, spatial_merge_size=2, image_grid_thw=[(1, 4, 4)], video_grid_thw=[(2, 2, 4)], video_interval=1
        )

    def test_frames_with_text_between(self):
        with pytest.raises(
            ValueError, match=r"grid 0 asks for 4 tokens together .* give split_frames\(video_grid_thw\)"
        ):
            mrope_positions(
                torch.tensor([[2, 2, 0, 2, 2]]),
                spatial_merge_size=2,
                video_grid_thw=[(2, 2, 4)],
                video_interval=1,
                after_video="side",
            )

    def test_a_picture_across_two_rows(self):
        with pytest.raises(ValueError, match="grid 0 asks for 4 tokens together from row 0, token 1 on"):
            mrope_positions(torch.tensor([[0, 1, 1], [1, 1, 0]]), spatial_merge_size=2, image_grid_thw=[(1, 4, 4)])

    def test_shapes_and_kinds(self):
        types = torch.zeros(2, 3, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"token_types: got shape \(3,\); it must be \(B, S\)"):
            mrope_positions(types[0], spatial_merge_size=2)
        with pytest.raises(ValueError, match="token_types: got 3; 0 is text"):
            mrope_positions(types + 3, spatial_merge_size=2)
        with pytest.raises(ValueError, match=r"attention_mask: got shape \(2, 2\); token_types has \(2, 3\)"):
            mrope_positions(types, spatial_merge_size=2, attention_mask=torch.ones(2, 2, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"document_ids: got shape \(1, 3\); token_types has \(2, 3\)"):
            mrope_positions(types, spatial_merge_size=2, document_ids=types[:1])
