"""A model patched with the plan of its own config is the same model: the promise, family by family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from theodolite.models import patched

from .tiny import FAMILIES, logits, own_plan, spread, tiny, tokens

# These run without fused attention or loop over experts in Python; a quarter of the tokens, at every fourth position.
SLOW = ("gemma2", "gpt_oss", "deepseek_v2", "deepseek_v3", "deepseek_v3-yarn")
LENGTH = 4096
# A prompt and what follows it, in tests where all of it is read again for each token.
PROMPT, GENERATED = 24, 8


def left_padded(lengths: tuple[int, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Rows of different lengths, padded on the left, with mask and positions."""
    ids = tokens(max(lengths), batch=len(lengths))
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - length for length in lengths]).long()
    return ids * mask, {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


@pytest.mark.parametrize("family", FAMILIES)
class TestOwnPlan:
    """Nothing changes but the rounding of angles."""

    def test_logits_at_4096_tokens(self, family: str) -> None:
        model = tiny(family)
        stride = 4 if family in SLOW else 1
        ids, more = tokens(LENGTH // stride), {}
        if stride > 1:
            # With a mask, transformers does not take a gap between positions for the start of another document.
            positions = torch.arange(stride - 1, LENGTH, stride)[None]
            more = {"position_ids": positions, "attention_mask": torch.ones_like(ids)}
        before = logits(model, ids, **more)
        with patched(model, own_plan(model), length=LENGTH):
            after = logits(model, ids, **more)
        assert float((after - before).abs().max()) < 1e-4 * spread(before)

    def test_positions_matter_and_unpatch_restores_every_bit(self, family: str) -> None:
        model, ids = tiny(family), tokens(64)
        mask, stretched = torch.ones_like(ids), 3 * torch.arange(64)[None]
        before = logits(model, ids)
        with patched(model, own_plan(model), length=LENGTH):
            here = logits(model, ids)
            elsewhere = logits(model, ids, position_ids=stretched, attention_mask=mask)
        assert float((here - elsewhere).abs().max()) > 1e-2 * spread(before)
        assert torch.equal(logits(model, ids), before)

    def test_generation_with_a_cache_equals_one_forward(self, family: str) -> None:
        model, ids = tiny(family, dtype=torch.float64), tokens(PROMPT)
        with patched(model, own_plan(model), length=PROMPT + GENERATED):
            out: Any = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=GENERATED,
                min_new_tokens=GENERATED,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            whole = logits(model, out.sequences)[:, PROMPT - 1 : -1]
        stepwise = torch.stack(out.logits, dim=1)
        # float64 throughout, but for norms and softmaxes that transformers keeps in float32: their rounding is 6e-8.
        assert float((stepwise - whole).abs().max()) < 1e-5 * spread(whole)

    def test_left_padded_rows_equal_single_runs(self, family: str) -> None:
        lengths = (9, 17, 13)
        # Gemma 2 in float64 makes NaN of rows that see nothing: its mask overflows in a float32 softmax.
        model = tiny(family, dtype=torch.float32 if family == "gemma2" else torch.float64)
        ids, more = left_padded(lengths)
        with patched(model, own_plan(model), length=max(lengths)):
            together = logits(model, ids, **more)
            for row, length in enumerate(lengths):
                alone = logits(model, ids[row : row + 1, -length:])
                assert float((together[row, -length:] - alone[0]).abs().max()) < 1e-5 * spread(alone)
