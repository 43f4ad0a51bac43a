"""A browser, and a service with a console and sixty days of data."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from bench.console.data import OPERATOR, OWNER, Life, fill
from bench.console.service import PASSWORD, WithConsole
from bench.harness.servers import Bundled
from serve_app import secret_files
from serve_app.console import links
from serve_app.console.app import PAGES
from serve_app.console.rules import ANYONE
from serve_app.contracts.units import HOUR_S
from serve_app.storage.sealing import SecretKeys

PATIENCE_S: Final = 60
#: Entries of PAGES that a browser does not show: files, parts of pages, and redirects to another server.
NO_PAGES: Final = ("/static/", ".csv", ".pdf", ".json", "/openid", "/playground/requests/")
SITE: Final = "https://example.com"
BRAND: Final = {
    "terms_url": f"{SITE}/terms",
    "privacy_url": f"{SITE}/privacy",
    "contact": "support@example.com",
    "status_url": f"{SITE}/status",
}
PUBLIC: Final = ("/", "/docs", "/docs/guides/quick-start")  # outside the console


class Lived(WithConsole, Bundled):
    """config.yaml with console, open sign-up and payments. Each start fills a new ledger with sixty days of data."""

    life: Life

    def config(self) -> dict[str, Any]:
        config = super().config()
        mail = {"host": "127.0.0.1", "port": 9, "sender": "console@example.com"}  # nothing listens on this port
        console = {"mail": mail, "url": f"{self.base_url}/console", "signup": "open", "brand": BRAND}
        config["applications"][-1]["args"] |= console
        next(one for one in config["applications"] if one["name"] == "gateway")["args"]["brand"] = BRAND
        return config

    def command(self) -> list[str]:
        command = super().command()
        self.life = fill(f"sqlite:///{self.home.absolute() / 'ledger.db'}")
        return command

    def environment(self) -> dict[str, str]:
        return dict(os.environ) | {
            "SERVE_APP_STRIPE_KEY": "sk_test_none",
            "SERVE_APP_STRIPE_WEBHOOK_SECRET": "whsec_none",
        }

    def pages(self) -> dict[str, list[tuple[str, str]]]:
        """Returns names and paths of all pages by visitor: "" (signed out), an owner, an operator."""
        life, month = self.life, time.strftime("%Y-%m", time.gmtime())
        keys = SecretKeys(secret_files.secret_file(self.home, "secret-key").encode())
        sign_up = links.make_link(keys, links.SIGN_UP, "kim@example.com", time.time() + HOUR_S)
        tokens = {"/invitations/{token}": life.invitation, "/first/{token}": life.first, "/sign-up/{token}": sign_up}
        values = {"account_id": life.account_id, "id": life.account_id, "month": month, "model": "svc-coder"}
        values |= {"key_id": life.key_id, "person_id": life.person_id, "link": life.reset}
        found: dict[str, list[tuple[str, str]]] = {"": [(path, path) for path in PUBLIC], OWNER: [], OPERATOR: []}
        for page in PAGES:
            if page.method != "GET" or any(part in page.path for part in NO_PAGES):
                continue
            path = page.path.format(**values, request_id=life.request_id, token=tokens.get(page.path, ""))
            visitor = "" if page.rule == ANYONE else OPERATOR if page.path.startswith("/operator") else OWNER
            found[visitor].append((f"/console{page.path}", f"/console{path}"))
        return found


@contextmanager
def browsing() -> Iterator[Chrome]:
    """Runs a headless Chromium."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    headless = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage")
    for argument in (*headless, "--hide-scrollbars", "--force-prefers-reduced-motion"):
        options.add_argument(argument)
    browser = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
    try:
        yield browser
    finally:
        browser.quit()


def sign_in(browser: Chrome, base_url: str, email: str) -> None:
    """Signs a person in; an empty address signs out."""
    browser.get(f"{base_url}/console/sign-in")
    browser.delete_all_cookies()
    if not email:
        return
    browser.get(f"{base_url}/console/sign-in")
    for name, text in {"email": email, "password": PASSWORD}.items():
        browser.find_element(By.NAME, name).send_keys(text)
    browser.find_element(By.CSS_SELECTOR, "form.stack button:not([type=button])").click()
    WebDriverWait(browser, PATIENCE_S).until(lambda _: "/accounts/" in browser.current_url)
