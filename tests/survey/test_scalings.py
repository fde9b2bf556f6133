"""Scalings as a user writes them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from theodolite.plan import NTK, DynamicNTK, Linear, Llama3, LongRoPE, ModelPlan, PlanError, Scaling, YaRN
from theodolite.survey.maps import spelled
from theodolite.survey.passages import LENGTH
from theodolite.survey.scalings import AS_SHIPPED, Candidate, candidate_of, default_factor, parse_scalings, with_factor
from theodolite.survey.settings import DEFAULT_SCALINGS

from .plans import TRAINED, plan_of


def scaling_of(candidate: Candidate) -> Scaling:
    rotary = candidate.plan.layers[0].rotate
    assert rotary is not None
    return rotary.scaling


def parsed(text: str, plan: ModelPlan | None = None, *, to: int = 768) -> dict[str, Scaling]:
    return {c.name: scaling_of(c) for c in parse_scalings(text, plan or plan_of(), to=to)}


class TestWhatIsMeant:
    """Every name, with and without a factor, with every setting."""

    @pytest.mark.parametrize(
        ("text", "scaling"),
        [
            ("linear", Linear(factor=2.0)),
            ("linear:3", Linear(factor=3)),
            ("ntk:1.5", NTK(factor=1.5)),
            ("dynamic:4", DynamicNTK(factor=4, original_max_position_embeddings=TRAINED)),
            ("yarn", YaRN(factor=2.0, original_max_position_embeddings=TRAINED)),
            ("yarn:beta_fast=64", YaRN(factor=2.0, original_max_position_embeddings=TRAINED, beta_fast=64)),
            (
                "yarn:4:beta_fast=64:beta_slow=2:truncate=false:attention_factor=1.25",
                YaRN(
                    factor=4,
                    original_max_position_embeddings=TRAINED,
                    beta_fast=64,
                    beta_slow=2,
                    truncate=False,
                    attention_factor_given=1.25,
                ),
            ),
            (
                "llama3:8",
                Llama3(factor=8, original_max_position_embeddings=TRAINED, low_freq_factor=1.0, high_freq_factor=4.0),
            ),
            (
                "llama3:8:low_freq_factor=2:high_freq_factor=8",
                Llama3(factor=8, original_max_position_embeddings=TRAINED, low_freq_factor=2, high_freq_factor=8),
            ),
        ],
    )
    def test_one_scaling(self, text, scaling):
        assert parsed(text) == {"none": Scaling(), text: scaling}

    def test_shipped_is_first_wherever_it_stands_and_if_it_is_not_named(self):
        for text in ("", " , ", "none", "linear:2,none", "linear:2"):
            candidates = parse_scalings(text, plan_of(), to=768)
            assert candidates[0] == Candidate(name=AS_SHIPPED, plan=plan_of())
            assert [c.name for c in candidates[1:]] == (["linear:2"] if "linear" in text else [])

    def test_the_same_scaling_by_two_names_stands_once(self):
        assert list(parsed(" linear:2 ,ntk:3,linear:2.0,linear,ntk:3")) == ["none", "linear:2", "ntk:3"]

    @given(factor=st.floats(1, 1000), name=st.sampled_from(["linear", "ntk", "dynamic", "yarn", "llama3"]))
    def test_any_factor_is_read_to_the_bit(self, factor, name):
        scaling = parsed(f"{name}:{factor!r}")[f"{name}:{factor!r}"]
        assert scaling.factor == factor  # type: ignore[attr-defined]


class TestWhatIsRefused:
    """An error repeats what was written and says what is allowed."""

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("roap", "scaling: got 'roap'; allowed: none, linear, ntk, dynamic, yarn, llama3, each with a factor"),
            ("YaRN", "scaling: got 'YaRN'; allowed: none, linear"),
            ("yarn:two", "scaling: got 'yarn:two'; 'two' is no number, true or false"),
            ("yarn:", "scaling: got 'yarn:'; '' is no number"),
            ("yarn:nan", "'nan' is no number"),
            ("yarn:2:3", "scaling: got 'yarn:2:3'; a factor comes first, then settings as key=value"),
            ("yarn:beta_fast=64:2", "a factor comes first, then settings as key=value"),
            ("linear:2:beta_fast=64", "scaling: got 'linear:2:beta_fast=64'; 'linear' has no setting 'beta_fast'"),
            ("yarn:2:factor=3", "'yarn' has no setting 'factor'"),
            ("yarn:2:beta_fast=3:beta_fast=4", "'beta_fast' stands twice"),
            ("linear:0.5", "factor: got 0.5; it must be at least 1"),
            ("linear:1e999", "factor: got inf; it must be a finite number above 0"),
            ("yarn:true", "factor: got True; it must be a finite number above 0"),
            ("yarn:-2", "factor: got -2; it must be a finite number above 0"),
            ("yarn:2:beta_fast=true", "beta_fast: got True"),
            ("llama3:2:low_freq_factor=4:high_freq_factor=1", r"high_freq_factor: got 1; it must be above"),
        ],
    )
    def test_text_of_the_error(self, text, message):
        with pytest.raises(PlanError, match=message.replace("(", r"\(")):
            parsed(f"none,{text}")

    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def test_any_text_is_candidates_or_a_plan_error(self, text):
        try:
            candidates = parse_scalings(text, plan_of(), to=768)
        except PlanError:
            return
        assert candidates[0].name == AS_SHIPPED
        assert len({c.plan for c in candidates}) == len(candidates)

    @given(
        st.lists(st.sampled_from([*"yarn:2=,.e-", "yarn", "linear", "beta_fast", "none", "true", "[", '"']), max_size=8)
    )
    def test_almost_right_text_is_candidates_or_a_plan_error(self, parts):
        self.test_any_text_is_candidates_or_a_plan_error.hypothesis.inner_test(self, "".join(parts))

    def test_a_model_without_a_length(self):
        with pytest.raises(PlanError, match="max_position_embeddings: got None"):
            parsed("yarn", plan_of(length=None))


class TestNativeScalings:
    """What a model carries already is multiplied or kept, never dropped."""

    NATIVE = YaRN(factor=8.0, original_max_position_embeddings=64, beta_fast=16.0, attention_factor_given=1.1)

    def test_yarn_over_yarn_multiplies_the_factor_and_keeps_the_rest(self):
        plan = plan_of(self.NATIVE)
        expected = YaRN(factor=16.0, original_max_position_embeddings=64, beta_fast=16.0, attention_factor_given=1.1)
        assert parsed("yarn", plan)["yarn"] == expected
        changed = YaRN(factor=24.0, original_max_position_embeddings=64, beta_fast=32, attention_factor_given=1.3)
        text = "yarn:3:beta_fast=32:attention_factor=1.3"
        assert parsed(text, plan)[text] == changed

    def test_a_stated_length_without_the_native_factor_is_not_stretched_twice(self):
        """Qwen 2.5 states 32,768 for both lengths beside factor 4: twice that is factor 2, not 8."""
        native = YaRN(factor=4.0, original_max_position_embeddings=TRAINED)
        assert parsed("yarn:2", plan_of(native))["yarn:2"] == YaRN(factor=2, original_max_position_embeddings=TRAINED)

    def test_linear_over_linear_multiplies(self):
        assert parsed("linear:2", plan_of(Linear(factor=8.0)))["linear:2"] == Linear(factor=16.0)

    @pytest.mark.parametrize(
        ("native", "left"),
        [
            (Linear(factor=8.0), ["none", "linear"]),
            (NATIVE, ["none", "yarn"]),
            (
                Llama3(factor=8, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0),
                ["none"],
            ),
            (
                LongRoPE(
                    short_factor=(1.0,) * 8,
                    long_factor=(2.0,) * 8,
                    original_max_position_embeddings=64,
                    factor=8.0,
                ),
                ["none"],
            ),
        ],
    )
    def test_the_default_list_leaves_out_what_does_not_stack_and_says_so(self, native, left):
        told: list[str] = []
        candidates = parse_scalings(DEFAULT_SCALINGS, plan_of(native), to=768, strict=False, tell=told.append)
        assert [c.name for c in candidates] == left
        assert len(told) == 5 - len(left)
        assert all(f"already carries {native.rope_type!r}, which must not be lost" in line for line in told)

    def test_one_that_is_the_same_as_another_is_left_out_and_named(self):
        told: list[str] = []
        candidates = parse_scalings("linear,linear:2", plan_of(), to=768, tell=told.append)
        assert [c.name for c in candidates] == ["none", "linear"]
        assert told == ["left out: linear:2, which is the same as linear"]

    def test_an_equal_native_factor_multiplies_too(self):
        assert parsed("linear:2", plan_of(Linear(factor=2.0)))["linear:2"] == Linear(factor=4.0)

    def test_a_list_of_the_user_raises(self):
        with pytest.raises(PlanError, match="already carries 'linear', which must not be lost"):
            parsed("none,yarn", plan_of(Linear(factor=8.0)))

    def test_what_is_wrong_in_itself_raises_even_where_some_are_left_out(self):
        with pytest.raises(PlanError, match=r"factor: got 0\.5"):
            parse_scalings("linear:0.5", plan_of(), to=768, strict=False)


class TestDefaultFactor:
    """A whole number that covers the length, never below 2."""

    @pytest.mark.parametrize(
        ("trained", "to", "factor"),
        [(8192, 12288, 2), (8192, 16384, 2), (8192, 16385, 3), (8192, 4096, 2), (512, 4096, 8)],
    )
    def test_values(self, trained, to, factor):
        assert default_factor(trained, to) == factor

    @given(trained=st.integers(352, 10**6), to=st.integers(352, 10**7))
    def test_covers_the_length_and_is_the_smallest_that_does(self, trained, to):
        factor = default_factor(trained, to)
        assert factor == math.floor(factor) >= 2
        assert factor * trained >= to
        assert factor == 2 or (factor - 1) * trained < to


class TestWithFactor:
    """A name that is to be used for another text says the factor that it had."""

    @pytest.mark.parametrize(
        ("name", "true"),
        [
            ("none", "none"),
            ("yarn", "yarn:2"),
            ("yarn:3", "yarn:3"),
            ("yarn:beta_fast=64", "yarn:2:beta_fast=64"),
            ("yarn:1.5:beta_fast=64", "yarn:1.5:beta_fast=64"),
            ("self-extend", "self-extend"),
        ],
    )
    def test_names(self, name: str, true: str) -> None:
        plan = plan_of()
        candidate = parse_scalings(name, plan, to=2 * TRAINED)[-1]
        named = with_factor(candidate, 2.0)
        assert named == true
        again = parse_scalings(named, plan, to=2 * TRAINED)[-1]
        assert (again.plan, again.relative) == (candidate.plan, candidate.relative)


class TestMapsThatMoveNothing:
    """Below the length from which a map moves anything it is the model as shipped, and left out of a list by name."""

    @pytest.mark.parametrize("name", ["self-extend", "rerope", "leaky-rerope", "sinks", "lm-infinite", "dca"])
    def test_left_out(self, name: str) -> None:
        plan, told = plan_of(), []
        moves = candidate_of(name, plan, to=4 * TRAINED).relative
        assert moves is not None
        # From so many tokens on, the last of a passage among them.
        first = next(n for n in range(1, 4 * TRAINED) if moves.largest_distance(n) < n - 1) - LENGTH
        named = spelled(moves)
        assert len(parse_scalings(named, plan, to=first - 1, tell=told.append)) == 1
        assert told == [f"left out: {named}, which is the same as none: it moves no distance in {first - 1:,} tokens"]
        assert len(parse_scalings(named, plan, to=first)) == 2
        # Who names one alone means it.
        assert candidate_of(named, plan, to=first - 1).relative == moves
