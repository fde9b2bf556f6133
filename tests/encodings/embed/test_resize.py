"""Tables of another length or grid: against loops written from the published rules."""

from __future__ import annotations

import math

import pytest
import torch

from theodolite.encodings.embed.resize import resize_grid_table, resize_table


def table(rows=11, width=3, dtype=torch.float64):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows), dtype=torch.float64).to(dtype)


def long_clip(old, keep=20):
    """Knowledge-preserved stretching (arXiv 2403.15378): after the first `keep`, four rows for each."""
    new = [old[i] for i in range(keep)]
    for i in range(keep, len(old)):
        step = old[i + 1] - old[i] if i + 1 < len(old) else old[i] - old[i - 1]
        new += [old[i] + quarter / 4 * step for quarter in range(4)]
    return torch.stack(new)


def linear(old, new, keep, source):
    """Row j of the new table from `source(j)` of the old, linearly."""
    rows = []
    for j in range(new):
        if j < keep:
            rows.append(old[j])
            continue
        at = source(j)
        low = min(math.floor(at), len(old) - 1)
        high = min(low + 1, len(old) - 1)
        rows.append(old[low] * (1 - (at - low)) + old[high] * (at - low))
    return torch.stack(rows)


# Sums of two products of numbers of order 4, in float64.
CLOSE = 1e-14


class TestOneDimension:
    """The first rows are what short texts were trained with: they stay; where the others come from is a choice."""

    def test_clip_to_long_clip(self):
        old = table(77, 8)
        new = resize_table(old, 248, keep=20)
        assert new.shape == (248, 8)
        assert torch.equal(new[:20], old[:20])
        assert torch.equal(new[20::4], old[20:])
        assert (new - long_clip(old)).abs().max() <= 2 * CLOSE

    @pytest.mark.parametrize("keep", [0, 1, 4])
    @pytest.mark.parametrize("new", [12, 23, 100])
    def test_stretch_is_linear_scaling_of_positions(self, keep, new):
        old = table()
        factor = (new - keep) / (11 - keep)
        mine = resize_table(old, new, method="stretch", keep=keep)
        # Up to the last old row; beyond it the last step goes on.
        inside = keep + math.floor((10 - keep) * factor) + 1
        expected = linear(old, inside, keep, lambda j: keep + (j - keep) / factor)
        assert (mine[:inside] - expected).abs().max() <= CLOSE * 100
        slope = (old[-1] - old[-2]) / factor
        for j in range(inside, new):
            expected = old[-1] + ((j - keep) - (10 - keep) * factor) * slope
            assert (mine[j] - expected).abs().max() <= CLOSE * 100

    @pytest.mark.parametrize("keep", [0, 4])
    @pytest.mark.parametrize("new", [12, 23, 7])
    @pytest.mark.parametrize(("method", "align_corners"), [("corners", True), ("centers", False)])
    def test_as_interpolate_does(self, method, align_corners, new, keep):
        old = table()
        tail = torch.nn.functional.interpolate(
            old[keep:].T[None], size=new - keep, mode="linear", align_corners=align_corners
        )
        expected = torch.cat((old[:keep], tail[0].T))
        assert (resize_table(old, new, method=method, keep=keep) - expected).abs().max() <= CLOSE * 10

    def test_corners_keeps_both_ends(self):
        old = table()
        new = resize_table(old, 30, method="corners", keep=2)
        assert torch.equal(new[2], old[2])
        assert torch.equal(new[-1], old[-1])

    def test_tile(self):
        old = table()
        assert torch.equal(resize_table(old, 25, method="tile"), torch.cat((old, old, old[:3])))
        assert torch.equal(resize_table(old, 20, method="tile", keep=4), torch.cat((old, old[4:], old[4:6])))

    def test_last(self):
        old = table()
        assert torch.equal(resize_table(old, 14, method="last"), torch.cat((old, old[-1:].expand(3, -1))))

    @pytest.mark.parametrize("alpha", [0.4, 0.2, 0.7])
    def test_hierarchical(self, alpha):
        old = table(5)
        new = resize_table(old, 25, method="hierarchical", alpha=alpha)
        assert torch.equal(new[:5], old)
        base = [(p - alpha * old[0]) / (1 - alpha) for p in old]
        for i in range(5):
            for j in range(5):
                assert (new[5 * i + j] - (alpha * base[i] + (1 - alpha) * base[j])).abs().max() <= CLOSE * 10

    @pytest.mark.parametrize("method", ["stretch", "corners", "centers", "tile", "last", "hierarchical"])
    def test_the_same_length_is_the_same_table(self, method):
        old = table(dtype=torch.bfloat16)
        same = resize_table(old, 11, method=method)
        assert torch.equal(same, old)
        assert same.data_ptr() != old.data_ptr()

    @pytest.mark.parametrize("method", ["stretch", "corners", "centers", "tile", "last"])
    def test_one_row_is_repeated(self, method):
        assert torch.equal(resize_table(table(1), 4, method=method), table(1).expand(4, -1))
        assert torch.equal(resize_table(table(4), 6, method="corners", keep=3)[3:], table(4)[3:].expand(3, -1))

    @pytest.mark.parametrize("factor", [2, 3, 49, 103])
    def test_a_whole_factor_leaves_every_old_row_in_place(self, factor):
        old = table()
        assert torch.equal(resize_table(old, 1 + 10 * factor, keep=1)[1::factor], old[1:])

    def test_cut(self):
        old = table()
        cut = resize_table(old, 6, keep=6)
        assert torch.equal(cut, old[:6])
        assert cut.data_ptr() != old.data_ptr()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("method", ["stretch", "hierarchical"])
    def test_is_rounded_once(self, method, dtype):
        old = table(dtype=dtype)
        new = resize_table(old, 40, method=method)
        assert torch.equal(new, resize_table(old.double(), 40, method=method).to(dtype))


def cubic(t, a):
    t = abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def triangle(t):
    return max(0.0, 1 - abs(t))


def axis_weights(old, new, mode, antialias):
    """(new, old) weights of one axis: Keys' kernel (a = -3/4; -1/2 where antialiased) or a triangle, cells centred."""
    scale = old / new
    width = max(scale, 1.0) if antialias else 1.0
    reach = 2 if mode == "bicubic" else 1
    weights = torch.zeros(new, old, dtype=torch.float64)
    for i in range(new):
        centre = (i + 0.5) * scale - 0.5
        if not antialias and mode == "bilinear":
            centre = max(centre, 0.0)
        for j in range(math.floor(centre - reach * width), math.ceil(centre + reach * width) + 1):
            a = -0.5 if antialias else -0.75
            weight = cubic((j - centre) / width, a) if mode == "bicubic" else triangle((j - centre) / width)
            if antialias and not 0 <= j < old:
                # A filter is cut at the border; a plain interpolation repeats the border.
                continue
            weights[i, min(max(j, 0), old - 1)] += weight
    return weights / weights.sum(1, keepdim=True)


def grid_by_hand(table, old, new, prefix, mode, antialias):
    grid = table[prefix:].reshape(*old, -1)
    rows = axis_weights(old[0], new[0], mode, antialias)
    columns = axis_weights(old[1], new[1], mode, antialias)
    return torch.cat((table[:prefix], torch.einsum("yh,xw,hwe->yxe", rows, columns, grid).flatten(0, 1)))


class TestGrid:
    """Grids are given, prefix rows are given; a factor rounds to one patch too few, and a root guesses."""

    @pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
    @pytest.mark.parametrize("antialias", [False, True])
    @pytest.mark.parametrize(("old", "new"), [((4, 4), (7, 9)), ((5, 3), (3, 8)), ((6, 7), (2, 3)), ((1, 4), (2, 4))])
    @pytest.mark.parametrize("prefix", [0, 1, 5])
    def test_equals_the_kernel_by_hand(self, mode, antialias, old, new, prefix):
        weights = table(prefix + old[0] * old[1], 2)
        mine = resize_grid_table(weights, old=old, new=new, prefix=prefix, mode=mode, antialias=antialias)
        expected = grid_by_hand(weights, old, new, prefix, mode, antialias)
        assert mine.shape == (prefix + new[0] * new[1], 2)
        assert torch.equal(mine[:prefix], weights[:prefix])
        # Sums of some 64 products of numbers of order 4.
        assert (mine - expected).abs().max() <= 64 * CLOSE

    @pytest.mark.parametrize(("old", "new"), [(37, 39), (37, 43), (37, 78), (14, 61), (14, 115), (14, 122)])
    def test_sizes_that_a_factor_misses(self, old, new):
        resized = resize_grid_table(table(1 + old * old, 1), old=(old, old), new=(new, new), prefix=1)
        assert len(resized) == 1 + new * new

    def test_196_and_197(self):
        for rows, prefix in ((196, 0), (197, 1)):
            resized = resize_grid_table(table(rows), old=(14, 14), new=(16, 16), prefix=prefix)
            assert len(resized) == 256 + prefix
        with pytest.raises(ValueError, match="old: a grid of 14 x 14 and prefix=1 make 197 rows; the table has 196"):
            resize_grid_table(table(196), old=(14, 14), new=(16, 16), prefix=1)
        with pytest.raises(ValueError, match="prefix=0 make 196 rows; the table has 197"):
            resize_grid_table(table(197), old=(14, 14), new=(16, 16), prefix=0)

    def test_the_same_grid_is_the_same_table(self):
        old = table(13, dtype=torch.float16)
        assert torch.equal(resize_grid_table(old, old=(3, 4), new=(3, 4), prefix=1), old)

    def test_a_plane_stays_a_plane_inside(self):
        # Linear in height and width, at different slopes: tells rows from columns.
        y, x = torch.meshgrid(torch.arange(8.0), torch.arange(12.0), indexing="ij")
        plane = (3 * y + x).reshape(-1, 1).double()
        mine = resize_grid_table(plane, old=(8, 12), new=(16, 24), prefix=0, mode="bilinear").reshape(16, 24)
        y, x = torch.meshgrid((torch.arange(16) + 0.5) / 2 - 0.5, (torch.arange(24) + 0.5) / 2 - 0.5, indexing="ij")
        # Quarters and whole numbers: no rounding at all.
        assert torch.equal(mine[1:-1, 1:-1].float(), (3 * y + x)[1:-1, 1:-1])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_is_rounded_once(self, dtype):
        old, grids = table(10, dtype=dtype), {"old": (3, 3), "new": (5, 4), "prefix": 1}
        assert torch.equal(resize_grid_table(old, **grids), resize_grid_table(old.double(), **grids).to(dtype))


GRID = {"old": (3, 3), "new": (5, 5), "prefix": 0}


class TestRefusals:
    """Numbers that do not fit together are named, never rounded into place."""

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: resize_table(table(), 0), "num_positions: got 0"),
            (lambda: resize_table(table(), 20, keep=12), "keep: got 12; the table has 11 rows, and is to have 20"),
            (lambda: resize_table(table(), 5, keep=6), "keep: got 6; the table has 11 rows, and is to have 5"),
            (lambda: resize_table(table(), 20, keep=11), "keep: got 11, all rows of the table"),
            (lambda: resize_table(table(), 20, keep=-1), "keep: got -1"),
            (lambda: resize_table(table(), 20, method="cubic"), "method: got 'cubic'; it must be one of 'stretch', "),
            (lambda: resize_table(table(), 122, method="hierarchical"), r"got 122; .* reaches 11\^2 = 121"),
            (lambda: resize_table(table(), 99, method="hierarchical", alpha=0.5), "alpha: got 0.5; .* not 0.5"),
            (lambda: resize_table(table(), 99, method="hierarchical", alpha=1), "alpha: got 1"),
            (lambda: resize_table(table(), 99, method="hierarchical", keep=2), "keep: got 2; .* keeps all 11 rows"),
            (lambda: resize_table(table()[None], 99), r"table: got torch.float64 of shape \(1, 11, 3\)"),
            (lambda: resize_table([[1.0]], 99), "table: got list"),
            (lambda: resize_table(table().long(), 99), "table: got torch.int64"),
            (lambda: resize_table(table().to("meta"), 99), "table: it is on the meta device"),
            (lambda: resize_grid_table(table(9), **{**GRID, "old": (9,)}), r"old: got \(9,\); it must be \(height"),
            (lambda: resize_grid_table(table(9), **{**GRID, "old": 3}), "old: got 3"),
            (lambda: resize_grid_table(table(9), **{**GRID, "new": (5.0, 5)}), r"new: got \(5.0, 5\)"),
            (lambda: resize_grid_table(table(9), **{**GRID, "new": (0, 5)}), r"new: got \(0, 5\)"),
            (lambda: resize_grid_table(table(9), **{**GRID, "prefix": -1}), "prefix: got -1"),
            (lambda: resize_grid_table(table(9), **GRID, mode="nearest"), "mode: got 'nearest'; .* 'bicubic' or 'bil"),
        ],
    )
    def test_words(self, call, message):
        with pytest.raises(ValueError, match=message):
            call()

    def test_the_prefix_is_never_guessed(self):
        with pytest.raises(TypeError, match="prefix"):
            resize_grid_table(table(9), old=(3, 3), new=(5, 5))
