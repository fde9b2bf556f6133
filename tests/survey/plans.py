"""Plans and rows of a summary that the tests of the survey share."""

from __future__ import annotations

from typing import Any

from theodolite.plan import LayerPlan, ModelPlan, Rotary, Scaling

TRAINED = 512


def plan_of(scaling: Scaling | None = None, *, length: int | None = TRAINED) -> ModelPlan:
    """One Llama layer of 16 channels."""
    rotary = Rotary(head_dim=16, rope_theta=10000.0, scaling=scaling or Scaling())
    return ModelPlan(model_type="llama", max_position_embeddings=length, layers=(LayerPlan(rotate=rotary),))


def band(end: int, perplexity: float, *, width: int = 128) -> dict[str, Any]:
    return {"from": end - width, "to": end, "perplexity": perplexity, "interval": [perplexity, perplexity]}


def bands(*perplexities: float, width: int = 128) -> list[dict[str, Any]]:
    """Bands of `width` from position 0 on."""
    return [band((i + 1) * width, value, width=width) for i, value in enumerate(perplexities)]


def scaling_row(
    name: str, *, perplexities: tuple[float, ...] = (), holds: int | None = None, recall: float | None = None,
    ratio: float = 1.0, length: int = 768,
) -> dict[str, Any]:  # fmt: skip
    """A scaling of a summary, with recall at two depths of `length` whose mean is `recall`."""
    cells = [] if recall is None else [
        {"length": length, "depth": depth, "accuracy": recall + shift, "accuracy_alone": 0.2}
        for depth, shift in ((0.1, -0.05), (0.9, 0.05))
    ]  # fmt: skip
    return {
        "name": name,
        "bands": bands(*perplexities),
        "holds_to": holds,
        "recall": cells,
        "short_cost": {"ratio": ratio},
    }
