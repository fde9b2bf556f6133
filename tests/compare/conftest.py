"""One thread: models here are too small for two."""

from __future__ import annotations

from tests.models.conftest import calm  # noqa: F401
