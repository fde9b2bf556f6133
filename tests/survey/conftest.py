"""Tiny models, made once; one thread, and transformers' log lines off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.conftest import calm  # noqa: F401

from .folders import write_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny-gemma3", "gemma3")
