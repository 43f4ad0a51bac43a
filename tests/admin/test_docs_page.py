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
from selenium.common.exceptions import ElementClickInterceptedException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from serve_app.admin.guides import GUIDES
from serve_app.settings import BrandSettings
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
    """Opens the page, which shows all operations with their fields, examples and errors; then a group by its link."""
    browser.get(f"{base}/docs")
    wait = WebDriverWait(browser, PATIENCE_S, ignored_exceptions=[ElementClickInterceptedException])
    wait.until(lambda _: len(browser.find_elements(By.CSS_SELECTOR, "#docs [id^='operation/']")) == operations)
    chat = browser.find_element(By.ID, "operation/createChatCompletion")
    for shown in ("frequency_penalty", "Needs an API key.", f"curl {base.removesuffix('/v1')}/v1/chat", "Air scatters"):
        assert shown in chat.text
    assert "number or null" in chat.text
    for hidden in ("(ChosenTools (", "Array of any", "9223372036854776000"):
        assert hidden not in chat.text
    tab = chat.find_element(By.XPATH, ".//li[text()='Python']")
    browser.execute_script("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' })", tab)
    wait.until(lambda _: tab.click() or tab.get_attribute("aria-selected") == "true")
    for operation in (chat, browser.find_element(By.ID, "operation/createMessage")):
        wait.until(lambda _, one=operation: "import" in one.find_element(By.CSS_SELECTOR, "[role=tabpanel] pre").text)
    assert "budget_exceeded" in browser.find_element(By.ID, "section/Errors").text
    for shown in ("dark", "light"):
        browser.find_element(By.CSS_SELECTOR, "[data-theme-toggle]").click()
        assert browser.execute_script("return document.documentElement.dataset.bsTheme") == shown
    browser.get(f"{base}/docs/guides/quick-start")
    links = browser.find_elements(By.CSS_SELECTOR, ".guides a[href*='#tag/']")
    anchors = [str(link.get_attribute("href")).partition("#")[2] for link in links]
    assert "tag/Account-management" in anchors
    links[anchors.index("tag/Messages")].click()
    top = "return document.getElementById('tag/Messages')?.getBoundingClientRect().top ?? 9999"
    wait.until(lambda _: browser.execute_script(top) < 200)
    assert all(browser.find_elements(By.ID, anchor) for anchor in anchors)


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
    assert {url.netloc for url in map(urlsplit, asked) if url.scheme not in ("data", "blob")} == {f"127.0.0.1:{port}"}
    assert [params for name, params in seen if name == "Network.loadingFailed"] == []
    statuses = {params["response"]["status"] for name, params in seen if name == "Network.responseReceived"}
    assert statuses <= {200, 304}
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


async def test_the_page_loads_nothing_from_other_hosts_and_can_not_be_framed(http: httpx.AsyncClient) -> None:
    for path in ("/docs", "/docs/start.js", "/docs/page.css", "/docs/redoc.js", "/docs/guides/chat"):
        answer = await http.get(path)
        assert answer.status_code == 200, path
        policy = dict(part.split(maxsplit=1) for part in answer.headers["content-security-policy"].split("; "))
        assert (policy["default-src"], policy["frame-ancestors"]) == ("'none'", "'none'"), path
        for sources in policy.values():
            assert set(sources.split()) <= {"'none'", "'self'", "'unsafe-inline'", "data:", "blob:"}, path
        assert [name for name, sources in policy.items() if "blob:" in sources] == ["worker-src"], path
        assert "'unsafe-inline'" not in policy["script-src"], path
        assert answer.headers["x-content-type-options"] == "nosniff", path


async def test_the_typeface_is_loaded_early_once_and_kept(http: httpx.AsyncClient) -> None:
    page = await http.get("/docs")
    [preloaded] = re.findall(r'<link rel="preload" href="docs/([^"]+)" as="font"', page.text)
    assert f'url("{preloaded}")' in (await http.get("/docs/console.css")).text
    font = await http.get(f"/docs/{preloaded}")
    assert (font.content[:4], font.headers["content-type"]) == (b"wOF2", "font/woff2")
    assert "immutable" in font.headers["cache-control"]
    assert "font-src 'self'" in page.headers["content-security-policy"]


async def test_no_file_outside_of_the_page_is_served(http: httpx.AsyncClient) -> None:
    for name in ("redoc.standalone.js", "vendor/redoc.standalone.js", "..%2f__init__.py", "../core.py", "nothing.js"):
        assert (await http.get(f"/docs/{name}")).status_code == 404


async def test_the_reference_names_the_services_own_base_url(http: httpx.AsyncClient) -> None:
    for path in ("/docs", "/v1/docs"):
        page = (await http.get(path, headers={"host": "api.example.org"})).text
        assert "<dt>Base URL</dt><dd><code>http://api.example.org/v1</code></dd>" in page
        assert "127.0.0.1:8000" not in page


async def test_visitors_find_the_operators_pages_below_each_page(world: World, http: httpx.AsyncClient) -> None:
    assert "<footer" not in (await http.get("/docs")).text
    world.admin.brand = BrandSettings(privacy_url="https://example.org/p?a&b", contact="help@example.org")
    for path in ("/docs", "/docs/guides/quick-start"):
        foot = (await http.get(path)).text.partition("<footer")[2]
        assert 'href="https://example.org/p?a&amp;b">Privacy</a>' in foot
        assert 'href="mailto:help@example.org">Contact</a>' in foot


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


async def test_the_pages_have_the_products_header_and_the_way_to_the_console(
    world: World, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    assert ">Console</a>" not in (await http.get("/docs")).text
    assert (await http.get("/docs/logo")).status_code == 404
    (tmp_path / "mark.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    world.admin.brand = BrandSettings(name="Ada & Co", logo=tmp_path / "mark.svg", accent="#0a7f3f")
    world.admin.console = lambda: "/console"
    for path in ("/docs", "/docs/guides/quick-start", "/v1/docs"):
        page = (await http.get(path)).text
        assert "· Ada &amp; Co</title>" in page
        assert '<a class="btn ms-2" href="/console/">Console</a>' in page
        for name in set(re.findall(r'(?:src|href)="((?:docs|\.\.)/[\w.]+)["#?]', page)):
            answer = await http.get(str(httpx.URL(f"http://service.test{path}").join(name).raw_path, "ascii"))
            assert answer.status_code == 200, (path, name)
    assert "--tblr-primary: #0a7f3f" in (await http.get("/docs/brand.css")).text


async def test_a_guide_speaks_to_customers(http: httpx.AsyncClient) -> None:
    for name in GUIDES:
        page = (await http.get(f"/docs/guides/{name}")).text.partition("<main")[2]
        assert 'href="#"' not in page, name
        assert not re.search(r">\w[\w-]*\.md<", page), name
    for name in ("quick-start", "clients", "troubleshooting"):
        page = (await http.get(f"/docs/guides/{name}")).text.partition("<main")[2]
        assert "make serve" not in page, name
        assert not re.search(r"tests (run|cover)|the tests", page), name


async def test_examples_in_several_languages_are_tabs_of_one_group(http: httpx.AsyncClient) -> None:
    page = (await http.get("/docs/guides/quick-start")).text
    first, second = re.findall(r'<div class="tabs">(.*?)</div>\n</div>', page, re.S)
    for group, languages in ((first, ["Shell", "Python", "Node"]), (second, ["Python", "Node"])):
        assert re.findall(r"<label[^>]*>(\w+)<", group) == languages
        assert len(set(re.findall(r'name="(tabs-\d+)"', group))) == 1
        assert group.count(" checked") == 1
        assert group.count("<code data-code=") == len(languages)
    assert len(set(re.findall(r' id="([^"]+)"', page))) == len(re.findall(r' id="([^"]+)"', page))


@pytest.mark.parametrize("path", ["/docs/tabler.min.css", "/docs/redoc.js", "/openapi.json"])
async def test_a_large_file_of_the_page_is_compressed_only_for_who_accepts_it(
    http: httpx.AsyncClient, path: str
) -> None:
    packed = await http.get(path, headers={"accept-encoding": "gzip"})
    plain = await http.get(path, headers={"accept-encoding": "identity"})
    assert (packed.headers["content-encoding"], packed.headers["vary"]) == ("gzip", "accept-encoding")
    assert "content-encoding" not in plain.headers
    assert packed.content == plain.content
