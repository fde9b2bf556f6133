"""Where the tensors of a bias are, checked in the same words everywhere: torch's own name no argument."""

from __future__ import annotations

from torch import Tensor, nn


def require_beside(module: nn.Module, learned: Tensor, **given: Tensor) -> None:
    """Refuse what is on another device than the parameters that it meets.

    Args:
        learned: one of the parameters of `module`.
        given: tensors by the caller's names.

    Raises:
        ValueError: as said, with both devices.
    """
    for name, tensor in given.items():
        if tensor.device != learned.device:
            raise ValueError(
                f"{name}: got a tensor on {tensor.device}, and the parameters of {type(module).__name__} are on "
                f"{learned.device}; put both on one device"
            )
