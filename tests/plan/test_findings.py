"""Each fault is found where it is, and nowhere else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import FAMILIES, tiny_config
from tests.plan.test_any_config import CONFIGS
from theodolite.plan import LayerPlan, LongRoPE, Mask, ModelPlan, PlanError, Rotary, YaRN
from theodolite.plan.findings import SEVERITIES, Finding, find
from theodolite.plan.gguf import read_metadata
from theodolite.plan.huggingface import read_config
from theodolite.plan.params import read_params

SOURCE = Path(__file__).parents[2] / "src" / "theodolite" / "plan" / "findings"
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "max_position_embeddings": 8192, "rope_theta": 10000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LISTS = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LATENT = {
    "model_type": "deepseek_v3", "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4},
}  # fmt: skip
QWEN3_VL = {"model_type": "qwen3_vl_text", "head_dim": 128}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]}


def new(**rope: Any) -> dict[str, Any]:
    """A config of transformers 5 with this rope dict, which has the base that other readers fall back to."""
    bare = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    return {**bare, "rope_parameters": {"rope_theta": 10000.0, **rope}}


def found(raw: dict[str, Any]) -> list[Finding]:
    return list(find(read_config(raw), raw))


def told(raw: dict[str, Any]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.field) for finding in found(raw)]


class TestLengthsAndFactors:
    """A factor that does not take the trained length to the stated one is the commonest slip of a hand-made config."""

    def test_too_small_a_factor_is_an_error(self) -> None:
        (finding,) = found(new(**{**YARN, "factor": 2.0}))
        assert (finding.severity, finding.field) == ("error", "factor")
        assert "factor 2 times original_max_position_embeddings 2,048 is 4,096" in finding.message
        assert "max_position_embeddings is 8,192" in finding.message
        assert finding.fix == "factor 4, or max_position_embeddings 4,096"

    def test_too_large_a_factor_is_a_warning(self) -> None:
        (finding,) = found(new(**{**YARN, "factor": 16.0}))
        assert (finding.severity, finding.field) == ("warning", "factor")
        assert finding.fix == "factor 4, or max_position_embeddings 32,768"
        # As Qwen's page says to add it: the stated length is still the trained one.
        (finding,) = found(new(**{**YARN, "original_max_position_embeddings": 8192}))
        assert finding.fix == "max_position_embeddings 32,768"

    def test_the_right_one_is_none(self) -> None:
        assert told(new(**YARN)) == []

    @pytest.mark.parametrize("rope", [{**YARN, "original_max_position_embeddings": 16384},
                                      {**LLAMA3, "original_max_position_embeddings": 16384}])  # fmt: skip
    def test_trained_to_more_than_is_stated(self, rope: dict[str, Any]) -> None:
        assert told(new(**rope)) == [("error", "original_max_position_embeddings")]

    def test_llama3_states_more_than_factor_times_original_itself(self) -> None:
        assert told({**new(**LLAMA3), "max_position_embeddings": 131072}) == []
        # Llama 3.2 of 1B and 3B states half of it.
        assert told({**new(**{**LLAMA3, "factor": 32.0}), "max_position_embeddings": 131072}) == []

    def test_llama3_that_falls_short_of_what_llama_3_1_has(self) -> None:
        (finding,) = found({**new(**{**LLAMA3, "factor": 2.0}), "max_position_embeddings": 131072})
        assert (finding.severity, finding.field) == ("warning", "factor")
        assert "factor 2 times original_max_position_embeddings 8,192 is 16,384" in finding.message
        assert finding.fix == "factor 8, or max_position_embeddings 32,768"
        assert told({**new(**{**LLAMA3, "factor": 7.99}), "max_position_embeddings": 131072}) == [("warning", "factor")]

    def test_llama3_that_stretches_nothing(self) -> None:
        (finding,) = found(new(**LLAMA3))
        assert (finding.severity, finding.field) == ("warning", "original_max_position_embeddings")
        assert "it is 8,192, as max_position_embeddings is" in finding.message

    def test_longrope_lists_that_are_exchanged(self) -> None:
        """The long list's first divisors may be under the short's, as Phi-3's are; as a whole it divides by more."""
        rope = {**LISTS, "original_max_position_embeddings": 2048, "short_factor": [2.0] * 8, "long_factor": [1.5] * 8}
        (finding, _) = found(new(**rope))
        assert (finding.severity, finding.field) == ("error", "short_factor, long_factor")
        assert "the short list slows the pairs 2 times on the mean and the long one 1.5 times" in finding.message
        assert told(new(**{**rope, "long_factor": [1.0] * 4 + [9.0] * 4})) == [("warning", "long_factor")]

    def test_longrope_with_a_factor_of_its_own(self) -> None:
        base = {**new(**LISTS, original_max_position_embeddings=2048)}
        assert told(base) == [("warning", "long_factor")]

        def with_factor(factor: float, **more: Any) -> list[tuple[str, str]]:
            return told({**base, "rope_parameters": {**base["rope_parameters"], "factor": factor, **more}})[:-1]

        assert with_factor(8.0) == [("warning", "long_factor")]
        assert with_factor(0.5) == [("error", "factor")]
        for right in (with_factor(4.0), with_factor(1.0), with_factor(8.0, attention_factor=1.2)):
            assert right == []

    def test_a_longrope_factor_names_the_ratio(self) -> None:
        rope = {**LISTS, "original_max_position_embeddings": 2048, "factor": 8.0}
        (_, finding) = found(new(**rope))
        assert (finding.field, finding.fix) == ("factor", "state factor 4, or attention_factor")

    def test_divisors_under_one(self) -> None:
        rope = {**LISTS, "original_max_position_embeddings": 2048, "short_factor": [0.9] + [1.0] * 7}
        assert told(new(**rope)) == [("warning", "long_factor"), ("warning", "short_factor")]

    def test_a_factor_of_one(self) -> None:
        assert told(new(rope_type="linear", factor=1.0)) == [("warning", "factor")]
        assert told(new(rope_type="linear", factor=1.5)) == []

    def test_a_factor_under_one_is_not_read_at_all(self) -> None:
        with pytest.raises(PlanError, match=r"factor: got 0\.5; it must be at least 1"):
            read_config(new(rope_type="linear", factor=0.5))


class TestYaRNFields:
    """Fields that engines read each in its own way."""

    def test_truncate(self) -> None:
        (finding,) = found(new(**YARN, truncate=False))
        assert (finding.severity, finding.field) == ("note", "truncate")
        low, high = YaRN(factor=4.0, original_max_position_embeddings=2048, truncate=False).ramp_ends(1e4, 16)
        assert f"from pair {low:.4g} to {high:.4g};" in finding.message
        assert told(new(**YARN, truncate=True)) == []

    def test_attention_factor(self) -> None:
        (finding,) = found(new(**YARN, attention_factor=1.0))
        assert (finding.severity, finding.field) == ("warning", "attention_factor")
        # What vLLM must multiply 0.1 ln 4 + 1 by.
        assert "it is 1, where YaRN has 1.13863 for factor 4" in finding.message
        assert "attn_factor 0.878249" in finding.fix
        # The usual one, rounded to four digits as in a released config.
        assert told(new(**YARN, attention_factor=1.1386)) == []

    def test_mscale_in_latent_attention(self) -> None:
        raw = {**LLAMA, **LATENT}
        (finding,) = found(raw)
        assert (finding.severity, finding.field) == ("note", "mscale, mscale_all_dim")
        assert "multiplied by 1 and the scores of latent attention by 1.29648;" in finding.message

    def test_mscale_elsewhere(self) -> None:
        (finding,) = found(new(**YARN, mscale=1.0, mscale_all_dim=1.0))
        assert (finding.severity, finding.field) == ("warning", "mscale, mscale_all_dim")
        assert "ratio of the two, 1; engines that read neither have 1.13863" in finding.message

    @pytest.mark.parametrize("name", ["mscale", "mscale_all_dim"])
    def test_one_of_the_two_alone(self, name: str) -> None:
        assert told(new(**YARN, **{name: 0.7})) == [("warning", name)]

    def test_betas(self) -> None:
        (finding,) = found(new(**YARN, beta_fast=1.0, beta_slow=1.0))
        assert (finding.severity, finding.field) == ("note", "beta_fast, beta_slow")
        assert "1 and 1, not the usual 32 and 1; equal, they make a step" in finding.message
        assert "equal" not in found(new(**YARN, beta_fast=16.0))[0].message
        assert told(new(**YARN, beta_fast=32, beta_slow=1)) == []


class TestDialect:
    """The same model in other words: what one reader finds, another passes over."""

    def test_a_base_in_rope_parameters_alone(self) -> None:
        (finding,) = found(new(rope_type="default", rope_theta=5e5))
        assert (finding.severity, finding.field) == ("note", "rope_theta")
        assert "the base 500,000 stands in rope_parameters alone" in finding.message

    def test_a_base_in_both_places_or_that_is_the_fallback(self) -> None:
        assert told({**new(rope_type="default", rope_theta=5e5), "rope_theta": 5e5}) == []
        assert told(new(rope_type="default", rope_theta=1e4)) == []
        assert told({**LLAMA, "rope_theta": 5e5}) == []

    def test_a_base_in_the_older_rope_scaling(self) -> None:
        raw = {**LLAMA, "rope_theta": None, "rope_scaling": {**YARN, "rope_theta": 5e5}}
        assert told(raw) == [("warning", "rope_scaling.rope_theta"), ("note", "rope_scaling")]

    def test_a_base_beside_rope_parameters_that_has_none(self) -> None:
        raw = {**LLAMA, "rope_theta": 5e5, "rope_parameters": YARN}
        assert told(raw) == [("warning", "rope_theta")]
        assert told({**raw, "rope_parameters": {**YARN, "rope_theta": 5e5}}) == []

    def test_a_base_in_the_family_s_code_alone(self) -> None:
        raw = {"model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 64, "sliding_window": 512}
        (finding,) = found(raw)
        assert (finding.severity, finding.field) == ("warning", "rope_theta")
        assert "1,000,000 is the default of the family's own code" in finding.message

    def test_the_older_keys(self) -> None:
        (finding,) = found({**LLAMA, "rope_scaling": YARN})
        assert (finding.severity, finding.field) == ("note", "rope_scaling")
        assert told({**LLAMA, "rope_scaling": None}) == []
        by_type = {key: value for key, value in YARN.items() if key != "rope_type"} | {"type": "yarn"}
        assert told({**LLAMA, "rope_scaling": by_type}) == [("warning", "rope_scaling.type"), ("note", "rope_scaling")]
        assert told({**LLAMA, "rope_scaling": {**by_type, "rope_type": "yarn"}}) == [("note", "rope_scaling")]

    def test_the_older_key_beside_the_newer(self) -> None:
        rope = {**YARN, "rope_theta": 1e4}
        assert told({**LLAMA, "rope_parameters": rope, "rope_scaling": rope}) == []

    def test_names_that_were_given_up(self) -> None:
        raw = {**new(**LISTS, original_max_position_embeddings=2048), "model_type": "phi3"}
        raw["rope_parameters"]["rope_type"] = "su"
        assert ("warning", "rope_parameters.rope_type") in told(raw)
        mrope = {**LLAMA, "model_type": "qwen2_vl_text", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
        assert ("warning", "rope_scaling.rope_type") in told(mrope)

    def test_dicts_by_layer_type(self) -> None:
        rope = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"type": "linear", "factor": 8.0, "rope_theta": 1e4},
        }
        raw = {"model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 64, "sliding_window": 512}
        fields = told({**raw, "rope_parameters": rope})
        assert fields == [("warning", "rope_parameters.full_attention.type"), ("note", "scaling")]

    def test_what_the_family_s_code_has_and_the_file_does_not_say(self) -> None:
        glm = {**LLAMA, "model_type": "glm", "head_dim": 16}
        (finding,) = found(glm)
        assert (finding.severity, finding.field) == ("note", "partial_rotary_factor")
        assert "8 of 16 channels" in finding.message
        assert finding.fix == "state partial_rotary_factor 0.5"
        assert told({**glm, "partial_rotary_factor": 0.5}) == []
        qwen = {**new(), **QWEN3_VL, "rope_parameters": MROPE}
        assert told(qwen) == [("note", "mrope_interleaved")]
        assert told({**qwen, "rope_parameters": {**MROPE, "mrope_interleaved": True}}) == []

    def test_a_family_whose_code_has_the_base_is_not_told_of_one(self) -> None:
        gptj = {"model_type": "gptj", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 2048, "rotary_dim": 8}
        assert told(gptj) == []


class TestLayers:
    """What holds for some layers and not for others."""

    @staticmethod
    def plan(*scaled: bool, window: int | None) -> ModelPlan:
        plain = Rotary(head_dim=16, rope_theta=1e4)
        yarn = Rotary(
            head_dim=16, rope_theta=1e4, scaling=YaRN(factor=4.0, original_max_position_embeddings=2048)
        )  # fmt: skip
        return ModelPlan(
            model_type="llama",
            max_position_embeddings=8192,
            layers=tuple(
                LayerPlan(rotate=yarn) if far else LayerPlan(rotate=plain, mask=Mask(sliding_window=window))
                for far in scaled
            ),
        )

    def test_far_layers_without_the_scaling(self) -> None:
        (finding,) = find(self.plan(True, False, True, False, window=None))
        assert (finding.severity, finding.field) == ("warning", "scaling")
        assert "2 layers are scaled, and 2 that see every distance are not (the first is layer 1)" in finding.message

    def test_windowed_layers_without_the_scaling(self) -> None:
        (finding,) = find(self.plan(True, False, False, window=512))
        assert (finding.severity, finding.field) == ("note", "scaling")
        assert "1 of 3 rotary layers are scaled, the 2 with a window are not" in finding.message

    def test_all_or_none(self) -> None:
        assert find(self.plan(True, True, window=None)) == ()
        assert find(self.plan(False, False, window=512)) == ()

    def test_a_window_wider_than_the_length(self) -> None:
        raw = {**LLAMA, "model_type": "mistral", "sliding_window": 8193}
        assert told(raw) == [("note", "sliding_window")]
        assert told({**raw, "sliding_window": 8192}) == []
        chunked = {**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 9000, "head_dim": 16}
        assert told(chunked) == [("note", "attention_chunk_size")]

    def test_proportional_is_not_partial(self) -> None:
        plan = ModelPlan(
            model_type="llama", max_position_embeddings=64,
            layers=(LayerPlan(rotate=Rotary(head_dim=16, rope_theta=1e4, live_pairs=2)),),
        )  # fmt: skip
        (finding,) = find(plan)
        assert (finding.severity, finding.field) == ("note", "rope_type")
        assert "turns 2 of 8 pairs, and each still has its partner 8 channels away" in finding.message
        assert finding.fix == "inv_freq has 8 entries, the last 6 of them 0"

    def test_no_length(self) -> None:
        assert told({**LLAMA, "max_position_embeddings": None}) == [("warning", "max_position_embeddings")]
        assert told({"model_type": "bloom", "n_layer": 2}) == []

    @pytest.mark.parametrize(
        ("more", "key"), [({"hidden_dim": 176}, "max_position_embeddings"), ({"multiple_of": 256}, "max_seq_len")]
    )
    def test_no_length_in_params(self, more: dict[str, Any], key: str) -> None:
        """The two formats have two names for it, and the fix is the name."""
        params = {"dim": 64, "n_layers": 2, "n_heads": 4, "rope_theta": 1e6, **more}
        (finding,) = find(read_params(params), params, source="params")
        assert (finding.field, finding.fix) == (key, f"state {key}, the trained length in tokens")
        assert read_params({**params, key: 4096}).max_position_embeddings == 4096


class TestLengthsThatChangeFrequencies:
    """Cached keys do not fit frequencies that have changed since."""

    def test_dynamic(self) -> None:
        (finding,) = found(new(rope_type="dynamic", factor=2.0))
        assert (finding.severity, finding.field) == ("warning", "rope_type")
        assert "past 8,192" in finding.message

    def test_one_list_for_all_lengths_is_none_of_it(self) -> None:
        divisors = LongRoPE(short_factor=(2.0,) * 8, long_factor=(2.0,) * 8, original_max_position_embeddings=2)
        rotary = Rotary(head_dim=16, rope_theta=1e4, scaling=divisors)
        plan = ModelPlan(model_type="llama", max_position_embeddings=64, layers=(LayerPlan(rotate=rotary),))
        assert find(plan) == ()


class TestOtherFiles:
    def test_a_gguf_without_a_base(self) -> None:
        keys = {
            "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 2048,
            "llama.embedding_length": 64, "llama.attention.head_count": 4,
        }  # fmt: skip
        (finding,) = find(read_metadata(keys), keys, source="gguf")
        assert (finding.severity, finding.field) == ("warning", "llama.rope.freq_base")
        keys["llama.rope.freq_base"] = 10000.0
        assert find(read_metadata(keys), keys, source="gguf") == ()

    def test_a_factor_that_params_do_not_state(self) -> None:
        params = {
            "dim": 64, "n_layers": 2, "n_heads": 4, "multiple_of": 256, "rope_theta": 500000.0, "max_seq_len": 131072,
            "use_scaled_rope": True,
        }  # fmt: skip
        (finding,) = find(read_params(params), params, source="params")
        assert (finding.severity, finding.field) == ("warning", "use_scaled_rope")
        assert "Meta's code has 8 written into it" in finding.message
        stated = {**params, "rope_scaling_factor": 32}
        assert find(read_params(stated), stated, source="params") == ()

    def test_a_factor_that_no_layer_has(self) -> None:
        """Where every layer is without rotation nothing is scaled, whatever is stated."""
        params = {
            "dim": 4096, "n_layers": 4, "n_heads": 32, "rope_theta": 500000.0, "use_scaled_rope": True,
            "attention_chunk_size": 8192, "nope_layer_interval": 1, "attn_temperature_tuning": True,
        }  # fmt: skip
        plan = read_params(params)
        assert plan.rotaries == ()
        assert not [finding for finding in find(plan, params, source="params") if finding.field == "use_scaled_rope"]


# What stands of a right config: the base that only transformers 5 looks for in rope_parameters, and what is true of
# every model of the family.
_BASE = ("note", "rope_theta")
STANDING = {
    "qwen2": [_BASE],
    "gemma3": [_BASE],
    "smollm3": [_BASE],
    "cohere": [_BASE],
    "llama4": [_BASE],
    # Its lists change with the length in every released model.
    "phi3-longrope": [("warning", "long_factor")],
    # 1.2 is not 0.1 ln 8 + 1, and full layers alone are scaled.
    "olmo3": [("warning", "attention_factor"), ("note", "scaling")],
    "deepseek_v3-yarn": [("note", "mscale, mscale_all_dim")],
    # The tiny one states 8,192 tokens beside the class's factor of 32 from 4,096.
    "gpt_oss": [("warning", "factor"), ("note", "truncate"), _BASE],
}


class TestClean:
    """A finding where nothing is wrong teaches people to pass over all of them."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_families_as_transformers_writes_them(self, family: str) -> None:
        raw = json.loads(json.dumps(tiny_config(family).to_dict(), default=str))
        assert told(raw) == STANDING.get(family, [])

    def test_the_base_in_both_places_leaves_nothing_of_it(self) -> None:
        for family in ("qwen2", "smollm3", "cohere", "llama4"):
            raw = json.loads(json.dumps(tiny_config(family).to_dict(), default=str))
            assert told({**raw, "rope_theta": raw["rope_parameters"]["rope_theta"]}) == []

    @pytest.mark.parametrize("raw", CONFIGS, ids=lambda raw: raw["model_type"])
    def test_no_error_in_a_readable_config(self, raw: dict[str, Any]) -> None:
        assert "error" not in {finding.severity for finding in found(raw)}


class TestForm:
    """Every finding says where, why, what to do and who else met it."""

    def test_gravest_first_and_each_once(self) -> None:
        raw = {**LLAMA, "rope_scaling": {**YARN, "factor": 2.0, "truncate": False, "attention_factor": 1.5}}
        severities = [finding.severity for finding in found(raw)]
        assert severities == sorted(severities, key=SEVERITIES.index)
        assert severities == ["error", "warning", "note", "note"]
        assert len(set(found(raw))) == 4

    def test_references_are_threads_or_papers(self) -> None:
        text = "".join(path.read_text(encoding="utf-8") for path in SOURCE.glob("*.py"))
        references = re.findall(r'reference="([^"]*)"', text)
        assert len(references) == text.count("reference=") >= 20
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+|arXiv:\d{4}\.\d{5}", reference) for reference in references)

    def test_an_unknown_severity(self) -> None:
        with pytest.raises(PlanError, match="severity: got 'fatal'; allowed: 'error', 'warning', 'note'"):
            Finding(severity="fatal", field="", message="", fix="", reference="")  # type: ignore[arg-type]

    def test_every_kind_is_in_the_document(self) -> None:
        document = (SOURCE.parents[3] / "docs" / "inspect.md").read_text(encoding="utf-8")
        text = "".join(path.read_text(encoding="utf-8") for path in SOURCE.glob("*.py"))
        for reference in set(re.findall(r'reference="([^"]*)"', text)):
            assert reference in document, reference
