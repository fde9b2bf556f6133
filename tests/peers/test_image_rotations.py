"""Rotations of image patches give the queries and keys of the models' own encoders, and of the printed formulas."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from transformers.vision_utils import get_vision_window_index

from theodolite.encodings.rotate.axial import AxialRotary
from theodolite.encodings.rotate.mixed import MixedRotary
from theodolite.plan.axial import Axial
from theodolite.positions.fractional_grids import centred_patch_positions, resized_patch_positions
from theodolite.positions.grids import (
    llama4_patch_positions,
    padded_patch_positions,
    patch_positions,
    patches_of_grids,
    with_special_tokens,
)

HEAD, HEADS = 24, 2
GRIDS = torch.tensor([[1, 4, 6], [2, 2, 4]])
TINY = {"hidden_size": HEAD * HEADS, "intermediate_size": 32, "num_attention_heads": HEADS, "initializer_range": 0.2}
QWEN = {"depth": 1, "num_heads": HEADS, "patch_size": 4, "in_channels": 1, "hidden_size": HEAD * HEADS}


class Turned(NamedTuple):
    """What an encoder's rotation was given and gave, and what to say for the same."""

    given: list[torch.Tensor]
    gave: list[torch.Tensor]
    axial: Axial
    positions: torch.Tensor
    heads_first: bool = False
    prefix: int = 0


def tiny(package: str, config: str, model: str, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """A random encoder of one layer, and the module that it is defined in."""
    configuration = import_module(f"transformers.models.{package}.configuration_{package}")
    modeling = import_module(f"transformers.models.{package}.modeling_{package}")
    torch.manual_seed(0)
    built = getattr(modeling, model)(getattr(configuration, config)(**options, attn_implementation="eager"))
    # The parameters alone: a cast of the whole encoder spoils its tables.
    for parameter in built.parameters():
        parameter.data = parameter.data.to(dtype)
    return built.eval(), modeling


def spy(monkeypatch: pytest.MonkeyPatch, modeling: Any, name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Record queries and keys on their way into and out of a rotation."""
    original, given, gave = getattr(modeling, name), [], []

    def spied(*args, **kwargs):
        out = original(*args, **kwargs)
        both = isinstance(out, tuple)
        given.extend(x.detach().clone() for x in args[: 2 if both else 1])
        gave.extend(x.detach() for x in (out if both else (out,)))
        return out

    monkeypatch.setattr(modeling, name, spied)
    return given, gave


def pixels(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def one_row(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """(S, H, D) as (1, S, H, D)."""
    return [x[None] for x in tensors]


def qwen(package: str, config: str, model: str, monkeypatch: Any, dtype: torch.dtype, **options: Any) -> Turned:
    encoder, modeling = tiny(package, config, model, dtype, **QWEN, **options)
    given, gave = spy(monkeypatch, modeling, "apply_rotary_pos_emb_vision")
    patches = int(GRIDS.prod(1).sum())
    encoder(pixels(patches, 2 * 4 * 4, dtype=dtype), grid_thw=GRIDS)
    positions = patches_of_grids(GRIDS, spatial_merge_size=2)
    return Turned(one_row(given), one_row(gave), Axial.qwen_vl(HEAD), positions)


def qwen2_vl(monkeypatch: Any, dtype: torch.dtype) -> Turned:
    model = "Qwen2VisionTransformerPretrainedModel"
    return qwen("qwen2_vl", "Qwen2VLVisionConfig", model, monkeypatch, dtype, embed_dim=HEAD * HEADS)


def qwen2_5_vl(monkeypatch: Any, dtype: torch.dtype) -> Turned:
    model, window = "Qwen2_5_VisionTransformerPretrainedModel", {"window_size": 16, "patch_size": 4}
    turned = qwen("qwen2_5_vl", "Qwen2_5_VLVisionConfig", model, monkeypatch, dtype, window_size=16)
    # Its encoder puts blocks of patches into the order of windows first.
    index, _ = get_vision_window_index(GRIDS, spatial_merge_size=2, **window)
    assert not torch.equal(index, torch.arange(len(index)))
    return turned._replace(positions=turned.positions.unflatten(1, (-1, 4))[:, index].flatten(1))


def qwen3_vl(monkeypatch: Any, dtype: torch.dtype) -> Turned:
    options = {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": []}
    return qwen("qwen3_vl", "Qwen3VLVisionConfig", "Qwen3VLVisionModel", monkeypatch, dtype, **options)


def pixtral(monkeypatch: Any, dtype: torch.dtype) -> Turned:
    options = {**TINY, "num_hidden_layers": 1, "image_size": 32, "patch_size": 4, "num_channels": 1}
    encoder, modeling = tiny("pixtral", "PixtralVisionConfig", "PixtralVisionModel", dtype, **options)
    given, gave = spy(monkeypatch, modeling, "apply_rotary_pos_emb")
    encoder(pixels(2, 1, 12, 20, dtype=dtype), image_sizes=[(12, 20), (8, 16)])
    positions = patches_of_grids([(1, 3, 5), (1, 2, 4)], spatial_merge_size=1)
    return Turned(given, gave, Axial.pixtral(HEAD), positions, heads_first=True)


def gemma4(monkeypatch: Any, dtype: torch.dtype) -> Turned:
    options = {**TINY, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": HEAD, "patch_size": 2}
    options |= {"position_embedding_size": 16, "pooling_kernel_size": 1}
    encoder, modeling = tiny("gemma4", "Gemma4VisionConfig", "Gemma4VisionModel", dtype, **options)
    given, gave = spy(monkeypatch, modeling, "apply_multidimensional_rope")
    positions = padded_patch_positions([(3, 5), (4, 2)], patches=16)
    encoder(pixels(2, 16, 3 * 4, dtype=dtype), pixel_position_ids=positions.permute(1, 2, 0))
    return Turned(given, gave, Axial.gemma4(HEAD), positions)


def llama4(monkeypatch: Any, dtype: torch.dtype) -> Turned:
    options = {**TINY, "num_hidden_layers": 1, "image_size": 16, "patch_size": 4, "projector_input_dim": 32}
    options |= {"intermediate_size": 4 * HEAD * HEADS, "projector_output_dim": 32}
    encoder, modeling = tiny("llama4", "Llama4VisionConfig", "Llama4VisionModel", dtype, **options)
    given, gave = spy(monkeypatch, modeling, "vision_apply_rotary_emb")
    encoder(pixels(2, 3, 16, 16, dtype=dtype))
    return Turned(given, gave, Axial.llama4(HEAD), llama4_patch_positions(4, 4))


def dinov3(monkeypatch: Any, dtype: torch.dtype, *, training: bool = False) -> Turned:
    options = {**TINY, "num_hidden_layers": 1, "num_register_tokens": 4, "image_size": 32, "patch_size": 4}
    options |= {"pos_embed_shift": 0.3, "pos_embed_jitter": 1.5}
    encoder, modeling = tiny("dinov3_vit", "DINOv3ViTConfig", "DINOv3ViTModel", dtype, **options)
    given, gave = spy(monkeypatch, modeling, "apply_rotary_pos_emb")
    moved, draw = [], modeling.augment_patches_center_coordinates

    def drawn(*args, **kwargs):
        moved.append(draw(*args, **kwargs))
        return moved[-1]

    monkeypatch.setattr(modeling, "augment_patches_center_coordinates", drawn)
    encoder.train(training)
    encoder(pixels(2, 3, 12, 20, dtype=dtype))
    positions = moved[0].T if training else centred_patch_positions(3, 5, normalize_coords="separate")
    return Turned(given, gave, Axial.dinov3(HEAD), positions, heads_first=True, prefix=5)


def dinov3_in_training(monkeypatch: Any, dtype: torch.dtype) -> Turned:
    return dinov3(monkeypatch, dtype, training=True)


def allowed(turned: Turned, x: torch.Tensor) -> float:
    """How far two right answers may be apart, in the dtype of x.

    Theirs takes angles in float32: the exponent's rounding is ln(theta) times that in the frequency, the power is off
    by 2 units of 2**-24, the reciprocal, 2 pi, and the product by one each at most, DINOv3's coordinates by 2. Then
    cos and sin are rounded, two products and a sum, on either side: 8 units. In bfloat16, unit 2**-9, they round the
    table, the products and the sum; here the result alone is rounded.
    """
    largest = max(1.0, float(turned.positions.abs().max())) * turned.axial.multiplier
    angle = (math.log(turned.axial.rope_theta) + 7) * largest
    units = (angle + 8) * 2.0**-24 + (4 * 2.0**-9 if x.dtype == torch.bfloat16 else 0)
    return units * 2 * float(x.abs().max())


def apart(turned: Turned, axial: Axial | None = None, positions: torch.Tensor | None = None) -> float:
    """The largest distance between theirs and ours, in multiples of what is allowed."""
    rope = AxialRotary(turned.axial if axial is None else axial)
    places = turned.positions if positions is None else positions
    tables = rope.tables(places)
    worst = 0.0
    for given, gave in zip(turned.given, turned.gave, strict=True):
        mine, _ = rope.apply_tables(given, None, tables, heads_first=turned.heads_first, prefix=turned.prefix)
        assert mine.dtype == gave.dtype
        assert mine.shape == gave.shape
        worst = max(worst, float((mine.double() - gave.double()).abs().max()) / allowed(turned, given))
    return worst


FAMILIES: list[Callable[..., Turned]] = [
    qwen2_vl, qwen2_5_vl, qwen3_vl, pixtral, gemma4, llama4, dinov3, dinov3_in_training,
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
class TestEncoders:
    """Queries and keys of the first layer, as transformers' own encoder turns them, from pictures of several sizes."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_queries_and_keys(self, family, dtype, monkeypatch):
        turned = family(monkeypatch, dtype)
        assert len(turned.given) == 2
        assert apart(turned) <= 1

    def test_the_comparison_sees_other_conventions(self, family, monkeypatch):
        turned = family(monkeypatch, torch.float32)
        own = turned.axial
        others = [
            dataclasses.replace(own, rope_theta=own.rope_theta * 1.02),
            dataclasses.replace(own, multiplier=own.multiplier * 1.001),
            dataclasses.replace(own, interleaved=not own.interleaved, halves_per_axis=False),
            dataclasses.replace(own, alternating=True, halves_per_axis=False),
            dataclasses.replace(own, shared_spectrum=not own.shared_spectrum),
        ]
        if own.halves_per_axis:
            others.append(dataclasses.replace(own, halves_per_axis=False))
        for other in others:
            assert apart(turned, other) > 5
        for moved in (turned.positions.flip(0), turned.positions + 1):
            assert apart(turned, positions=moved) > 5


class TestTokensWithoutAPlace:
    """Class and register tokens pass bit for bit: in front with `prefix`, anywhere at 0 on every axis."""

    @pytest.mark.parametrize("training", [False, True])
    def test_dinov3(self, training, monkeypatch):
        turned = dinov3(monkeypatch, torch.float32, training=training)
        rope, given, gave = AxialRotary(turned.axial), turned.given[0], turned.gave[0]
        behind, _ = rope(given, None, turned.positions, prefix=5)
        placed, _ = rope(given, None, with_special_tokens(turned.positions, before=5))
        assert torch.equal(gave[:, :, :5], given[:, :, :5])
        assert torch.equal(behind[:, :, :5], given[:, :, :5])
        assert torch.equal(placed, behind)

    def test_llama4(self, monkeypatch):
        turned = llama4(monkeypatch, torch.float32)
        mine, _ = AxialRotary(turned.axial)(turned.given[0], None, turned.positions, heads_first=False)
        assert torch.equal(mine[:, -1], turned.given[0][:, -1])
        assert torch.equal(turned.gave[0][:, -1], turned.given[0][:, -1])


class TestCasts:
    """A cast of the whole encoder spoils the tables that transformers keeps as buffers; ours has none."""

    def test_theirs_are_off_and_ours_are_not(self, monkeypatch):
        exact = qwen2_vl(monkeypatch, torch.float32)
        config = import_module("transformers.models.qwen2_vl.configuration_qwen2_vl").Qwen2VLVisionConfig
        modeling = import_module("transformers.models.qwen2_vl.modeling_qwen2_vl")
        rotary = modeling.Qwen2VLVisionRotaryEmbedding(config(embed_dim=HEAD * HEADS, num_heads=HEADS))
        q, k = (x[0] for x in exact.given)
        monkeypatch.undo()
        for cast, spoiled in ((lambda module: module, False), (lambda module: module.bfloat16(), True)):
            gave = modeling.apply_rotary_pos_emb_vision(q, k, *cast(rotary)(q, exact.positions.T))
            assert (apart(exact._replace(gave=one_row(list(gave)))) > 5) == spoiled
        rope, positions = AxialRotary(exact.axial), exact.positions
        assert torch.equal(rope.bfloat16()(q[None], None, positions, heads_first=False)[0],
                           AxialRotary(exact.axial)(q[None], None, positions, heads_first=False)[0])  # fmt: skip

    def test_llama4_loses_its_sines(self):
        config = import_module("transformers.models.llama4.configuration_llama4").Llama4VisionConfig
        modeling = import_module("transformers.models.llama4.modeling_llama4")
        rotary = modeling.Llama4VisionRotaryEmbedding(config(image_size=16, patch_size=4))
        with pytest.warns(UserWarning, match="discards the imaginary part"):
            rotary.to(torch.bfloat16)
        assert not rotary.freqs_ci.is_complex()


class TestOtherLayouts:
    """Axes that alternate, three axes, and a head of which some channels do not turn."""

    def both(self, package: str, config: str, name: str, positions: torch.Tensor, head_dim: int) -> Turned:
        module = import_module(f"transformers.models.{package}.modeling_{package}")
        configuration = import_module(f"transformers.models.{package}.configuration_{package}")
        made = getattr(configuration, config)(hidden_size=head_dim * HEADS, num_attention_heads=HEADS)
        given = [pixels(positions.shape[1], HEADS, head_dim, dtype=torch.float32) + extra for extra in (0, 1)]
        tables = getattr(module, name)(made)(given[0], positions.T)
        gave = module.apply_rotary_pos_emb_vision(*given, *tables)
        return Turned(one_row(given), one_row(gave), Axial.qwen_vl(head_dim), positions)

    def test_kimi_k25(self):
        turned = self.both(
            "kimi_k25", "Kimi_K25VisionConfig", "Kimi_K25VisionRotaryEmbedding", patch_positions(5, 7), HEAD
        )
        turned = turned._replace(axial=dataclasses.replace(turned.axial, alternating=True))
        assert apart(turned, positions=turned.positions.flip(0)) <= 1
        assert apart(turned) > 5

    def test_minimax_m3(self):
        positions = patches_of_grids([(3, 4, 6)], spatial_merge_size=2, time=True)
        turned = self.both(
            "minimax_m3_vl", "MiniMaxM3VLVisionConfig", "MiniMaxM3VLVisionRotaryEmbedding", positions, 20
        )
        turned = turned._replace(axial=Axial(head_dim=20, rope_theta=1e4, axes_dim=(6, 6, 6)))
        assert apart(turned) <= 1
        assert apart(turned, positions=positions.roll(1, 0)) > 5


DEFAULTS = {
    "qwen2_vl": ("Qwen2VLVisionConfig", Axial.qwen_vl),
    "qwen2_5_vl": ("Qwen2_5_VLVisionConfig", Axial.qwen_vl),
    "qwen3_vl": ("Qwen3VLVisionConfig", Axial.qwen_vl),
    "pixtral": ("PixtralVisionConfig", Axial.pixtral),
    "gemma4": ("Gemma4VisionConfig", Axial.gemma4),
    "llama4": ("Llama4VisionConfig", Axial.llama4),
    "dinov3_vit": ("DINOv3ViTConfig", Axial.dinov3),
}


class TestDefaults:
    """The numbers that the constructors carry are those of the families' configs."""

    @pytest.mark.parametrize("package", DEFAULTS)
    def test_base(self, package):
        name, constructor = DEFAULTS[package]
        config = getattr(import_module(f"transformers.models.{package}.configuration_{package}"), name)()
        theirs = config.rope_theta if package == "dinov3_vit" else config.rope_parameters["rope_theta"]
        assert constructor(64).rope_theta == theirs

    def test_dinov3_moves_by_scale_alone_unless_told(self):
        config = import_module("transformers.models.dinov3_vit.configuration_dinov3_vit").DINOv3ViTConfig()
        assert (config.pos_embed_shift, config.pos_embed_jitter, config.pos_embed_rescale) == (None, None, 2.0)


def complex_rotation(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """(x[2i] + i x[2i+1]) times e^(i angle), float64."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


class TestPrintedFormulas:
    """timm's EVA-02 and naver-ai's rope-vit, whose packages are not here: their formulas, in loops and float64.

    One output is a sum of two products with table entries within 6e-8, rounded once: 4 units of 2**-24 of |x1| + |x2|.
    """

    def assert_same(self, mine: torch.Tensor, x: torch.Tensor, angles: torch.Tensor) -> None:
        expected = complex_rotation(x, angles)
        assert float((mine.double() - expected).abs().max()) <= 4 * 2.0**-24 * 2 * float(x.abs().max())
        assert float((x.double() - expected).abs().max()) > 0.1

    def test_eva02_on_another_grid_than_pretrained(self):
        rows, columns, trained = 6, 4, 16
        angles = torch.empty(rows * columns, HEAD // 2, dtype=torch.float64)
        for row in range(rows):
            for column in range(columns):
                for band in range(HEAD // 4):
                    frequency = 1 / 10000 ** (band / (HEAD // 4))
                    angles[row * columns + column, band] = row / rows * trained * frequency
                    angles[row * columns + column, HEAD // 4 + band] = column / columns * trained * frequency
        q = pixels(2, HEADS, rows * columns, HEAD, dtype=torch.float32)
        positions = resized_patch_positions(rows, columns, trained_rows=trained, trained_columns=trained)
        self.assert_same(AxialRotary(Axial.eva02(HEAD))(q, None, positions)[0], q, angles)

    def test_rope_vit_axial_behind_the_class_token(self):
        width, height = 5, 3
        angles = torch.empty(width * height, HEAD // 2, dtype=torch.float64)
        for token in range(width * height):
            for index, channel in enumerate(range(0, HEAD, 4)):
                frequency = 1 / 100 ** (channel / HEAD)
                angles[token, index] = token % width * frequency
                angles[token, HEAD // 4 + index] = token // width * frequency
        q = pixels(2, HEADS, 1 + width * height, HEAD, dtype=torch.float32)
        positions = patch_positions(height, width).flip(0)
        mine, _ = AxialRotary(Axial.rope_vit(HEAD))(q, None, positions, prefix=1)
        assert torch.equal(mine[:, :, 0], q[:, :, 0])
        self.assert_same(mine[:, :, 1:], q[:, :, 1:], angles)

    def test_rope_vit_mixed(self):
        rope, width, height = MixedRotary(HEAD, HEADS), 5, 3
        frequencies = rope.frequencies.detach().double()
        angles = torch.empty(HEADS, width * height, HEAD // 2, dtype=torch.float64)
        for head in range(HEADS):
            for token in range(width * height):
                x, y = token % width, token // width
                angles[head, token] = x * frequencies[0, head] + y * frequencies[1, head]
        q = pixels(2, HEADS, 1 + width * height, HEAD, dtype=torch.float32)
        mine, k = rope(q, q.clone(), patch_positions(height, width).flip(0), prefix=1)
        assert torch.equal(mine[:, :, 0], q[:, :, 0])
        assert torch.equal(k, mine)
        self.assert_same(mine[:, :, 1:].detach(), q[:, :, 1:], angles)

    def test_rope_vit_mixed_begins_the_same(self):
        """A seed gives the directions that it gives rope-vit, layer by layer."""
        torch.manual_seed(5)
        layers = [MixedRotary(HEAD, 3).frequencies.detach() for _ in range(2)]
        torch.manual_seed(5)
        for layer in layers:
            for head in range(3):
                turn = float(torch.rand(1)) * 2 * math.pi
                for index, channel in enumerate(range(0, HEAD, 4)):
                    length = 10 ** (-channel / HEAD)
                    for offset, angle in ((0, turn), (HEAD // 4, turn + math.pi / 2)):
                        mine = layer[:, head, offset + index].double()
                        expected = torch.tensor([length * math.cos(angle), length * math.sin(angle)]).double()
                        assert float((mine - expected).abs().max()) <= 2**-23
