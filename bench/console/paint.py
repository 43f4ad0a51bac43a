"""How soon a browser shows the console's pages: `make bench-paint`, some minutes. It needs Debian's chromium-driver.

A headless Chromium signs in and opens each page some times; the figure is its own "first-contentful-paint", counted
from the beginning of the request.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from typing import Any, Final
from urllib.error import URLError

from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from bench.console.service import EMAIL, PAGES, PASSWORD, WithConsole
from bench.harness.command import PEERS, completed, say
from bench.harness.machine import describe
from bench.harness.servers import ServerError

PATIENCE_S: Final = 30
PAINTED: Final = """
return performance.getEntriesByName("first-contentful-paint").map((one) => one.startTime)[0] || 0;
"""


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
        for name, text in {"name": "Reader", "new_password": PASSWORD}.items():
            browser.find_element(By.NAME, name).send_keys(text)
        browser.find_element(By.CSS_SELECTOR, "form.stack button").click()
        WebDriverWait(browser, PATIENCE_S).until(lambda _: "/accounts/" in browser.current_url)
        for path in (*PAGES, "/playground", "/docs"):
            say(f"opening {path or 'the overview'}")
            for _ in range(times):
                browser.get(f"{server.base_url}/console/accounts/{account_id}{path}")
                WebDriverWait(browser, PATIENCE_S).until(lambda _: browser.execute_script(PAINTED))
                paints.setdefault(path or "overview", []).append(browser.execute_script(PAINTED))
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
