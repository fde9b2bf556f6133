"""One thread, also while what a module shares is made: sums of two threads round otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.models.conftest import calm  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
