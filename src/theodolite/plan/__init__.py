"""What a model says about positions: frozen data and plain maths. Imports neither torch nor transformers."""

from theodolite.plan.axial import Axial
from theodolite.plan.bias import Bias, Embedding
from theodolite.plan.errors import PlanError
from theodolite.plan.model import LayerPlan, Mask, ModelPlan, Temperature
from theodolite.plan.rotary import Rotary
from theodolite.plan.scaling import NTK, DynamicNTK, Linear, Llama3, LongRoPE, Scaling, YaRN, YaRNByLength

__all__ = [
    "NTK",
    "Axial",
    "Bias",
    "DynamicNTK",
    "Embedding",
    "LayerPlan",
    "Linear",
    "Llama3",
    "LongRoPE",
    "Mask",
    "ModelPlan",
    "PlanError",
    "Rotary",
    "Scaling",
    "Temperature",
    "YaRN",
    "YaRNByLength",
]
