"""Where positions are used: attention, exactly the same however a sequence is fed."""

from theodolite.attention.by_policy import Path, attend_by_policy, path_of
from theodolite.attention.cache import Cache
from theodolite.attention.module import Attention
from theodolite.attention.pieces import Piece, attend, merge, with_sink
from theodolite.attention.plain import attend_plainly
from theodolite.attention.relative import attend_relatively

__all__ = [
    "Attention",
    "Cache",
    "Path",
    "Piece",
    "attend",
    "attend_by_policy",
    "attend_plainly",
    "attend_relatively",
    "merge",
    "path_of",
    "with_sink",
]
