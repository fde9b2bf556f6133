"""What is learned of positions is kept in full precision, in a model of half precision too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class FullPrecision(nn.Module):
    """A module whose parameters a cast of the model cannot narrow.

    An angle is a frequency times a position: a frequency rounded to bfloat16 (1 part in 512) is off by a whole radian
    some hundreds of radians on. So `.half()`, `.bfloat16()` and `.to(dtype)` move the parameters to the device that
    they say, and leave them float32, or float64 after `.double()`; `.float()` goes back. A checkpoint in half
    precision is loaded by its values, into float32, with `assign=True` too.

    What casts parameters elsewhere is not seen here: a mixed-precision policy of FSDP with `param_dtype`, or a
    parameter replaced by hand.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def kept(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            return tensor.to(applied.device) if _narrows(tensor, applied.dtype) else applied

        return super()._apply(kept, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        # A copy into a parameter keeps the dtype of the parameter; an assignment would not.
        if local_metadata.get("assign_to_params_buffers", False):
            for name, parameter in self._parameters.items():
                given = state_dict.get(prefix + name)
                if parameter is not None and isinstance(given, Tensor) and _narrows(parameter, given.dtype):
                    state_dict[prefix + name] = given.to(torch.float32)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def _narrows(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype in (torch.float32, torch.float64) and dtype.is_floating_point and dtype.itemsize < 4
