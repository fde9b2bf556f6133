"""Positions of prompts and patches against transformers' own code, called without a model around it."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Llama4VisionConfig, PixtralVisionConfig
from transformers.models.dinov3_vit.modeling_dinov3_vit import (
    augment_patches_center_coordinates,
    get_patches_center_coordinates,
)
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeModel
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.modeling_glm4v import Glm4vModel
from transformers.models.llama4.modeling_llama4 import Llama4VisionRotaryEmbedding
from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.vision_utils import get_vision_position_ids

from theodolite.positions.fractional_grids import augmented_patch_positions, centred_patch_positions
from theodolite.positions.grids import llama4_patch_positions, padded_patch_positions, patches_of_grids
from theodolite.positions.mrope import mrope_next_positions, mrope_positions, split_frames, temporal_interval

MERGE = 2
TEXT, IMAGE, VIDEO = 0, 1, 2


def prompts(seed, *, frames_apart=False, time_merge=1):
    """A batch of random prompts: token types, mask, image grids, video grids; padded on either side."""
    choose = random.Random(seed)
    rows, images, videos = [], [], []
    for _ in range(choose.randint(1, 4)):
        row = [TEXT] * choose.randint(1, 4)
        for _ in range(choose.randint(0, 3)):
            height, width = choose.randint(1, 4), choose.randint(1, 4)
            if choose.random() < 0.5:
                images.append([1, height * MERGE, width * MERGE])
                row += [IMAGE] * (height * width)
            else:
                frames = choose.randint(1, 5)
                videos.append([frames * time_merge, height * MERGE, width * MERGE])
                for _ in range(frames):
                    row += [VIDEO] * (height * width) + ([TEXT] * choose.randint(1, 3) if frames_apart else [])
            row += [TEXT] * choose.randint(1, 4)
        rows.append(row)
    longest, left = max(map(len, rows)), choose.random() < 0.5
    types, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.int64)
    for number, row in enumerate(rows):
        real = slice(longest - len(row), None) if left else slice(0, len(row))
        types[number, real], mask[number, real] = torch.tensor(row), 1
    return types, mask, grid_tensor(images), grid_tensor(videos)


def grid_tensor(grids):
    return torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)


def theirs(model, types, mask, images, videos, **given):
    """`get_rope_index` of a model class, on something that has its config and nothing else."""
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2, temporal_merge_size=2)
    stand_in = SimpleNamespace(
        config=SimpleNamespace(vision_config=vision),
        get_vision_position_ids=lambda *args, **kwargs: model.get_vision_position_ids(None, *args, **kwargs),
    )
    return model.get_rope_index(
        stand_in,
        torch.zeros_like(types),
        mm_token_type_ids=types,
        image_grid_thw=images,
        video_grid_thw=videos,
        attention_mask=mask,
        **given,
    )


def assert_same(mine, expected):
    assert torch.equal(mine.positions, expected[0])
    assert torch.equal(mine.delta, expected[1].squeeze(1))


@pytest.mark.parametrize("seed", range(40))
class TestPrompts:
    """Every model of the family, on batches of prompts with text, pictures and videos, padded left and right."""

    def test_qwen2_vl(self, seed):
        types, mask, images, videos = prompts(seed)
        mine = mrope_positions(
            types,
            spatial_merge_size=MERGE,
            image_grid_thw=images,
            video_grid_thw=videos,
            video_interval=1,
            after_video="side",
            attention_mask=mask,
        )
        assert_same(mine, theirs(Qwen2VLModel, types, mask, images, videos))

    @pytest.mark.parametrize("as_list", [False, True])
    def test_qwen2_5_vl(self, seed, as_list):
        types, mask, images, videos = prompts(seed)
        choose = random.Random(seed)
        rates = [choose.choice([0.5, 1.0, 2.0, 2 / 24, 2 / 25, 2 / 29.97, 0.08, 1 / 3]) for _ in videos]
        seconds = rates if as_list else torch.tensor(rates)
        mine = mrope_positions(
            types,
            spatial_merge_size=MERGE,
            image_grid_thw=images,
            video_grid_thw=videos,
            video_interval=temporal_interval(seconds, tokens_per_second=2),
            after_video="side",
            attention_mask=mask,
        )
        assert_same(mine, theirs(Qwen2_5_VLModel, types, mask, images, videos, second_per_grid_ts=seconds))

    @pytest.mark.parametrize("model", [Qwen3VLModel, Glm4vModel])
    def test_frames_apart(self, seed, model):
        types, mask, images, videos = prompts(seed, frames_apart=True)
        mine = mrope_positions(
            types,
            spatial_merge_size=MERGE,
            image_grid_thw=images,
            video_grid_thw=split_frames(videos),
            attention_mask=mask,
        )
        assert_same(mine, theirs(model, types, mask, images, videos))

    def test_ernie4_5_vl(self, seed):
        types, mask, images, videos = prompts(seed, time_merge=2)
        mine = mrope_positions(
            types,
            spatial_merge_size=MERGE,
            image_grid_thw=images,
            video_grid_thw=videos // torch.tensor([2, 1, 1]),
            video_interval=1,
            after_video="side",
            attention_mask=mask,
        )
        assert_same(mine, theirs(Ernie4_5_VLMoeModel, types, mask, images, videos))

    def test_decoding(self, seed):
        types, mask, images, videos = prompts(seed, frames_apart=True)
        mine = mrope_positions(
            types,
            spatial_merge_size=MERGE,
            image_grid_thw=images,
            video_grid_thw=split_frames(videos),
            attention_mask=mask,
        )
        expected, deltas = theirs(Qwen3VLModel, types, mask, images, videos)
        stand_in = SimpleNamespace(rope_deltas=deltas)
        grown = torch.cat([mask, torch.ones(len(mask), 2, dtype=torch.int64)], dim=1)
        decoded = Qwen3VLModel.compute_3d_position_ids(
            stand_in,
            input_ids=None,
            inputs_embeds=torch.empty(len(types), 2, 1),
            attention_mask=grown,
            cache=SimpleNamespace(get_seq_length=lambda: types.shape[1]),
        )
        next_positions = mrope_next_positions(mask.sum(1), delta=mine.delta, new_tokens=2)
        assert torch.equal(next_positions, decoded[..., -2:])
        assert expected.shape == mine.positions.shape


class TestWhereTheyGoWrong:
    """What they accept without a word, and what it gives."""

    def test_text_after_a_long_video_stands_inside_it(self):
        types = torch.tensor([[0, *[2] * 5, 0]])
        videos, mask = torch.tensor([[5, 2, 2]]), torch.ones(1, 7, dtype=torch.int64)
        call = {"spatial_merge_size": MERGE, "video_grid_thw": videos, "video_interval": 1}
        expected, _ = theirs(Qwen2VLModel, types, mask, None, videos)
        assert expected[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 2]
        assert torch.equal(mrope_positions(types, after_video="side", **call).positions, expected)
        # Qwen's own code, and transformers before 5: the largest position and one.
        assert mrope_positions(types, after_video="end", **call).positions[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]

    def test_two_pictures_with_nothing_between(self):
        types, mask = torch.tensor([[0, 1, 1, 1]]), torch.ones(1, 4, dtype=torch.int64)
        images = torch.tensor([[1, 2, 2], [1, 2, 4]])
        with pytest.raises(RuntimeError, match="shape mismatch"):
            theirs(Qwen2VLModel, types, mask, images, None)
        mine = mrope_positions(types, spatial_merge_size=MERGE, image_grid_thw=images)
        assert mine.positions[2, 0].tolist() == [0, 1, 2, 3]

    def test_a_grid_too_many_is_not_noticed(self):
        types, mask = torch.tensor([[0, 1, 0]]), torch.ones(1, 3, dtype=torch.int64)
        images = torch.tensor([[1, 2, 2], [1, 4, 4]])
        theirs(Qwen2VLModel, types, mask, images, None)
        with pytest.raises(ValueError, match="image_grid_thw: 2 grids ask for 5 tokens"):
            mrope_positions(types, spatial_merge_size=MERGE, image_grid_thw=images)


class TestPatches:
    """Patches stand where each vision encoder of transformers puts them."""

    @pytest.mark.parametrize("merge", [1, 2])
    @pytest.mark.parametrize("time", [False, True])
    def test_qwen(self, merge, time):
        grids = torch.tensor([[1, 4, 6], [3, 8, 2], [2, 2, 2], [1, 6, 10]])
        expected = get_vision_position_ids(grids, merge, include_temporal=time)
        assert torch.equal(patches_of_grids(grids, spatial_merge_size=merge, time=time), expected.T)

    def test_pixtral(self):
        torch.manual_seed(0)
        config = PixtralVisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=32,
            patch_size=4,
        )
        model = PixtralVisionModel(config).eval()
        seen = []
        model.patch_positional_embedding.register_forward_hook(lambda module, args, output: seen.append(args[1]))
        with torch.no_grad():
            model(torch.randn(2, 3, 20, 28), image_sizes=torch.tensor([[20, 12], [8, 28]]))
        assert torch.equal(patches_of_grids([(1, 5, 3), (1, 2, 7)], spatial_merge_size=1), seen[0].T)

    def test_gemma4(self):
        processor = Gemma4ImageProcessorPil(do_resize=False, patch_size=4, max_soft_tokens=70)
        patch = processor.patch_size
        images = [np.zeros((3 * patch, 6 * patch, 3), np.uint8), np.zeros((9 * patch, 3 * patch, 3), np.uint8)]
        expected = processor(images, return_tensors="pt")["image_position_ids"]
        mine = padded_patch_positions([(3, 6), (9, 3)], patches=expected.shape[1])
        assert torch.equal(mine.permute(1, 2, 0), expected)

    def test_llama4(self):
        config = Llama4VisionConfig(
            image_size=20, patch_size=4, hidden_size=32, num_attention_heads=2, rope_parameters={"rope_theta": 100.0}
        )
        table = Llama4VisionRotaryEmbedding(config).freqs_ci.squeeze(1)
        frequencies = 100.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        x, y = llama4_patch_positions(5, 5).double()
        angles = torch.cat([x[:, None] * frequencies, y[:, None] * frequencies], dim=-1)
        # Their angles are products of float32 numbers, up to 5 radians; sin and cos are rounded once more.
        assert table.shape == angles.shape
        assert (torch.angle(table).double() - angles.remainder(2 * torch.pi)).sin().abs().max() <= 20 * 2.0**-24

    def test_dinov3(self):
        expected = get_patches_center_coordinates(5, 8, dtype=torch.float64, device=torch.device("cpu"))
        mine = centred_patch_positions(5, 8, normalize_coords="separate")
        # Both round three times, in another order.
        assert (mine.T - expected).abs().max() <= 3 * 2.0**-52

    @pytest.mark.parametrize(
        "moves", [{"shift": 0.3}, {"jitter": 1.5}, {"rescale": 2.0}, {"shift": 0.3, "jitter": 1.5, "rescale": 2.0}]
    )
    def test_dinov3_training_draws_the_same_numbers(self, moves):
        positions = centred_patch_positions(5, 8, normalize_coords="separate")
        torch.manual_seed(11)
        expected = augment_patches_center_coordinates(positions.T, **moves)
        mine = augmented_patch_positions(positions, generator=torch.Generator().manual_seed(11), **moves)
        assert torch.equal(mine.T, expected)
