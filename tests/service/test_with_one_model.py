"""One command serves a model's folder: `python -m serve_app.launch --model FOLDER`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.service.started import started

pytestmark = [pytest.mark.service, pytest.mark.slow]


def test_a_folder_is_served_on_the_cpu_with_one_command(model_path: Path, tiny_path: Path) -> None:
    with started(model_path, "config.yaml", options=("--model", str(tiny_path), "--gpus", "0")) as service:
        client = service.client()
        for model in ("svc-chat", "svc-coder"):
            reply = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=5, temperature=0
            )
            assert reply.usage is not None
            assert reply.usage.completion_tokens > 0
        written = yaml.safe_load((service.home / "run" / "config.yaml").read_text())
        [backend] = [one for one in written["applications"] if one["import_path"] == "deployments.apps:model"]
        assert backend["args"]["model"] == str(tiny_path)
        assert backend["args"]["max_context"] == 8192  # the model's own
