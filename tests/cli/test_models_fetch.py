"""`serve-app models fetch`, against a stand-in for the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from serve_app.engine.loading import checkpoint
from tests.engine.fake_hub import COMMIT, FakeHub, served

from .conftest import Run

NAME = "team/model"
ROOT = Path(__file__).parents[2]
CHUNK = 10_000_000  # that the hub's client writes at a time


@pytest.fixture
def hub(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FakeHub]:
    """It has a model of `size` numbers of 4 bytes."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "README.md").write_text("not fetched")
    size = getattr(request, "param", 1000)
    save_file({"weight": torch.rand(size)}, folder / "model.safetensors")
    with served(NAME, folder) as running:
        yield running


@pytest.fixture
def cache(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client in this process uses this hub and a cache of this test. It read its environment long ago."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)


def test_a_model_is_fetched_goes_on_after_a_cut_and_serves_offline_then(
    hub: FakeHub, cache: None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cut_after = 2500
    [got] = run("models", "fetch", NAME, "--dtype", "bfloat16", "--json").json["data"]
    assert (got["model"], got["revision"]) == (NAME, COMMIT)
    fetched = sorted(path.name for path in Path(got["folder"]).iterdir())
    assert fetched == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert got["fingerprint"] == checkpoint.fingerprint(Path(got["folder"]), "bfloat16")
    assert hub.ranges, "the rest alone was asked for"
    sent = hub.sent
    assert sent < 6000
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = run("models", "fetch", NAME, "--revision", COMMIT)
    assert again.code == 0, again.err
    assert COMMIT in again.out
    assert hub.sent == sent


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("hub", [3 * CHUNK // 5], indirect=True)
def test_the_environment_names_the_hub_and_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    def fetch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "cache"),
            "NO_PROXY": "127.0.0.1",
            **environment,
        }
        return subprocess.run(
            [sys.executable, "-m", "serve_app.cli", "models", "fetch", *arguments],
            env={**os.environ, **own}, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    hub.cut_after = 3 * CHUNK // 2
    first = fetch(NAME, "--json")
    assert first.returncode == 0, first.stderr
    [got] = json.loads(first.stdout)["data"]
    assert Path(got["folder"]).is_relative_to(tmp_path / "cache")
    assert hub.ranges, "the rest alone was asked for"
    sent = hub.sent
    assert sent < 3 * CHUNK
    again = fetch(NAME, "--revision", COMMIT, HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert COMMIT in again.stdout
    assert hub.sent == sent


def test_the_models_of_a_config_file_are_fetched_each_in_its_revision(
    hub: FakeHub, cache: None, run: Run, tmp_path: Path
) -> None:
    backend = {"import_path": "deployments.apps:model"}
    applications = [
        {"name": "one", **backend, "args": {"model": NAME, "revision": "v1"}},
        {"name": "two", **backend, "args": {"model": NAME, "revision": "v1"}},
        {"name": "here", **backend, "args": {"model": "bundled"}},
    ]
    (tmp_path / "config.yaml").write_text(json.dumps({"applications": applications}))
    done = run("models", "fetch")
    assert done.code == 0, done.err
    assert done.out.count(NAME) == 1
    assert COMMIT in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((NAME, "--revision", "v9"), "The hub has no revision v9 of team/model: check 'revision'."),
        (("team/other",), "the hub has no public model of that name"),
        (("bundled",), "bundled is not on the hub: there is nothing to fetch."),
        ((), "config.yaml: there is no such file"),
    ],
)
def test_what_can_not_be_fetched_is_one_line(
    hub: FakeHub, cache: None, run: Run, arguments: tuple[str, ...], message: str
) -> None:
    done = run("models", "fetch", *arguments)
    assert done.code == 1
    assert message in done.err.splitlines()[-1]


def test_a_revision_without_a_model_is_a_wrong_command(run: Run) -> None:
    done = run("models", "fetch", "--revision", "v1")
    assert (done.code, done.error_line) == (2, "error: --revision needs a MODEL")
