"""DeBERTa's keys: terms, buckets, the norm of its vectors."""

from __future__ import annotations

from typing import Any

import pytest

from theodolite.plan import Bias, PlanError
from theodolite.plan.huggingface import read_config

V2: dict[str, Any] = {
    "model_type": "deberta-v2", "num_hidden_layers": 1, "relative_attention": True, "max_position_embeddings": 512,
    "max_relative_positions": -1, "position_buckets": 256, "position_biased_input": False,
}  # fmt: skip


def bias(**keys: Any) -> Bias | None:
    return read_config({**V2, **keys}).layers[0].bias


class TestWhatIsRead:
    """Terms are in the scale of all scores, and the norm is in every vector: lost, nothing matches."""

    # As microsoft/deberta-v3-base has it.
    V3: dict[str, Any] = {  # noqa: RUF012
        "pos_att_type": "p2c|c2p", "norm_rel_ebd": "layer_norm", "share_att_key": True, "layer_norm_eps": 1e-7,
    }  # fmt: skip

    def test_version_3(self) -> None:
        assert bias(**self.V3) == Bias(
            kind="deberta", buckets=512, max_distance=512, layer_norm_eps=1e-7, share_att_key=True
        )
        silent = {key: value for key, value in self.V3.items() if key != "layer_norm_eps"}
        assert bias(**silent) == bias(**self.V3)

    @pytest.mark.parametrize("given", ["c2p", " C2P ", ["c2p"], ("c2p",)])
    def test_one_term(self, given: Any) -> None:
        assert bias(pos_att_type=given) == Bias(kind="deberta", buckets=512, max_distance=512, terms=("c2p",))

    def test_the_order_of_terms_is_nothing(self) -> None:
        assert bias(pos_att_type=["p2c", "c2p"]) == bias(pos_att_type="c2p|p2c")

    @pytest.mark.parametrize("given", [None, []])
    def test_no_term_is_no_bias(self, given: Any) -> None:
        """The code adds nothing to the scores then, and scales them by the width alone."""
        assert bias(pos_att_type=given) is None

    def test_minus_one_is_the_stated_length(self) -> None:
        for keys in ({"max_relative_positions": -1}, {"max_relative_positions": 512}):
            read = bias(pos_att_type="c2p", **keys)
            assert read is not None
            assert read.max_distance == 512

    def test_version_1_has_no_buckets_and_no_norm(self) -> None:
        """Its code reads neither key."""
        read = bias(**self.V3, model_type="deberta", max_relative_positions=64)
        assert read == Bias(kind="deberta", buckets=128, max_distance=64)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pos_att_type": "c2p|p2p"}, "pos_att_type: got 'p2p'; allowed: 'c2p', 'p2c'"),
        ({"pos_att_type": ["c2p", "c2p"]}, r"pos_att_type: got \['c2p', 'c2p'\]; each term once"),
        ({"pos_att_type": ["c2p"], "norm_rel_ebd": "rescale"}, "norm_rel_ebd: got 'rescale'; allowed: 'none', 'layer"),
        ({"pos_att_type": ["c2p"], "norm_rel_ebd": 3}, "norm_rel_ebd: got 3; it must be a name"),
        ({"pos_att_type": ["c2p"], "position_buckets": 512}, "position_buckets: got 512; it must not equal the furthe"),
    ],
)
def test_what_is_not_known_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        bias(**keys)


@pytest.mark.parametrize("terms", [(), ("c2p", "c2p"), ("p2p",), None, "c2p"])
def test_a_bias_refuses_other_terms(terms: Any) -> None:
    with pytest.raises(PlanError, match="terms: got"):
        Bias(kind="deberta", buckets=8, max_distance=8, terms=terms)
