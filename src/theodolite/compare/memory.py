"""What a step of training keeps until its gradient is there: the memory by which policies differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from theodolite.compare.batch import IGNORE, Batch


def kept_for_backward(model: nn.Module, batch: Batch) -> int:
    """Bytes of the tensors that the forward of a batch keeps for its backward, each counted once, weights left out.

    A count and not a reading of the process: the same on every machine and in every order of runs.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def give(tensor: Any) -> Any:
        return tensor

    device = next(model.parameters()).device
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, give):
        logits = model(batch.ids.to(device), batch.positions.to(device))
        loss = cross_entropy(logits.float().flatten(0, 1), batch.targets.to(device).flatten(), ignore_index=IGNORE)
    # While the loss lives nothing that it keeps is let go of, so no address stands for two tensors.
    del loss
    return sum(kept.values())
