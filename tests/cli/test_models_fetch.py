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
from safetensors.torch import save_file

from serve_app.engine.loading import checkpoint
from tests.engine.fake_hub import COMMIT, FakeHub, served

NAME = "team/model"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """It has a model of 24 MB, more than the hub's client writes at a time."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "README.md").write_text("not fetched")
    save_file({"weight": torch.rand(6_000_000)}, folder / "model.safetensors")
    with served(NAME, folder) as running:
        yield running


def fetch(hub: FakeHub, tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # The hub's client reads its environment when it is imported.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {
        "PYTHONPATH": path,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "cache"),
        "NO_PROXY": "127.0.0.1",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-m", "serve_app.cli", "models", "fetch", *arguments],
        env={**os.environ, **own}, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_model_is_fetched_goes_on_after_a_cut_and_serves_offline_then(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut_after = 15_000_000
    first = fetch(hub, tmp_path, NAME, "--dtype", "bfloat16", "--json")
    assert first.returncode == 0, first.stderr
    [got] = json.loads(first.stdout)["data"]
    assert (got["model"], got["revision"]) == (NAME, COMMIT)
    fetched = sorted(path.name for path in Path(got["folder"]).iterdir())
    assert fetched == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert got["fingerprint"] == checkpoint.fingerprint(Path(got["folder"]), "bfloat16")
    assert hub.ranges, "the rest alone was asked for"
    sent = hub.sent
    assert sent < 30_000_000
    again = fetch(hub, tmp_path, NAME, "--revision", COMMIT, HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert COMMIT in again.stdout
    assert hub.sent == sent


def test_the_models_of_a_config_file_are_fetched_each_in_its_revision(hub: FakeHub, tmp_path: Path) -> None:
    backend = {"import_path": "deployments.apps:model"}
    applications = [
        {"name": "one", **backend, "args": {"model": NAME, "revision": "v1"}},
        {"name": "two", **backend, "args": {"model": NAME, "revision": "v1"}},
        {"name": "here", **backend, "args": {"model": "bundled"}},
    ]
    (tmp_path / "config.yaml").write_text(json.dumps({"applications": applications}))
    done = fetch(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(NAME) == 1
    assert COMMIT in done.stdout


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
    hub: FakeHub, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = fetch(hub, tmp_path, *arguments)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


def test_a_revision_without_a_model_is_a_wrong_command(hub: FakeHub, tmp_path: Path) -> None:
    done = fetch(hub, tmp_path, "--revision", "v1")
    assert done.returncode == 2
    assert done.stderr == "error: --revision is of one model: name it\n"
