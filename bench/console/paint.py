"""Measures how soon a browser shows the console's pages: `make bench-paint`, two minutes.

It needs Debian's chromium-driver. A headless Chromium signs in as an owner who is also an operator, and opens each page
of the table of rules some times. The figure is its own "first-contentful-paint", counted from the beginning of the
request.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from typing import Any, Final
from urllib.error import URLError

from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from bench.console.service import EMAIL, PASSWORD, WithConsole
from bench.harness.command import PEERS, completed, say
from bench.harness.machine import describe
from bench.harness.servers import ServerError
from serve_app.console.app import PAGES

PATIENCE_S: Final = 30
PAINTED: Final = """
return performance.getEntriesByName("first-contentful-paint").map((one) => one.startTime)[0] || 0;
"""


def pages(server: WithConsole, account_id: str) -> dict[str, str]:
    """Paths of the table of rules that a browser shows, as they are there and for this account."""
    invited = server.admin(f"/admin/accounts/{account_id}/people", {"email": f"new-{EMAIL}", "role": "member"})
    values = {
        "account_id": account_id,
        "id": account_id,
        "month": time.strftime("%Y-%m", time.gmtime()),
        "token": invited["path"].rsplit("/", 1)[1],
    }
    paths = [page.path for page in PAGES if page.method == "GET"]
    others = ("/static/", ".csv", "/openid", "{request_id}")
    return {path: path.format(**values) for path in paths if not any(other in path for other in others)}


def fill(browser: Chrome, **values: str) -> None:
    """Fills in the page's first form, sends it and waits for an account's page."""
    for name, text in values.items():
        browser.find_element(By.NAME, name).send_keys(text)
    browser.find_element(By.CSS_SELECTOR, "form.stack button").click()
    WebDriverWait(browser, PATIENCE_S).until(lambda _: "/accounts/" in browser.current_url)


def measure(server: WithConsole, times: int) -> dict[str, Any]:
    account_id, _ = server.new_account("paint", "10")
    invited = server.admin(f"/admin/accounts/{account_id}/people", {"email": EMAIL, "role": "owner"})
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    browser = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
    paints: dict[str, list[float]] = {}
    try:
        browser.get(f"{server.base_url}/console{invited['path']}")
        fill(browser, name="Reader", new_password=PASSWORD)
        server.admin("/admin/people/operator", {"email": EMAIL, "role": "admin", "account_id": account_id})
        browser.get(f"{server.base_url}/console/sign-in")
        fill(browser, email=EMAIL, password=PASSWORD)
        for page, path in pages(server, account_id).items():
            say(f"opening {page}")
            for _ in range(times):
                browser.get(f"{server.base_url}/console{path}")
                WebDriverWait(browser, PATIENCE_S).until(lambda _: browser.execute_script(PAINTED))
                paints.setdefault(page, []).append(browser.execute_script(PAINTED))
    finally:
        browser.quit()
    return {
        "machine": describe(),
        "first contentful paint, ms: median and most": {
            page: [round(statistics.median(found)), round(max(found))] for page, found in paints.items()
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.console.paint", description=__doc__)
    parser.add_argument("--times", type=int, default=7, help="that each page is opened; default: 7")
    options = parser.parse_args(arguments)
    server = WithConsole(PEERS)

    def run() -> dict[str, Any]:
        try:
            server.start()
            return measure(server, options.times)
        finally:
            server.stop()

    print(json.dumps(completed(run, (ServerError, URLError, WebDriverException)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
