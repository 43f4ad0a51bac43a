"""The look that all pages share: its files, its templates, and what a browser keeps of them."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from serve_app.console import formats, static_files
from serve_app.console.assets import ICONS, RECORD, VENDOR
from serve_app.contracts.money import MINUS, fixed_amount, summing_places
from serve_app.settings import BrandSettings
from tests.accounting.books import NOON

from .conftest import House, submit, words

TEMPLATES = sorted((Path(static_files.__file__).parent / "templates").glob("*.html"))
ICON = re.compile(r"""icon\("([\w-]+)"|icon="([\w-]+)\"""")
REFERENCE = re.compile(r'(?:src|href)="/console(/static/[^"#]+)')


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_template_has_a_style_or_a_script_in_it(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:|hx-on", text)
    for tag in re.findall(r"<script[^>]*>", text):
        assert "|static" in tag or 'type="application/json"' in tag, tag


def test_every_vendored_file_is_the_recorded_one() -> None:
    record = {one["file"]: one for one in json.loads((VENDOR / RECORD).read_text())}
    assert {path.name for path in VENDOR.iterdir()} == {*record, RECORD}
    for name, one in record.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == one["sha256"], name
        assert one["version"] and one["licence"]  # noqa: PT018
    sizes = {path.name: path.stat().st_size for path in VENDOR.iterdir()}
    assert sizes.pop("redoc.standalone.js") < 1_200_000  # only the API reference loads it
    assert sum(sizes.values()) < 1_600_000


def test_every_icon_is_in_the_sprite() -> None:
    used = {name for path in TEMPLATES for found in ICON.findall(path.read_text()) for name in found if name}
    assert used > {"key", "bell"}
    assert used <= set(ICONS.split())


def test_a_browser_keeps_each_file_by_its_version(house: House) -> None:
    browser = house.member()
    page = browser.get(f"/console/accounts/{house.account_id}").text
    found = set(REFERENCE.findall(page))
    assert len(found) >= 8
    for path in found:
        answer = browser.get(f"/console{path}")
        assert answer.status_code == 200, path
        assert ("immutable" in answer.headers["cache-control"]) == ("?v=" in path), path
    stale = browser.get("/console/static/console.css?v=of-before")
    assert stale.headers["cache-control"] == static_files.UNVERSIONED
    again = browser.get("/console/static/console.css", headers={"if-none-match": stale.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_cold_page_is_light(house: House) -> None:
    """Bytes on the wire: a page with all its files at most 600 KB, and at most 250 KB once they are kept."""
    browser = house.member()
    page = browser.get(f"/console/accounts/{house.account_id}").text
    files = {path.partition("?")[0].rpartition("/")[2] for path in REFERENCE.findall(page)} - {static_files.BRAND}
    sent = [file.compressed or file.content for name in files if (file := static_files.file_named(name))]
    assert len(sent) == len(files)
    assert len(page.encode()) < 250_000
    assert len(page.encode()) + sum(map(len, sent)) < 600_000


def test_a_file_is_compressed_only_for_who_accepts_it(house: House) -> None:
    path, browser = "/console/static/tabler.min.css", house.browser()
    with browser.stream("GET", path, headers={"accept-encoding": "gzip"}) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == "gzip"
    plain = browser.get(path, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert gzip.decompress(raw) == plain.content


def test_the_typeface_is_the_services_own_and_kept(house: House) -> None:
    """The style sheet names it by the address that the page loads early, or a browser would load it twice."""
    browser = house.browser()
    page = browser.get("/console/sign-in")
    [preloaded] = re.findall(r'<link rel="preload" href="/console/static/([^"]+)" as="font"', page.text)
    assert f'url("{preloaded}")' in browser.get("/console/static/console.css").text
    font = browser.get(f"/console/static/{preloaded}", headers={"accept-encoding": "gzip"})
    assert (font.content[:4], font.headers["content-type"]) == (b"wOF2", "font/woff2")
    assert font.headers["cache-control"] == static_files.FOREVER
    assert "content-encoding" not in font.headers
    assert "font-src 'self'" in page.headers["content-security-policy"]


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fweb.py", "vendor", "%2Fetc%2Fpasswd"])
def test_no_other_file_is_sent(house: House, name: str) -> None:
    assert house.browser().get(f"/console/static/{name}").status_code == 404


def test_the_brand_is_on_the_pages(house: House, tmp_path: Path) -> None:
    browser = house.browser()
    assert browser.get("/console/static/logo").status_code == 404
    (tmp_path / "mark.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    house.console.brand = BrandSettings(name="Ada & Co", logo=tmp_path / "mark.svg", accent="#0a7f3f")
    assert "Ada &amp; Co" in browser.get("/console/sign-in").text
    assert "--tblr-primary: #0a7f3f" in browser.get("/console/static/brand.css").text
    logo = browser.get("/console/static/logo")
    assert (logo.headers["content-type"], logo.text[:4]) == ("image/svg+xml", "<svg")
    assert "default-src 'none'" in logo.headers["content-security-policy"]


@pytest.mark.parametrize("wrong", [{"accent": "red"}, {"accent": "#12345;"}, {"logo": "/nowhere.svg"}, {"name": ""}])
def test_a_brand_that_can_not_be_shown_is_refused_at_startup(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="BrandSettings"):
        BrandSettings(**wrong)  # type: ignore[arg-type]


def test_what_is_done_is_said_once_on_the_next_page(house: House) -> None:
    browser, path = house.member(), f"/console/accounts/{house.account_id}/alerts"
    house.console.has_mail = True
    fields = {"kind": "balance", "threshold": "1", "target": "ada@example.org"}
    assert submit(browser, path, path, **fields).status_code == 303
    assert "Alert created" in browser.get(path).text
    assert "Alert created" not in browser.get(path).text


def test_a_cell_has_the_name_of_its_column_for_narrow_screens() -> None:
    rows = Markup('<tr class="x"><td>a</td><td class="text-end">1 &lt;td&gt;</td><td>menu</td></tr>')
    rows += Markup('<tr><th colspan="2">all</th><td>b</td></tr>')
    made = formats.labelled(rows, ["Name", ('Cost "USD"', "end"), ""])
    assert made.partition("<tr><th")[0].replace(" data-lead", "") == (
        '<tr class="x"><td>a</td>'
        '<td data-label="Cost &#34;USD&#34;" class="text-end">1 &lt;td&gt;</td><td>menu</td></tr>'
    )
    assert made.endswith('<tr><th colspan="2">all</th><td>b</td></tr>')


@pytest.mark.parametrize(
    ("columns", "lead"),
    [
        (["Model", ("Mean duration (s)", "end"), ("Cost (USD)", "end")], "Cost (USD)"),
        (["Ended", "Model", "Status", ("Duration", "end"), ("Cost (USD)", "end")], "Cost (USD)"),
        (["Name", "Key", "Status", ("Attempts", "end")], "Status"),
        (["Backend", ("Replicas", "end"), ("Running", "end")], "Replicas"),
        (["Model", ("Input (USD per million tokens)", "end"), ("Context", "end")], "Context"),  # the name is too long
        (["When", "What happened", ""], ""),
    ],
)
def test_an_amount_the_status_or_a_number_leads_a_row_on_narrow_screens(columns: list[Any], lead: str) -> None:
    made = formats.labelled(Markup("<tr>" + "<td>a</td>" * len(columns) + "</tr>"), columns)
    assert re.findall(r'data-label="([^"]*)" data-lead', made) == ([lead] if lead else [])


def test_a_refused_form_keeps_its_values_and_shows_the_error_at_its_field(house: House) -> None:
    browser, path = house.member(), f"/console/accounts/{house.account_id}/keys"
    answer = submit(browser, path, path, name="night job", rpm="many", tags="a<b")
    assert answer.status_code == 422
    assert '<dialog class="dialog" id="new-key" aria-labelledby="new-key-title" data-open>' in answer.text
    for kept in ("night job", "many", "a&lt;b"):
        assert f'value="{kept}"' in answer.text
    assert "Requests per minute: type a whole number." in answer.text.partition('id="f-rpm-error">')[2][:60]


def test_a_key_is_edited_and_terms_that_are_emptied_end(house: House) -> None:
    browser, path = house.member(), f"/console/accounts/{house.account_id}/keys"
    terms = {"model": "svc-chat", "rpm": "3", "budget": "2.50", "expires": "2026-07-01", "tags": "ci"}
    submit(browser, path, path, name="laptop", **terms)
    [key] = house.ledger.list_keys(house.account_id)
    form = browser.get(f"{path}/{key.key_id}").text
    for value in ("laptop", "2.50", "2026-07-01", "ci", "3"):
        assert f'value="{value}"' in form, value
    changed = {"name": "desk", "model": "svc-coder", "tpm": "9", "budget": "1", "budget_period": "day"}
    answer = submit(browser, f"{path}/{key.key_id}", f"{path}/{key.key_id}", **changed)
    assert (answer.status_code, answer.headers["location"]) == (303, path)
    [after] = house.ledger.list_keys(house.account_id)
    assert (after.name, after.models, dict(after.limits)) == ("desk", ("svc-coder",), {"tpm": 9})
    assert (after.budget, after.budget_period, after.expires_at, after.tags) == (10**9, "day", None, None)
    other = house.member("bob@example.org", account_id=house.ledger.create_account("Bob's").account_id)
    assert other.get(f"{path}/{key.key_id}").status_code == 403


def test_first_steps_are_shown_until_they_are_done_or_dismissed(house: House) -> None:
    browser, path = house.member(), f"/console/accounts/{house.account_id}"
    assert "0 of 4 done" in words(browser.get(path).text)
    submit(browser, f"{path}/keys", f"{path}/keys", name="laptop")
    assert "1 of 4 done" in words(browser.get(path).text)
    assert "First steps" not in house.member("mia@example.org", "member").get(path).text
    assert submit(browser, path, f"{path}/first-steps/dismiss").status_code == 303
    assert "First steps" not in browser.get(path).text


@pytest.mark.parametrize(
    ("nano", "balance", "cost"),
    [
        (0, "0.00", "0.00"),
        (1_234_567_890_123, "1,234.57", "1,234.57"),
        (46, "0.00", "0.000000046"),
        (1_234_567, "0.00", "0.00123457"),
        (-5_005_000_000, "−5.00", "−5.005"),
        (-46, "0.00", "−0.000000046"),
        (5 * 10**16, "50,000,000.00", "50,000,000.00"),
    ],
)
def test_an_amount_has_the_decimals_that_matter(nano: int, balance: str, cost: str) -> None:
    assert (formats.balance(nano), formats.cost(nano)) == (balance, cost)


@pytest.mark.parametrize(
    ("amounts", "places"),
    [
        ([243_838_000_000, 275_000_000_000, -46_846_000_000, -21_036_000_000], 3),
        ([10**9, -250_000_000], 2),
        ([10**9, -46], 8),
        ([0, 0], 2),
    ],
)
def test_the_amounts_of_a_page_add_up_as_they_are_shown(amounts: list[int], places: int) -> None:
    assert summing_places(amounts) == places
    shown = [Decimal(fixed_amount(nano, places).replace(MINUS, "-")) for nano in amounts]
    assert sum(shown) == Decimal(fixed_amount(sum(amounts), places))
    assert all(bool(one) == bool(nano) for one, nano in zip(shown, amounts, strict=True))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "just now"),
        (-59, "just now"),
        (-60, "1 minute ago"),
        (-7200, "2 hours ago"),
        (7200, "in 2 hours"),
        (3 * 86400, "4 Jun 2026"),
        (-86400, "31 May 2026"),
    ],
)
def test_a_time_within_a_day_is_relative(seconds: float, said: str) -> None:
    assert formats.relative(NOON + seconds, NOON) == said
