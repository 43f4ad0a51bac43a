"""The images' contents: installed into new environments by the Dockerfiles' own steps, they do their work.

Without the base image and Debian's packages. torch is the build for this machine; that for CUDA is not installed here,
and `make test-vllm` installs what Dockerfile.vllm does, with the CPU build of vLLM.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from serve_app.cli.node_certificates import FILES

from .certificate_rules import COMMAND
from .checks import REPOSITORY
from .test_images import ENGINE, STARTED, constraints, instructions

pytestmark = [pytest.mark.slow, pytest.mark.long]

# A ledger with its schema, the console with its pages, the boards: what is more than Python files of the package.
GATEWAY = """
import importlib, sys
for module in sys.argv[1].split(","):
    importlib.import_module(module)
from importlib.resources import files
from serve_app.accounting.ledger import Ledger
from serve_app.console.web import TEMPLATES
Ledger("sqlite:///ledger.db").close()
assert TEMPLATES.list_templates()
assert len([file for file in files("serve_app.boards").iterdir() if file.name.endswith(".json")]) == 5
"""
# The bundled model's first reply, as a replica makes it before it is healthy.
MODEL = """
import asyncio, sys
import deployments.model
from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine
from serve_app.model.dialect import Dialect
from serve_app.model.warm_up import warm_up
engine = Engine.from_settings(EngineSettings(model=sys.argv[1], cache_dir=".", kv_cache_memory="64MiB"))
asyncio.run(warm_up(engine, Dialect(engine.chat)))
engine.close()
"""


OF_ALL = ("pip", "setuptools", "uv", "serve-app")


class Image:
    """The result of a Dockerfile, built in the test's own folders."""

    def __init__(self, dockerfile: str, folder: Path) -> None:
        self._bin = folder / "venv" / "bin"
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        self._workdir = folder / "serve-app"
        self._workdir.mkdir()
        self.elsewhere = folder / "elsewhere"  # what runs here finds the installed package alone
        self.elsewhere.mkdir()
        for word, text in instructions(dockerfile):
            if word == "COPY":
                *sources, target = text.split()
                for source in sources:
                    self._copy(REPOSITORY / source, self._workdir / target)
            elif word == "RUN" and text.startswith(("pip ", "uv pip ")):
                here = text.replace("--system", f"--python {self._bin / 'python'}")
                self.run("bash", "-c", here.replace("pip install", "pip install --quiet", 1), cwd=self._workdir)

    def _copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Runs a command and returns what it prints."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment = {**kept, "PATH": f"{self._bin}:/usr/bin:/bin", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = subprocess.run(
            command, cwd=cwd or self.elsewhere, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def distributions(self) -> dict[str, str]:
        """Versions by name, without what every environment has."""
        found = json.loads(self.run("pip", "list", "--format", "json"))
        versions = {canonicalize_name(one["name"]): one["version"] for one in found}
        return {name: version for name, version in versions.items() if name not in OF_ALL}

    def make_certificate(self) -> None:
        """As the init container of every pod."""
        self.run("serve-app", "cluster", "certificates", "--out=authority")
        self.run(*COMMAND, "--authority=authority", "--to=tls", "10.0.0.7")
        assert {path.name for path in (self.elsewhere / "tls").iterdir()} == set(FILES.values())


def pinned() -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in constraints().items()}


def test_the_gateways_image_has_what_was_tested_no_torch_and_all_files(tmp_path: Path) -> None:
    image = Image("Dockerfile.gateway", tmp_path)
    there = image.distributions()
    assert there.items() <= pinned().items(), there.items() - pinned().items()
    assert not ENGINE & there.keys()
    assert not [name for name in there if name.startswith(("nvidia", "triton"))]
    image.run("python", "-c", GATEWAY, ",".join(STARTED))
    assert "accounts" in image.run("serve-app", "--help")
    image.make_certificate()


def test_the_model_image_has_what_was_tested_and_replies(tmp_path: Path, model_path: Path) -> None:
    image = Image("Dockerfile", tmp_path)
    there = image.distributions()
    unknown = {name: version for name, version in there.items() if pinned().get(name) != version.partition("+")[0]}
    assert {name for name in unknown if not name.startswith(("nvidia", "triton"))} == set()
    image.run("python", "-c", MODEL, str(model_path))
    image.make_certificate()
