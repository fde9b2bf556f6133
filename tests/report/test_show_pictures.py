"""The views: what is drawn is what the formulas say, number by number, and the same figure gives the same bytes."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import Circle, Wedge

from theodolite.plan import NTK, DynamicNTK, Linear, LongRoPE, Rotary, YaRN
from theodolite.report import show
from theodolite.report.show.canvas import kind_of_file
from theodolite.report.show.hands import turns_text
from theodolite.report.show.rotations import groups, mean_cosines

EPSILON = np.finfo(np.float64).eps


def sinusoids(tokens: int, dim: int) -> np.ndarray:
    """The table of the paper, entry by entry."""
    return np.array(
        [
            [(math.cos if c % 2 else math.sin)(p / 10000 ** ((c - c % 2) / dim)) for c in range(dim)]
            for p in range(tokens)
        ]
    )


def heading_of(figure) -> str:
    return figure.get_suptitle().replace("\n", " ")


def line(axes, label):
    (found,) = [one for one in axes.get_lines() if one.get_label() == label]
    return found.get_xdata(), found.get_ydata()


class TestVectors:
    """A heat map whose rows are swapped, or a similarity that is not a cosine, would look as good."""

    def test_heat_map_has_a_row_for_each_channel(self):
        table = sinusoids(37, 10)
        figure = show.heat_map(table, name="sinusoidal")
        axes, bar = figure.axes
        (image,) = axes.get_images()
        np.testing.assert_array_equal(image.get_array(), table.T)
        most = np.abs(table).max()
        assert image.get_clim() == (-most, most)
        assert image.get_extent() == [-0.5, 36.5, 9.5, -0.5]
        assert (axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()) == ("position (tokens)", "channel", "value")
        assert heading_of(figure) == "sinusoidal: 10 channels at 37 positions"

    def test_curves_are_single_channels(self):
        table = sinusoids(53, 8)
        figure = show.curves(table, channels=[0, 3, 7], name="x")
        for axes, channel in zip(figure.axes, (0, 3, 7), strict=True):
            (drawn,) = axes.get_lines()
            np.testing.assert_array_equal(drawn.get_ydata(), table[:, channel])
            assert axes.get_ylabel() == f"channel\n{channel}"
        shown = [axes.xaxis.get_tick_params()["labelbottom"] for axes in figure.axes]
        assert shown == [False, False, True]

    def test_similarity_is_the_mean_of_cosines_by_distance(self):
        # sin a sin b + cos a cos b = cos(a - b): the cosine between two rows is the mean over pairs.
        tokens, dim = 33, 12
        distances = np.arange(tokens)
        wanted = np.mean([np.cos(distances / 10000 ** (2 * pair / dim)) for pair in range(dim // 2)], axis=0)
        figure = show.similarity(sinusoids(tokens, dim), name="x")
        left, right = figure.axes[:2]
        np.testing.assert_allclose(right.get_lines()[0].get_ydata(), wanted, atol=64 * EPSILON)
        away = np.abs(distances[:, None] - distances)
        np.testing.assert_allclose(left.get_images()[0].get_array(), wanted[away], atol=64 * EPSILON)
        assert left.get_images()[0].get_clim() == (-1, 1)

    def test_the_band_is_the_range_of_what_differs(self):
        table = np.array([[1.0, 0], [0, 2], [3, 3], [0, 0]])
        right = show.similarity(table, name="x").axes[1]
        half = math.sqrt(0.5)
        # The last row has no direction.
        np.testing.assert_allclose(right.get_lines()[0].get_ydata(), [0.75, half / 3, half / 2, 0], atol=4 * EPSILON)
        (band,) = right.collections
        at = band.get_paths()[0].vertices
        assert at[at[:, 0] == 1][:, 1].min() == 0
        assert at[at[:, 0] == 1][:, 1].max() == pytest.approx(half)

    @pytest.mark.parametrize(
        ("table", "message"),
        [(np.zeros(3), r"table: got shape \(3,\)"), (np.array([[1, np.nan]]), "table: some of its numbers")],
    )
    def test_what_is_no_table(self, table, message):
        for view in (show.heat_map, show.similarity):
            with pytest.raises(ValueError, match=message):
                view(table, name="x")

    @pytest.mark.parametrize("channels", [[], [8], [-1], list(range(13))])
    def test_channels_that_are_not_there(self, channels):
        with pytest.raises(ValueError, match=r"channels: got .*; give 1 to 12 of them, each from 0 to 7"):
            show.curves(np.ones((4, 8)), channels=channels, name="x")


PLAIN = Rotary(head_dim=16, rope_theta=10_000.0)
ROTARIES = {
    "none": PLAIN,
    "linear:4": Rotary(head_dim=16, rope_theta=10_000.0, scaling=Linear(factor=4)),
    "ntk:4": Rotary(head_dim=16, rope_theta=10_000.0, scaling=NTK(factor=4)),
}


def frequencies(name: str) -> np.ndarray:
    """The formulas of the three, for 8 pairs."""
    base = 10_000.0 * (4 ** (16 / 14) if name == "ntk:4" else 1)
    return np.array([base ** (-pair / 8) for pair in range(8)]) / (4 if name == "linear:4" else 1)


class TestRotations:
    """Lines under a wrong scaling, or at a wrong distance, would look as good."""

    def test_scores(self):
        distances = np.array([1, 2, 7, 100, 4095])
        for name, rotary in ROTARIES.items():
            wanted = [np.mean(np.cos(distance * frequencies(name))) for distance in distances]
            allowed = 4095 * 8 * EPSILON
            np.testing.assert_allclose(show.scores(rotary, distances, length=4096), wanted, atol=allowed)

    def test_scores_count_channels_that_stand_still_and_the_attention_factor(self):
        yarn = YaRN(factor=4, original_max_position_embeddings=64, attention_factor_given=1.5)
        rotary = Rotary(head_dim=16, rope_theta=10_000.0, rotary_dim=8, scaling=yarn)
        (score,) = show.scores(rotary, np.array([3]), length=64)
        turned = 2 * np.cos(3 * rotary.inv_freq()).sum() * 1.5**2
        assert score == pytest.approx((turned + 8) / 16, rel=1e-14)
        half = Rotary(head_dim=16, rope_theta=10_000.0, live_pairs=4)
        assert show.scores(half, np.array([5]), length=64)[0] == pytest.approx(
            (np.cos(5 * frequencies("none")[:4]).sum() + 4) / 8, rel=1e-14
        )
        # Only those that turn.
        assert mean_cosines(half, np.array([5]), length=64)[0] == pytest.approx(
            np.cos(5 * frequencies("none")[:4]).mean(), rel=1e-14
        )

    def test_distances_in_groups(self):
        for length in (2, 3, 17, 100, 8192):
            together = groups(length)
            assert together[0][0] == 1
            assert together[-1][-1] == length - 1
            assert all(np.all(np.diff(one) > 0) for one in together)
            joined = np.concatenate(together)
            assert np.all(np.diff(joined) > 0)
            assert len(joined) == length - 1 if length <= 100 else max(map(len, together)) == 64

    def test_decay_draws_the_mean_of_each_group_and_its_range(self):
        figure = show.decay(ROTARIES, length=100, trained=64)
        (axes,) = figure.axes
        for number, name in enumerate(ROTARIES):
            x, y = line(axes, name)
            wanted = [np.cos(np.outer(one, frequencies(name))).mean() for one in groups(100)]
            np.testing.assert_allclose(y, wanted, atol=1e-13)
            np.testing.assert_allclose(x, [math.sqrt(one[0] * one[-1]) for one in groups(100)])
            band = axes.collections[number].get_paths()[0].vertices
            last = [np.cos(distance * frequencies(name)).mean() for distance in groups(100)[-1]]
            at_the_end = band[band[:, 0] == x[-1]][:, 1]
            assert (at_the_end.min(), at_the_end.max()) == pytest.approx((min(last), max(last)))
        assert axes.get_xscale() == "log"
        assert [text.get_text() for text in axes.texts] == ["trained length 64"]
        assert [text.get_text() for text in figure.legends[0].get_texts()] == list(ROTARIES)

    def test_wavelengths_that_never_turn_are_hollow(self):
        (axes,) = show.wavelengths(ROTARIES, length=1000, trained=400).axes
        waves = 2 * math.pi / frequencies("linear:4")
        np.testing.assert_allclose(line(axes, "linear:4")[1], waves, rtol=1e-13)
        marks = [one for one in axes.get_lines() if one.get_marker() == "o"]
        hollow = [one for one in marks if one.get_markerfacecolor() == "white"]
        assert [len(one.get_ydata()) for one in hollow] == [
            int((2 * math.pi / frequencies(name) > 400).sum()) for name in ROTARIES
        ]
        assert all((one.get_ydata() > 400).all() for one in hollow)
        assert "400 tokens: pairs above it (hollow) never turned once" in [text.get_text() for text in axes.texts]

    def test_coverage_is_turns(self):
        (axes,) = show.coverage(ROTARIES, length=1000).axes
        for name in ROTARIES:
            np.testing.assert_allclose(line(axes, name)[1], 1000 * frequencies(name) / (2 * math.pi), rtol=1e-13)
        assert axes.get_ylabel() == "turns in 1,000 tokens"

    def test_what_depends_on_the_length_is_settled_for_it(self):
        dynamic = Rotary(
            head_dim=16, rope_theta=10_000.0, scaling=DynamicNTK(factor=1, original_max_position_embeddings=100)
        )
        (axes,) = show.wavelengths({"dynamic": dynamic}, length=400, trained=100).axes
        np.testing.assert_allclose(line(axes, "dynamic")[1], 2 * math.pi / frequencies("ntk:4"), rtol=1e-13)

    @pytest.mark.parametrize("view", [show.decay, show.wavelengths, show.coverage])
    def test_refusals(self, view):
        with pytest.raises(ValueError, match="rotaries: got none"):
            view({}, length=100)
        for length in (1, True, 2.5):
            with pytest.raises(ValueError, match="length: got"):
                view(ROTARIES, length=length)


class TestClockHands:
    """A hand that turns against the clock, or from another hour, is a wrong picture."""

    @pytest.mark.parametrize("position", [0, 1, 7, 100_003])
    def test_hands_point_where_the_angles_are(self, position):
        (axes,) = show.clock_hands({"none": PLAIN}, position=position).axes
        hands = [one for one in axes.get_lines() if one.get_linewidth() > 2]
        assert len(hands) == len([patch for patch in axes.patches if isinstance(patch, Circle)]) == 8
        for hand, angle in zip(hands, position * frequencies("none"), strict=True):
            (x0, x1), (y0, y1) = hand.get_data()
            reach = math.hypot(x1 - x0, y1 - y0)
            # Up at position 0, then to the right.
            assert ((x1 - x0) / reach, (y1 - y0) / reach) == pytest.approx((math.sin(angle), math.cos(angle)), abs=1e-9)

    def test_a_hand_that_was_not_round_once_is_shaded_as_far_as_it_came(self):
        position = 100
        (axes,) = show.clock_hands({"none": PLAIN}, position=position).axes
        turns = position * frequencies("none") / (2 * math.pi)
        wedges = [patch for patch in axes.patches if isinstance(patch, Wedge)]
        assert [wedge.theta2 for wedge in wedges] == [90] * int((turns < 1).sum())
        np.testing.assert_allclose([90 - wedge.theta1 for wedge in wedges], 360 * turns[turns < 1], rtol=1e-9)
        assert axes.texts[0].get_text() == f"0: {turns_text(turns[0])}" == "0: 15.9"

    def test_several_rotations_have_a_hand_each(self):
        figure = show.clock_hands(ROTARIES, position=50)
        hands = [one for one in figure.axes[0].get_lines() if one.get_linewidth() > 1]
        assert len(hands) == 3 * 8
        assert [text.get_text() for text in figure.legends[0].get_texts()] == list(ROTARIES)

    def test_the_unscaled_hand_is_told_from_the_others(self):
        """Ink beside dark blue is one colour to the eye: in lightness, width and order they are far apart."""
        pair = {"yarn:4": PLAIN, "none": PLAIN}
        (axes,) = show.clock_hands(pair, position=50).axes
        hands = [one for one in axes.get_lines() if one.get_linewidth() > 1]
        scaled, plain = hands[0], hands[1]
        lightness = [sum(to_rgb(one.get_color())) / 3 for one in (scaled, plain)]
        assert lightness[1] - lightness[0] > 0.4
        assert plain.get_linewidth() > 2 * scaled.get_linewidth()
        assert plain.get_zorder() < scaled.get_zorder()

    def test_of_many_pairs_some_are_drawn_first_and_last_among_them(self):
        (axes,) = show.clock_hands({"none": Rotary(head_dim=130, rope_theta=1e4)}, position=9).axes
        pairs = [int(text.get_text().split(":")[0]) for text in axes.texts]
        assert (len(pairs), pairs[0], pairs[-1]) == (32, 0, 64)

    def test_refusals(self):
        with pytest.raises(ValueError, match=r"rotaries: got \[4, 8\] pairs"):
            show.clock_hands({"a": PLAIN, "b": Rotary(head_dim=8, rope_theta=1e4)}, position=1)
        for position in (-1, 2**24 + 1, 1.5, True):
            with pytest.raises(ValueError, match="position: got"):
                show.clock_hands({"a": PLAIN}, position=position)

    def test_turns_in_few_digits(self):
        assert [turns_text(x) for x in (0, 163.2, 16.34, 0.5, 0.01634, 3.2e-7)] == [
            "0", "163", "16.3", "0.500", "0.0163", "3e-7",
        ]  # fmt: skip

    def test_a_scaling_by_length(self):
        long = LongRoPE(
            short_factor=(1.0,) * 8, long_factor=(4.0,) * 8, original_max_position_embeddings=64, factor=4.0
        )
        rotary = Rotary(head_dim=16, rope_theta=10_000.0, scaling=long)
        (axes,) = show.clock_hands({"long": rotary}, position=70).axes
        assert axes.texts[0].get_text() == f"0: {turns_text(70 / 4 / (2 * math.pi))}"


class TestBiases:
    """A transposed matrix shows each query the keys after it."""

    def test_matrix_shows_keys_up_to_the_query(self):
        size = 5
        distance = np.arange(size)[:, None] - np.arange(size)
        bias = np.stack([-0.5 * distance, -0.25 * distance])
        figure = show.bias_matrix(bias, name="ALiBi", labels=["head 0", "head 1"])
        for axes, wanted, title in zip(figure.axes, bias, ("head 0", "head 1"), strict=False):
            drawn = axes.get_images()[0].get_array()
            np.testing.assert_array_equal(drawn.mask, distance < 0)
            np.testing.assert_array_equal(drawn.compressed(), wanted[distance >= 0])
            assert axes.get_title(loc="left") == title
            assert axes.get_ylim() == (4.5, -0.5)
        assert heading_of(figure) == "ALiBi: bias for every query and key"

    def test_both_ways_hides_nothing_and_what_is_no_number_is_hidden(self):
        bias = np.array([[[0.0, 1], [np.nan, 2]]])
        drawn = show.bias_matrix(bias, name="x", labels=[""], causal=False).axes[0].get_images()[0].get_array()
        np.testing.assert_array_equal(drawn.mask, [[False, False], [True, False]])

    def test_positions_that_are_apart(self):
        (axes, _) = show.bias_matrix(np.zeros((1, 3, 3)), name="x", labels=[""], positions=[0, 100, 200]).axes
        assert axes.get_images()[0].get_extent() == [-50, 250, 250, -50]

    def test_lines_by_distance(self):
        distances = np.arange(9)
        (axes,) = show.bias_by_distance({"a": -distances, "b": -2.0 * distances}, distances=distances, name="x").axes
        np.testing.assert_array_equal(line(axes, "b")[1], -2.0 * distances)
        np.testing.assert_array_equal(line(axes, "b")[0], distances)
        (axes,) = show.bias_by_distance({"a": distances}, distances=distances, name="x", log=True).axes
        np.testing.assert_array_equal(line(axes, "a")[0], distances + 1)
        assert axes.get_xscale() == "log"

    def test_refusals(self):
        with pytest.raises(ValueError, match=r"bias: got shape \(5, 2, 2\)"):
            show.bias_matrix(np.zeros((5, 2, 2)), name="x", labels=[""] * 5)
        with pytest.raises(ValueError, match="labels: got 1; there are 2 heads"):
            show.bias_matrix(np.zeros((2, 2, 2)), name="x", labels=[""])
        with pytest.raises(ValueError, match="lines: got 0"):
            show.bias_by_distance({}, distances=[0, 1], name="x")
        with pytest.raises(ValueError, match="'a' has shape"):
            show.bias_by_distance({"a": [1]}, distances=[0, 1], name="x")
        with pytest.raises(ValueError, match="distances: got -1"):
            show.bias_by_distance({"a": [1, 2]}, distances=[-1, 1], name="x", log=True)


class TestFiles:
    """The same numbers give the same file, whatever the user's settings, the day or a name are."""

    @pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
    def test_same_bytes(self, kind):
        first, second = (show.encoded(show.decay(ROTARIES, length=64), kind) for _ in range(2))
        assert first == second
        assert first.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind])
        assert b"matplotlib.org" not in first or kind == "svg"

    def test_a_user_style_changes_nothing(self):
        import matplotlib

        def drawn() -> bytes:
            return show.encoded(show.heat_map(sinusoids(9, 4), name="x"), "png")

        expected = drawn()
        with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "lines.linewidth": 9}):
            assert drawn() == expected

    @pytest.mark.parametrize("name", ["$\\frac{1}{0}$", "a\nb\x00", "模型 \U0001f600", "<b>&"])
    def test_any_name_is_text(self, name):
        for figure in (
            show.heat_map(sinusoids(9, 4), name=name),
            show.decay({name: PLAIN}, length=64),
            show.bias_matrix(np.zeros((1, 2, 2)), name=name, labels=[name], what=name),
        ):
            assert show.encoded(figure, "svg")

    def test_kinds(self, tmp_path):
        assert kind_of_file(tmp_path / "a.PNG", "out") == "png"
        for name in ("config.json", "a", "a.jpg"):
            with pytest.raises(ValueError, match=r"out: got .*; the name must end in \.png, \.svg, \.pdf"):
                kind_of_file(tmp_path / name, "out")
        with pytest.raises(ValueError, match="kind: got 'gif'"):
            show.encoded(show.decay(ROTARIES, length=64), "gif")

    def test_missing_matplotlib_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"matplotlib is needed to draw pictures: pip install"):
            show.decay(ROTARIES, length=64)
