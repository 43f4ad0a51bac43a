"""The console over the running service, in a real browser: from the invitation to a request that it shows."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from standardwebhooks import Webhook

from tests.console.webhook_receiver import Receiver
from tests.service.harness import FRANCE, Account, Service, until
from tests.service.started import started

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.service,
    pytest.mark.slow,
    pytest.mark.skipif(None in (BROWSER, DRIVER), reason="needs Debian's chromium and chromium-driver"),
]
PATIENCE_S = 60
PASSWORD = "correct horse battery"
WIDTHS = (360, 1440)
AXE = Path(__file__).parents[1] / "clients/node/node_modules/axe-core/axe.min.js"
RUN_AXE = """;
const done = arguments[arguments.length - 1];
axe.run().then((result) => done(result.violations.filter((one) => ["serious", "critical"].includes(one.impact))
    .map((one) => `${one.id}: ${one.nodes.map((node) => node.html).join(" ")}`)), (error) => done([String(error)]));
"""


@pytest.fixture(scope="module")
def service(model_path: Path) -> Iterator[Service]:
    with started(model_path, "tests/service/console.yaml") as running:
        until(lambda: httpx.get(f"{running.base_url}/console/sign-in", trust_env=False).status_code == 200, 60)
        yield running


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = BROWSER or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path}"):
        options.add_argument(argument)
    chrome = Chrome(options=options, service=ChromeService(DRIVER))
    yield chrome
    chrome.quit()


def fill(browser: Chrome, **fields: str) -> None:
    """Types into a form by the names of its fields, and sends it."""
    for name, text in fields.items():
        browser.find_element(By.NAME, name).send_keys(text)
    browser.find_element(By.CSS_SELECTOR, "form.stack button").click()


def titled(browser: Chrome, title: str) -> None:
    WebDriverWait(browser, PATIENCE_S).until(lambda _: browser.title == title)


def shown(browser: Chrome) -> dict[str, str]:
    """The figures of the overview."""
    names, values = (browser.find_elements(By.TAG_NAME, tag) for tag in ("dt", "dd"))
    return {name.text: value.text for name, value in zip(names, values, strict=True)}


def expect_usable(browser: Chrome) -> None:
    """No overflow on a phone and on a desk, no serious violation of axe-core in light and dark, a small page."""
    for width in WIDTHS:
        browser.set_window_size(width, 900)
        inner, wide = browser.execute_script("return [innerWidth, document.documentElement.scrollWidth]")
        assert wide <= inner, (browser.title, width)
    assert len(browser.page_source) < 100_000
    for scheme in ("light", "dark") if AXE.exists() else ():
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        found = browser.execute_async_script(AXE.read_text(encoding="utf-8") + RUN_AXE)
        assert found == [], (browser.title, scheme)


def test_from_the_invitation_to_a_request_that_the_overview_shows(
    service: Service, browser: Chrome, receiver: Receiver
) -> None:
    account: Account = service.account("Ada's")
    link = service.cli("people", "invite", "ada@example.org", account.id)["link"]
    assert link.startswith(f"{service.base_url}/console/invitations/")
    browser.get(link)
    expect_usable(browser)
    fill(browser, name="Ada", new_password=PASSWORD)
    titled(browser, "Ada's")
    assert shown(browser)["Requests today"] == "0"
    expect_usable(browser)
    browser.find_element(By.LINK_TEXT, "Keys").click()
    titled(browser, "Keys")
    assert "svc-chat" in browser.page_source
    expect_usable(browser)
    fill(browser, name="laptop")
    titled(browser, "Your new key")
    expect_usable(browser)
    key = browser.find_element(By.ID, "key").text
    base = re.search(r'base_url="([^"]+)"', browser.find_element(By.TAG_NAME, "body").text)
    assert base is not None
    stream = service.client(key, base_url=base[1]).chat.completions.create(
        model="svc-chat", messages=FRANCE, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    usage = [chunk.usage for chunk in stream][-1]
    assert usage is not None
    account.settled(1)
    browser.find_element(By.LINK_TEXT, "Playground").click()
    titled(browser, "Playground")
    expect_usable(browser)
    browser.find_element(By.NAME, "second").click()
    browser.find_element(By.NAME, "logprobs").click()
    browser.find_element(By.NAME, "max_tokens").send_keys("5")
    browser.find_element(By.NAME, "prompt").send_keys("Is it true?" + Keys.CONTROL + Keys.ENTER)
    account.settled(3)

    def told() -> list[str]:
        return [one.text for one in browser.find_elements(By.CLASS_NAME, "figures") if " tokens, 0.0" in one.text]

    until(lambda: len(told()) == 2)
    assert len(browser.find_elements(By.CSS_SELECTOR, ".assistant span[title*='%']")) == 10
    browser.find_element(By.CSS_SELECTOR, "#code summary").click()
    until(lambda: "Is it true?" in browser.find_element(By.ID, "python").text)
    assert '"logprobs": True' in browser.find_element(By.ID, "python").text
    expect_usable(browser)
    severe = [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    assert [message for message in severe if "favicon" not in message] == []
    browser.find_element(By.LINK_TEXT, "Overview").click()
    titled(browser, "Ada's")
    figures = shown(browser)
    assert figures["Requests today"] == "3"
    assert int(figures["Tokens today"]) > usage.total_tokens
    browser.find_element(By.LINK_TEXT, "Usage").click()
    titled(browser, "Usage")
    assert len(browser.find_elements(By.CSS_SELECTOR, "figure > svg > rect")) == 1
    assert browser.execute_script("return getComputedStyle(document.querySelector('rect')).fill") != "rgb(0, 0, 0)"
    expect_usable(browser)
    browser.find_element(By.CSS_SELECTOR, "table a").click()
    WebDriverWait(browser, PATIENCE_S).until(lambda _: browser.title.startswith("Requests of "))
    assert str(usage.prompt_tokens) in [cell.text for cell in browser.find_elements(By.TAG_NAME, "td")]
    expect_usable(browser)
    for section in ("Billing", "Members", "Alerts"):
        browser.find_element(By.LINK_TEXT, section).click()
        titled(browser, section)
        expect_usable(browser)
    fill(browser, threshold="6", target=receiver.url)  # of a balance below 5
    titled(browser, "The webhook's secret")
    expect_usable(browser)
    secret = browser.find_element(By.ID, "secret").text
    until(lambda: receiver.came)
    headers, body = receiver.came[0]
    assert Webhook(secret).verify(body, headers)["type"] == "balance.low"
    browser.find_element(By.LINK_TEXT, "Keys").click()
    titled(browser, "Keys")
    browser.find_element(By.XPATH, "//button[text()='Revoke laptop']").click()
    until(lambda: service.chat(key, FRANCE, max_tokens=1).status_code == 401, 30)
    browser.find_element(By.XPATH, "//button[text()='Sign out']").click()
    titled(browser, "Sign in")
    expect_usable(browser)
    browser.get(f"{service.base_url}/console/accounts/{account.id}/keys")
    titled(browser, "Sign in")
    fill(browser, email="ada@example.org", password=PASSWORD)
    titled(browser, "Ada's")


def test_operators_limit_suspend_and_give_credit_that_a_second_one_approves(service: Service, browser: Chrome) -> None:
    account, staff = service.account("Cleo's"), service.account("Staff")
    operators = ("olga@example.org", "omar@example.org")
    for email in operators:
        browser.get(service.cli("people", "invite", email, staff.id)["link"])
        fill(browser, name=email, new_password=PASSWORD)
        titled(browser, "Staff")
        service.cli("people", "operator", email, "--role", "admin")

    def sign_in(email: str) -> None:
        browser.delete_all_cookies()
        browser.get(f"{service.base_url}/console/sign-in")
        fill(browser, email=email, password=PASSWORD)
        titled(browser, "Staff")
        browser.find_element(By.LINK_TEXT, "Operator").click()
        titled(browser, "Accounts")
        expect_usable(browser)

    def click(button: str) -> None:
        browser.find_element(By.XPATH, f"//button[text()='{button}']").click()

    sign_in(operators[0])
    browser.find_element(By.LINK_TEXT, "Cleo's").click()
    titled(browser, "Account Cleo's")
    expect_usable(browser)
    browser.find_element(By.NAME, "rpm").send_keys("7")
    click("Set the limits")
    until(lambda: account.show()["limits"]["rpm"] == 7)
    titled(browser, "Account Cleo's")
    click("Suspend the account")
    until(lambda: service.chat(account.key, FRANCE, max_tokens=1).status_code == 401, 30)
    titled(browser, "Account Cleo's")
    click("Let it send requests again")
    until(lambda: service.chat(account.key, FRANCE, max_tokens=1).status_code == 200, 30)
    titled(browser, "Account Cleo's")
    browser.find_element(By.NAME, "amount").send_keys("150")
    browser.find_element(By.NAME, "memo").send_keys("invoice 7")
    click("Credit")
    titled(browser, "Credits that wait")
    assert browser.find_elements(By.XPATH, "//button[text()='Approve 150.00']") == []
    assert account.nano < 5 * 10**9
    sign_in(operators[1])
    browser.find_element(By.LINK_TEXT, "Credits").click()
    titled(browser, "Credits that wait")
    expect_usable(browser)
    click("Approve 150.00")
    until(lambda: account.nano > 154 * 10**9)
    for section in ("Audit log", "Books"):
        browser.find_element(By.LINK_TEXT, section).click()
        titled(browser, section)
        expect_usable(browser)


def test_a_suspended_person_is_signed_out(service: Service, browser: Chrome) -> None:
    account = service.account("Ben's")
    browser.get(service.cli("people", "invite", "ben@example.org", account.id)["link"])
    fill(browser, name="Ben", new_password=PASSWORD)
    titled(browser, "Ben's")
    service.cli("people", "suspend", "ben@example.org")
    browser.get(f"{service.base_url}/console/accounts/{account.id}")
    titled(browser, "Sign in")
    fill(browser, email="ben@example.org", password=PASSWORD)
    WebDriverWait(browser, PATIENCE_S).until(lambda _: browser.find_elements(By.CSS_SELECTOR, "[role=alert]"))
    assert browser.title == "Sign in"


def test_the_api_is_where_it_was(service: Service) -> None:
    reply = service.client().chat.completions.create(model="svc-chat", messages=FRANCE, max_tokens=1)
    assert reply.usage is not None
    answer = httpx.get(f"{service.base_url}/console", trust_env=False, follow_redirects=True)
    assert (answer.status_code, answer.url.path) == (200, "/console/sign-in")
