"""What `theodolite show` can draw: every encoding under every view, with the numbers of its formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite.plan.huggingface import read_config
from theodolite.plan.open import Opened
from theodolite.report.show.catalogue import ENCODINGS, pictures_of
from theodolite.report.show.of_model import pictures_of_model
from theodolite.report.show.settings import Settings


def opened(**raw) -> Opened:
    llama = {
        "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
        "max_position_embeddings": 512, "rope_theta": 10000.0,
    }  # fmt: skip
    made = {**llama, **raw}
    return Opened(plan=read_config(made), name="mine", location="mine/config.json", kind="config", raw=made)


def lines_of(figure) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    (axes,) = figure.axes
    return {one.get_label(): one.get_data() for one in axes.get_lines() if not one.get_label().startswith("_")}


def image_of(figure, panel: int = 0):
    return figure.axes[panel].get_images()[0].get_array()


class TestEncodings:
    """A name on the list that cannot be drawn, or draws another encoding, is found here."""

    @pytest.mark.parametrize("name", list(ENCODINGS))
    def test_every_view_is_drawn(self, name):
        settings = Settings(length=300, trained=64, head_dim=16, dim=24, heads=5, position=50)
        pictures = pictures_of(name, settings)
        assert tuple(pictures) == tuple(ENCODINGS[name].views)
        for draw in pictures.values():
            figure = draw()
            assert figure.get_suptitle()
            assert any(axes.has_data() for axes in figure.axes)

    def test_sinusoidal(self):
        pictures = pictures_of("sinusoidal", Settings(length=21, dim=6, theta=100.0))
        wanted = [
            [(math.cos if c % 2 else math.sin)(p / 100 ** ((c - c % 2) / 6)) for p in range(21)] for c in range(6)
        ]
        np.testing.assert_allclose(image_of(pictures["heat"]()), wanted, atol=6e-8)

    def test_alibi(self):
        drawn = lines_of(pictures_of("alibi", Settings(heads=4, length=50))["distance"]())
        assert list(drawn) == [f"head {head}" for head in range(4)]
        for head in range(4):
            x, y = drawn[f"head {head}"]
            np.testing.assert_array_equal(x, np.arange(50))
            np.testing.assert_allclose(y, -(2.0 ** (-2 * (head + 1))) * np.arange(50), rtol=1e-6)
        matrix = image_of(pictures_of("alibi", Settings(heads=4, length=7))["matrix"](), panel=2)
        assert matrix[6, 2] == pytest.approx(-4 / 64)
        assert matrix.mask[2, 6]

    def test_both_ways(self):
        settings = Settings(heads=2, length=9, bidirectional=True)
        x, y = lines_of(pictures_of("alibi", settings)["distance"]())["head 0"]
        np.testing.assert_array_equal(x, np.arange(-8, 9)[:: 1 if x[0] < 0 else -1])
        np.testing.assert_allclose(y, -np.abs(x) / 16, rtol=1e-6)
        assert not np.ma.getmaskarray(image_of(pictures_of("alibi", settings)["matrix"]())).any()

    def test_t5_counts_one_by_one_and_then_by_logarithm(self):
        x, y = lines_of(pictures_of("t5", Settings(length=200))["distance"]())["bucket"]
        wanted = [r if r < 16 else min(31, 16 + int(math.log(r / 16) / math.log(8) * 16 + 1e-9)) for r in map(int, x)]
        np.testing.assert_array_equal(y, wanted)

    def test_t5_both_ways_tells_keys_after_the_query_apart(self):
        x, y = lines_of(pictures_of("t5", Settings(length=20, bidirectional=True))["distance"]())["bucket"]
        assert y[list(x).index(3)] == 3
        assert y[list(x).index(-3)] == 16 + 3

    def test_shaw_and_deberta(self):
        _, y = lines_of(pictures_of("shaw", Settings(length=40))["distance"]())["vector"]
        np.testing.assert_array_equal(y, [max(0, 16 - r) for r in range(40)])
        _, y = lines_of(pictures_of("deberta", Settings(length=129))["distance"]())["bucket"]
        np.testing.assert_array_equal(y, np.arange(129))

    def test_kerple_follows_its_seed(self):
        def drawn(**more):
            return lines_of(pictures_of("kerple-log", Settings(heads=2, length=64, **more))["distance"]())["head 1"][1]

        before = torch.get_rng_state()
        first = drawn()
        assert torch.equal(torch.get_rng_state(), before)
        np.testing.assert_array_equal(first, drawn())
        assert not np.array_equal(first, drawn(seed=1))
        assert first[0] == 0
        assert (np.diff(first) < 0).all()

    def test_fire_depends_on_the_query(self):
        drawn = lines_of(pictures_of("fire", Settings(length=1600))["distance"]())
        assert list(drawn) == ["query at 100", "query at 400", "query at 1,599"]
        counts = [int(np.isfinite(y).sum()) for _, y in drawn.values()]
        assert counts == [101, 401, 1600]
        # At most 512 tokens have one threshold, so that these two are one function of the distance.
        np.testing.assert_allclose(drawn["query at 100"][1][:101], drawn["query at 400"][1][:101], rtol=1e-5)

    def test_xpos(self):
        drawn = lines_of(pictures_of("xpos", Settings(length=100, head_dim=8))["factors"]())
        for pair in range(4):
            zeta = (2 * pair / 8 + 0.4) / 1.4
            np.testing.assert_allclose(drawn[f"pair {pair}"][1], zeta ** (np.arange(100) / 512), rtol=1e-6)
        lines = lines_of(pictures_of("xpos", Settings(length=100, head_dim=8))["decay"]())
        turned = np.cos(np.outer(np.arange(100), 10_000.0 ** (-np.arange(4) / 4)))
        np.testing.assert_allclose(lines["RoPE"][1], turned.mean(1), atol=1e-7)

    def test_maps_of_distances(self):
        drawn = lines_of(pictures_of("rerope:window=8", Settings(length=40, trained=16))["distance"]())
        np.testing.assert_array_equal(drawn["true distance"][1], np.arange(40))
        np.testing.assert_array_equal(drawn["seen by the query at 39"][1], np.minimum(np.arange(40), 8))
        matrix = image_of(pictures_of("lm-infinite", Settings(length=40, trained=16))["matrix"]())
        # Beyond the window nothing is seen but the first tokens.
        assert matrix.mask[39, 20]
        assert not matrix.mask[39, 0]

    def test_scalings_stand_beside_the_plain_one(self):
        settings = Settings(scaling="yarn:4,ntk:2", trained=64, head_dim=16)
        assert list(lines_of(pictures_of("rotary", settings)["coverage"]())) == ["none", "yarn:4", "ntk:2"]
        assert len(lines_of(pictures_of("rotary", Settings(head_dim=16))["decay"]())) == 4

    @pytest.mark.parametrize(
        ("name", "settings", "message"),
        [
            ("nope", {}, "encoding: got 'nope'; there are sinusoidal, learned"),
            ("alibi:4", {}, "'alibi' takes no settings in its name"),
            ("rotary", {"scaling": "self-extend"}, "a map of distances, .*`theodolite show self-extend` draws it"),
            ("rotary", {"scaling": "yarm"}, "scaling: got 'yarm'"),
            ("rerope:window=0", {}, "window"),
        ],
    )
    def test_refusals(self, name, settings, message):
        with pytest.raises(ValueError, match=message):
            pictures_of(name, Settings(**settings))

    @pytest.mark.parametrize(
        "given", [{"length": 1}, {"heads": 0}, {"dim": 0}, {"position": -1}, {"theta": 1.0}, {"theta": math.inf}]
    )
    def test_numbers_out_of_range(self, given):
        with pytest.raises(ValueError, match=f"{next(iter(given))}: got"):
            Settings(**given)


class TestStoredTables:
    """A trained table is read as numbers, from a file that may be a stranger's."""

    def test_numpy(self, tmp_path):
        table = np.arange(12.0).reshape(4, 3)
        np.save(tmp_path / "a.npy", table)
        drawn = image_of(pictures_of("learned", Settings(table=tmp_path / "a.npy"))["heat"]())
        np.testing.assert_array_equal(drawn, table.T)

    def test_safetensors_by_its_usual_name_or_by_key(self, tmp_path):
        from safetensors.torch import save_file

        tensors = {"transformer.wpe.weight": torch.full((4, 3), 2.0, dtype=torch.bfloat16), "other": torch.ones(2, 2)}
        save_file(tensors, tmp_path / "a.safetensors")
        for key, wanted in ((None, 2.0), ("other", 1.0)):
            drawn = image_of(pictures_of("learned", Settings(table=tmp_path / "a.safetensors", key=key))["heat"]())
            assert (drawn == wanted).all()
        with pytest.raises(ValueError, match=r"key: .* has no tensor 'x'"):
            pictures_of("learned", Settings(table=tmp_path / "a.safetensors", key="x"))

    def test_no_pickle_is_loaded(self, tmp_path):
        np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
        with pytest.raises(ValueError, match=r"table: .* is no array of numbers"):
            pictures_of("learned", Settings(table=tmp_path / "a.npy"))

    def test_what_is_no_table(self, tmp_path):
        np.save(tmp_path / "a.npy", np.ones(3))
        (tmp_path / "b.safetensors").write_bytes(b"no header")
        (tmp_path / "c.txt").write_text("1 2")
        for name, message in (
            ("a.npy", "has shape"),
            ("b.safetensors", "is no safetensors file"),
            ("c.txt", "must be"),
        ):
            with pytest.raises(ValueError, match=f"table: .*{message}"):
                pictures_of("learned", Settings(table=tmp_path / name))


class TestModels:
    """A model's own positions, with the lengths that its config states."""

    def test_rotary(self):
        pictures = pictures_of_model(opened(), Settings(scaling="linear:2"))
        assert list(lines_of(pictures_of_model(opened(), Settings())["coverage"]())) == ["as shipped"]
        drawn = lines_of(pictures["coverage"]())
        turns = 512 * 10_000.0 ** (-np.arange(8) / 8) / (2 * math.pi)
        np.testing.assert_allclose(drawn["none"][1], turns, rtol=1e-13)
        np.testing.assert_allclose(drawn["linear:2"][1], turns / 2, rtol=1e-13)

    def test_several_rotations(self):
        gemma = {
            "model_type": "gemma3_text", "num_hidden_layers": 8, "sliding_window": 64, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        }  # fmt: skip
        drawn = lines_of(pictures_of_model(opened(**gemma), Settings())["coverage"]())
        assert list(drawn) == ["layers 0-4, 6-7", "layers 5"]
        drawn = lines_of(pictures_of_model(opened(**gemma), Settings(scaling="ntk:2"))["coverage"]())
        assert list(drawn) == ["layers 0-4, 6-7, none", "layers 5, none", "layers 5, ntk:2"]

    def test_alibi_with_the_heads_that_it_states(self):
        bloom = Opened(
            plan=read_config({"model_type": "bloom", "n_layer": 2, "n_head": 2}), name="b", location="b", kind="config",
            raw={"model_type": "bloom", "n_layer": 2, "n_head": 2},
        )  # fmt: skip
        drawn = lines_of(pictures_of_model(bloom, Settings(length=10))["distance"]())
        np.testing.assert_allclose(drawn["head 0"][1], -np.arange(10) / 16, rtol=1e-6)
        with pytest.raises(ValueError, match="scaling: got 'yarn:2', and 'b' has no rotation"):
            pictures_of_model(bloom, Settings(scaling="yarn:2"))

    def test_what_is_in_the_weights(self):
        roberta = {"model_type": "roberta", "max_position_embeddings": 514, "num_hidden_layers": 2, "pad_token_id": 1}
        with pytest.raises(ValueError, match=r"nothing to draw of 'mine': its positions \(learned vectors\)"):
            pictures_of_model(opened(**roberta), Settings())
