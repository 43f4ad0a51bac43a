"""`/models` lists the fingerprints that replies of the running backends have."""

from __future__ import annotations

import pytest

from tests.service.harness import Service

pytestmark = pytest.mark.service


def test_the_list_of_models_has_the_fingerprint_of_replies(service: Service) -> None:
    account = service.account("fingerprints")
    headers = {"authorization": f"Bearer {account.key}"}
    told = {
        model["id"]: model["system_fingerprints"]
        for model in service.http.get("/models", headers=headers).json()["data"]
    }
    for model in ("svc-chat", "svc-coder"):
        reply = account.client().chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=1
        )
        assert [reply.system_fingerprint] == told[model]
    assert told["svc-broken"] == []  # an application that has none
    assert told["svc-chat"] != told["svc-coder"]
