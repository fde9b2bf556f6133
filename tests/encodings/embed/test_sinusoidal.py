"""Sinusoids: the printed formula in 50 digits, its identities, and every layout that checkpoints were made with."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf
from torch import nn

from theodolite.encodings.embed.sinusoidal import Sinusoidal

LAYOUTS = ["interleaved", "halves"]
SPACINGS = ["paper", "tensor2tensor"]


def true_vector(position, dim, layout="interleaved", spacing="paper", base=10000, cos_first=False):
    """PE(position) in 50 digits, from the printed formulas."""
    with mp.workdps(50):
        if spacing == "paper":
            frequencies = [mpf(base) ** (-mpf(2 * i) / dim) for i in range((dim + 1) // 2)]
        else:
            pairs = dim // 2
            frequencies = [mpf(base) ** (-mpf(i) / max(pairs - 1, 1)) for i in range(pairs)]
        sines = [mp.sin(mpf(position) * w) for w in frequencies]
        cosines = [mp.cos(mpf(position) * w) for w in frequencies]
        first, second = (cosines, sines) if cos_first else (sines, cosines)
        if layout == "interleaved":
            out = [value for pair in zip(first, second, strict=True) for value in pair][:dim]
        else:
            out = first + second[: dim - len(first)]
        return out + [mpf(0)] * (dim - len(out))


FAR = [0, 1, -1, 7, 511, 512, 513, -4096, 65_535, 1_048_577, 2**24 - 1, 2**24, -(2**24)]
FRACTIONS = [0.5, -3.25, 1e-3, 12345.678, 16_777_215.9]


class TestExact:
    """Float32 angles are off by 1e-3 at 8 K and by a full turn at 10 M; these are not."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("spacing", SPACINGS)
    @pytest.mark.parametrize("cos_first", [False, True])
    @pytest.mark.parametrize(("dim", "base"), [(12, 10000), (7, 10000), (5, 31.5), (2, 10000), (3, 1e6)])
    def test_formula(self, layout, spacing, cos_first, dim, base):
        encoding = Sinusoidal(dim, layout=layout, spacing=spacing, base=base, cos_first=cos_first)
        for positions in (torch.tensor(FAR), torch.tensor(FRACTIONS, dtype=torch.float64)):
            table = encoding.table(positions)
            assert table.dtype == torch.float32
            assert table.shape == (len(positions), dim)
            for position, row in zip(positions.tolist(), table.tolist(), strict=True):
                truth = true_vector(position, dim, layout, spacing, base, cos_first)
                assert max(abs(mpf(mine) - exact) for mine, exact in zip(row, truth, strict=True)) <= 6e-8

    def test_one_channel_is_a_sine(self):
        assert Sinusoidal(1).table(torch.tensor([2])).item() == pytest.approx(math.sin(2), abs=6e-8)

    def test_a_width_of_512_at_a_million(self):
        row = Sinusoidal(512).table(torch.tensor([1_000_003]))[0].tolist()
        assert max(abs(mpf(a) - b) for a, b in zip(row, true_vector(1_000_003, 512), strict=True)) <= 6e-8

    def test_rows_of_a_batch_have_their_own_positions(self):
        encoding = Sinusoidal(10)
        positions = torch.tensor([[0, 5, 9], [100_000, 3, 3]])
        for row in range(2):
            assert torch.equal(encoding.table(positions)[row], encoding.table(positions[row]))

    @pytest.mark.parametrize("offset", [1, 2])
    def test_offset_moves_every_position(self, offset):
        moved, plain = Sinusoidal(8, offset=offset), Sinusoidal(8)
        whole = torch.tensor([0, 6, 253, 254], dtype=torch.uint8)
        assert torch.equal(moved.table(whole), plain.table(whole.long() + offset))
        fractions = torch.tensor([1e6 + 0.3, -0.5], dtype=torch.float64)
        assert torch.equal(moved.table(fractions), plain.table(fractions + offset))
        # A sum that float32 does not hold.
        far = torch.tensor([2.0**23 - 0.5])
        assert torch.equal(moved.table(far), plain.table(far.double() + offset))

    def test_strength_is_rounded_with_the_entry(self):
        for position in range(70_001, 70_011):
            row = Sinusoidal(8, strength=0.3).table(torch.tensor([position]))[0]
            exact = [float(mpf(0.3) * entry) for entry in true_vector(position, 8)]
            assert torch.equal(row, torch.tensor(exact))


def inner(encoding, p, q):
    one, other = encoding.table(torch.tensor([p, q])).double()
    return float(one @ other)


class TestIdentities:
    """What the paper says of its encoding, and what it does not say: similarity is not monotone."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("spacing", SPACINGS)
    @pytest.mark.parametrize("dim", [8, 64])
    @settings(max_examples=25, deadline=None)
    @given(data=st.data())
    def test_inner_products_depend_on_distance_alone(self, layout, spacing, dim, data):
        far = st.integers(-(2**23), 2**23)
        p, k, moved = data.draw(far), data.draw(st.integers(-5000, 5000)), data.draw(far)
        encoding = Sinusoidal(dim, layout=layout, spacing=spacing)
        w = encoding.inv_freq()
        expected = sum(math.cos(k * frequency) for frequency in w)
        # dim products of entries within 6e-8, each entry at most 1.
        allowed = 2 * dim * 6e-8
        assert inner(encoding, p, p + k) == pytest.approx(expected, abs=allowed)
        assert inner(encoding, moved + k, moved) == pytest.approx(expected, abs=allowed)
        assert inner(encoding, p, p) == pytest.approx(dim / 2, abs=allowed)

    @pytest.mark.parametrize(
        ("dim", "first_rise", "rises", "first_negative"),
        [(64, 6, 0.495, 725), (128, 12, 0.486, 1707), (512, 44, 0.493, 3284)],
    )
    def test_similarity_goldens(self, dim, first_rise, rises, first_negative):
        table = Sinusoidal(dim).table(torch.arange(4097)).double()
        similarity = table @ table[0] * 2 / dim
        steps = similarity.diff() > 0
        assert int(steps.nonzero()[0]) + 1 == first_rise
        assert float(steps.double().mean()) == pytest.approx(rises, abs=5e-4)
        assert int((similarity < 0).nonzero()[0]) == first_negative

    def test_similarity_values(self):
        distances = [1, 2, 4, 8, 16, 64, 256, 1024, 4096]
        table = Sinusoidal(128).table(torch.tensor([0, *distances])).double()
        values = [0.970, 0.897, 0.759, 0.714, 0.620, 0.477, 0.321, 0.204, -0.053]
        assert (table[1:] @ table[0] / 64).tolist() == pytest.approx(values, abs=5e-4)


WITH_MATRIX = [
    {"dim": dim, "layout": layout, "spacing": spacing, "cos_first": cos_first}
    for dim, spacing in [(8, "paper"), (12, "tensor2tensor"), (7, "tensor2tensor"), (2, "paper")]
    for layout in LAYOUTS
    for cos_first in (False, True)
]


class TestShiftMatrix:
    """ "For any fixed offset k, PE(pos+k) can be represented as a linear function of PE(pos)"."""

    @pytest.mark.parametrize("options", WITH_MATRIX)
    def test_moves_any_position(self, options):
        encoding = Sinusoidal(**options)
        for k in (0, 1, -7, 0.5, 4096, 1_000_001):
            positions = torch.tensor([0.0, 3.0, 77.5, -12_345.0], dtype=torch.float64)
            moved = encoding.table(positions).double() @ encoding.shift_matrix(k).T
            # Each entry is a sum of two, with factors of length 1, of entries within 6e-8; and so is the other side.
            assert (moved - encoding.table(positions + k).double()).abs().max() <= 3 * 6e-8

    @pytest.mark.parametrize("options", WITH_MATRIX)
    def test_is_a_group_of_rotations(self, options):
        shift = Sinusoidal(**options).shift_matrix
        identity = torch.eye(options["dim"], dtype=torch.float64)
        # Products of two numbers below 1 and angles of 60 at most, in float64.
        assert (shift(11) @ shift(46.5) - shift(57.5)).abs().max() <= 1e-13
        assert (shift(11).T @ shift(11) - identity).abs().max() <= 1e-15
        assert torch.equal(shift(0), identity)
        assert torch.equal(shift(-3), shift(3).T)

    def test_dtype_and_device(self):
        with torch.device("meta"):
            on_the_cpu = Sinusoidal(4).shift_matrix(2)
        assert torch.equal(on_the_cpu, Sinusoidal(4).shift_matrix(2))
        assert Sinusoidal(4).shift_matrix(2).dtype == torch.float64
        assert Sinusoidal(4).shift_matrix(2, dtype=torch.float32).dtype == torch.float32

    def test_a_sine_alone_cannot_be_moved(self):
        with pytest.raises(ValueError, match="dim: got 7; in an odd width the last sine stands alone"):
            Sinusoidal(7).shift_matrix(1)
        with pytest.raises(ValueError, match="the last cosine stands alone"):
            Sinusoidal(7, cos_first=True).shift_matrix(1)


class TestStrength:
    """Fixed, or a number that is learned from where it was set."""

    def test_learned(self):
        encoding = Sinusoidal(6, strength=0.5, learn_strength=True)
        assert {name: value.tolist() for name, value in encoding.state_dict().items()} == {"strength": [0.5]}
        x, positions = torch.zeros(2, 5, 6), torch.arange(3, 8)
        encoding(x, positions).sum().backward()
        assert encoding.strength.grad.item() == pytest.approx(2 * Sinusoidal(6).table(positions).sum().item(), rel=1e-6)
        with torch.no_grad():
            encoding.strength.fill_(2.0)
        assert torch.equal(encoding.table(positions), 2 * Sinusoidal(6).table(positions))
        encoding.reset_parameters()
        assert encoding.strength.item() == 0.5

    def test_gradcheck(self):
        encoding = Sinusoidal(6, strength=0.7, learn_strength=True).double()
        positions = torch.tensor([[0, 5, 9], [2, 2, 4]])
        x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

        def call(x, strength):
            return torch.func.functional_call(encoding, {"strength": strength}, (x, positions))

        assert encoding.table(positions).dtype == torch.float64
        assert torch.autograd.gradcheck(call, (x, encoding.strength.detach().clone().requires_grad_()))


class TestNothingToSpoil:
    """Weight initialisers made the sinusoids of Pegasus, Marian, XLM and M2M100 random, and nothing said so."""

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: m.apply(lambda x: nn.init.normal_(x.weight) if hasattr(x, "weight") else None),
            lambda m: m.apply(lambda x: [nn.init.normal_(p) for p in x.parameters(recurse=False)]),
            lambda m: m.half(),
            lambda m: m.bfloat16().float(),
            lambda m: m.double(),
            lambda m: m._apply(lambda t: torch.full_like(t, float("nan"))),
        ],
    )
    def test_survives(self, change):
        model = nn.ModuleDict({"embed_positions": Sinusoidal(8), "proj": nn.Linear(2, 2)})
        expected = model["embed_positions"].table(torch.arange(5))
        change(model)
        assert torch.equal(model["embed_positions"].table(torch.arange(5)), expected)
        assert list(model["embed_positions"].parameters()) == list(model["embed_positions"].buffers()) == []


def model_with(encoding):
    return nn.ModuleDict({"embed_positions": encoding, "proj": nn.Linear(2, 2)})


class TestOldCheckpoints:
    """A stored table that says the same is dropped with a note; one that says something else is not taken for ours."""

    @pytest.mark.parametrize("key", ["weight", "weights", "pe", "position_ids", "_float_tensor", "inv_freq"])
    def test_derived_keys_are_dropped(self, key):
        model = model_with(Sinusoidal(8))
        rows = torch.tensor([true_vector(p, 8) for p in range(6)], dtype=torch.float32)
        state = {**model.state_dict(), f"embed_positions.{key}": rows}
        with pytest.warns(UserWarning, match=f"Sinusoidal: the checkpoint's {key} is not read"):
            assert str(model.load_state_dict(state)) == "<All keys matched successfully>"

    @pytest.mark.parametrize(
        "change",
        [
            lambda rows: rows.bfloat16(),
            lambda rows: rows.half(),
            lambda rows: rows.double(),
            lambda rows: rows[None],
            lambda rows: rows[:, None],
            lambda rows: torch.cat((rows[:1], 0 * rows[1:2], rows[2:])),
            lambda rows: rows.to("meta"),
        ],
        ids=["bfloat16", "float16", "float64", "(1, N, d)", "(N, 1, d)", "padding row of zeros", "meta"],
    )
    def test_as_they_were_stored(self, change):
        encoding = Sinusoidal(16, layout="halves", spacing="tensor2tensor", offset=2)
        rows = Sinusoidal(16, layout="halves", spacing="tensor2tensor").table(torch.arange(100))
        with pytest.warns(UserWarning, match="is not read"):
            encoding.load_state_dict({"weights": change(rows)})

    @pytest.mark.parametrize("rows", [5000, 60_000])
    def test_a_table_of_float32_angles_passes(self, rows):
        # The usual snippet: wrong by 3e-4 at row 5000 and 5e-3 at row 60 000, and nothing else that it could be.
        frequencies = torch.exp(torch.arange(0, 64, 2) * (-math.log(10000.0) / 64))
        angles = torch.arange(rows)[:, None] * frequencies
        pe = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)
        with pytest.warns(UserWarning, match="is not read"):
            Sinusoidal(64).load_state_dict({"pe": pe[:, None]})

    def test_a_table_with_the_strength_in_it_passes(self):
        encoding = Sinusoidal(8, strength=8**-0.5)
        for strength in (1.0, 8**-0.5):
            with pytest.warns(UserWarning, match="is not read"):
                encoding.load_state_dict({"weight": strength * Sinusoidal(8).table(torch.arange(9))})

    @pytest.mark.parametrize(
        "other",
        [
            Sinusoidal(8, layout="halves").table(torch.arange(9)),
            Sinusoidal(8, spacing="tensor2tensor").table(torch.arange(9)),
            Sinusoidal(8, base=500.0).table(torch.arange(9)),
            Sinusoidal(8, cos_first=True).table(torch.arange(9)),
            torch.randn(9, 8, generator=torch.Generator().manual_seed(0)),
            torch.full((9, 8), float("nan")),
            Sinusoidal(6).table(torch.arange(9)),
            torch.tensor(1.0),
            torch.zeros(9, 8),
            torch.zeros(1, 8),
            Sinusoidal(8).table(torch.arange(9)) * (torch.arange(9) % 5 != 1)[:, None],
            torch.cat((Sinusoidal(8).table(torch.arange(9000)), torch.zeros(2, 8))),
            Sinusoidal(8).table(torch.arange(2**19)) + 0.2 * (torch.arange(2**19) == 3)[:, None],
        ],
        ids=[
            "layout",
            "spacing",
            "base",
            "cos_first",
            "learned",
            "nan",
            "width",
            "scalar",
            "zeros",
            "one row of zeros",
            "two rows of zeros",
            "zeros at the end",
            "one row of many",
        ],
    )
    def test_another_table_is_refused(self, other):
        model = model_with(Sinusoidal(8))
        state = {**model.state_dict(), "embed_positions.weight": other}
        with (
            pytest.warns(UserWarning, match="is not read"),
            pytest.raises(RuntimeError, match=r"embed_positions.weight: the checkpoint's table of shape .*LearnedEmb"),
        ):
            model.load_state_dict(state, strict=False)

    def test_one_channel_is_zero_at_position_0(self):
        with pytest.warns(UserWarning, match="is not read"):
            Sinusoidal(1).load_state_dict({"weight": Sinusoidal(1).table(torch.arange(4))})

    def test_unknown_keys_are_unexpected(self):
        with pytest.raises(RuntimeError, match="Unexpected key"):
            Sinusoidal(8).load_state_dict({"bias": torch.zeros(8)})


class TestRefusals:
    """Bad arguments are named when the module is made, bad positions when it is called."""

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: Sinusoidal(8, layout="half"), "layout: got 'half'; it must be 'interleaved' or 'halves'"),
            (lambda: Sinusoidal(8, spacing="t2t"), "spacing: got 't2t'; it must be 'paper' or 'tensor2tensor'"),
            (lambda: Sinusoidal(8, base=0), "base: got 0; it must be a finite number of at least 1"),
            (lambda: Sinusoidal(8, base=1e-9), "base: got 1e-09; it must be a finite number of at least 1"),
            (lambda: Sinusoidal(8, base=float("inf")), "base: got inf; it must be a finite number of at least 1"),
            (lambda: Sinusoidal(8, strength=-float("inf")), "strength: got -inf; it must be a finite number$"),
            (
                lambda: Sinusoidal(8, learn_strength=True).to("meta")(torch.zeros(1, 3, 8), torch.arange(3)),
                "strength: it is on the meta device and has no value; load it first",
            ),
            (lambda: Sinusoidal(8, base=float("nan")), "base: got nan"),
            (lambda: Sinusoidal(8, base=None), "base: got None"),
            (lambda: Sinusoidal(8, strength=float("inf")), "strength: got inf; it must be a finite number$"),
            (lambda: Sinusoidal(8, strength=True), "strength: got True"),
            (lambda: Sinusoidal(8, offset=-1), "offset: got -1"),
            (lambda: Sinusoidal(0), "dim: got 0"),
            (lambda: Sinusoidal(1, spacing="tensor2tensor"), "dim: got 1; spacing 'tensor2tensor' needs a pair"),
            (lambda: Sinusoidal(8).table(torch.tensor([2**24 + 1])), r"positions: got 16777217; .* exact up to"),
        ],
    )
    def test_words(self, call, message):
        with pytest.raises(ValueError, match=message):
            call()

    def test_repr_says_what_matters(self):
        encoding = Sinusoidal(8, layout="halves", cos_first=True, offset=2, strength=0.5, channels=slice(0, 8))
        assert repr(encoding) == (
            "Sinusoidal(8, channels=0:8, layout='halves', spacing='paper', base=10000, cos_first=True, offset=2, "
            "strength=0.5)"
        )
        assert "learn_strength=True" in repr(Sinusoidal(8, learn_strength=True))
