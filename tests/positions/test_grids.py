import math

import pytest
import torch

from theodolite.positions.fractional_grids import (
    augmented_patch_positions,
    centred_patch_positions,
    resized_patch_positions,
)
from theodolite.positions.grids import (
    llama4_patch_positions,
    padded_patch_positions,
    patch_positions,
    patches_of_grids,
    special_tokens,
    with_special_tokens,
)

GRIDS = [(1, 4, 6), (3, 2, 4), (1, 8, 2), (2, 6, 6)]


def blocks_in_loops(grids, merge):
    """(time, row, column) of every patch, walked block by block."""
    return torch.tensor(
        [
            (t, block_row + row, block_column + column)
            for frames, height, width in grids
            for t in range(frames)
            for block_row in range(0, height, merge)
            for block_column in range(0, width, merge)
            for row in range(merge)
            for column in range(merge)
        ]
    ).T


class TestWholeCoordinates:
    """A patch's place decides its angle: the order of the patches and of the axes is the model's."""

    def test_rows_first(self):
        expected = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]])
        assert torch.equal(patch_positions(2, 3), expected)
        assert patch_positions(2, 3).dtype == torch.int64

    @pytest.mark.parametrize("merge", [1, 2])
    def test_blocks_that_merge_stand_together(self, merge):
        expected = blocks_in_loops(GRIDS, merge)
        assert torch.equal(patches_of_grids(GRIDS, spatial_merge_size=merge), expected[1:])
        assert torch.equal(patches_of_grids(torch.tensor(GRIDS), spatial_merge_size=merge, time=True), expected)

    def test_blocks_of_three(self):
        grids = [(2, 3, 9), (1, 6, 3)]
        assert torch.equal(patches_of_grids(grids, spatial_merge_size=3, time=True), blocks_in_loops(grids, 3))

    def test_without_blocks_it_is_the_raster_of_each_image(self):
        joined = torch.cat([patch_positions(3, 5), patch_positions(2, 7)], dim=1)
        assert torch.equal(patches_of_grids([(1, 3, 5), (1, 2, 7)], spatial_merge_size=1), joined)

    def test_no_image_has_no_patches(self):
        assert patches_of_grids([], spatial_merge_size=2).shape == (2, 0)

    def test_llama4_counts_from_one_column_first_and_the_class_token_stands_still(self):
        positions = llama4_patch_positions(2, 3)
        assert positions.tolist() == [[1, 2, 3, 1, 2, 3, 0], [1, 1, 1, 2, 2, 2, 0]]

    def test_gemma4_column_first_and_minus_one_at_padding(self):
        positions = padded_patch_positions([(2, 3), (1, 1)], patches=7)
        assert positions.shape == (2, 2, 7)
        assert positions[:, 0].tolist() == [[0, 1, 2, 0, 1, 2, -1], [0, 0, 0, 1, 1, 1, -1]]
        assert positions[:, 1].tolist() == [[0] + [-1] * 6, [0] + [-1] * 6]

    @pytest.mark.parametrize("merge", [1, 2])
    def test_the_device_of_the_grids_is_kept(self, merge):
        assert patch_positions(2, 3, device="meta").device.type == "meta"
        assert patches_of_grids(GRIDS, spatial_merge_size=merge, device="cpu").device.type == "cpu"


class TestSpecialTokens:
    """Whether 196 tokens are 14 x 14 patches, or 195 and a class token, no square root can tell: the grid is given."""

    def test_they_stand_at_zero_where_no_rotation_turns_them(self):
        positions = with_special_tokens(patch_positions(2, 2) + 1, before=2, after=1)
        assert positions.tolist() == [[0, 0, 1, 1, 2, 2, 0], [0, 0, 1, 2, 1, 2, 0]]

    def test_fractions_stay_fractions(self):
        positions = centred_patch_positions(3, 5, normalize_coords="separate")
        placed = with_special_tokens(positions, before=5)
        assert placed.dtype == torch.float64
        assert torch.equal(placed[:, 5:], positions)
        assert not placed[:, :5].any()

    @pytest.mark.parametrize(("tokens", "expected"), [(196, 0), (197, 1), (201, 5)])
    def test_their_number_comes_from_the_grid(self, tokens, expected):
        assert special_tokens(tokens, rows=14, columns=14) == expected

    def test_a_grid_that_is_no_square(self):
        assert special_tokens(16, rows=3, columns=5) == 1

    def test_too_few_tokens(self):
        with pytest.raises(ValueError, match=r"tokens: got 195; a grid of 14 x 14 has 196 patches"):
            special_tokens(195, rows=14, columns=14)


class TestDINOv3:
    """Coordinates run from -1 to 1 whatever the resolution; training moves them at random, from one generator."""

    @pytest.mark.parametrize(("normalize", "sizes"), [("separate", (3, 5)), ("max", (5, 5)), ("min", (3, 3))])
    def test_centres(self, normalize, sizes):
        positions = centred_patch_positions(3, 5, normalize_coords=normalize)
        assert positions.dtype == torch.float64
        for index in range(15):
            row, column = divmod(index, 5)
            # Three roundings of numbers up to 3 1/3.
            assert math.isclose(positions[0, index], 2 * (row + 0.5) / sizes[0] - 1, abs_tol=3 * 2.0**-51)
            assert math.isclose(positions[1, index], 2 * (column + 0.5) / sizes[1] - 1, abs_tol=3 * 2.0**-51)

    def test_symmetric_about_the_middle(self):
        positions = centred_patch_positions(7, 4, normalize_coords="separate")
        assert torch.allclose(positions, -positions.flip(1), rtol=0, atol=2.0**-51)

    def test_moves_are_within_their_limits_and_shared_as_said(self):
        positions = centred_patch_positions(3, 5, normalize_coords="separate")
        generator = torch.Generator().manual_seed(3)
        for _ in range(50):
            moved = augmented_patch_positions(positions, generator=generator, shift=0.25) - positions
            assert moved.abs().max() <= 0.25 + 2.0**-51
            assert torch.allclose(moved, moved[:, :1].expand_as(moved), rtol=0, atol=2.0**-51)
            jitter = augmented_patch_positions(positions, generator=generator, jitter=2.0)[:, 0] / positions[:, 0]
            assert ((jitter.log().abs() <= math.log(2.0) + 2.0**-51) & (jitter > 0)).all()
            assert jitter[0] != jitter[1]
            scaled = augmented_patch_positions(positions, generator=generator, rescale=1.5)[:, 0] / positions[:, 0]
            assert scaled.log().abs().max() <= math.log(1.5) + 2.0**-51
            assert math.isclose(scaled[0], scaled[1], rel_tol=2.0**-50)

    def test_multipliers_are_log_uniform(self):
        positions = torch.ones(2, 1, dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        draws = torch.stack(
            [augmented_patch_positions(positions, generator=generator, jitter=4.0).log() for _ in range(2000)]
        )
        # 4000 draws uniform on [-ln 4, ln 4]: the mean is within 5 of its standard deviations, ln 4 / sqrt(3 * 4000);
        # below half the limit stand half of the draws, within 5 of sqrt(1 / (4 * 4000)).
        assert abs(draws.mean()) < 5 * math.log(4) / math.sqrt(3 * 4000)
        assert abs((draws.abs() < math.log(2)).double().mean() - 0.5) < 5 / math.sqrt(4 * 4000)

    def test_the_same_generator_gives_the_same_and_global_state_has_no_say(self):
        positions = centred_patch_positions(3, 5, normalize_coords="separate")
        results = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            generator = torch.Generator().manual_seed(7)
            results.append(
                augmented_patch_positions(positions, generator=generator, shift=0.1, jitter=1.5, rescale=2.0)
            )
        assert torch.equal(*results)

    def test_nothing_asked_nothing_moved(self):
        positions = centred_patch_positions(3, 5, normalize_coords="separate")
        generator = torch.Generator().manual_seed(7)
        before = generator.get_state()
        assert torch.equal(augmented_patch_positions(positions, generator=generator), positions)
        assert torch.equal(generator.get_state(), before)


class TestResized:
    """A grid of another size is laid over the grid of training, so that the angles stay those that were trained."""

    def test_at_the_trained_size_coordinates_are_the_index(self):
        assert torch.equal(
            resized_patch_positions(5, 7, trained_rows=5, trained_columns=7), patch_positions(5, 7).double()
        )

    def test_formula(self):
        positions = resized_patch_positions(24, 36, trained_rows=16, trained_columns=16, offset=0.5)
        for index in (0, 1, 35, 36, 500, 863):
            row, column = divmod(index, 36)
            # Two roundings of numbers below 16.
            assert math.isclose(positions[0, index], (row + 0.5) * 16 / 24, rel_tol=2.0**-51)
            assert math.isclose(positions[1, index], (column + 0.5) * 16 / 36, rel_tol=2.0**-51)

    def test_it_never_leaves_the_trained_grid(self):
        positions = resized_patch_positions(64, 40, trained_rows=16, trained_columns=16)
        assert positions.max() < 16

    def test_default_device_has_no_say(self):
        with torch.device("meta"):
            assert resized_patch_positions(2, 2, trained_rows=4, trained_columns=4).device.type == "cpu"
            assert centred_patch_positions(2, 2, normalize_coords="max").device.type == "cpu"


class TestErrors:
    """A wrong grid is refused where it is given, in words."""

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (lambda: patch_positions(0, 3), "rows: got 0; it must be at least 1"),
            (lambda: patch_positions(2, 3.0), "columns: got a float; give "),
            (
                lambda: patches_of_grids([(1, 4, 6), (1, 4, 5)], spatial_merge_size=2),
                r"grid_thw: grid 1 is \[1, 4, 5\]; .* must divide by spatial_merge_size \(2\)",
            ),
            (lambda: patches_of_grids([(0, 4, 4)], spatial_merge_size=2), r"grid 0 is \[0, 4, 4\]; .* at least 1"),
            (lambda: patches_of_grids([(4, 4)], spatial_merge_size=2), r"got shape \(1, 2\); it must be \(N, 3\)"),
            (lambda: patches_of_grids([(1.0, 4, 4)], spatial_merge_size=2), "grid_thw: got torch.float32"),
            (lambda: patches_of_grids([(1, 4, 4), (1, 4)], spatial_merge_size=2), "give three integers for each"),
            (lambda: patches_of_grids(GRIDS, spatial_merge_size=0), "spatial_merge_size: got 0"),
            (lambda: padded_patch_positions([(3, 3)], patches=8), r"patches: got 8; image 0 has 3 x 3 = 9"),
            (lambda: with_special_tokens(patch_positions(1, 1), before=-1), "before: got -1; it must be at least 0"),
            (lambda: centred_patch_positions(2, 2, normalize_coords="mean"), "normalize_coords: got 'mean'; allowed"),
            (
                lambda: resized_patch_positions(2, 2, trained_rows=0, trained_columns=2),
                "trained_rows: got 0; it must be at least 1",
            ),
            (
                lambda: resized_patch_positions(2, 2, trained_rows=2, trained_columns=2, offset=math.nan),
                "offset: got nan; give a finite number",
            ),
        ],
    )
    def test_words(self, call, words):
        with pytest.raises(ValueError, match=words):
            call()

    @pytest.mark.parametrize(("name", "value"), [("shift", -0.1), ("jitter", 0.5), ("rescale", math.inf)])
    def test_random_moves(self, name, value):
        positions = centred_patch_positions(2, 2, normalize_coords="separate")
        with pytest.raises(ValueError, match=f"{name}: got {value}; give a finite number"):
            augmented_patch_positions(positions, generator=torch.Generator(), **{name: value})

    def test_random_moves_need_float64(self):
        with pytest.raises(ValueError, match=r"positions: got torch.int64 on cpu; give float64 on the CPU"):
            augmented_patch_positions(patch_positions(2, 2), generator=torch.Generator())
