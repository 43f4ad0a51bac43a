"""The document and the page to read it come through the load balancer whole, without a key."""

from __future__ import annotations

import pytest

from tests.service.harness import Service

pytestmark = pytest.mark.service


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_the_documentation_is_served_whole_and_without_a_key(service: Service, prefix: str) -> None:
    document = service.http.get(f"{prefix}/openapi.json").json()
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert fields["model"]["enum"] == ["svc-chat", "svc-coder", "svc-broken"]
    page = service.http.get(f"{prefix}/docs")
    assert page.headers["content-type"].startswith("text/html")
    for name, least in (("swagger-ui-bundle.js", 10**6), ("swagger-ui.css", 10**5), ("start.js", 10)):
        assert f"docs/{name}" in page.text
        asset = service.http.get(f"{prefix}/docs/{name}")
        assert asset.status_code == 200
        assert len(asset.content) == int(asset.headers["content-length"]) >= least
        assert asset.headers["x-request-id"]
