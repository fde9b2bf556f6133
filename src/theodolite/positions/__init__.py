"""Where each token stands: positions as data, for every way in which a sequence is fed."""

from theodolite.positions.attention_sinks import AttentionSinks
from theodolite.positions.chunks import Chunk, chunk, chunk_sizes, chunks
from theodolite.positions.decoding import next_positions, seen_after_draft, tokens_seen, tree_positions
from theodolite.positions.dual_chunk import DualChunk
from theodolite.positions.fractional_grids import (
    augmented_patch_positions,
    centred_patch_positions,
    resized_patch_positions,
)
from theodolite.positions.grids import (
    llama4_patch_positions,
    padded_patch_positions,
    patch_positions,
    patches_of_grids,
    special_tokens,
    with_special_tokens,
)
from theodolite.positions.mrope import (
    MRopePositions,
    mrope_next_positions,
    mrope_positions,
    split_frames,
    temporal_interval,
    token_types,
)
from theodolite.positions.packing import (
    cu_seqlens_of_documents,
    cu_seqlens_of_lengths,
    document_ids,
    from_cu_seqlens,
    from_document_ids,
)
from theodolite.positions.padding import from_attention_mask
from theodolite.positions.relative import Group, LeakyReRoPE, LMInfinite, RelativeMap, ReRoPE, SelfExtend
from theodolite.positions.samplers import pose_positions, randomized_positions
from theodolite.positions.segments import Segments, segment_positions, starts_after
from theodolite.positions.shards import contiguous, shard, striped, unshard, zigzag, zigzag_packed
from theodolite.positions.visible import visible_by_position, visible_in_documents, visible_keys

__all__ = [
    "AttentionSinks",
    "Chunk",
    "DualChunk",
    "Group",
    "LMInfinite",
    "LeakyReRoPE",
    "MRopePositions",
    "ReRoPE",
    "RelativeMap",
    "Segments",
    "SelfExtend",
    "augmented_patch_positions",
    "centred_patch_positions",
    "chunk",
    "chunk_sizes",
    "chunks",
    "contiguous",
    "cu_seqlens_of_documents",
    "cu_seqlens_of_lengths",
    "document_ids",
    "from_attention_mask",
    "from_cu_seqlens",
    "from_document_ids",
    "llama4_patch_positions",
    "mrope_next_positions",
    "mrope_positions",
    "next_positions",
    "padded_patch_positions",
    "patch_positions",
    "patches_of_grids",
    "pose_positions",
    "randomized_positions",
    "resized_patch_positions",
    "seen_after_draft",
    "segment_positions",
    "shard",
    "special_tokens",
    "split_frames",
    "starts_after",
    "striped",
    "temporal_interval",
    "token_types",
    "tokens_seen",
    "tree_positions",
    "unshard",
    "visible_by_position",
    "visible_in_documents",
    "visible_keys",
    "with_special_tokens",
    "zigzag",
    "zigzag_packed",
]
