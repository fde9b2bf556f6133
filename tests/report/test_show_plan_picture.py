"""One picture of a plan: its layers in a row, and what follows from each rotation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from theodolite.encodings import alibi_slopes as published
from theodolite.plan.huggingface import read_config
from theodolite.plan.layer_json import kind_of
from theodolite.plan.open import Opened
from theodolite.report import plan_picture, show
from theodolite.report.show.rotations import groups
from theodolite.report.style import RULE

BUCKETS = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip
GEMMA = LLAMA | {
    "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 64, "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}  # fmt: skip


def opened(raw, name="mine") -> Opened:
    return Opened(plan=read_config(raw), name=name, location=name, kind="config", raw=raw)


def picture(raw, name="mine"):
    return plan_picture.plan_picture(opened(raw, name))


def titles(figure) -> list[str]:
    return [axes.get_title(loc="left").replace("\n", " ") for axes in figure.axes]


class TestLayers:
    """A layer that is drawn as another kind hides what a model is."""

    def test_windows_are_low_and_rotations_have_colours(self):
        figure = picture(GEMMA)
        bars = figure.axes[0].patches
        assert [bar.get_height() for bar in bars] == [0.5] * 5 + [1.0] + [0.5]
        assert len({bar.get_facecolor() for bar in bars}) == 2
        assert bars[5].get_facecolor() != bars[4].get_facecolor() == bars[6].get_facecolor()
        rows = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        assert rows == ["0-4, 6: base 10,000, window of 64", "5: base 1,000,000"]

    def test_nope_and_layers_without_attention(self):
        from matplotlib.colors import to_rgba

        cohere = LLAMA | {"model_type": "cohere2", "sliding_window": 64}
        bars = picture(cohere).axes[0].patches
        assert bars[3].get_facecolor() == to_rgba("white")
        hybrid = LLAMA | {"model_type": "qwen3_next", "head_dim": 64}
        made = opened(hybrid)
        bars = plan_picture.plan_picture(made).axes[0].patches
        linear = [kind_of(layer) == "linear_attention" for layer in made.plan.layers]
        assert [bar.get_facecolor() == to_rgba(RULE) for bar in bars] == linear

    def test_many_kinds_are_counted(self):
        kinds = plan_picture.layer_kinds(read_config(GEMMA))
        assert list(kinds.values()) == [[0, 1, 2, 3, 4, 6], [5]]


class TestRotations:
    """Each panel has a line for each rotation, at the model's stated length."""

    def test_a_plain_model(self):
        figure = picture(LLAMA)
        _, waves, turns, cosines = figure.axes
        wanted = 2 * math.pi * 10_000.0 ** (np.arange(8) / 8)
        np.testing.assert_allclose(waves.get_lines()[0].get_ydata(), wanted, rtol=1e-13)
        np.testing.assert_allclose(turns.get_lines()[0].get_ydata(), 512 / wanted, rtol=1e-13)
        means = [np.cos(np.outer(one, 2 * math.pi / wanted)).mean() for one in groups(512)]
        np.testing.assert_allclose(cosines.get_lines()[0].get_ydata(), means, atol=1e-12)
        hollow = [one for one in waves.get_lines() if one.get_markerfacecolor() == "white"]
        assert [len(one.get_xdata()) for one in hollow] == [int((wanted > 512).sum())]
        assert titles(figure)[1:] == [
            "Tokens for a turn; hollow: never a whole one",
            "Coverage: turns that each pair makes",
            "Decay: mean cosine by distance, to 512 tokens",
        ]
        assert figure.get_suptitle().startswith("mine: rotary positions in all 4 layers")

    def test_two_rotations_have_a_line_each(self):
        cosines = picture(GEMMA).axes[3]
        assert [text.get_text() for text in cosines.get_legend().get_texts()] == ["layers 0-4, 6", "layers 5"]

    def test_a_layer_with_a_window_turns_within_it(self):
        """Distances past the window are none of its own."""
        figure, plan = picture(GEMMA), read_config(GEMMA)
        window = plan.layers[0].mask.sliding_window
        assert window < plan.max_position_embeddings
        local, far = figure.axes[2].get_lines()[:2]
        for line, rotary, end in (
            (local, plan.layers[0].rotate, window), (far, plan.layers[5].rotate, plan.max_position_embeddings),
        ):  # fmt: skip
            waves = 2 * math.pi / rotary.inv_freq()
            np.testing.assert_allclose(line.get_ydata(), end / waves, rtol=1e-13)
        assert figure.axes[2].get_ylabel().endswith(", or the window")
        hollow = [one for one in figure.axes[1].get_lines() if one.get_markerfacecolor() == "white"]
        assert len(hollow[0].get_xdata()) == int((2 * math.pi / plan.layers[0].rotate.inv_freq() > window).sum())

    def test_no_stated_length(self):
        raw = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
        assert titles(picture(raw))[3].endswith("to 8,192 tokens, for no length is stated")

    @pytest.mark.parametrize("name", ["$\\frac{1}{0}$", "</script><img src=x>", "a\nb\x00\u202e", "模型 \U0001f600"])
    def test_any_name(self, name):
        assert show.encoded(picture(LLAMA, name), "png")


class TestALiBi:
    """A bias of the distance has its own panel, with the heads that the file states."""

    @pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 31, 32])
    @pytest.mark.parametrize("bias_max", [8.0, 5.5])
    def test_slopes_are_the_published_ones(self, heads, bias_max):
        assert tuple(plan_picture.alibi_slopes(heads, bias_max)) == published(heads, bias_max=bias_max)

    def test_lines(self):
        figure = picture({"model_type": "bloom", "n_layer": 2, "n_head": 4, "seq_length": 256})
        axes = figure.axes[1]
        for head in range(4):
            (drawn,) = [one for one in axes.get_lines() if one.get_label() == f"head {head}"]
            x, y = drawn.get_data()
            np.testing.assert_allclose(y, 2.0 ** (-2 * (head + 1)) * x, rtol=1e-13)
        assert titles(figure)[1].startswith("ALiBi by distance, 4 heads; ")

    def test_heads_that_are_not_stated(self):
        made = Opened(
            plan=read_config({"model_type": "bloom", "n_layer": 2, "n_head": 4}), name="m", location="m", kind="config",
            raw={},
        )  # fmt: skip
        assert "8 heads (assumed: it states none)" in titles(plan_picture.plan_picture(made))[1]


class TestRefusals:
    """What is in the weights is said in words, with what to do."""

    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            ({"model_type": "gpt2", "n_layer": 2, "n_positions": 64}, "has learned absolute positions, which are in"),
            (
                {"model_type": "t5", "num_layers": 2, "num_heads": 2, "d_model": 8, **BUCKETS},
                "has t5 biases, which are in",
            ),
        ],
    )
    def test_nothing_to_draw(self, raw, message, tmp_path):
        with pytest.raises(ValueError, match=f"picture: nothing to draw: 'mine' {message}"):
            plan_picture.write(opened(raw), tmp_path / "p.png")
        assert not list(tmp_path.iterdir())
