"""Positions go with the tokens: every sharding, put together again, is the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

from theodolite.encodings import rotary_tables
from theodolite.plan import Rotary
from theodolite.positions.packing import from_cu_seqlens
from theodolite.positions.shards import contiguous, shard, striped, unshard, zigzag, zigzag_packed

PLAIN = [contiguous, zigzag, striped]


def oracle(name: str, total: int, ranks: int) -> list[list[int]]:
    """Deal the tokens out."""
    if name == "striped":
        return [list(range(total))[rank::ranks] for rank in range(ranks)]
    pieces = ranks * (2 if name == "zigzag" else 1)
    cut = [list(range(n * (total // pieces), (n + 1) * (total // pieces))) for n in range(pieces)]
    return [cut[rank] + cut[pieces - 1 - rank] if name == "zigzag" else cut[rank] for rank in range(ranks)]


class TestWhoHoldsWhat:
    """The orders that the field uses, so that shards can be exchanged with it."""

    def test_eight_tokens_on_two_ranks(self):
        assert contiguous(8, ranks=2).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert zigzag(8, ranks=2).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
        assert striped(8, ranks=2).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]

    def test_two_documents_on_two_ranks(self):
        # Without the start of the document, later documents take the tokens of the first.
        cu = torch.tensor([0, 4, 8], dtype=torch.int32)
        table = zigzag_packed(cu, ranks=2)
        assert table.tolist() == [[0, 3, 4, 7], [1, 2, 5, 6]]
        assert table.dtype == torch.int64
        positions = from_cu_seqlens(cu)
        assert [shard(positions, row, dim=0).tolist() for row in table] == [[0, 3, 0, 3], [1, 2, 1, 2]]

    @settings(max_examples=60, deadline=None)
    @given(st.sampled_from(PLAIN), st.integers(1, 5), st.integers(0, 4))
    def test_any_size(self, sharding, ranks, times):
        total = 2 * ranks * times
        assert sharding(total, ranks=ranks).tolist() == oracle(sharding.__name__, total, ranks)

    @settings(max_examples=80, deadline=None)
    @given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 4))
    def test_packed_is_each_document_alone(self, lengths, ranks):
        lengths = [2 * ranks * length for length in lengths]
        starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        expected: list[list[int]] = [[] for _ in range(ranks)]
        for start, length in zip(starts, lengths, strict=False):
            for rank, row in enumerate(oracle("zigzag", length, ranks)):
                expected[rank] += [start + index for index in row]
        assert zigzag_packed(torch.tensor(starts), ranks=ranks).tolist() == expected

    @pytest.mark.parametrize("ranks", [1, 2, 3, 8])
    def test_zigzag_of_one_document_is_the_plain_one(self, ranks):
        total = 6 * ranks
        assert torch.equal(zigzag_packed(torch.tensor([0, total]), ranks=ranks), zigzag(total, ranks=ranks))

    @pytest.mark.parametrize(("total", "ranks"), [(8, 2), (24, 3), (64, 8), (6, 1)])
    def test_zigzag_against_torch(self, total, ranks):
        theirs = _HeadTailLoadBalancer(total, ranks, "cpu")
        table = zigzag(total, ranks=ranks)
        assert torch.equal(table.reshape(1, -1), theirs._generate_indices().long())
        x = torch.randn(total)
        gathered = torch.cat([shard(x, row, dim=0) for row in table])
        assert torch.equal(gathered[theirs._generate_indices(restore=True)[0]], x)

    def test_every_rank_has_the_same_work_under_a_causal_mask(self):
        keys_seen = zigzag(48, ranks=4) + 1
        assert keys_seen.sum(1).unique().numel() == 1


class TestTogetherTheyAreTheWhole:
    """Gathering the shards of any tensor gives the tensor back, so no token is lost, doubled or moved."""

    @settings(max_examples=80, deadline=None)
    @given(
        st.sampled_from([*PLAIN, zigzag_packed]),
        st.integers(1, 4),
        st.lists(st.integers(0, 3), min_size=1, max_size=4),
        st.integers(-3, 2),
    )
    def test_any_tensor_and_positions(self, sharding, ranks, lengths, dim):
        cu = torch.tensor([0, *(2 * ranks * length for length in lengths)]).cumsum(0)
        total = int(cu[-1])
        table = sharding(cu, ranks=ranks) if sharding is zigzag_packed else sharding(total, ranks=ranks)
        shape = [2, 3, 5]
        shape[dim] = total
        whole = torch.randn(shape)
        parts = [shard(whole, table[rank], dim=dim) for rank in range(ranks)]
        assert torch.equal(unshard(parts, table, dim=dim), whole)
        assert torch.equal(unshard(torch.stack(parts), table, dim=dim), whole)
        for positions in (torch.arange(total), from_cu_seqlens(cu)):
            parts = [shard(positions, table[rank], dim=-1) for rank in range(ranks)]
            assert torch.equal(unshard(parts, table, dim=-1), positions)

    def test_positions_are_not_counted_anew_on_each_rank(self):
        for sharding in PLAIN:
            table = sharding(24, ranks=3)
            firsts = {int(shard(torch.arange(24), row, dim=0)[0]) for row in table}
            assert len(firsts) == 3

    def test_three_axes_and_a_batch(self):
        positions = torch.randint(0, 99, (3, 2, 12))
        table = zigzag(12, ranks=3)
        assert torch.equal(unshard([shard(positions, row, dim=-1) for row in table], table, dim=-1), positions)

    def test_gradients_come_back_to_their_tokens(self):
        whole = torch.randn(2, 8, requires_grad=True)
        table = zigzag(8, ranks=2)
        weight = torch.arange(8.0)
        (unshard([shard(whole, row, dim=1) for row in table], table, dim=1) * weight).sum().backward()
        assert torch.equal(whole.grad, weight.expand(2, -1))


class TestTablesAreMadeFromPositions:
    """No table of cos and sin is cut to fit a rank: a rank's rows are those of the whole, by position."""

    @pytest.mark.parametrize("sharding", PLAIN)
    def test_rows_of_the_whole_table(self, sharding):
        rotary = Rotary(head_dim=8, rope_theta=10000.0)
        positions = from_cu_seqlens(torch.tensor([0, 5, 24]))
        whole = rotary_tables(rotary, positions)
        for row in sharding(24, ranks=3):
            local = rotary_tables(rotary, shard(positions, row, dim=-1))
            assert torch.equal(local.cos, whole.cos[row])
            assert torch.equal(local.sin, whole.sin[row])


class TestDevicesAndGraphs:
    """Tables follow the device asked for, and can be made inside a graph."""

    def test_meta(self):
        for sharding in PLAIN:
            assert sharding(8, ranks=2, device="meta").device.type == "meta"
        assert zigzag_packed(torch.zeros(3, dtype=torch.int64, device="meta"), ranks=2, total=8).shape == (2, 4)

    def test_compiled(self):
        def work(x, cu):
            table = zigzag_packed(cu, ranks=2, total=8)
            return (
                unshard([shard(x, table[0], dim=0), shard(x, table[1], dim=0)], table, dim=0) + zigzag(8, ranks=2)[0, 0]
            )

        x, cu = torch.randn(8), torch.tensor([0, 4, 8])
        assert torch.equal(torch.compile(work, fullgraph=True, backend="eager")(x, cu), x)


class TestRefusals:
    """What does not divide is said, with the length to pad to; nothing is dropped at the end."""

    def test_lengths_that_do_not_divide(self):
        for sharding in (contiguous, striped):
            with pytest.raises(ValueError, match="total: got 9 tokens; a multiple of ranks = 4 is needed: pad to 12"):
                sharding(9, ranks=4)
        with pytest.raises(ValueError, match="total: got 12 tokens; a multiple of 2 x ranks = 8 is needed: pad to 16"):
            zigzag(12, ranks=4)
        message = "cu_seqlens: document 1 has 6 tokens; a multiple of 2 x ranks = 4 is needed: pad to 8"
        with pytest.raises(ValueError, match=message):
            zigzag_packed(torch.tensor([0, 4, 10, 12]), ranks=2)

    def test_others(self):
        table = contiguous(8, ranks=2)
        with pytest.raises(ValueError, match="ranks: got 0; it must be at least 1"):
            zigzag(8, ranks=0)
        with pytest.raises(ValueError, match="total: got a float; give a Python int"):
            contiguous(8.0, ranks=2)
        with pytest.raises(ValueError, match="shards: got 1; the sharding has 2 ranks"):
            unshard([torch.zeros(4)], table, dim=0)
        with pytest.raises(ValueError, match="shards: rank 1 has 3 tokens along dim 0; the sharding gives it 4"):
            unshard([torch.zeros(4), torch.zeros(3)], table, dim=0)
        with pytest.raises(ValueError, match="sharding: it does not hold each token from 0 on once"):
            unshard([torch.zeros(4), torch.zeros(4)], table.clamp(max=6), dim=0)
        with pytest.raises(ValueError, match=r"sharding: got shape \(8,\); it must be \(ranks, tokens of a rank\)"):
            unshard([torch.zeros(4), torch.zeros(4)], table.reshape(-1), dim=0)
        with pytest.raises(ValueError, match="cu_seqlens: ends at 8; it must end at the 12 tokens of the pack"):
            zigzag_packed(torch.tensor([0, 4, 8]), ranks=2, total=12)
        with pytest.raises(ValueError, match=r"indices: got shape \(2, 4\); it must be \(S,\)"):
            shard(torch.zeros(8), table, dim=0)
