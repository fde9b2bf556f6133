"""One thread, also while what a module shares is made, and no accelerator left to the tests of others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.models.conftest import calm  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    # Sums of two threads round otherwise.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def own_accelerator() -> Iterator[None]:
    yield
    # A process has one precision, the first that was asked for.
    AcceleratorState._reset_state(reset_partial_state=True)
