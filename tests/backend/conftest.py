"""The real bundled model, for what only it can show; see tests/engine/conftest.py."""

from __future__ import annotations

from tests.engine.conftest import loaded, make_engine, model_path, reference

__all__ = ["loaded", "make_engine", "model_path", "reference"]
