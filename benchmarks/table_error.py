"""How far cos and sin are from the true values: ours, and angles in float32 as most libraries compute them.

Truth is float64 angles reduced by mpmath with 50 digits. 256 positions from each start, base 10,000, 128 channels.

    python benchmarks/table_error.py
"""

from __future__ import annotations

import mpmath
import numpy as np
import torch

from theodolite import Rotary, rotary_tables

STARTS = (8_192, 131_072, 1_048_576, 2**24 - 256)
THETA, DIM = 10_000, 128


def truth(positions: list[int]) -> np.ndarray:
    """cos and sin, shape (2, S, DIM/2), from 50-digit arithmetic."""
    with mpmath.workdps(50):
        frequencies = [mpmath.power(THETA, -mpmath.mpf(2 * i) / DIM) for i in range(DIM // 2)]
        angles = [[p * f for f in frequencies] for p in positions]
        return np.asarray([[[float(turn(a)) for a in row] for row in angles] for turn in (mpmath.cos, mpmath.sin)])


def float32_angles(positions: torch.Tensor) -> np.ndarray:
    """The usual way: inverse frequencies and their product with the positions in float32."""
    inv_freq = 1.0 / (THETA ** (torch.arange(0, DIM, 2, dtype=torch.float) / DIM))
    angles = positions[:, None].float() * inv_freq
    return torch.stack((angles.cos(), angles.sin())).double().numpy()


def main() -> None:
    rotary = Rotary(head_dim=DIM, rope_theta=THETA)
    print(f"{'position':>12} {'theodolite':>12} {'float32 angles':>16}")
    for start in STARTS:
        positions = torch.arange(start, start + 256, 8)
        true = truth(positions.tolist())
        ours = torch.stack(rotary_tables(rotary, positions)).double().numpy()
        errors = (np.abs(table - true).max() for table in (ours, float32_angles(positions)))
        print(f"{start:>12,} " + " ".join(f"{error:>13.1e}" for error in errors))


if __name__ == "__main__":
    main()
