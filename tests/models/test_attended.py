"""How much is attended to parts of a text: the sums of the weights that transformers itself computes."""

from __future__ import annotations

import pytest
import torch

from tests.models.test_stream import MAPS
from tests.models.tiny import own_plan, tiny, tokens
from theodolite.models import patched
from theodolite.models.attended import attended
from theodolite.models.reader import Reader

COUNT, ASKED = 40, 11
PARTS = [slice(0, 5), slice(5, 6), slice(9, 31), slice(31, 40)]


def weights(model, ids: torch.Tensor) -> torch.Tensor:
    """(layers, H, S, T) as eager attention gives them."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return torch.cat(model(input_ids=ids[None], use_cache=False, output_attentions=True).attentions)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt_oss", "deepseek_v3"])
def test_sums_of_the_models_own_weights(family: str) -> None:
    short = {"sliding_window": 24} if family in ("gemma2", "gemma3", "gpt_oss") else {}
    model, ids = tiny(family, dtype=torch.float64, **short), tokens(COUNT + ASKED)[0]
    plan = own_plan(model)
    with patched(model, plan):
        true = weights(model, ids)[:, :, COUNT:]
        with Reader(model, plan, capacity=len(ids), chunk=16) as reader:
            reader.next_logits(ids[:COUNT], torch.arange(COUNT))
            found = attended(reader, ids[COUNT:], torch.arange(COUNT, COUNT + ASKED), PARTS)
            # Nothing was added, and going on gives what it would have given.
            assert reader.length == COUNT
    expected = torch.stack([true[..., part].sum(-1) for part in PARTS], -1)
    assert found.shape == expected.shape
    # Weights are given in float32, of sums of at most 1; tables are float32 too.
    assert float((found.double() - expected).abs().max()) < 1e-6


@pytest.mark.parametrize("relative", MAPS, ids=lambda relative: type(relative).__name__)
def test_at_mapped_distances_they_sum_to_one_with_what_is_nearer(relative) -> None:
    model, ids = tiny("llama", dtype=torch.float64), tokens(COUNT + 1)[0]
    plan = own_plan(model)
    with Reader(model, plan, capacity=COUNT + 1, relative=relative) as reader:
        reader.next_logits(ids[:COUNT], torch.arange(COUNT))
        parts = [slice(i, i + 1) for i in range(COUNT)]
        found = attended(reader, ids[COUNT:], torch.tensor([COUNT]), parts)[:, :, 0]
        unseen = ~relative.seen(torch.tensor([COUNT]), torch.arange(COUNT))[0]
    assert (found[:, :, unseen] == 0).all()
    assert (found[:, :, ~unseen] > 0).all()
    assert (found.sum(-1) < 1).all()
    assert float(found.sum(-1).min()) > 0.5


def test_nothing_read() -> None:
    model = tiny("llama")
    with (
        Reader(model, own_plan(model), capacity=4) as reader,
        pytest.raises(ValueError, match="parts: nothing was read"),
    ):
        attended(reader, tokens(2)[0], torch.arange(2), [slice(0, 1)])
