"""What stands in for the rotation of a model: every form of call, one native call for queries and keys, no copy."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from theodolite.encodings import RotaryEmbedding, rotary_tables
from theodolite.models import parts, patch, patched, rotation
from theodolite.models.hooks import CheckRotation, SelectRotation
from theodolite.models.rotation import Dispatcher, LayerRotation, PositionTables
from theodolite.plan import Rotary

from .tiny import logits, own_plan, tiny, tokens

PLAN = Rotary(head_dim=8, rope_theta=100.0)
PAIRS = Rotary(head_dim=8, rope_theta=100.0, interleaved=True)
POSITIONS = torch.tensor([[3, 4, 9], [0, 700, 5]])


def heads(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def of_layer(rotary: Rotary | None) -> LayerRotation:
    return LayerRotation(rotary, None if rotary is None else rotary_tables(rotary, POSITIONS))


def dispatcher(module: str, name: str = "apply_rotary_pos_emb") -> Dispatcher:
    path = f"transformers.models.{module}.modeling_{module}"
    return Dispatcher(import_module(path), name)


class TestForms:
    """However a model calls its function, what comes back is what that function makes of the same tables."""

    @pytest.mark.parametrize("heads_first", [True, False])
    def test_queries_and_keys(self, heads_first: bool) -> None:
        q, k = (heads(2, 4, 3, 8), heads(2, 2, 3, 8)) if heads_first else (heads(2, 3, 4, 8), heads(2, 3, 2, 8))
        dim, apply, given = 1 if heads_first else 2, dispatcher("llama"), of_layer(PLAN)
        assert given.tables is not None
        cos, sin = (torch.cat((table, table), -1) for table in given.tables)
        judge = apply(q, k, cos, sin, dim)
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((q, k, given, given, dim), {}),
            ((q, k, given, given), {"unsqueeze_dim": dim}),
            ((q, k), {"sin": given, "unsqueeze_dim": dim, "cos": given}),
            ((), {"unsqueeze_dim": dim, "k": k, "q": q, "sin": given, "cos": given}),
        ]
        if heads_first:
            calls += [((q, k, given, given), {}), ((q,), {"k": k, "cos": given, "sin": given})]
        for args, more in calls:
            # Two products and a sum of numbers below 10, in float64.
            for ours, theirs in zip(apply(*args, **more), judge, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)

    def test_queries_alone_and_another_place_for_tables(self) -> None:
        # GPT-J: (tensor, sin, cos) of (B, S, H, D), the channels that turn cut out before.
        x, given, apply = heads(2, 3, 4, 8), of_layer(PAIRS), dispatcher("gptj")
        assert given.tables is not None
        judge = apply(x, given.tables.sin, given.tables.cos)
        for ours in (apply(x, given, given), apply(x, cos=given, sin=given), apply(cos=given, sin=given, tensor=x)):
            torch.testing.assert_close(ours, judge, rtol=0, atol=1e-14)

    @pytest.mark.parametrize(("dim", "shape"), [(1, (2, 4, 3, 8)), (2, (2, 3, 4, 8))])
    def test_one_tensor_in_either_layout(self, dim: int, shape: tuple[int, ...]) -> None:
        x, given, apply = heads(*shape), of_layer(PLAN), dispatcher("gemma4")
        assert given.tables is not None
        cos, sin = (torch.cat((table, table), -1) for table in given.tables)
        for ours in (apply(x, given, given, dim), apply(x, given, given, unsqueeze_dim=dim)):
            torch.testing.assert_close(ours, apply(x, cos, sin, dim), rtol=0, atol=1e-14)

    def test_complex_frequencies(self) -> None:
        # Llama 4: one argument for both, float32, tokens first.
        q, k, given = heads(2, 3, 4, 8).float(), heads(2, 3, 2, 8).float(), of_layer(PAIRS)
        apply = dispatcher("llama4", "apply_rotary_emb")
        assert given.tables is not None
        judge = apply(q, k, torch.complex(*given.tables))
        for ours, theirs in zip(apply(q, k, given), judge, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)

    def test_position_ids_between(self) -> None:
        q, k, given = heads(2, 4, 3, 8), heads(2, 4, 3, 8), of_layer(PAIRS)
        apply = dispatcher("deepseek_v3", "apply_rotary_pos_emb_interleave")
        expected = RotaryEmbedding(PAIRS)(q, k, POSITIONS)
        for made in (apply(q, k, given, given), apply(q, k, given, given, POSITIONS, 1)):
            assert all(torch.equal(*pair) for pair in zip(made, expected, strict=True))

    def test_nothing_turns(self) -> None:
        q, k, given = heads(2, 4, 3, 8), heads(2, 2, 3, 8), of_layer(None)
        turned = dispatcher("llama")(q, k, given, given)
        assert turned[0] is q
        assert turned[1] is k
        assert given.used

    @pytest.mark.parametrize("trailing", [False, True])
    def test_a_part_of_the_channels(self, trailing: bool) -> None:
        part = Rotary(head_dim=8, rope_theta=100.0, rotary_dim=4, trailing=trailing)
        q, k, given = heads(2, 4, 3, 8), heads(2, 2, 3, 8), of_layer(part)
        whole = dispatcher("llama")(q, k, given, given)
        expected = RotaryEmbedding(part)(q, k, POSITIONS)
        cut = slice(4, 8) if trailing else slice(0, 4)
        slices = dispatcher("llama")(q[..., cut], k[..., cut], given, given)
        for made, alone, true in zip(whole, slices, expected, strict=True):
            assert torch.equal(made, true)
            assert torch.equal(alone, true[..., cut])

    @pytest.mark.parametrize("dim", [0, 3, -2])
    def test_other_layouts_are_refused(self, dim: int) -> None:
        given = of_layer(PLAN)
        with pytest.raises(RuntimeError, match=f"got unsqueeze_dim={dim}; a patched model turns"):
            dispatcher("llama")(heads(2, 4, 3, 8), heads(2, 4, 3, 8), given, given, unsqueeze_dim=dim)

    def test_tensors_go_to_the_function_itself(self) -> None:
        q, k, cos, sin = heads(2, 4, 3, 8), heads(2, 2, 3, 8), heads(2, 3, 8), heads(3, 2, 8).view(2, 3, 8)
        apply = dispatcher("llama")
        for made, true in zip(apply(q, k, sin=sin, cos=cos), apply.original(q, k, cos, sin), strict=True):
            assert torch.equal(made, true)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'sin'"):
            apply(q, k, cos)

    def test_tables_of_two_layers_are_refused(self) -> None:
        with pytest.raises(RuntimeError, match="outside its decoder layers"):
            dispatcher("llama")(heads(2, 4, 3, 8), heads(2, 4, 3, 8), of_layer(PLAN), of_layer(PLAN))
        with pytest.raises(RuntimeError, match="outside its decoder layers"):
            dispatcher("llama")(heads(2, 4, 3, 8), heads(2, 4, 3, 8), of_layer(PLAN), torch.ones(2, 3, 8))


class TestOneCall:
    """Queries and keys of a layer are turned together, as they lie in memory."""

    def test_of_each_layer_and_without_a_copy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, ids = tiny("llama", num_hidden_layers=3), tokens(11, batch=2)
        seen, projected, real = [], [], rotation.rotate
        monkeypatch.setattr(rotation, "rotate", lambda *x, **how: seen.append(x[:2]) or real(*x, **how))
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj"):
                getattr(layer.self_attn, name).register_forward_hook(lambda m, a, out: projected.append(out))
        with patched(model, own_plan(model)):
            logits(model, ids)
        assert len(seen) == 3
        given = [x for pair in seen for x in pair]
        assert [x.data_ptr() for x in given] == [out.data_ptr() for out in projected]
        assert [x.shape for x in seen[0]] == [(2, 4, 11, 16), (2, 2, 11, 16)]


class TestHooks:
    """A layer's own rotation takes the place of the tables, wherever the model hands them to it."""

    def test_by_position_and_by_name(self) -> None:
        tables, other = PositionTables(POSITIONS, torch.device("cpu")), object()
        select = SelectRotation(PLAN)
        args, kwargs = select(torch.nn.Identity(), (other, tables), {"a": 1, "position_embeddings": tables, "b": other})
        assert (args[0], kwargs["a"], kwargs["b"]) == (other, 1, other)
        for made in (args[1], kwargs["position_embeddings"]):
            assert isinstance(made, LayerRotation)
            assert made.rotary == PLAN
            assert torch.equal(made.tables.cos, rotary_tables(PLAN, POSITIONS).cos)
            assert torch.equal(made.tables.sin, rotary_tables(PLAN, POSITIONS).sin)

    @pytest.mark.parametrize("by_name", [False, True])
    def test_one_that_was_not_used_is_found(self, by_name: bool) -> None:
        given, check = of_layer(PLAN), CheckRotation(7)
        args, kwargs = ((), {"position_embeddings": given}) if by_name else ((given,), {})
        with pytest.raises(RuntimeError, match=r"layers\[7\].rotate: the plan turns queries and keys in this layer"):
            check(torch.nn.Identity(), args, kwargs, None)
        given.used = True
        check(torch.nn.Identity(), args, kwargs, None)
        check(torch.nn.Identity(), (of_layer(None),), {}, None)

    def test_a_function_that_is_put_back_behind_the_patch_is_replaced_again(self) -> None:
        model, ids = tiny("llama"), tokens(20)
        with patched(model, own_plan(model)):
            before, original = logits(model, ids), modeling_llama.apply_rotary_pos_emb.original
            modeling_llama.apply_rotary_pos_emb = original
            assert torch.equal(logits(model, ids), before)
            assert isinstance(modeling_llama.apply_rotary_pos_emb, Dispatcher)
        assert not isinstance(modeling_llama.apply_rotary_pos_emb, Dispatcher)


class TestDevices:
    """Layers that stand on other devices find the tables there."""

    def test_a_forward_for_each(self) -> None:
        tables = PositionTables(POSITIONS, torch.device("cpu"))
        assert tables.to("cpu") is tables
        moved = tables.to("meta")
        assert moved.of(PLAN, PLAN.inv_freq().tolist()).sin.is_meta
        assert not tables.of(PLAN, PLAN.inv_freq().tolist()).sin.is_meta

    def test_a_layer_is_the_same_object(self) -> None:
        given = of_layer(PLAN)
        before = given.tables
        assert given.to("cpu") is given
        assert given.tables is not None
        assert before is not None
        assert all(torch.equal(*pair) for pair in zip(given.tables, before, strict=True))
        assert given.to("meta").tables.cos.is_meta
        assert of_layer(None).to("meta").tables is None


class TestUnknownForms:
    """A model whose rotation cannot be replaced is refused before anything is changed, not in its first forward."""

    def test_no_function_is_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny("llama")
        monkeypatch.setattr(parts, "_is_known", lambda function: False)
        with pytest.raises(ValueError, match="LlamaModel: its layers turn queries and keys by no function"):
            patch(model, own_plan(model))
        assert "forward" not in vars(model.model.rotary_emb)
