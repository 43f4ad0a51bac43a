"""The console over the running service, in a real browser: from the invitation to a request that it shows."""

from __future__ import annotations

import json
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
from selenium.webdriver.support.ui import Select, WebDriverWait
from standardwebhooks import Webhook

from serve_app.console.app import PAGES
from serve_app.settings import BrandSettings
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
PRODUCT = BrandSettings().name
WIDTHS = (360, 1440)
HEIGHT = 900
AXE = Path(__file__).parents[1] / "clients/node/node_modules/axe-core/axe.min.js"
#: Whether an element shows that it has the focus.
SHOWS_FOCUS = """
const [one] = arguments;
const look = () => {
  const style = getComputedStyle(one);
  return [style.outlineStyle, style.boxShadow, style.borderColor, style.backgroundColor].join();
};
const focused = look();
one.blur();
const blurred = look();
one.focus();
return focused !== blurred;
"""
RUN_AXE = """;
const done = arguments[arguments.length - 1];
axe.run().then((result) => done(result.violations.filter((one) => ["serious", "critical"].includes(one.impact))
    .map((one) => `${one.id}: ${one.nodes.map((node) => node.html).join(" ")}`)), (error) => done([String(error)]));
"""

#: What a model may say: orders to htmx and to our scripts, parts of forms, and a cover over the page.
HOSTILE = """<div data-hx-post="/x" data-hx-trigger="load" hx-get="/y" id="csrf" class="position-fixed">a</div>
<textarea name="prompt" data-parameter="tools"></textarea><select></select><span class="copy" data-copy="x">b</span>

|c|
|-|
|<b>d</b>|
"""
FITS = "return innerWidth === arguments[0] && document.documentElement.scrollWidth <= innerWidth"
SHOW_MARKDOWN = """
const [text, done] = arguments, source = document.querySelector('script[src*="playground.js"]').src;
import(source.replace("playground.js", "playground-markdown.js")).then((module) => {
  const place = document.createElement("div");
  module.showMarkdown(place, text);
  for (const table of place.querySelectorAll("table")) table.removeAttribute("class");
  done([...place.querySelectorAll("*")].flatMap((one) => [one.localName, ...one.getAttributeNames()]));
});
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
    arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--force-prefers-reduced-motion"]
    for argument in (*arguments, f"--user-data-dir={tmp_path}"):
        options.add_argument(argument)
    chrome = Chrome(options=options, service=ChromeService(DRIVER))
    widen(chrome, WIDTHS[-1])
    yield chrome
    chrome.quit()


def widen(browser: Chrome, width: int) -> None:
    """Sets the width of the page: a window has a least one, which is wider than a phone."""
    size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def press(browser: Chrome, label: str) -> None:
    """Presses the button that is shown with this text."""
    found = browser.find_elements(By.XPATH, f'//button[normalize-space()="{label}"]')
    next(one for one in found if one.is_displayed()).click()


def fill(browser: Chrome, **fields: str) -> None:
    """Types into the shown form by the names of its fields, and sends it."""
    shown = [one for name in fields for one in browser.find_elements(By.NAME, name) if one.is_displayed()]
    for field, text in zip(shown, fields.values(), strict=True):
        field.send_keys(text)
    shown[0].find_element(By.XPATH, "ancestor::form//button[not(@type='button')]").click()


def confirm(browser: Chrome, typed: str = "") -> None:
    """Answers the dialog that asks before something is done."""
    dialog = browser.find_element(By.CSS_SELECTOR, "dialog[open]")
    if typed:
        dialog.find_element(By.NAME, "typed").send_keys(typed)
    dialog.find_element(By.CSS_SELECTOR, ".modal-footer button:not([type=button])").click()


def titled(browser: Chrome, title: str) -> None:
    title = f"{title} · {PRODUCT}"
    try:
        WebDriverWait(browser, PATIENCE_S).until(lambda _: browser.title == title)
    except TimeoutException:
        text = browser.find_element(By.TAG_NAME, "body").text
        raise AssertionError(f"waited for {title}, and there is {browser.title}: {text[:500]}") from None


def enter(browser: Chrome, section: str, title: str = "") -> None:
    """Opens a page from the navigation."""
    browser.find_element(By.XPATH, f"//aside//a[normalize-space()='{section}']").click()
    titled(browser, title or section)


def sign_out(browser: Chrome) -> None:
    browser.find_element(By.CSS_SELECTOR, "[aria-label='Your profile']").click()
    press(browser, "Sign out")
    titled(browser, "Sign in")


def shown(browser: Chrome) -> dict[str, str]:
    """The figures of the overview."""
    tiles = browser.find_elements(By.CLASS_NAME, "tile")
    parts = ([tile.find_element(By.CSS_SELECTOR, part) for part in (".subheader", ".h1")] for tile in tiles)
    return {name.get_attribute("textContent"): value.text for name, value in parts}


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
            assert browser.execute_script(SHOWS_FOCUS, here), here.get_attribute("outerHTML")
        if here == wanted:
            return
    raise AssertionError(f"the keyboard does not reach {wanted.get_attribute('outerHTML')}")


def expect_no_error(browser: Chrome) -> None:
    severe = [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    assert severe == [], browser.title


def expect_usable(browser: Chrome) -> None:
    """No error in the browser's log, no overflow on a phone and on a desk, no serious violation of axe-core in light
    and dark, a small page.
    """
    expect_no_error(browser)
    for width in WIDTHS:
        widen(browser, width)
        # A chart takes its new width a moment later.
        until(lambda wanted=width: browser.execute_script(FITS, wanted))
    sent = browser.execute_script("return performance.getEntriesByType('navigation')[0].decodedBodySize")
    assert 0 < sent < 100_000, (browser.title, sent)
    page = browser.find_element(By.TAG_NAME, "html")
    for scheme in ("light", "dark") if AXE.exists() else ():
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        until(lambda wanted=scheme: page.get_attribute("data-bs-theme") in (wanted, None))
        found = browser.execute_async_script(AXE.read_text(encoding="utf-8") + RUN_AXE)
        assert found == [], (browser.title, scheme)


def test_from_the_invitation_to_a_request_that_the_overview_shows(
    service: Service, browser: Chrome, receiver: Receiver
) -> None:
    account: Account = service.account("Ada's")
    link = service.cli("people", "invite", "ada@example.org", account.id)["link"]
    assert link.startswith(f"{service.base_url}/console/invitations/")
    browser.get(link)
    titled(browser, "Join Ada's")
    expect_usable(browser)
    fill(browser, name="Ada", new_password=PASSWORD)
    titled(browser, "Overview")
    assert "Ada's" in browser.find_element(By.CLASS_NAME, "account-switcher").text
    assert shown(browser)["Requests"] == "0"
    expect_usable(browser)
    enter(browser, "API keys")
    press(browser, "Create key")
    assert "svc-chat" not in browser.find_element(By.ID, "new-key").text, "all models are allowed at first"
    browser.find_element(By.XPATH, "//label[normalize-space()='Selected models']").click()
    assert "svc-chat" in browser.find_element(By.ID, "new-key").text
    expect_usable(browser)
    browser.find_element(By.XPATH, "//label[normalize-space()='All models']").click()
    fill(browser, name="laptop")
    titled(browser, "Your new key")
    expect_usable(browser)
    assert len(browser.find_elements(By.CSS_SELECTOR, ".snippet .copy")) == 2
    origin = {"origin": service.base_url, "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.execute_cdp_cmd("Browser.grantPermissions", origin)
    press(browser, "Copy")
    until(lambda: browser.find_element(By.ID, "toasts").text == "Copied")
    key = browser.find_element(By.ID, "key").text
    assert browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])") == key
    browser.find_element(By.XPATH, "//label[normalize-space()='Python']").click()
    base = re.search(r'base_url="([^"]+)"', browser.find_element(By.ID, "snippet-python").text)
    assert base is not None
    stream = service.client(key, base_url=base[1]).chat.completions.create(
        model="svc-chat", messages=FRANCE, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    usage = [chunk.usage for chunk in stream][-1]
    assert usage is not None
    account.settled(1)
    enter(browser, "Playground")
    until(lambda: "per 1M tokens" in browser.find_element(By.ID, "offer0").text)
    expect_usable(browser)
    browser.find_element(By.NAME, "second").click()
    Select(browser.find_element(By.NAME, "model1")).select_by_visible_text("svc-chat")
    for group in ("Length", "Token probabilities"):
        browser.find_element(By.XPATH, f"//summary[text()='{group}']").click()
    browser.find_element(By.NAME, "logprobs").click()
    browser.find_element(By.NAME, "temperature").send_keys("0")
    browser.find_element(By.NAME, "max_tokens").send_keys("5")
    browser.find_element(By.NAME, "prompt").send_keys("Is it true?" + Keys.CONTROL + Keys.ENTER)
    account.settled(3)

    def told() -> list[str]:
        return [
            one.text for one in browser.find_elements(By.CLASS_NAME, "figures") if " output tokens · $0.0" in one.text
        ]

    until(lambda: len(told()) == 2)
    assert len(browser.find_elements(By.CSS_SELECTOR, ".assistant span[title*='%']")) == 10
    browser.refresh()
    until(lambda: len(told()) == 2)  # the conversation stays
    press(browser, "View code")
    until(lambda: "Is it true?" in browser.find_element(By.ID, "code-python").text)
    assert "logprobs=True" in browser.find_element(By.ID, "code-python").text
    expect_usable(browser)
    browser.find_element(By.CSS_SELECTOR, "#code .btn-close").click()
    left = set(browser.execute_async_script(SHOW_MARKDOWN, HOSTILE))
    assert left == {"table", "thead", "tbody", "tr", "th", "td"}
    enter(browser, "Overview")
    figures = shown(browser)
    assert figures["Requests"] == "3"
    assert int(figures["Tokens"].replace(",", "")) > usage.total_tokens
    expect_usable(browser)
    enter(browser, "Usage")
    assert browser.execute_script("return Chart.getChart('usage-chart').data.datasets.length") == 1
    expect_usable(browser)
    browser.find_element(By.CSS_SELECTOR, "details.folded summary").click()
    browser.find_element(By.CSS_SELECTOR, "details.folded table a").click()
    titled(browser, "Requests")
    assert str(usage.prompt_tokens) in [cell.text for cell in browser.find_elements(By.TAG_NAME, "td")]
    expect_usable(browser)
    browser.find_element(By.CSS_SELECTOR, "td a").click()
    titled(browser, "Request")
    assert "Generation" in browser.find_element(By.CSS_SELECTOR, ".timeline").text
    expect_usable(browser)
    for section in ("Billing", "Members", "Alerts"):
        enter(browser, section)
        expect_usable(browser)
    press(browser, "Create alert")
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
    enter(browser, "Billing")
    assert "20.00" in browser.page_source
    enter(browser, "API keys")
    expect_usable(browser)
    browser.find_element(By.CSS_SELECTOR, "[aria-label='Actions for laptop']").click()
    press(browser, "Rotate")
    Select(browser.find_element(By.CSS_SELECTOR, "dialog[open] select")).select_by_visible_text("0 minutes")
    confirm(browser)
    titled(browser, "Your new key")
    successor = browser.find_element(By.ID, "key").text
    until(lambda: service.chat(key, FRANCE, max_tokens=1).status_code == 401)
    assert service.chat(successor, FRANCE, max_tokens=1).status_code == 200
    sign_out(browser)
    expect_usable(browser)
    browser.get(f"{service.base_url}/console/accounts/{account.id}/keys")
    titled(browser, "Sign in")
    fill(browser, email="ada@example.org", password=PASSWORD)
    titled(browser, "Overview")


@pytest.mark.long
def test_every_page_is_usable(service: Service, browser: Chrome) -> None:
    """All that the table of rules has, so that a new page is among them."""
    account, staff = service.account("Eve's"), service.account("New")
    invite = ("people", "invite")
    for name in ("gil", "eve"):
        browser.get(service.cli(*invite, f"{name}@example.org", account.id)["link"])
        fill(browser, name=name, new_password=PASSWORD)
        titled(browser, "Overview")
    service.cli("people", "operator", "eve@example.org", "--role", "admin", "--account", account.id)
    browser.get(f"{service.base_url}/console/sign-in")
    fill(browser, email="eve@example.org", password=PASSWORD)
    titled(browser, "Overview")
    assert service.chat(account.key, FRANCE, max_tokens=1).status_code == 200
    values = {"account_id": account.id, "id": account.id, "month": time.strftime("%Y-%m", time.gmtime())}
    values["key_id"] = service.admin("GET", f"/admin/accounts/{account.id}/keys")["data"][0]["id"]
    browser.get(f"{service.base_url}/console/operator/accounts/{account.id}")
    person = browser.find_element(By.LINK_TEXT, "gil@example.org").get_attribute("href")
    values["person_id"] = str(person).rsplit("/", 1)[1]
    values["model"] = "svc-chat"
    values["link"] = service.cli("people", "reset", "gil@example.org")["link"].rsplit("/", 1)[1]
    tokens = {
        "/invitations/{token}": service.cli(*invite, "fay@example.org", account.id)["link"],
        "/first/{token}": service.admin("POST", f"/admin/accounts/{staff.id}/sign-in-link")["path"],
    }
    # Files, parts of pages, sign-up, which this service has not, and a reference that another program draws.
    no_pages = ("/static/", ".csv", ".pdf", "/openid", "{request_id}", "/sign-up", "/operator/api")
    paths = [page.path for page in PAGES if page.method == "GET"]
    pages = [path for path in paths if not any(part in path for part in no_pages)]
    assert len(pages) >= 30
    for page in pages:
        token = tokens.get(page, "").rsplit("/", 1)[-1]
        browser.get(f"{service.base_url}/console{page.format(**values, token=token)}")
        assert "/sign-in" not in browser.current_url or page == "/sign-in", page
        assert browser.find_elements(By.TAG_NAME, "h1"), page
        alerts = [one.text for one in browser.find_elements(By.CSS_SELECTOR, "[role=alert]") if one.is_displayed()]
        assert alerts == [], page
        expect_usable(browser)
    browser.get(f"{service.base_url}/console/operator/api")
    until(lambda: browser.find_elements(By.CSS_SELECTOR, "[id^='operation/']"))
    expect_no_error(browser)


@pytest.mark.long
def test_the_keyboard_alone_suffices(service: Service, browser: Chrome) -> None:
    account = service.account("Kay's")

    def press_keys(*keys: str) -> None:
        ActionChains(browser).send_keys(*keys).perform()

    def reach(path: str) -> None:
        tab_to(browser, browser.find_element(By.XPATH, path))

    browser.get(service.cli("people", "invite", "kay@example.org", account.id)["link"])
    reach("//input[@name='name']")
    press_keys("Kay", Keys.TAB, PASSWORD, Keys.ENTER)
    titled(browser, "Overview")
    reach("//aside//a[normalize-space()='API keys']")
    press_keys(Keys.ENTER)
    titled(browser, "API keys")
    reach("//button[normalize-space()='Create key']")
    press_keys(Keys.ENTER)
    assert browser.switch_to.active_element == browser.find_element(By.NAME, "name")  # of the dialog
    press_keys("by keys")
    reach("//dialog//button[normalize-space()='Create key']")
    press_keys(Keys.SPACE)
    titled(browser, "Your new key")
    sections = ("Playground", "Usage", "Requests", "Billing", "Alerts", "Members", "Settings")
    links = [f"//aside//a[normalize-space()='{section}']" for section in sections]
    menu = "//a[@aria-label='Your profile']"
    titles = [*sections, "Docs", "Profile"]
    for title, path in zip(titles, [*links, "//header//a[contains(@href, '/docs')]", menu], strict=True):
        reach(path)
        press_keys(Keys.ENTER)
        if path == menu:
            reach("//a[normalize-space()='Profile']")
            press_keys(Keys.ENTER)
        titled(browser, title)
        reached = browser.find_elements(By.CSS_SELECTOR, "main :is(a, button, input, select, textarea):enabled, main a")
        there = [one for one in reached if one.is_displayed() and one.get_attribute("type") != "hidden"]
        if there:
            tab_to(browser, there[-1])
        browser.refresh()
    reach(menu)
    press_keys(Keys.ENTER)
    reach("//button[normalize-space()='Sign out']")
    press_keys(Keys.ENTER)
    titled(browser, "Sign in")


@pytest.mark.long
def test_operators_limit_suspend_and_give_credit_that_a_second_one_approves(service: Service, browser: Chrome) -> None:
    account, staff = service.account("Cleo's"), service.account("Staff")
    operators = ("olga@example.org", "omar@example.org")
    for email in operators:
        browser.get(service.cli("people", "invite", email, staff.id)["link"])
        fill(browser, name=email, new_password=PASSWORD)
        titled(browser, "Overview")
        service.cli("people", "operator", email, "--role", "admin", "--account", staff.id)

    def sign_in(email: str) -> None:
        browser.delete_all_cookies()
        browser.get(f"{service.base_url}/console/sign-in")
        fill(browser, email=email, password=PASSWORD)
        titled(browser, "Overview")
        enter(browser, "Accounts")
        expect_usable(browser)

    sign_in(operators[0])
    browser.find_element(By.LINK_TEXT, "Cleo's").click()
    titled(browser, "Cleo's")
    expect_usable(browser)
    press(browser, "Edit limits")
    browser.find_element(By.NAME, "rpm").send_keys("7")
    press(browser, "Save limits")
    until(lambda: account.show()["limits"]["rpm"] == 7)
    titled(browser, "Cleo's")
    press(browser, "Suspend account")
    confirm(browser, "Cleo's")
    until(lambda: service.chat(account.key, FRANCE, max_tokens=1).status_code == 401)
    titled(browser, "Cleo's")
    press(browser, "Reactivate account")
    confirm(browser)
    until(lambda: service.chat(account.key, FRANCE, max_tokens=1).status_code == 200)
    titled(browser, "Cleo's")
    press(browser, "Add credit or payment")
    fill(browser, amount="150", memo="invoice 7")
    titled(browser, "Credits")
    assert browser.find_elements(By.XPATH, "//button[normalize-space()='Approve']") == []
    assert account.nano < 5 * 10**9
    sign_in(operators[1])
    enter(browser, "Credits")
    expect_usable(browser)
    press(browser, "Approve")
    assert "Book 150.00 USD to Cleo's?" in browser.find_element(By.CSS_SELECTOR, "dialog[open]").text
    confirm(browser)
    until(lambda: account.nano > 154 * 10**9)
    for section in ("Audit", "Accounting", "Live"):
        enter(browser, section)
        expect_usable(browser)
    browser.get(f"{service.base_url}/console/operator")
    titled(browser, "Service overview")
    expect_usable(browser)


@pytest.mark.long
def test_a_suspended_person_is_signed_out(service: Service, browser: Chrome) -> None:
    account = service.account("Ben's")
    browser.get(service.cli("people", "invite", "ben@example.org", account.id)["link"])
    fill(browser, name="Ben", new_password=PASSWORD)
    titled(browser, "Overview")
    service.cli("people", "suspend", "ben@example.org")
    browser.get(f"{service.base_url}/console/accounts/{account.id}")
    titled(browser, "Sign in")
    fill(browser, email="ben@example.org", password=PASSWORD)
    WebDriverWait(browser, PATIENCE_S).until(lambda _: browser.find_elements(By.CSS_SELECTOR, "[role=alert]"))
    titled(browser, "Sign in")
