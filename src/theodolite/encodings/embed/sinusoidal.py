"""Sines and cosines of the position, in every layout in use, exact at any position."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from theodolite.encodings.embed.base import Embed
from theodolite.encodings.rotate.tables import pair_tables
from theodolite.positions.checks import require_count


class Sinusoidal(Embed):
    """PE(p) has sin(p w_i) and cos(p w_i) for each pair i of channels ("Attention Is All You Need", section 3.5).

    Any position has a vector: negative, fractional (float64), up to 2**24 either way; every entry is within 6e-8 of
    the true value. There is no buffer to cast, re-initialise or store, and no length. The table that an older module
    stored (`weight`, `pe`, ...) is compared when it is loaded, and dropped with a note if it says the same: one that
    was learned, or laid out in another way, is refused.

    Args:
        dim: channels. An odd width has a sine more than cosines.
        layout: "interleaved" is sin, cos, sin, cos (the paper, XLM); "halves" is all sines, then all cosines.
        spacing: w_i of n pairs. "paper" is base^(-2i/dim): the slowest is a little faster than 1/base (XLM, Marian,
            Pegasus, RoFormer, Transformer-XL). "tensor2tensor" is base^(-i/(n-1)): the slowest is 1/base (fairseq,
            M2M100, Whisper, PEGASUS-X, Speech2Text, MusicGen); there, as in those, an odd width ends in a channel of
            zeros.
        base: 10000 in the paper; at least 1, for a pair that turns faster than a radian a token would not be exact.
        cos_first: cosines stand where sines do otherwise (MusicGen, diffusion timesteps).
        offset: added to every position. fairseq and what descends from it count from padding_idx + 1 (M2M100: 2).
        strength: multiplies the vectors.
        learn_strength: `strength` is where a learned number begins (the scaled encoding of arXiv 1809.08895).
        channels: as in `Embed`.

    Example:
        >>> import torch
        >>> encoding = Sinusoidal(512)
        >>> x = encoding(torch.randn(2, 5, 512), torch.arange(5))
    """

    legacy_keys = (
        *Embed.legacy_keys,
        "weight",
        "weights",
        "pe",
        "pos_table",
        "positional_embedding",
        "inv_freq",
        "_float_tensor",
    )
    _stored_tables = ("weight", "weights", "pe", "pos_table", "positional_embedding")

    def __init__(
        self,
        dim: int,
        *,
        layout: Literal["interleaved", "halves"] = "interleaved",
        spacing: Literal["paper", "tensor2tensor"] = "paper",
        base: float = 10000.0,
        cos_first: bool = False,
        offset: int = 0,
        strength: float = 1.0,
        learn_strength: bool = False,
        channels: slice | None = None,
    ) -> None:
        super().__init__(dim, channels=channels)
        _require_choice("layout", layout, ("interleaved", "halves"))
        _require_choice("spacing", spacing, ("paper", "tensor2tensor"))
        _require_number("base", base, least=1.0)
        _require_number("strength", strength)
        require_count("offset", offset, least=0)
        if spacing == "tensor2tensor" and dim < 2:
            raise ValueError("dim: got 1; spacing 'tensor2tensor' needs a pair of channels at least")
        self.layout, self.spacing, self.base = layout, spacing, float(base)
        self.cos_first, self.offset = cos_first, offset
        # Plain numbers: no cast finds them, and a compiled graph carries them as constants.
        self._inv_freq = _inv_freq(dim, spacing, self.base)
        self._first_strength = float(strength)
        self.strength: float | nn.Parameter = self._first_strength
        if learn_strength:
            # One dimension, for sharded training refuses parameters without any.
            self.strength = nn.Parameter(torch.empty(1))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if isinstance(self.strength, Tensor):
            nn.init.constant_(self.strength, self._first_strength)

    def inv_freq(self) -> tuple[float, ...]:
        """w_i, radians per token, one for each pair."""
        return self._inv_freq

    def shift_matrix(self, k: float, *, dtype: torch.dtype = torch.float64) -> Tensor:
        """M(k) with PE(p + k) = M(k) PE(p) for every p: (dim, dim), on the CPU.

        A rotation of each pair: M(k) M(l) = M(k + l), and the transpose is the inverse.

        Raises:
            ValueError: an odd width with the paper's spacing: what the last sine turns into is a cosine that is
                not there.
        """
        if self.dim < 2 * len(self._inv_freq):
            raise ValueError(
                f"dim: got {self.dim}; in an odd width the last {'cosine' if self.cos_first else 'sine'} stands alone, "
                "and no matrix moves it"
            )
        pairs = len(self._inv_freq)
        channels = torch.arange(2 * pairs, device="cpu")
        halves = self.layout == "halves"
        first, second = channels.reshape(2, pairs) if halves else channels.reshape(pairs, 2).unbind(1)
        sin, cos = (second, first) if self.cos_first else (first, second)
        angles = torch.tensor(self._inv_freq, dtype=torch.float64, device="cpu") * k
        matrix = torch.eye(self.dim, dtype=torch.float64, device="cpu")
        matrix[sin, sin] = matrix[cos, cos] = angles.cos()
        matrix[sin, cos] = angles.sin()
        matrix[cos, sin] = -angles.sin()
        return matrix.to(dtype)

    def _table(self, positions: Tensor, device: torch.device | str | None) -> Tensor:
        device = positions.device if device is None else device
        if self.offset:
            # Fractions are moved in float64, which some devices lack.
            whole = not positions.is_floating_point()
            positions = (positions.to(torch.int64) if whole else positions.to("cpu", torch.float64)) + self.offset
        if isinstance(self.strength, Tensor):
            if self.strength.is_meta and torch.device(device).type != "meta":
                raise ValueError("strength: it is on the meta device and has no value; load it first")
            table = self._vectors(positions, 1.0, device)
            return table * self.strength.to(table.device, torch.promote_types(self.strength.dtype, torch.float32))
        return self._vectors(positions, self.strength, device)

    def _vectors(self, positions: Tensor, strength: float, device: torch.device | str) -> Tensor:
        cos, sin = pair_tables(self._inv_freq, positions, amplitude=strength, device=device)
        first, second = (cos, sin) if self.cos_first else (sin, cos)
        if self.layout == "interleaved":
            table = torch.stack((first, second), dim=-1).flatten(-2)[..., : self.dim]
        else:
            table = torch.cat((first, second[..., : self.dim - len(self._inv_freq)]), dim=-1)
        return nn.functional.pad(table, (0, self.dim - table.shape[-1]))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for key in self._stored_tables:
            stored = state_dict.get(prefix + key)
            if isinstance(stored, Tensor) and not stored.is_meta and not self._says_the_same(stored):
                error_msgs.append(
                    f"{prefix}{key}: the checkpoint's table of shape {tuple(stored.shape)} is not that of {self!r}; if "
                    "it was learned, load it into LearnedEmbedding; else layout, spacing, base or cos_first differ"
                )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _says_the_same(self, stored: Tensor) -> bool:
        """Whether a stored table (..., rows, dim) is this encoding, by row from position 0."""
        if not stored.dim() or stored.shape[-1] != self.dim:
            return False
        given = stored.detach().to("cpu", torch.float32).reshape(-1, self.dim)
        rows = torch.arange(len(given), device="cpu")
        true = self._vectors(rows, 1.0, "cpu")
        # Stored in bfloat16 at worst; made of float32 angles, which go wrong with the position.
        allowed = 2.0**-8 + rows[:, None] * 2.0**-21
        for strength in {1.0, self._first_strength}:
            others = given[~((given - strength * true).abs() <= abs(strength) * allowed).all(-1)]
            # The row of the padding was set to 0: one of several.
            if not len(others) or (len(others) == 1 < len(given) and not others.any()):
                return True
        return False

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), f"layout={self.layout!r}", f"spacing={self.spacing!r}", f"base={self.base:g}"]
        parts += ["cos_first=True"] if self.cos_first else []
        parts += [f"offset={self.offset}"] if self.offset else []
        if isinstance(self.strength, Tensor):
            parts.append("learn_strength=True")
        elif self.strength != 1.0:
            parts.append(f"strength={self.strength:g}")
        return ", ".join(parts)


def _inv_freq(dim: int, spacing: str, base: float) -> tuple[float, ...]:
    if spacing == "paper":
        return tuple(base ** (-2 * i / dim) for i in range((dim + 1) // 2))
    pairs = dim // 2
    return tuple(base ** (-i / max(pairs - 1, 1)) for i in range(pairs))


def _require_choice(name: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ValueError(f"{name}: got {given!r}; it must be {' or '.join(map(repr, choices))}")


def _require_number(name: str, given: float, *, least: float = -math.inf) -> None:
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not number or not least <= given < math.inf or given == -math.inf:
        rule = "a finite number" if least == -math.inf else f"a finite number of at least {least:g}"
        raise ValueError(f"{name}: got {given!r}; it must be {rule}")
