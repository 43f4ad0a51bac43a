"""Tests of what one load balancer serves without a key: the document, the page to read it, and the console."""

from __future__ import annotations

import pytest

from tests.service.harness import Service, until

pytestmark = pytest.mark.service


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_the_documentation_is_served_whole_and_without_a_key(service: Service, prefix: str) -> None:
    document = service.http.get(f"{prefix}/openapi.json").json()
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert fields["model"]["enum"] == ["svc-chat", "svc-coder", "svc-broken", "svc-moves"]
    page = service.http.get(f"{prefix}/docs")
    assert page.headers["content-type"].startswith("text/html")
    for name, least in (("redoc.js", 10**6), ("page.css", 10**3), ("start.js", 10)):
        assert f"docs/{name}" in page.text
        asset = service.http.get(f"{prefix}/docs/{name}", headers={"accept-encoding": "identity"})
        assert asset.status_code == 200
        assert len(asset.content) == int(asset.headers["content-length"]) >= least
        assert asset.headers["x-request-id"]


def test_the_console_is_beside_the_api(service: Service) -> None:
    until(lambda: service.http.get("/console/sign-in").status_code == 200)
    answer = service.http.get("/console", follow_redirects=True)
    assert (answer.status_code, answer.url.path) == (200, "/console/sign-in")
    assert service.http.get("/health").status_code == 200
