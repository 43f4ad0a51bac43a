"""The console over the running service, in a real browser: from the invitation to a request that it shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from selenium.common.exceptions import TimeoutException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from standardwebhooks import Webhook

from serve_app.console.app import PAGES
from tests.console.webhook_receiver import Receiver
from tests.service.conftest import STRIPE_SECRET
from tests.service.harness import FRANCE, Account, Service, until

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.service,
    pytest.mark.slow,
    pytest.mark.skipif(None in (BROWSER, DRIVER), reason="needs Debian's chromium and chromium-driver"),
]
PATIENCE_S = 60
PASSWORD = "correct horse battery"
WIDTHS = (360, 1440)
#: A folder for pictures of the console, which README.md shows: `make pictures` names it.
PICTURES = os.environ.get("SERVE_APP_PICTURES")
AXE = Path(__file__).parents[1] / "clients/node/node_modules/axe-core/axe.min.js"
RUN_AXE = """;
const done = arguments[arguments.length - 1];
axe.run().then((result) => done(result.violations.filter((one) => ["serious", "critical"].includes(one.impact))
    .map((one) => `${one.id}: ${one.nodes.map((node) => node.html).join(" ")}`)), (error) => done([String(error)]));
"""


@pytest.fixture(autouse=True)
def console(service: Service) -> None:
    until(lambda: service.http.get("/console/sign-in").status_code == 200)


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
    try:
        WebDriverWait(browser, PATIENCE_S).until(lambda _: browser.title == title)
    except TimeoutException:
        text = browser.find_element(By.TAG_NAME, "body").text
        raise AssertionError(f"waited for {title}, and there is {browser.title}: {text[:500]}") from None


def shown(browser: Chrome) -> dict[str, str]:
    """The figures of the overview."""
    names, values = (browser.find_elements(By.TAG_NAME, tag) for tag in ("dt", "dd"))
    return {name.text: value.text for name, value in zip(names, values, strict=True)}


def picture(browser: Chrome, name: str) -> None:
    if PICTURES is not None:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.set_window_size(1100, 800)
        browser.execute_script("scrollTo(0, 0)")
        browser.save_screenshot(str(Path(PICTURES) / f"{name}.png"))


def pay(service: Service, account_id: str, cents: int) -> None:
    """Sends Stripe's report of a payment, signed as Stripe signs it."""
    from stripe import WebhookSignature  # loads a large library

    session = {"id": "cs_1", "object": "checkout.session", "payment_intent": "pi_1", "payment_status": "paid"}
    session |= {"mode": "payment", "metadata": {"account_id": account_id}, "amount_total": cents, "currency": "usd"}
    event = {"id": "evt_1", "object": "event", "type": "checkout.session.completed", "data": {"object": session}}
    body, at = json.dumps(event), int(time.time())
    signature = WebhookSignature._compute_signature(f"{at}.{body}", STRIPE_SECRET)
    hook, headers = f"{service.base_url}/console/payments/stripe", {"stripe-signature": f"t={at},v1={signature}"}
    assert httpx.post(hook, content=body, headers=headers, trust_env=False).status_code == 200


def tab_to(browser: Chrome, wanted: WebElement) -> None:
    """With the keyboard alone. Whatever has the focus on the way can be seen to have it."""
    for _ in range(200):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        here = browser.switch_to.active_element
        if here.tag_name != "body":
            assert here.value_of_css_property("outline-style") != "none", here.get_attribute("outerHTML")
        if here == wanted:
            return
    raise AssertionError(f"the keyboard does not reach {wanted.get_attribute('outerHTML')}")


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
    assert len(browser.find_elements(By.XPATH, "//pre/following-sibling::button[text()='Copy']")) == 4
    origin = {"origin": service.base_url, "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.execute_cdp_cmd("Browser.grantPermissions", origin)
    browser.find_element(By.XPATH, "//button[text()='Copy']").click()
    WebDriverWait(browser, PATIENCE_S).until(lambda _: browser.find_elements(By.XPATH, "//button[text()='Copied']"))
    key = browser.find_element(By.ID, "key").text
    assert browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])") == key
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
    browser.find_element(By.NAME, "temperature").send_keys("0")
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
    browser.find_element(By.CSS_SELECTOR, "#code summary").click()
    picture(browser, "playground")
    severe = [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    assert [message for message in severe if "favicon" not in message] == []
    browser.find_element(By.LINK_TEXT, "Overview").click()
    titled(browser, "Ada's")
    figures = shown(browser)
    assert figures["Requests today"] == "3"
    picture(browser, "overview")
    assert int(figures["Tokens today"]) > usage.total_tokens
    browser.find_element(By.LINK_TEXT, "Usage").click()
    titled(browser, "Usage")
    assert len(browser.find_elements(By.CSS_SELECTOR, "figure > svg > rect")) == 1
    assert browser.execute_script("return getComputedStyle(document.querySelector('rect')).fill") != "rgb(0, 0, 0)"
    expect_usable(browser)
    picture(browser, "usage")
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
    before = account.nano
    pay(service, account.id, 2_000)
    assert account.nano == before + 20 * 10**9
    browser.find_element(By.LINK_TEXT, "Billing").click()
    titled(browser, "Billing")
    assert "20.00" in browser.page_source
    browser.find_element(By.LINK_TEXT, "Keys").click()
    titled(browser, "Keys")
    rotate = browser.find_element(By.XPATH, "//button[text()='Rotate laptop']")
    rotate.find_element(By.XPATH, "..//option[text()='0 minutes']").click()
    rotate.click()
    titled(browser, "Your new key")
    successor = browser.find_element(By.ID, "key").text
    until(lambda: service.chat(key, FRANCE, max_tokens=1).status_code == 401)
    assert service.chat(successor, FRANCE, max_tokens=1).status_code == 200
    browser.find_element(By.XPATH, "//button[text()='Sign out']").click()
    titled(browser, "Sign in")
    expect_usable(browser)
    browser.get(f"{service.base_url}/console/accounts/{account.id}/keys")
    titled(browser, "Sign in")
    fill(browser, email="ada@example.org", password=PASSWORD)
    titled(browser, "Ada's")


@pytest.mark.long
def test_every_page_is_usable(service: Service, browser: Chrome) -> None:
    """All that the table of rules has, so that a new page is among them."""
    account = service.account("Eve's")
    invite = ("people", "invite")
    browser.get(service.cli(*invite, "gil@example.org", account.id)["link"])
    fill(browser, name="Gil", new_password=PASSWORD)
    titled(browser, "Eve's")
    browser.get(service.cli(*invite, "eve@example.org", account.id)["link"])
    fill(browser, name="Eve", new_password=PASSWORD)
    titled(browser, "Eve's")
    service.cli("people", "operator", "eve@example.org", "--role", "admin", "--account", account.id)
    browser.get(f"{service.base_url}/console/sign-in")
    fill(browser, email="eve@example.org", password=PASSWORD)
    titled(browser, "Eve's")
    assert service.chat(account.key, FRANCE, max_tokens=1).status_code == 200
    values = {"account_id": account.id, "id": account.id, "month": time.strftime("%Y-%m", time.gmtime())}
    values["token"] = service.cli(*invite, "fay@example.org", account.id)["link"].rsplit("/", 1)[1]
    values["link"] = service.cli("people", "reset", "gil@example.org")["link"].rsplit("/", 1)[1]
    no_pages = ("/static/", ".csv", "/openid", "{request_id}")
    paths = [page.path for page in PAGES if page.method == "GET"]
    pages = [path.format(**values) for path in paths if not any(part in path for part in no_pages)]
    assert len(pages) >= 20
    for page in pages:
        browser.get(f"{service.base_url}/console{page}")
        assert "/sign-in" not in browser.current_url or page == "/sign-in", page
        assert browser.find_elements(By.TAG_NAME, "h1"), page
        assert not [one.text for one in browser.find_elements(By.CSS_SELECTOR, "[role=alert]") if one.is_displayed()]
        expect_usable(browser)


@pytest.mark.long
def test_the_keyboard_alone_suffices(service: Service, browser: Chrome) -> None:
    account = service.account("Kay's")

    def press(*keys: str) -> None:
        ActionChains(browser).send_keys(*keys).perform()

    browser.get(service.cli("people", "invite", "kay@example.org", account.id)["link"])
    tab_to(browser, browser.find_element(By.NAME, "name"))
    press("Kay", Keys.TAB, PASSWORD, Keys.ENTER)
    titled(browser, "Kay's")
    tab_to(browser, browser.find_element(By.LINK_TEXT, "Keys"))
    press(Keys.ENTER)
    titled(browser, "Keys")
    tab_to(browser, browser.find_element(By.NAME, "name"))
    press("by keys")
    tab_to(browser, browser.find_element(By.XPATH, "//button[text()='Create the key']"))
    press(Keys.SPACE)
    titled(browser, "Your new key")
    for section in ("Playground", "Usage", "Billing", "Alerts", "Members", "API", "Docs", "Profile"):
        tab_to(browser, browser.find_element(By.LINK_TEXT, section))
        press(Keys.ENTER)
        WebDriverWait(browser, PATIENCE_S).until(lambda _, section=section: section in browser.title)
        reached = browser.find_elements(By.CSS_SELECTOR, "main :is(a, button, input, select, textarea):enabled, main a")
        there = [one for one in reached if one.is_displayed() and one.get_attribute("type") != "hidden"]
        if there:
            tab_to(browser, there[-1])
        browser.refresh()
    tab_to(browser, browser.find_element(By.XPATH, "//button[text()='Sign out']"))
    press(Keys.ENTER)
    titled(browser, "Sign in")


@pytest.mark.long
def test_operators_limit_suspend_and_give_credit_that_a_second_one_approves(service: Service, browser: Chrome) -> None:
    account, staff = service.account("Cleo's"), service.account("Staff")
    operators = ("olga@example.org", "omar@example.org")
    for email in operators:
        browser.get(service.cli("people", "invite", email, staff.id)["link"])
        fill(browser, name=email, new_password=PASSWORD)
        titled(browser, "Staff")
        service.cli("people", "operator", email, "--role", "admin", "--account", staff.id)

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
    until(lambda: service.chat(account.key, FRANCE, max_tokens=1).status_code == 401)
    titled(browser, "Account Cleo's")
    click("Reactivate the account")
    until(lambda: service.chat(account.key, FRANCE, max_tokens=1).status_code == 200)
    titled(browser, "Account Cleo's")
    browser.find_element(By.NAME, "amount").send_keys("150")
    browser.find_element(By.NAME, "memo").send_keys("invoice 7")
    click("Credit")
    titled(browser, "Pending credits")
    assert browser.find_elements(By.XPATH, "//button[text()='Approve 150.00']") == []
    assert account.nano < 5 * 10**9
    sign_in(operators[1])
    browser.find_element(By.LINK_TEXT, "Credits").click()
    titled(browser, "Pending credits")
    expect_usable(browser)
    click("Approve 150.00")
    until(lambda: account.nano > 154 * 10**9)
    for section in ("Audit log", "Books", "Live"):
        browser.find_element(By.LINK_TEXT, section).click()
        titled(browser, section)
        expect_usable(browser)


@pytest.mark.long
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
