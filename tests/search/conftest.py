"""Tiny models, made once; one thread, and transformers' log lines off."""

from __future__ import annotations

from tests.survey.conftest import calm, tiny_gemma3, tiny_llama  # noqa: F401
