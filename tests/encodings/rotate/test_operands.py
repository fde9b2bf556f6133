"""What does not fit is refused in words that name it, by every rotation alike."""

from __future__ import annotations

import pytest
import torch

from tests.encodings.rotate.test_behaviour import CASES, PLAN, WIDTH, equal, inputs, options
from theodolite.encodings import RotaryEmbedding
from theodolite.encodings.rotate.axial import AxialRotary
from theodolite.encodings.rotate.mixed import MixedRotary
from theodolite.encodings.rotate.parts import RotateByChannel, RotateByHead
from theodolite.encodings.rotate.per_head import PerHeadRotary
from theodolite.encodings.rotate.rerotation import rerotate
from theodolite.encodings.rotate.tables import Tables
from theodolite.encodings.rotate.xpos import XPos
from theodolite.plan import DynamicNTK, Rotary
from theodolite.plan.axial import Axial

ALL = pytest.mark.parametrize("name", CASES)
ROPE = RotaryEmbedding(PLAN)


def heads(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 4, 19, width), torch.randn(2, 2, 19, width)


class TestWidth:
    """A plan of 8 channels does not turn the first 8 of 16: another width is another model."""

    @ALL
    @pytest.mark.parametrize("width", [2 * WIDTH, WIDTH + 2, 12])
    def test_others_are_refused(self, name, width):
        case = CASES[name]
        rotate, positions, arguments = case.build(), case.positions(19), options(case)
        q, k = heads(width)
        text = rf": got shape \(2, [24], 19, {width}\); its last must be head_dim, 16"
        for given in ((q, k), (q, None), (None, k)):
            with pytest.raises(ValueError, match=("q" if given[0] is not None else "k") + text):
                rotate(*given, positions, **arguments)
        with pytest.raises(ValueError, match="x" + text):
            rotate.turn_values(k, rotate.tables(positions, amplitude=False, **arguments))

    def test_of_patches(self):
        positions = torch.stack([torch.arange(19), torch.arange(19)])
        small = Axial(head_dim=16, rope_theta=1e4, axes_dim=(8, 8), halves_per_axis=True)
        for rope in (AxialRotary(Axial.qwen_vl(16)), AxialRotary(small), MixedRotary(16, 2)):
            with pytest.raises(ValueError, match=r"q: got shape \(2, 4, 19, 32\); its last must be head_dim, 16"):
                rope(*heads(32), positions)

    @pytest.mark.parametrize("trailing", [False, True])
    def test_what_turns_may_come_alone(self, trailing):
        plan = Rotary(head_dim=16, rope_theta=1e4, rotary_dim=8, trailing=trailing)
        q, k = heads(16)
        part = slice(8, 16) if trailing else slice(0, 8)
        for rope in (RotaryEmbedding(plan), XPos(plan, centre=0), PerHeadRotary([plan, plan])):
            whole = rope(q, k, torch.arange(19))
            alone = rope(q[..., part], k[..., part], torch.arange(19))
            assert equal(alone, [x[..., part] for x in whole])
            with pytest.raises(ValueError, match="head_dim, 16, or 8 where the channels that turn are given alone"):
                rope(*heads(24), torch.arange(19))


class TestOperands:
    """No AttributeError from inside."""

    @ALL
    @pytest.mark.parametrize("number", [1, 3])
    def test_of_other_dimensions(self, name, number):
        case = CASES[name]
        q, k = inputs()
        wrong, text = q[(0,) * (4 - number)], r": got shape \(.*\); it must have four dimensions, \(B, H, S, D\)"
        with pytest.raises(ValueError, match="q" + text):
            case.build()(wrong, k, case.positions(19), **options(case))
        with pytest.raises(ValueError, match="k" + text):
            case.build()(q, wrong, case.positions(19), **options(case))

    def test_of_parts(self):
        both = RotateByHead([(ROPE, 1), (None, 1)])
        with pytest.raises(ValueError, match=r"q: got shape \(16,\); it must have four dimensions"):
            both.apply_tables(torch.randn(16), None, both.tables(torch.arange(19)))
        with pytest.raises(ValueError, match="q: got a list; give a tensor"):
            ROPE([1.0], None, torch.arange(19))

    def test_tables_that_are_none(self):
        cos = ROPE.tables(torch.arange(19)).cos
        with pytest.raises(ValueError, match="tables: got a Tables whose sin is a NoneType; give what `tables` of the"):
            ROPE.apply_tables(*inputs(), Tables(cos, None))
        with pytest.raises(ValueError, match="tables: got a Tensor whose cos is a builtin_function"):
            ROPE.apply_tables(*inputs(), cos)

    @ALL
    def test_tables_without_values(self, name):
        case = CASES[name]
        rotate = case.build()
        tables = rotate.tables(case.positions(19).to("meta"), **options(case))
        with pytest.raises(ValueError, match="cos: got a tensor on the meta device, which has no values, and q is on"):
            rotate.apply_tables(*inputs(), tables)

    def test_lengths_that_are_a_number(self):
        plan = Rotary(head_dim=16, rope_theta=1e4, scaling=DynamicNTK(factor=2, original_max_position_embeddings=8))
        for rope in (RotaryEmbedding(plan), PerHeadRotary([plan, plan])):
            with pytest.raises(ValueError, match="lengths: got 5; give a whole number for each row"):
                rope(*inputs(), torch.arange(19), lengths=5)


class TestConstructors:
    """One thing where several belong."""

    def test_plans(self):
        with pytest.raises(ValueError, match="rotaries: got a Rotary; give a list of plans, one for each key-value"):
            PerHeadRotary(PLAN)
        with pytest.raises(ValueError, match="rotaries: got a NoneType; give a list of plans"):
            PerHeadRotary(None)

    @pytest.mark.parametrize("kind", [RotateByHead, RotateByChannel])
    def test_parts(self, kind):
        with pytest.raises(ValueError, match="parts: got a RotaryEmbedding among them; give pairs of a rotation, or"):
            kind([ROPE])
        with pytest.raises(ValueError, match="parts: got a RotaryEmbedding; give pairs of a rotation, or None"):
            kind(ROPE)


class TestInPlace:
    """What q and k share would be turned twice, in whichever parts it lies."""

    def test_parts_that_share(self):
        cos_k = torch.randn(1, 6, 19, 16)
        # Heads 0 to 3 and 2 to 5: the parts of two heads share nothing with each other.
        q, k = cos_k[:, :4], cos_k[:, 2:]
        by_head = RotateByHead([(ROPE, 2), (ROPE, 2)])
        by_channel = RotateByChannel([(RotaryEmbedding(Rotary(head_dim=8, rope_theta=1e4)), 8)] * 2)
        for both in (by_head, by_channel):
            before = cos_k.clone()
            with pytest.raises(ValueError, match="k: it shares elements with q"):
                both.apply_tables(q, k, both.tables(torch.arange(19)), inplace=True)
            assert torch.equal(cos_k, before)


class TestMoves:
    """`rerotate` speaks of k and by, for it has no q and no positions."""

    @pytest.mark.parametrize("by", [2**25, -(2**25), torch.full((19,), 2**25)])
    def test_too_far(self, by):
        with pytest.raises(ValueError, match=r"by: got -?33554432; the tables are exact up to"):
            rerotate(inputs()[1], rotary=PLAN, by=by)

    @pytest.mark.parametrize("given", [{"by": 3}, {"by": torch.arange(19)}])
    @pytest.mark.parametrize("number", [1, 3])
    def test_keys_of_other_dimensions(self, given, number):
        with pytest.raises(ValueError, match=r"k: got shape \(.*\); it must have four dimensions"):
            rerotate(inputs()[1][(0,) * (4 - number)], rotary=PLAN, **given)


class TestStoredFrequencies:
    """A checkpoint's frequencies are those of the module, or it is another model."""

    FIXED = pytest.mark.parametrize(
        "name", [name for name in CASES if name.split()[0] in ("rotary", "per", "xpos", "stored")]
    )

    @FIXED
    @pytest.mark.parametrize("key", ["inv_freq", "freqs"])
    def test_of_another_number(self, name, key):
        rotate = CASES[name].build()
        own = rotate.rotary_dim // 2
        text = rf"{key}: the checkpoint has 7 frequencies, and .* has {own}: it is of another model"
        for stored in (torch.zeros(7), torch.zeros(7, device="meta")):
            with pytest.raises(RuntimeError, match=text):
                rotate.load_state_dict({key: stored})

    @FIXED
    def test_of_another_base(self, name):
        rotate = CASES[name].build()
        own = torch.tensor(rotate._fixed_frequencies()[-1])
        with pytest.warns(UserWarning, match="inv_freq is not read"):
            rotate.load_state_dict({"inv_freq": own})
        with pytest.raises(RuntimeError, match=r"inv_freq: the checkpoint's frequencies, .* base or scaling differ"):
            rotate.load_state_dict({"inv_freq": own / 3})

    def test_placeholders_pass(self):
        with pytest.warns(UserWarning, match="inv_freq is not read"):
            ROPE.load_state_dict({"inv_freq": torch.zeros(0)})
