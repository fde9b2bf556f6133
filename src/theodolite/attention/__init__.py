"""Where positions are used: attention, exactly the same however a sequence is fed."""

from theodolite.attention.pieces import Piece, attend, merge, with_sink

__all__ = ["Piece", "attend", "merge", "with_sink"]
