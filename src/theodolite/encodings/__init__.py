"""Position encodings as torch modules, built from a plan or by hand: one folder for each place where they act."""

from theodolite.encodings.bias.alibi import ALiBi, alibi_slopes
from theodolite.encodings.bias.base import Bias, Content, PairwiseBias, ScoreMod
from theodolite.encodings.bias.combined import BiasByHead, BiasSum
from theodolite.encodings.bias.cope import CoPE
from theodolite.encodings.bias.deberta import DisentangledBias, RelativeEmbeddings, log_bucket
from theodolite.encodings.bias.fire import Fire
from theodolite.encodings.bias.forgetting import ForgettingGate
from theodolite.encodings.bias.kerple import Kerple
from theodolite.encodings.bias.low_rank import LowRankBias
from theodolite.encodings.bias.shaw import ShawBias
from theodolite.encodings.bias.t5 import T5Bias
from theodolite.encodings.bias.transformer_xl import TransformerXLBias
from theodolite.encodings.build import build, build_embed
from theodolite.encodings.embed.base import Embed
from theodolite.encodings.embed.bilevel import Bilevel
from theodolite.encodings.embed.learned import LearnedEmbedding
from theodolite.encodings.embed.sinusoidal import Sinusoidal
from theodolite.encodings.policy import Policy
from theodolite.encodings.rotate.axial import AxialRotary
from theodolite.encodings.rotate.base import Rotate
from theodolite.encodings.rotate.learned import LearnedBase, LeRoPE
from theodolite.encodings.rotate.learned_tables import learned_tables
from theodolite.encodings.rotate.length_base import LengthBase
from theodolite.encodings.rotate.mixed import MixedRotary
from theodolite.encodings.rotate.parts import RotateByChannel, RotateByHead
from theodolite.encodings.rotate.per_head import PerHeadRotary
from theodolite.encodings.rotate.quantised import StoredRotary
from theodolite.encodings.rotate.rerotation import rerotate
from theodolite.encodings.rotate.rotary import RotaryEmbedding
from theodolite.encodings.rotate.tables import Tables, pair_tables, rotary_tables
from theodolite.encodings.rotate.xpos import XPos
from theodolite.encodings.scale.base import Scale
from theodolite.encodings.scale.combined import ScaleByHead, ScaleProduct
from theodolite.encodings.scale.constant import ConstantScale
from theodolite.encodings.scale.ssmax import SSMax
from theodolite.encodings.scale.temperature import LogN, LogScale, PowerScale, Temperature
from theodolite.encodings.shared import SharedTables

__all__ = [
    "ALiBi",
    "AxialRotary",
    "Bias",
    "BiasByHead",
    "BiasSum",
    "Bilevel",
    "CoPE",
    "ConstantScale",
    "Content",
    "DisentangledBias",
    "Embed",
    "Fire",
    "ForgettingGate",
    "Kerple",
    "LeRoPE",
    "LearnedBase",
    "LearnedEmbedding",
    "LengthBase",
    "LogN",
    "LogScale",
    "LowRankBias",
    "MixedRotary",
    "PairwiseBias",
    "PerHeadRotary",
    "Policy",
    "PowerScale",
    "RelativeEmbeddings",
    "RotaryEmbedding",
    "Rotate",
    "RotateByChannel",
    "RotateByHead",
    "SSMax",
    "Scale",
    "ScaleByHead",
    "ScaleProduct",
    "ScoreMod",
    "SharedTables",
    "ShawBias",
    "Sinusoidal",
    "StoredRotary",
    "T5Bias",
    "Tables",
    "Temperature",
    "TransformerXLBias",
    "XPos",
    "alibi_slopes",
    "build",
    "build_embed",
    "learned_tables",
    "log_bucket",
    "pair_tables",
    "rerotate",
    "rotary_tables",
]
