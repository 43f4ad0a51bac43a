"""Takes pictures of the console for README.md: `make pictures`, two minutes.

It needs Debian's chromium-driver. With `--all`, it takes pictures of every page instead, at the sizes of a desktop and
a phone, of a service with a canary and some minutes of traffic. This takes about twelve minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from copy import deepcopy
from http.client import HTTPException
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final
from urllib.error import URLError
from urllib.parse import urlsplit

from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from bench.console.browse import PATIENCE_S, Lived, browsing, sign_in
from bench.harness.command import PEERS, completed, say
from bench.harness.servers import ServerError

DESK, PHONE = (1440, 900), (390, 844)
HIGHEST: Final = 6000
TRAFFIC_S: Final = 360.0  # seconds of traffic before the pictures of `--all`
PER_S: Final = 0.7  # requests per second
CANARY: Final = "smollm2-next"
DRAW_S: Final = 0.5  # time for drawing the charts after the page has loaded
QUESTION: Final = "What is an API key? Answer in two sentences."
ACCOUNT: Final = "/console/accounts/{account_id}"
#: Pictures of README.md, by the path of their page.
SHOWN: Final = {
    f"{ACCOUNT}/playground": "playground",
    ACCOUNT: "overview",
    f"{ACCOUNT}/usage": "usage",
    f"{ACCOUNT}/requests": "requests",
    f"{ACCOUNT}/keys": "keys",
    "/console/operator": "operators",
}
#: Pages that `--all` also takes in dark mode.
DARK: Final = ("/", "/console/sign-in", "/console/operator/accounts/{id}", f"{ACCOUNT}/billing", *SHOWN)
#: CSS selectors of the buttons that open dialogs, by the path of their page.
DIALOGS: Final = {
    f"{ACCOUNT}/keys": ("[commandfor=new-key]", "[aria-label='Actions for production']"),
    f"{ACCOUNT}/billing": ("[commandfor=add-funds]",),
}


class Busy(Lived):
    """A service with a canary, and with visitors who send requests until it stops."""

    def config(self) -> dict[str, Any]:
        config = super().config()
        by_name = {one["name"]: one for one in config["applications"]}
        config["applications"].append({**deepcopy(by_name["smollm2"]), "name": CANARY})
        gateway = next(one for one in by_name["gateway"]["deployments"] if one["name"] == "Gateway")
        gateway["user_config"]["models"]["svc-coder"]["backends"] = {"smollm2": 80, CANARY: 20}
        return config

    def visit(self, ended: threading.Event) -> None:
        """Sends requests with the keys of the accounts in the pictures. The service rejects a few of them."""
        rng, keys = Random("visitors"), self.life.api_keys
        while not ended.wait(rng.expovariate(PER_S)):
            model = rng.choices(("svc-chat", "svc-coder", "svc-large"), (60, 37, 3))[0]
            text = " ".join(rng.choices(QUESTION.split(), k=rng.randrange(5, 60)))
            key = rng.choices(keys, (8, 4, 8, 3, *[1] * (len(keys) - 4)))[0]
            threading.Thread(target=self._send, args=(key, model, text, rng.randrange(8, 48)), daemon=True).start()

    def _send(self, key: str, model: str, text: str, max_tokens: int) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        url = f"{self.base_url}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps({**body, "stream": True}).encode(), headers)
        with suppress(OSError, HTTPException), urllib.request.urlopen(request, timeout=60) as reply:
            reply.read()


def resize(browser: Chrome, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def paint(browser: Chrome, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def take(browser: Chrome, path: Path) -> None:
    time.sleep(DRAW_S)
    browser.save_screenshot(str(path))


def converse(browser: Chrome) -> None:
    """Asks the model a question on the playground's page."""
    browser.find_element(By.NAME, "temperature").send_keys("0")
    browser.find_element(By.NAME, "prompt").send_keys(QUESTION + Keys.CONTROL + Keys.ENTER)
    wait = WebDriverWait(browser, PATIENCE_S)
    wait.until(
        lambda _: any(" output tokens · $0.0" in one.text for one in browser.find_elements(By.CLASS_NAME, "figures"))
    )


def for_readme(server: Lived, browser: Chrome, folder: Path) -> None:
    resize(browser, *DESK)
    pages = {name: (visitor, path) for visitor, paths in server.pages().items() for name, path in paths}
    signed_in = ""
    for page, name in SHOWN.items():
        visitor, path = pages[page]
        if visitor != signed_in:
            sign_in(browser, server.base_url, visitor)
            signed_in = visitor
        # The operators' chart shows 30 days, because a service that has just started has no requests of today.
        browser.get(server.base_url + path + ("?days=30" if name == "operators" else ""))
        if name == "playground":
            converse(browser)
        say(f"taking {name}")
        take(browser, folder / f"{name}.png")


def of_all(server: Lived, browser: Chrome, folder: Path) -> None:
    numbers = count(1)
    for visitor, pages in server.pages().items():
        sign_in(browser, server.base_url, visitor)
        for page, path in pages:
            name = re.sub(r"\W+", "-", page.removeprefix("/console")).strip("-") or ("home" if visitor else "landing")
            name = f"{next(numbers):02}-{name}"
            say(f"taking {name}")
            if page.endswith("/requests/{request_id}"):
                # Shows the request of the playground, because the request log has no older ones.
                browser.get(server.base_url + path.rsplit("/", 1)[0])
                path = urlsplit(browser.find_element(By.CSS_SELECTOR, "td a").get_attribute("href") or "").path
            for scheme in ("light", "dark") if page in DARK else ("light",):
                paint(browser, scheme)
                for width, height in (DESK, PHONE):
                    resize(browser, width, height)
                    browser.get(server.base_url + path)
                    if page == f"{ACCOUNT}/playground" and scheme == "light" and width == DESK[0]:
                        converse(browser)
                    time.sleep(DRAW_S)
                    high = browser.execute_script("return document.documentElement.scrollHeight")
                    resize(browser, width, min(max(high, height), HIGHEST))
                    take(browser, folder / f"{name}-{width}-{scheme}.png")
            paint(browser, "light")
            for number, opener in enumerate(DIALOGS.get(page, ()), 1):
                for width, height in (DESK, PHONE):
                    resize(browser, width, height)
                    browser.get(server.base_url + path)
                    button = browser.find_element(By.CSS_SELECTOR, opener)
                    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
                    button.click()
                    take(browser, folder / f"{name}-dialog{number}-{width}-light.png")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.console.pictures", description=__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--all", action="store_true", help="take every page")
    options = parser.parse_args(arguments)
    options.to.mkdir(parents=True, exist_ok=True)
    server = Busy(PEERS) if options.all else Lived(PEERS)
    ended = threading.Event()

    def run() -> None:
        try:
            server.start()
            if isinstance(server, Busy):
                say(f"sending requests for {TRAFFIC_S:.0f} s")
                threading.Thread(target=server.visit, args=(ended,), daemon=True).start()
                time.sleep(TRAFFIC_S)
            with browsing() as browser:
                (of_all if options.all else for_readme)(server, browser, options.to)
        finally:
            ended.set()
            server.stop()

    completed(run, (ServerError, URLError, WebDriverException))
    return 0


if __name__ == "__main__":
    sys.exit(main())
