"""The images: pinned, not root, made of what .dockerignore lets in; the gateway's has all that its processes import."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .checks import CLUSTER, REPOSITORY

FILES = ["Dockerfile", "Dockerfile.gateway", "Dockerfile.vllm"]
PYTHON = re.compile(r"python:3\.\d+\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?")
ENGINE = {"torch", "transformers", "accelerate", "gguf", "llguidance", "safetensors"}
# What runs on the gateway's image: the deployments, the builders of all applications, the autoscaling policy.
STARTED = (
    "deployments.gateway", "deployments.limiter", "deployments.accounting", "deployments.apps",
    "deployments.applications", "deployments.autoscaling", "deployments.model", "deployments.routing",
    "serve_app.cli.__main__", "serve_app.cli.node_certificates",
)  # fmt: skip
# Imports with only what the named distributions require, as if no other were installed.
IMPORT = """
import importlib, sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from importlib.util import find_spec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
wanted, todo = set(), [Requirement(one) for one in sys.argv[2].split(";")]
while todo:
    one = todo.pop()
    key = (canonicalize_name(one.name), *sorted(one.extras))
    if key in wanted:
        continue
    wanted.add(key)
    try:
        required = distribution(one.name).requires or []
    except PackageNotFoundError:
        continue
    for text in required:
        needed = Requirement(text)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *one.extras)):
            todo.append(needed)
brought_by_ray = {path.name for path in (Path(find_spec("ray").origin).parent / "thirdparty_files").iterdir()}
names = {key[0] for key in wanted} | {"serve-app", "setuptools", "pip"}
hidden = {
    module for module, owners in packages_distributions().items()
    if not {canonicalize_name(owner) for owner in owners} & names
} - brought_by_ray
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
assert "torch" in hidden and "transformers" in hidden, sorted(hidden)
sys.meta_path.insert(0, Hidden())
for module in sys.argv[1].split(","):
    importlib.import_module(module)
"""


def instructions(name: str) -> list[tuple[str, str]]:
    text = (CLUSTER / name).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(" ", 1)[0], " ".join(line.split(" ", 1)[1].split())) for line in lines]


def gateway_requirements() -> list[str]:
    (line,) = [text for word, text in instructions("Dockerfile.gateway") if word == "RUN" and "--constraint" in text]
    return [one.strip('"') for one in line.split("constraints.txt ")[1].split()]


def constraints() -> dict[str, str]:
    text = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE))


@pytest.mark.parametrize("name", FILES)
def test_an_image_runs_without_root_and_installs_what_was_tested(name: str) -> None:
    steps = instructions(name)
    assert [text for word, text in steps if word == "USER"][-1] == "1000:1000"
    for _, text in steps:
        if "pip install" in text and not re.fullmatch(r"pip install --no-cache-dir uv==[\d.]+", text):
            assert "--constraint constraints.txt" in text or "--no-deps" in text, text
    assert "index-url" not in str(steps)
    assert ":latest" not in str(steps)


def test_the_driver_is_found_where_container_toolkits_and_google_mount_it() -> None:
    given = dict(
        one.split("=", 1) for word, text in instructions("Dockerfile") if word == "ENV" for one in text.split()
    )
    assert given["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert set(given["NVIDIA_DRIVER_CAPABILITIES"].split(",")) >= {"compute", "utility"}
    assert given["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"


def test_all_images_have_one_python() -> None:
    bases = {name: [text for word, text in instructions(name) if word == "FROM"] for name in FILES}
    assert bases["Dockerfile"] == bases["Dockerfile.gateway"]
    assert PYTHON.fullmatch(bases["Dockerfile"][0])
    assert bases["Dockerfile.vllm"] == ["${BASE}"]


@pytest.mark.parametrize(
    ("image", "accepted"),
    [
        ("python:3.11.14-slim-bookworm", True),
        (f"python:3.11.14-slim-bookworm@sha256:{'0a' * 32}", True),
        (f"python@sha256:{'0a' * 32}", False),  # does not say which Python
        ("python:3.11.14-slim-bookworm@sha256:0a", False),
        ("python:3-slim-bookworm", False),
    ],
)
def test_a_base_image_may_be_pinned_by_its_digest_beside_its_version(image: str, accepted: bool) -> None:
    assert bool(PYTHON.fullmatch(image)) == accepted


@pytest.mark.parametrize("name", FILES)
def test_what_an_image_copies_is_there_and_not_ignored(name: str) -> None:
    lines = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    allowed = {line[1:] for line in lines if line.startswith("!")}
    for word, text in instructions(name):
        for source in text.split()[:-1] if word == "COPY" else ():
            assert source in allowed
            assert (REPOSITORY / source).exists()


def test_the_gateways_image_has_the_dependencies_of_the_project_but_the_engines() -> None:
    project: Any = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["postgres"]]
    needed = {(canonicalize_name(one.name), *sorted(one.extras)) for one in map(Requirement, texts)}
    given = {(canonicalize_name(one.name), *sorted(one.extras)) for one in map(Requirement, gateway_requirements())}
    assert given == {one for one in needed if one[0] not in ENGINE}
    pinned = {canonicalize_name(name) for name in constraints()}
    assert {one[0] for one in given} <= pinned


@pytest.mark.slow
def test_gateway_limiter_and_accounting_start_with_what_their_image_has() -> None:
    command = [sys.executable, "-c", IMPORT, ",".join(STARTED), ";".join(gateway_requirements())]
    done = subprocess.run(command, cwd=REPOSITORY, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
