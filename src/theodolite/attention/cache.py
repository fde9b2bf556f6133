"""Keys and values that are kept from call to call: each with its position, whatever slot it lies in.

Shapes: B batch, G key-value heads, H query heads, N slots, S new tokens, D channels of keys, E channels of values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from theodolite.attention.turning import Turning, plans_of, rows_alike, turning_of
from theodolite.encodings.policy import Policy
from theodolite.encodings.rotate.lengths import Lengths
from theodolite.encodings.rotate.rerotation import rerotate
from theodolite.encodings.rotate.rotary import RotaryEmbedding
from theodolite.encodings.shared import SharedTables
from theodolite.plan import Mask
from theodolite.positions.attention_sinks import AttentionSinks
from theodolite.positions.checks import require_count, require_integers, require_mask
from theodolite.positions.relative import LMInfinite, RelativeMap

_FIRST_ROOM = 64


class Kept(NamedTuple):
    """What attention reads: keys (B, G, N, D), values (B, G, N, E), positions and `real` (B, N), state or None."""

    k: Tensor
    v: Tensor
    positions: Tensor
    real: Tensor
    state: Tensor | None


class Cache:
    """The keys and values of one layer, growing, of fixed size, or of a sliding window with the first tokens kept.

    Slots mean nothing: attention goes by the positions that were given with the tokens, so that rows may differ in
    length, padding may stand anywhere, and what is dropped leaves no trace in what stays.

    Args:
        turned: keys are kept as they were turned, once. Without it they are kept as projected and turned when they are
            read: exact where frequencies change with a sequence's length, and needed by biases that read keys.
        follow_lengths: where a row's frequencies change with its length, turn the keys of that row again, rather than
            refuse: one more rotation and rounding of each, at every change.
        capacity: tokens (slots) that fit; one more is an error. None grows.
        window: of each row, only keys less than so many tokens behind the newest stay: what a mask with that
            `sliding_window` lets the next query see.
        sinks: with a window, keys at the positions below this number stay as well, and are seen (`sees`).
        margin: with a window, so many tokens more stay, so that a draft of as many can be taken back.

    A cache knows by which frequencies the keys of each row were turned, and refuses others.
    """

    def __init__(
        self,
        *,
        turned: bool = True,
        follow_lengths: bool = False,
        capacity: int | None = None,
        window: int | None = None,
        sinks: int = 0,
        margin: int = 0,
    ) -> None:
        for name, number in (("capacity", capacity), ("window", window)):
            if number is not None:
                require_count(name, number, least=1)
        require_count("sinks", sinks, least=0)
        require_count("margin", margin, least=0)
        if window is None and (sinks or margin):
            raise ValueError(f"window: got None with sinks={sinks} and margin={margin}, which are of a window")
        if follow_lengths and not turned:
            raise ValueError(
                "follow_lengths: got True with turned=False, whose keys follow the lengths as they are read"
            )
        self.turned, self.follow_lengths, self.capacity = turned, follow_lengths, capacity
        self.window, self.sinks, self.margin = window, sinks, margin
        self._buffers: list[Tensor] = []
        self._used = 0
        self._turned_by: Turning | None = None
        # Whether any key was turned at another position than the one that is kept.
        self._elsewhere = False
        # Of each row, the highest position that was dropped.
        self._dropped: Tensor | None = None

    def __len__(self) -> int:
        """Slots in use, those of padding included."""
        return self._used

    @property
    def seen(self) -> Tensor | None:
        """(B,): the position after the newest token of each row, 0 for none; None before the first tokens."""
        if not self._buffers:
            return None
        kept = self.kept()
        return (
            torch.where(kept.real, kept.positions + 1, 0).amax(-1)
            if self._used
            else kept.positions.new_zeros(len(kept.k))
        )

    def kept(self) -> Kept:
        """What is in it, views of its memory."""
        if not self._buffers:
            raise ValueError("cache: it is empty")
        views = [x[:, :, : self._used] for x in (*self._buffers[:2], *self._buffers[4:])]
        positions, real = (x[:, : self._used] for x in self._buffers[2:4])
        return Kept(views[0], views[1], positions, real, views[2] if len(views) > 2 else None)

    def sees(self, q_positions: Tensor) -> Tensor | None:
        """(B, S, N) booleans: which keys are no padding and, with a window, stand in it or are sinks; None for all.

        What a causal mask hides is for the policy to say.
        """
        kept = self.kept()
        visible = kept.real.unsqueeze(1)
        if self.window is not None:
            q = torch.atleast_2d(q_positions).long().unsqueeze(-1)
            k = kept.positions.unsqueeze(1)
            visible = visible & ((q - k < self.window) | (k < self.sinks))
        return None if bool(visible.all()) else visible

    def require_sees(self, mask: Mask, relative: RelativeMap | None = None) -> None:
        """Raise where a layer with this mask, or this map of distances, sees keys that a window drops, or hides sinks.

        A layer that sees everything is let have a window: what it sees is then what the cache has.
        """
        if self.window is None:
            return
        if isinstance(relative, (AttentionSinks, LMInfinite)):
            if self.window < relative.window or self.sinks < relative.sinks:
                raise ValueError(
                    f"cache: its window of {self.window} and {self.sinks} sinks drop keys that {relative} shows"
                )
        elif relative is not None:
            raise ValueError(f"cache: {relative} shows all keys, and a window drops some; use Cache(turned=False)")
        elif mask.reach is not None and self.window <= mask.reach:
            raise ValueError(f"cache: its window of {self.window} drops keys that {mask} shows")
        elif mask.reach is not None and self.sinks:
            raise ValueError(f"cache: {mask} hides the {self.sinks} sinks; give a mask without a window, or no sinks")

    def append(
        self,
        policy: Policy,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        *,
        real: Tensor | None = None,
        state: Tensor | None = None,
        tables: SharedTables | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        """Add new tokens, as projected: k (B, G, S, D) and v (B, G, S, E).

        Args:
            policy: turns them, where they are kept turned.
            positions: (S,) or (B, S), integers.
            real: (S,) or (B, S), not 0 at tokens that are no padding; all by default.
            state: (B, H, S, ...), what the bias keeps of each token.
            tables: those of this forward; made of `positions` by default. They may be of others (the axes of pictures):
                what is seen goes by `positions`, and such keys cannot be turned again.
            lengths: as in `RotaryEmbedding.tables`; those of `tables` by default.

        Raises:
            ValueError: other frequencies than those of the keys in it, more tokens than fit, or keys that ask for a
                gradient.
        """
        batch, _, tokens, _ = k.shape
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError("cache: keys and values ask for a gradient, which it does not keep; use torch.no_grad()")
        require_integers("positions", positions, dims=(1, 2))
        at = _of_each("positions", positions, batch, tokens).long().to(k.device)
        if real is None:
            is_real = torch.ones_like(at, dtype=torch.bool)
        else:
            require_mask("real", real, dims=(1, 2))
            is_real = _of_each("real", real, batch, tokens).ne(0).to(k.device)
        self._require_alike(k, v)
        turning, rows = self._turned_so(policy, lengths, tables, batch) if self.turned else (None, [])
        if self.capacity is not None and self._used + tokens > self.capacity:
            raise ValueError(
                f"cache: {self._used} of its {self.capacity} slots are in use, and {tokens} tokens are to come; give a "
                "larger capacity, none, or a window"
            )
        if self.turned:
            tables = SharedTables(positions, lengths=lengths, device=k.device) if tables is None else tables
            _, k = policy.turn(None, k, tables)
            v = policy.turn_values(v, tables)
            elsewhere = tables.positions is not positions and not _same_places(tables.positions, at)
        new = [k, v, at, is_real, *(() if state is None else (state,))]
        if not self._buffers:
            self._buffers = [
                x.new_empty(*x.shape[: _token_axis(i)], 0, *x.shape[_token_axis(i) + 1 :]) for i, x in enumerate(new)
            ]
        if len(new) != len(self._buffers):
            raise ValueError("state: it is kept of every token, or of none")
        if turning is not None:
            self._turn_again(rows, turning)
            self._elsewhere = (self._used > 0 and self._elsewhere) or elsewhere
        self._make_room(tokens, new)
        for number, (buffer, x) in enumerate(zip(self._buffers, new, strict=True)):
            buffer.narrow(_token_axis(number), self._used, tokens).copy_(x)
        self._used += tokens

    def evict(self) -> None:
        """Drop what no query to come can see; after the queries of the newest tokens have attended."""
        if self.window is None or not self._used:
            return
        kept, seen = self.kept(), self.seen
        assert seen is not None
        # The next query stands at `seen`, or with a draft taken back up to a margin before.
        stays = kept.real & (
            (kept.positions >= (seen - self.margin - self.window + 1).unsqueeze(-1)) | (kept.positions < self.sinks)
        )
        gone = torch.where(kept.real & ~stays, kept.positions, -1).amax(-1)
        self._dropped = gone if self._dropped is None else torch.maximum(self._dropped, gone)
        self._keep(stays)

    def truncate(self, length: int | Tensor) -> None:
        """Keep of each row the tokens at positions below `length`, a number or (B,): a draft is taken back.

        Raises:
            ValueError: keys that the next query would see were dropped already.
        """
        kept = self.kept()
        limit = torch.as_tensor(length, device=kept.positions.device)
        fits = limit.dim() == 0 or (limit.dim() == 1 and len(limit) == len(kept.k))
        if not fits or limit.is_floating_point() or bool((limit < 0).any()):
            raise ValueError(
                f"length: got {length!r}; give a whole number of at least 0, or one for each of the {len(kept.k)} rows"
            )
        limit = limit.expand(len(kept.k))
        if self._dropped is not None and self.window is not None:
            # Of what is taken back nothing is missed; of the rest what the next query sees.
            before = torch.minimum(self._dropped, limit - 1)
            lost = before > (limit - self.window).clamp(min=self.sinks - 1)
            if bool(lost.any()):
                row = int(lost.nonzero()[0])
                raise ValueError(
                    f"length: got {int(limit[row])} for row {row}, whose keys up to position "
                    f"{int(self._dropped[row])} are gone from a window of {self.window}; give the cache a margin of as "
                    "many tokens as a draft has"
                )
        self._keep(kept.real & (kept.positions < limit.unsqueeze(-1)))
        self._dropped = None if self._dropped is None else torch.minimum(self._dropped, limit - 1)

    def move(self, by: int) -> None:
        """Let all tokens stand `by` further on: a prefix that is used again at another offset.

        Raises:
            ValueError: keys that were turned by what is no `RotaryEmbedding` cannot be moved.
        """
        kept, turning = self.kept(), self._turned_by
        if turning is not None and turning.rotate is not None:
            plans = plans_of("move", turning, len(kept.k))
            moved = [
                (x, rows, rerotate(x[rows], rotary=plan, by=by, inplace=True))
                for (plan, _), rows in rows_alike(plans, plans, range(len(plans)))
                for x in (kept.k, *([kept.v] if turning.values else []))
            ]
            for x, rows, turned in moved:
                x[rows] = turned
        kept.positions.add_(by)
        if self._dropped is not None:
            self._dropped = torch.where(self._dropped >= 0, self._dropped + by, self._dropped)

    def turn_to(self, policy: Policy, *, lengths: Lengths | None = None) -> None:
        """Turn the keys of each row from the frequencies that they have to those of `policy`, where they are.

        Each key is rotated once, by the difference of its two angles (`rerotate`); rows whose frequencies are the same
        are not touched.

        Args:
            lengths: the tokens of each row's whole sequence, where the frequencies of `policy` depend on it.

        Raises:
            ValueError: either is no `RotaryEmbedding`; keys that were turned at other positions than those kept, of
                several axes for example; lengths that are missing, or not one for each row.
        """
        if not self.turned or not self._buffers:
            return
        rows = len(self._buffers[0])
        new = turning_of(policy, lengths, rows)
        if not isinstance(new.rotate, RotaryEmbedding) or (new.lengths is None and new.rotate.rotary.depends_on_length):
            raise ValueError(
                f"policy: got {policy}; keys are turned again to a RotaryEmbedding, and where its frequencies depend "
                "on the length, give lengths="
            )
        self._turn_again(self._rows_of_others(new, rows), new)

    def select(self, rows: Tensor) -> None:
        """Its rows in another order, or some of them again and again (beams): rows (B',), integers."""
        require_integers("rows", rows, dims=(1,))
        self._buffers = [x.index_select(0, rows.to(x.device)) for x in self._buffers]
        if self._turned_by is not None and self._turned_by.lengths is not None:
            lengths = self._turned_by.lengths
            self._turned_by = self._turned_by._replace(lengths=tuple(lengths[row] for row in rows.tolist()))
        self._dropped = None if self._dropped is None else self._dropped[rows]

    def last_state(self) -> Tensor | None:
        """(B, H, ...): the state of each row's newest token, for `Bias.state(x, previous)`; None without any."""
        if len(self._buffers) < 5 or not self._used:
            return None
        kept = self.kept()
        assert kept.state is not None
        newest = torch.where(kept.real, kept.positions, -1).argmax(-1)
        return kept.state[torch.arange(len(newest), device=newest.device), :, newest]

    def _require_alike(self, k: Tensor, v: Tensor) -> None:
        """Raise where new keys or values are not of the kind that the cache has: of another layer or model."""
        for name, x, buffer in zip("kv", (k, v), self._buffers, strict=False):
            if x.shape[:2] != buffer.shape[:2] or x.shape[3] != buffer.shape[3] or x.dtype != buffer.dtype:
                mine = f"({buffer.shape[0]}, {buffer.shape[1]}, S, {buffer.shape[3]}), {buffer.dtype}"
                raise ValueError(f"{name}: got shape {tuple(x.shape)}, {x.dtype}; the cache has {mine}")

    def _keep(self, stays: Tensor) -> None:
        """The slots of (B, N) that stay, moved together; rows that keep fewer end in padding."""
        if bool(stays.all()):
            return
        count = int(stays.sum(-1).max())
        order = (~stays).to(torch.uint8).argsort(dim=-1, stable=True)[:, :count]
        kept = [x.narrow(_token_axis(i), 0, self._used) for i, x in enumerate(self._buffers)]
        real = stays.gather(1, order)
        for number, x in enumerate(kept):
            axis = _token_axis(number)
            index = (
                order
                if axis == 1
                else order.view(len(order), 1, count, *(1,) * (x.dim() - 3)).expand(-1, x.shape[1], -1, *x.shape[3:])
            )
            self._buffers[number].narrow(axis, 0, count).copy_(real if number == 3 else x.gather(axis, index))
        self._used = count

    def _make_room(self, tokens: int, new: list[Tensor]) -> None:
        room = self._buffers[2].shape[1]
        needed = self._used + tokens
        if needed <= room:
            return
        # Doubled, so that a token costs the same however long the sequence.
        size = self.capacity if self.capacity is not None else max(needed, 2 * room, _FIRST_ROOM)
        grown = []
        for number, (buffer, x) in enumerate(zip(self._buffers, new, strict=True)):
            axis = _token_axis(number)
            larger = x.new_zeros(*x.shape[:axis], size, *x.shape[axis + 1 :])
            larger.narrow(axis, 0, self._used).copy_(buffer.narrow(axis, 0, self._used))
            grown.append(larger)
        self._buffers = grown

    def _turned_so(
        self, policy: Policy, lengths: Lengths | None, tables: SharedTables | None, batch: int
    ) -> tuple[Turning, list[int]]:
        """How new keys are turned, and the rows whose keys must be turned again to it.

        Raises:
            ValueError: these keys and those in the cache would be mixed.
        """
        bias = policy.bias
        if policy.rotate is not None and bias is not None and "k" in bias.reads:
            raise ValueError(
                f"cache: {type(bias).__name__} reads keys as they were before turning; use Cache(turned=False)"
            )
        turning = turning_of(policy, lengths if tables is None or lengths is not None else tables.lengths, batch)
        if tables is not None and tables.lengths is not lengths and turning.lengths is not None:
            made = turning_of(policy, tables.lengths, batch).lengths
            if made != turning.lengths:
                raise ValueError(f"tables: they are of lengths {made}; lengths are {turning.lengths}")
        rows = self._rows_of_others(turning, batch)
        old = self._turned_by
        if rows and not (self.follow_lengths and old is not None and old.same_rotation(turning)):
            raise ValueError(
                f"cache: its keys were turned by {old}, and this layer turns by {turning}; use Cache(turned=False) "
                "where frequencies change, Cache(follow_lengths=True) where they follow the length, or "
                "cache.turn_to(policy) to turn them again"
            )
        return turning, rows

    def _rows_of_others(self, turning: Turning, batch: int) -> list[int]:
        """The rows with keys of other frequencies than those of `turning`."""
        old = self._turned_by
        if old is None or not self._used or old == turning:
            return []
        before, after = old.plans(batch), turning.plans(batch)
        if before is None or after is None or old.values != turning.values:
            rows = [] if old.same_rotation(turning) and old.lengths == turning.lengths else list(range(batch))
        else:
            rows = [row for row in range(batch) if before[row] != after[row]]
        # A row that was emptied has nothing to mix.
        return [row for row in rows if bool(self.kept().real[row].any())]

    def _turn_again(self, rows: list[int], turning: Turning) -> None:
        """Turn the keys of these rows from what they have to `turning`, which holds for all rows from now on."""
        old = self._turned_by
        if rows and old is not None:
            kept = self.kept()
            before, after = (plans_of("cache", one, len(kept.k)) for one in (old, turning))
            if old.values != turning.values:
                raise ValueError("policy: rotate_values differs from that of the keys and values in the cache")
            if self._elsewhere:
                raise ValueError(
                    "cache: its keys were turned at other positions than it keeps (several axes, or tables of others), "
                    "and cannot be turned again; feed the sequence anew"
                )
            again = []
            for (one, other), alike in rows_alike(before, after, rows):
                at = kept.positions[alike]
                again.append((kept.k, alike, rerotate(kept.k[alike], old=one, new=other, positions=at, inplace=True)))
                if old.values:
                    v = rerotate(kept.v[alike], old=one, new=other, positions=at, amplitude=False, inplace=True)
                    again.append((kept.v, alike, v))
            # All are worked out before any is written: an error leaves the cache as it was.
            for x, alike, turned in again:
                x[alike] = turned
        self._turned_by = turning


def _token_axis(number: int) -> int:
    """Of the buffers k, v, positions, real, state."""
    return 1 if number in (2, 3) else 2


def _of_each(name: str, x: Tensor, batch: int, tokens: int) -> Tensor:
    """(S,), (1, S) or (B, S) for each row."""
    rows: Tensor = torch.atleast_2d(x)
    if rows.shape[1] != tokens or rows.shape[0] not in (1, batch):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}; {batch} rows of {tokens} tokens are added")
    return rows.expand(batch, tokens)


def _same_places(positions: Tensor, kept: Tensor) -> bool:
    """Whether (S,) or (B, S) are those of (B, S); several axes never are."""
    return positions.dim() < 3 and bool((positions.to(kept.device) == kept).all())
