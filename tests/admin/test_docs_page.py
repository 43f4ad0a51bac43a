"""`/docs` in a real browser: it shows every operation and loads nothing from another host."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from serve_app.admin.guides import GUIDES
from tests.gateway.connections import served
from tests.gateway.world import World

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PATIENCE_S = 300  # of a browser on a busy machine


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    if BROWSER is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver (Debian: apt install chromium chromium-driver)")
    options = ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,1600"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    chrome = Chrome(options=options, service=ChromeService(DRIVER))
    chrome.get("about:blank")
    chrome.get_log("performance")  # of the browser's own first page
    yield chrome
    chrome.quit()


def traffic(browser: Chrome) -> list[tuple[str, dict[str, Any]]]:
    """The requests over the network, and those that failed."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [(message["method"], message["params"]) for message in messages if message["method"].startswith("Network.")]


def read(browser: Chrome, base: str, operations: int) -> None:
    """Opens the page, the first operation on it and the schema of its body."""
    browser.get(f"{base}/docs")
    wait = WebDriverWait(browser, PATIENCE_S)
    wait.until(lambda _: len(browser.find_elements(By.CSS_SELECTOR, ".opblock")) == operations)
    browser.find_element(By.CSS_SELECTOR, ".opblock-summary-control").click()
    wait.until(lambda _: "Why is the sky blue?" in browser.find_element(By.CSS_SELECTOR, ".opblock.is-open").text)
    browser.find_element(By.XPATH, "//*[text()='Schema']").click()
    wait.until(lambda _: "frequency_penalty" in browser.find_element(By.CSS_SELECTOR, ".opblock.is-open").text)
    assert not browser.find_elements(By.CSS_SELECTOR, ".errors-wrapper, .loading-container .failed-config")


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["/v1", pytest.param("", marks=pytest.mark.long)])
async def test_the_page_shows_every_operation_and_sends_no_request_to_another_host(
    world: World, browser: Chrome, prefix: str
) -> None:
    async with served(world) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        document = (await client.get("/openapi.json")).json()
        operations = sum(len(item) for item in document["paths"].values())
        await asyncio.to_thread(read, browser, f"http://127.0.0.1:{port}{prefix}", operations)
    seen = traffic(browser)
    asked = {params["request"]["url"] for name, params in seen if name == "Network.requestWillBeSent"}
    assert f"http://127.0.0.1:{port}{prefix}/openapi.json" in asked
    assert {url.netloc for url in map(urlsplit, asked) if url.scheme != "data"} == {f"127.0.0.1:{port}"}
    assert [params for name, params in seen if name == "Network.loadingFailed"] == []
    statuses = {params["response"]["status"] for name, params in seen if name == "Network.responseReceived"}
    assert statuses <= {200, 304}
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


async def test_the_page_loads_nothing_from_other_hosts_and_can_not_be_framed(http: httpx.AsyncClient) -> None:
    for path in ("/docs", "/docs/start.js", "/docs/page.css", "/docs/swagger-ui-bundle.js", "/docs/guides/chat"):
        answer = await http.get(path)
        assert answer.status_code == 200, path
        policy = dict(part.split(maxsplit=1) for part in answer.headers["content-security-policy"].split("; "))
        assert (policy["default-src"], policy["frame-ancestors"]) == ("'none'", "'none'"), path
        for sources in policy.values():
            assert set(sources.split()) <= {"'none'", "'self'", "'unsafe-inline'", "data:"}, path
        assert "'unsafe-inline'" not in policy["script-src"], path
        assert answer.headers["x-content-type-options"] == "nosniff", path


async def test_no_file_outside_of_the_page_is_served(http: httpx.AsyncClient) -> None:
    for name in ("redoc.standalone.js", "..%2f__init__.py", "../core.py", "nothing.js"):
        assert (await http.get(f"/docs/{name}")).status_code == 404


async def test_the_guides_are_linked_to_each_other_and_have_the_services_own_address(http: httpx.AsyncClient) -> None:
    pages = {name: (await http.get(f"/docs/guides/{name}", headers={"host": "api.example.org"})) for name in GUIDES}
    for name, page in pages.items():
        assert page.status_code == 200, name
        assert "<h1 id=" in page.text, name
        assert "127.0.0.1:8000" not in page.text, name
        for target in re.findall(r'href="([^"]+)"', page.text.partition("<main")[2]):
            path, _, anchor = target.partition("#")
            if path.startswith("http"):
                continue
            other = pages[path] if path else page
            assert not anchor or f'id="{anchor}"' in other.text, (name, target)
    assert "http://api.example.org/v1" in pages["quick-start"].text
    assert 'href="docs/guides/quick-start"' in (await http.get("/docs")).text
    assert (await http.get("/docs/guides/admin-api")).status_code == 404
