"""Measures how fast a browser shows the console's pages, and how large they are: `make bench-paint`, five minutes.

It needs Debian's chromium-driver. A headless Chromium opens each page of the console several times, with sixty days of
data. The times are those with the shared files in the cache: Chromium's "first-contentful-paint", from the start of the
request. The bytes are those received for the page: once with an empty cache, then with the shared files in the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any, Final
from urllib.error import URLError

from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome
from selenium.webdriver.support.ui import WebDriverWait

from bench.console.browse import PATIENCE_S, Lived, browsing, sign_in
from bench.harness.command import PEERS, completed, say
from bench.harness.machine import describe
from bench.harness.servers import ServerError

PAINTED: Final = """
return performance.getEntriesByName("first-contentful-paint").map((one) => one.startTime)[0] || 0;
"""
RECEIVED: Final = """
const entries = ["navigation", "resource"].flatMap((kind) => performance.getEntriesByType(kind));
return document.readyState === "complete" ? entries.reduce((sum, one) => sum + one.transferSize, 0) : 0;
"""


def opened(browser: Chrome, url: str) -> tuple[float, int]:
    """Opens a page. Returns the milliseconds to its first paint, and the bytes received."""
    browser.get(url)
    wait = WebDriverWait(browser, PATIENCE_S)
    return wait.until(lambda _: browser.execute_script(PAINTED)), wait.until(lambda _: browser.execute_script(RECEIVED))


def measure(server: Lived, times: int) -> dict[str, Any]:
    rows: dict[str, dict[str, int]] = {}
    with browsing() as browser:
        for visitor, pages in server.pages().items():
            sign_in(browser, server.base_url, visitor)
            for name, path in pages:
                say(f"opening {name}")
                browser.execute_cdp_cmd("Network.clearBrowserCache", {})
                _, cold = opened(browser, server.base_url + path)
                warm = [opened(browser, server.base_url + path) for _ in range(times)]
                rows[name] = {
                    "median ms": round(statistics.median(paint for paint, _ in warm)),
                    "maximum ms": round(max(paint for paint, _ in warm)),
                    "cached KB": round(max(size for _, size in warm) / 1000),
                    "cold KB": round(cold / 1000),
                }
    return {"machine": describe(), "pages": rows}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.console.paint", description=__doc__)
    parser.add_argument("--times", type=int, default=7, help="times to open each page with a warm cache; default: 7")
    options = parser.parse_args(arguments)
    server = Lived(PEERS)

    def run() -> dict[str, Any]:
        try:
            server.start()
            return measure(server, options.times)
        finally:
            server.stop()

    found = completed(run, (ServerError, URLError, WebDriverException))
    print(json.dumps(found["machine"]))
    columns = list(next(iter(found["pages"].values())))
    print(*(column.rjust(11) for column in columns), " page")
    for name, row in sorted(found["pages"].items(), key=lambda one: -one[1]["median ms"]):
        print(*(str(row[column]).rjust(11) for column in columns), f" {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
