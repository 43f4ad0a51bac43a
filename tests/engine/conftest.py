from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from serve_app.engine.grammar.compiler import GrammarCompiler


@pytest.fixture(scope="session")
def bundled_compiler(bundled_tokenizer: Any) -> Iterator[GrammarCompiler]:
    """Compiles for the bundled model's tokenizer, whose tables take a second to make."""
    from serve_app.engine.grammar.compiler import GrammarCompiler

    compiler = GrammarCompiler(bundled_tokenizer, len(bundled_tokenizer), frozenset({bundled_tokenizer.eos_token_id}))
    yield compiler
    compiler.close()


@pytest.fixture
def copied_kernels(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Copies the tests' own kernels wherever kernels would be compiled; the copies made."""
    from serve_app.engine.config import EngineSettings
    from serve_app.engine.models.choose_runner import native_folder
    from serve_app.engine.models.native import library

    folder, copies = native_folder(EngineSettings(model="none")), list[Path]()
    if library.load(folder) is not None:
        ready = folder / library._name(library._compiler(), "native")

        def copy(compiler: str, architecture: str, path: Path) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            copies.append(Path(shutil.copyfile(ready, path)))

        monkeypatch.setattr(library, "_compile", copy)
    return copies
