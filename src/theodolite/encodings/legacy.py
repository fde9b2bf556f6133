"""Keys that older modules left in checkpoints although they are derived from the config."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn


def drop_legacy_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Take the keys that `module.legacy_keys` names out of a state dict that is being loaded, with a note."""
    found = [key for key in getattr(module, "legacy_keys", ()) if prefix + key in state_dict]
    for key in found:
        del state_dict[prefix + key]
    if found:
        warnings.warn(
            f"{type(module).__name__}: the checkpoint's {', '.join(found)} is not read: it is computed from the "
            "arguments of this module, exactly",
            stacklevel=4,
        )
