"""Where positions are used: attention, exactly the same however a sequence is fed."""

from theodolite.attention.pieces import Piece, attend, merge, with_sink
from theodolite.attention.plain import attend_plainly

__all__ = ["Piece", "attend", "attend_plainly", "merge", "with_sink"]
