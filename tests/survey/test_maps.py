"""Maps of distances as a user writes them, and what they are by default."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from theodolite.plan import LayerPlan, Mask, ModelPlan, PlanError, Rotary, YaRN
from theodolite.positions import AttentionSinks, DualChunk, LeakyReRoPE, LMInfinite, RelativeMap, ReRoPE, SelfExtend
from theodolite.survey.maps import MAPS, describe_map, record, spelled
from theodolite.survey.passages import LENGTH
from theodolite.survey.scalings import Candidate, candidate_of, names_map, parse_scalings

from .plans import TRAINED, plan_of

# Every kind once, with all its settings given.
GIVEN = {
    "self-extend:4:window=100": SelfExtend(window=100, group_size=4),
    "dca:chunk_size=300:local_size=20": DualChunk(chunk_size=300, local_size=20),
    "dca:chunk_size=300:local_size=20:pinned=300": DualChunk(chunk_size=300, local_size=20, pinned=300),
    "rerope:window=99": ReRoPE(window=99),
    "leaky-rerope:2.5:window=99": LeakyReRoPE(window=99, factor=2.5),
    "sinks:7:window=99": AttentionSinks(window=99, sinks=7),
    "lm-infinite:7:window=99": LMInfinite(window=99, sinks=7),
}


def maps(text: str, plan: ModelPlan | None = None, *, to: int = 768, **more) -> dict[str, RelativeMap | None]:
    return {c.name: c.relative for c in parse_scalings(text, plan or plan_of(), to=to, **more)[1:]}


def windowed(*windows: int | None) -> ModelPlan:
    rotary = Rotary(head_dim=16, rope_theta=10000.0)
    layers = tuple(LayerPlan(rotate=rotary, mask=Mask(sliding_window=window)) for window in windows)
    return ModelPlan(model_type="llama", max_position_embeddings=TRAINED, layers=layers)


class TestWhatIsMeant:
    """Every name, with and without its number, with every setting."""

    @pytest.mark.parametrize("text", GIVEN)
    def test_all_settings(self, text):
        plan = plan_of()
        made = parse_scalings(text, plan, to=768)
        assert made[1] == Candidate(name=text, plan=plan, relative=GIVEN[text])
        assert candidate_of(f" {text} ", plan, to=768) == made[1]

    @pytest.mark.parametrize(
        ("text", "made"),
        [
            # 512 trained, 768 and a passage of 44 tokens to be read.
            ("self-extend", SelfExtend(window=256, group_size=3)),
            ("self-extend:8", SelfExtend(window=256, group_size=8)),
            ("self-extend:window=128", SelfExtend(window=128, group_size=2)),
            ("self-extend:group_size=5", SelfExtend(window=256, group_size=5)),
            ("dca", DualChunk(chunk_size=384, local_size=32)),
            ("dca:chunk_size=240", DualChunk(chunk_size=240, local_size=20)),
            ("dca:local_size=9", DualChunk(chunk_size=384, local_size=9)),
            ("rerope", ReRoPE(window=256)),
            ("leaky-rerope", LeakyReRoPE(window=256, factor=3.0)),
            ("leaky-rerope:window=100", LeakyReRoPE(window=100, factor=2.0)),
            ("leaky-rerope:7", LeakyReRoPE(window=256, factor=7.0)),
            ("sinks", AttentionSinks(window=508, sinks=4)),
            ("sinks:10", AttentionSinks(window=502, sinks=10)),
            ("lm-infinite", LMInfinite(window=508, sinks=4)),
            ("lm-infinite:window=90", LMInfinite(window=90, sinks=4)),
        ],
    )
    def test_what_is_not_given(self, text, made):
        assert maps(text) == {text: made}

    def test_the_plan_stays_the_models_own(self):
        native = plan_of(YaRN(factor=8.0, original_max_position_embeddings=64))
        assert candidate_of("rerope", native, to=768).plan == native

    def test_two_spellings_stand_once(self):
        told: list[str] = []
        text = "dca,dca:pinned=383,dca:local_size=32:chunk_size=384,self-extend:3,self-extend,leaky-rerope:3.0"
        text += ",leaky-rerope:3:window=256,rerope,leaky-rerope:Infinity,sinks:0:window=9,lm-infinite:0:window=9"
        assert list(maps(text, tell=told.append)) == [
            "dca",
            "self-extend:3",
            "leaky-rerope:3.0",
            "rerope",
            "sinks:0:window=9",
        ]
        assert told[0] == "left out: dca:pinned=383, which is the same as dca"
        assert len(told) == 6

    def test_a_map_that_changes_no_distance_is_the_model_as_shipped(self):
        told: list[str] = []
        assert maps("self-extend:1,leaky-rerope:1:window=9", tell=told.append) == {}
        assert told == [
            f"left out: {name}, which is the same as none" for name in ("self-extend:1", "leaky-rerope:1:window=9")
        ]

    def test_names(self):
        assert [name for name in ("none", "yarn:2", "yarn, sinks", "dca:chunk_size=9") if names_map(name)] == [
            "yarn, sinks",
            "dca:chunk_size=9",
        ]

    def test_one_by_name(self):
        plan = plan_of()
        assert candidate_of("none", plan, to=768) == Candidate(name="none", plan=plan)
        assert candidate_of("self-extend:1", plan, to=768) == Candidate(name="self-extend:1", plan=plan)
        scaled = candidate_of("yarn:2", plan, to=768)
        assert (scaled.plan, scaled.relative) == (parse_scalings("yarn:2", plan, to=768)[1].plan, None)
        for text in ("", " ", "none,yarn"):
            with pytest.raises(PlanError, match="give the name of one, for example yarn:2"):
                candidate_of(text, plan, to=768)


class TestDefaults:
    """No distance that the model was not trained for, at any length, short or long."""

    @given(name=st.sampled_from(list(MAPS)), trained=st.integers(8, 200_000), to=st.integers(1, 4_000_000))
    def test_fit(self, name, trained, to):
        made = candidate_of(name, plan_of(length=trained), to=to).relative
        assert made.largest_distance(to) <= trained - 1
        # A passage begun again after the text fits too.
        assert made.largest_distance(to + LENGTH) <= trained - 1

    @given(name=st.sampled_from(list(MAPS)), trained=st.integers(8, 60), to=st.integers(1, 200))
    def test_fit_by_the_distances_themselves(self, name, trained, to):
        made = candidate_of(name, plan_of(length=trained), to=to).relative
        at = torch.arange(to)
        distances = made.relative(at, at)[made.seen(at, at)]
        assert 0 <= float(distances.min()) <= float(distances.max()) <= trained - 1

    @given(trained=st.integers(8, 400), to=st.integers(1, 20_000), window=st.integers(1, 420))
    def test_the_smallest_that_fits(self, trained, to, window):
        tokens = to + LENGTH

        def fits(made: RelativeMap) -> bool:
            return made.largest_distance(tokens) <= trained - 1

        group = candidate_of(f"self-extend:window={window}", plan_of(length=trained), to=to).relative
        smaller = [size for size in range(2, group.group_size) if fits(SelfExtend(window=window, group_size=size))]
        assert smaller == []
        assert fits(group) or (window >= trained and group.group_size == 2)
        leaky = candidate_of(f"leaky-rerope:window={window}", plan_of(length=trained), to=to).relative
        assert fits(leaky) or (window >= trained - 1 and leaky.factor == 2)
        assert leaky.factor == 2 or not fits(replace(leaky, factor=leaky.factor - 1))

    def test_the_proportions_of_chunkllama(self):
        for trained in (4096, 8192, 1000, 77):
            made = candidate_of("dca", plan_of(length=trained), to=9 * trained).relative
            assert (made.chunk_size, made.local_size) == (trained * 3 // 4, trained // 16)

    def test_the_longest_length_is_found_at_once(self):
        made = candidate_of("self-extend:window=8191", plan_of(length=8192), to=2**24 - LENGTH).relative
        assert made.largest_distance(2**24) <= 8191

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("self-extend:2", "self-extend:2: distances to 1,151 in 2,048 tokens, and those trained end at 511"),
            ("rerope:window=600", "rerope:window=600: distances to 600 in 2,048 tokens, and those trained end at 511"),
            ("rerope:window=512", "rerope:window=512: distances to 512 in 2,048 tokens, and those trained end at 511"),
            ("rerope:window=511", None),
            ("self-extend:window=600", "self-extend:window=600: distances to 1,323 in 2,048 tokens, and those trained"),
            ("dca:chunk_size=512:pinned=512", "dca:chunk_size=512:pinned=512: distances to 512 in 2,048 tokens"),
            ("sinks:4:window=509", "sinks:4:window=509: distances to 512 in 2,048 tokens"),
            ("sinks:600", "sinks:600: distances to 600 in 2,048 tokens"),
        ],
    )
    def test_a_setting_that_does_not_fit_is_told_and_taken(self, text, told):
        lines: list[str] = []
        assert list(maps(text, to=2048, tell=lines.append)) == [text]
        assert [line[: len(told or "")] for line in lines] == ([told] if told else [])


class TestWhatIsRefused:
    """An error repeats what was written and says what is allowed."""

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("selfextend", "scaling: got 'selfextend'; allowed: none, linear, ntk, dynamic, yarn, llama3, each with a"),
            ("self-extends", "and self-extend, dca, rerope, leaky-rerope, sinks, lm-infinite, each with settings"),
            ("rerope:4096", "scaling: got 'rerope:4096'; 'rerope' has no number; its settings are window="),
            ("dca:2", "'dca' has no number; its settings are chunk_size=, local_size=, pinned="),
            ("self-extend:2:group_size=3", "'group_size' stands twice"),
            ("self-extend:2:window=9:window=9", "'window' stands twice"),
            ("self-extend:2:factor=3", "'self-extend' has no setting 'factor'; it has window=, group_size="),
            ("self-extend:2:3", "a factor comes first, then settings as key=value"),
            ("self-extend:0", "group_size: got 0; it must be at least 1"),
            ("self-extend:2.5", "group_size: got a float; give a Python int"),
            ("self-extend:true", "group_size: got a bool"),
            ("self-extend:null", "'null' is no number"),
            ("self-extend:window=null", "window: got a NoneType"),
            ("rerope:window=-4", "window: got -4; it must be at least 0"),
            ("rerope:window=0", "window: got 0; it must be at least 1"),
            ("rerope:window=99999999999", "window: got 99999999999; it must be at most 16777216"),
            ("leaky-rerope:0.5", "factor: got 0.5; give a number of at least 1"),
            ("leaky-rerope:NaN", "factor: got nan; give a number of at least 1"),
            ('leaky-rerope:"2"', "factor: got '2'; give a number of at least 1"),
            ("leaky-rerope:1e300", "factor: got 1e+300; it must be at most 16777216"),
            ("dca:chunk_size=100:local_size=51", "local_size: got 51; at most half of chunk_size (100)"),
            ("dca:pinned=7", "pinned: got 7; allowed: 383 (the paper), 384 (ChunkLlama)"),
        ],
    )
    def test_text_of_the_error(self, text, message):
        with pytest.raises(PlanError) as caught:
            maps(text)
        assert message in str(caught.value)
        assert repr(text) in str(caught.value)

    @pytest.mark.parametrize("name", MAPS)
    @given(
        parts=st.lists(
            st.sampled_from(
                [*":=,.e-27", "window", "factor", "sinks", "pinned", "null", "true", "[", '"', "Infinity", "9" * 400]
            ),
            max_size=8,
        )
    )
    def test_any_settings_are_a_map_or_a_plan_error(self, name, parts):
        try:
            candidates = parse_scalings(f"{name}:{''.join(parts)}", plan_of(), to=768)
        except PlanError:
            return
        assert all(c.relative is None or c.relative.largest_distance(768) >= 0 for c in candidates)

    @pytest.mark.parametrize(
        ("layer", "reason"),
        [
            (LayerPlan(), "this model has layers that turn nothing, which no map changes"),
            (
                LayerPlan(rotate=Rotary(head_dim=16, rope_theta=10000.0, mrope_section=(2, 3, 3))),
                "this model turns by positions on several axes, and a map knows one",
            ),
        ],
    )
    def test_a_model_that_takes_no_map(self, layer, reason):
        plan = replace(plan_of(), layers=(*plan_of().layers, layer))
        told: list[str] = []
        assert maps("yarn:2,self-extend", plan, strict=False, tell=told.append) == {"yarn:2": None}
        assert told == [f"left out: self-extend; {reason}"]
        with pytest.raises(PlanError, match=f"scaling: got 'self-extend'; {reason}"):
            maps("yarn:2,self-extend", plan)

    def test_a_model_without_a_length(self):
        with pytest.raises(PlanError, match="max_position_embeddings: got None"):
            maps("rerope", plan_of(length=None))

    def test_layers_that_all_have_windows(self):
        told: list[str] = []
        assert maps("rerope,dca", windowed(64, 128), tell=told.append) == {}
        reason = "all layers have windows of their own, whose distances a map leaves as they are"
        assert told == [f"left out: {name}, which is the same as none: {reason}" for name in ("rerope", "dca")]
        assert list(maps("rerope", windowed(64, None))) == ["rerope"]


class TestWords:
    """A map can be told: as data, as a command line that makes it again, and in a sentence."""

    @pytest.mark.parametrize("text", GIVEN)
    def test_spelled_in_full(self, text):
        assert spelled(GIVEN[text]) == text

    @given(name=st.sampled_from(list(MAPS)), to=st.integers(400, 100_000), further=st.integers(400, 100_000))
    def test_the_full_spelling_makes_the_same_map_at_any_length(self, name, to, further):
        made = candidate_of(name, plan_of(), to=to).relative
        assert candidate_of(spelled(made), plan_of(), to=further).relative == made

    def test_as_data(self):
        assert record(SelfExtend(window=4096, group_size=2)) == {"kind": "self_extend", "window": 4096, "group_size": 2}
        assert record(LeakyReRoPE(window=9, factor=2.5)) == {"kind": "leaky_rerope", "window": 9, "factor": 2.5}
        kinds = [record(candidate_of(name, plan_of(), to=768).relative)["kind"] for name in MAPS]
        assert kinds == ["self_extend", "dca", "rerope", "leaky_rerope", "sinks", "lm_infinite"]

    @pytest.mark.parametrize(
        ("relative", "words"),
        [
            (SelfExtend(window=4096, group_size=2), "Self-Extend: groups of 2 beyond 4,096 tokens"),
            (ReRoPE(window=4096), "ReRoPE: no distance beyond 4,096 tokens"),
            (LeakyReRoPE(window=4096, factor=2.0), "leaky ReRoPE: distances beyond 4,096 tokens divided by 2"),
            (
                DualChunk(chunk_size=6144, local_size=512),
                "dual chunk attention: chunks of 6,144 tokens, 512 local, no distance beyond 6,143",
            ),
            (DualChunk(chunk_size=6144, local_size=512, pinned=6144), "no distance beyond 6,144"),
            (AttentionSinks(window=8188), "attention sinks: the last 8,188 tokens and the first 4, no others"),
            (LMInfinite(window=8188, sinks=4), "LM-Infinite: the last 8,188 tokens and the first 4, no others"),
        ],
    )
    def test_in_words(self, relative, words):
        assert describe_map(relative).endswith(words)

    def test_what_is_no_map_of_a_command_line(self):
        class Other(RelativeMap):
            def largest_distance(self, tokens):
                return math.inf

            def _groups(self, m, n):
                return ()

        with pytest.raises(TypeError, match="Other has no words here"):
            describe_map(Other())
