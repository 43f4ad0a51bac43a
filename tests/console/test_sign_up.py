"""Sign-up, resets by e-mail, invitations and the first person's link: what strangers learn, and who gets in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pyotp
import pytest

from serve_app.console import links
from serve_app.console.attempts import OF_MAILS, OF_PAIR, WINDOW_S
from serve_app.console.mailer import Mailer
from serve_app.contracts import people
from serve_app.contracts import sign_in as ways
from serve_app.contracts.key_format import digest
from serve_app.settings import ConsoleArgs, MailSettings, SettingsError, parse

from .conftest import PASSWORD, House, operator, submit

EMAIL = "ada@example.org"
NEW = "another long enough one"
URL = "https://service.example/console"
LINK = re.compile(rf"{URL}(/\S+)")
SIGN_IN, SIGN_UP, RESET = "/console/sign-in", "/console/sign-up", "/console/reset"
MAIL = MailSettings(host="127.0.0.1", sender="service@service.example")


class Post(Mailer):
    """Keeps the mails instead of sending them."""

    def __init__(self, house: House) -> None:
        super().__init__(MAIL, "", house.clock)
        self.house = house
        self.sent: list[tuple[str, str, str]] = []

    async def send(self, to: str, subject: str, text: str, *_: Any) -> None:
        self.sent.append((to, subject, text))

    def last_link(self) -> str:
        """The path, on this console, of the link in the last mail."""
        self.wait()
        found = LINK.search(self.sent[-1][2])
        assert found is not None
        return f"/console{found[1]}"

    def wait(self) -> None:
        self.house.wait_for(self.drain)


@pytest.fixture
def post(house: House) -> Iterator[Post]:
    made = Post(house)
    house.console.mailer, house.console.url, house.console.signup = made, URL, "open"
    yield made
    made.wait()


def sign_in(house: House, email: str, password: str) -> int:
    return submit(house.browser(), SIGN_IN, SIGN_IN, email=email, password=password).status_code


def test_a_confirmed_address_becomes_a_person_with_an_account_once(house: House, post: Post) -> None:
    house.console.signup_credit, house.console.signup_credit_per_day = 5 * 10**9, 8 * 10**9
    browser = house.browser()
    assert "Check your inbox" in submit(browser, SIGN_UP, SIGN_UP, email=" New@Example.org ").text
    path = post.last_link()
    assert post.sent[-1][0] == "new@example.org"
    assert "new@example.org" in browser.get(path).text
    for wrong in ({"name": ""}, {"new_password": "short"}, {"account": "x" * 101}):
        page = submit(browser, path, path, **{"name": "Ada", "new_password": PASSWORD, "account": "Acme", **wrong})
        assert page.status_code == 422
        assert "is-invalid" in page.text
    assert 'value="Acme"' in submit(browser, path, path, name="", account="Acme", new_password=PASSWORD).text
    made = submit(browser, path, path, name="Ada", account="Acme", new_password=PASSWORD)
    assert made.headers["location"] == "/console/"
    overview = browser.get(browser.get("/console/").headers["location"]).text
    assert "Acme" in overview
    assert "5.00" in overview
    again = submit(house.browser(), path, path, name="Eve", new_password=NEW)
    assert again.status_code == 409
    answers = [submit(house.browser(), path, path, name="Eve", new_password=NEW).status_code for _ in range(OF_PAIR)]
    assert answers[-1] == 429, "each costs the hash of a password"
    assert sign_in(house, "new@example.org", NEW) == 403
    submit(house.browser(), SIGN_UP, SIGN_UP, email="other@example.org")
    other, path = house.browser(), post.last_link()
    submit(other, path, path, name="Ben", new_password=PASSWORD)
    [account] = house.ledger.run(people.FindPerson("other@example.org")).roles
    assert house.ledger.get_account(account).balance == 0, "beyond the cap of the day"


def test_a_stranger_does_not_learn_who_has_a_login(house: House, post: Post) -> None:
    house.member()
    for page in (SIGN_UP, RESET):
        answers = {email: submit(house.browser(), page, page, email=email) for email in (EMAIL, "nobody@example.org")}
        known, unknown = (answer.text.replace(email, "") for email, answer in answers.items())
        tokens = re.compile(r"[0-9a-f]{32,64}")
        assert tokens.sub("", known) == tokens.sub("", unknown)
        assert {answer.status_code for answer in answers.values()} == {200}
    post.wait()
    assert [(to, "Confirm" in subject) for to, subject, _ in post.sent] == [
        (EMAIL, False), ("nobody@example.org", True), (EMAIL, False),
    ]  # fmt: skip


def test_mails_are_few_for_each_address_whether_or_not_it_has_a_login(house: House, post: Post) -> None:
    house.member()
    for email in (EMAIL, "nobody@example.org"):
        answers = [submit(house.browser(), RESET, RESET, email=email).status_code for _ in range(OF_MAILS + 1)]
        assert answers == [200] * OF_MAILS + [429]
    house.clock.now += WINDOW_S / OF_MAILS
    assert submit(house.browser(), RESET, RESET, email=EMAIL).status_code == 200


def test_a_link_of_sign_up_expires_and_is_made_by_this_service_for_this_address(house: House, post: Post) -> None:
    submit(house.browser(), SIGN_UP, SIGN_UP, email="new@example.org")
    path = post.last_link()
    token = path.rpartition("/")[2]
    encoded, until, signature = token.split(".")
    other = links.make_link(house.console.secret_keys, links.RESET, "new@example.org", house.clock.now + 60)
    victim = links.make_link(house.console.secret_keys, links.SIGN_UP, "v@example.org", house.clock.now + 60)
    for wrong in (
        "x", "a.b", "a.b.c", f"{encoded}.{int(until) + 1}.{signature}", other,
        f"{victim.split('.')[0]}.{until}.{signature}",
    ):  # fmt: skip
        assert house.browser().get(f"{SIGN_UP}/{wrong}").status_code == 404, wrong
    house.clock.now += links.SIGN_UP_S
    assert house.browser().get(path).status_code == 404


@pytest.mark.parametrize("signup", ["closed", "invited"])
def test_sign_up_is_closed_unless_it_is_open(house: House, post: Post, signup: str) -> None:
    token = links.make_link(house.console.secret_keys, links.SIGN_UP, "new@example.org", house.clock.now + 60)
    house.console.signup = signup
    assert "/sign-up" not in house.browser().get(SIGN_IN).text
    for path in (SIGN_UP, f"{SIGN_UP}/{token}"):
        assert house.browser().get(path).status_code == 404
        assert submit(house.browser(), SIGN_IN, path, email="a@b.example", new_password=PASSWORD).status_code == 404
    assert post.sent == []


def test_a_forgotten_password_is_replaced_once_and_the_old_one_works_until_then(house: House, post: Post) -> None:
    session = house.member()
    person = house.ledger.run(people.FindPerson(EMAIL))
    assert person is not None
    house.ledger.run(ways.AddPasskey("of whoever knew the password", person.user_id, "phone", "key", 0))
    submit(house.browser(), RESET, RESET, email=EMAIL.upper())
    path = post.last_link()
    assert sign_in(house, EMAIL, PASSWORD) == 303, "whoever asks does not lock the person out"
    browser = house.browser()
    assert submit(browser, path, path, new_password="short").status_code == 422
    assert submit(browser, path, path, new_password=NEW).headers["location"] == "/console/"
    assert session.get("/console/profile").status_code == 303, "earlier sessions have ended"
    assert house.browser().get(path).status_code == 404
    assert (sign_in(house, EMAIL, PASSWORD), sign_in(house, EMAIL, NEW)) == (403, 303)
    assert house.ledger.run(ways.ListPasskeys(person.user_id)) == []


def test_a_link_to_reset_expires_and_opens_nothing_for_a_person_who_is_suspended(house: House, post: Post) -> None:
    house.member()
    submit(house.browser(), RESET, RESET, email=EMAIL)
    path = post.last_link()
    house.ledger.run(people.SuspendPerson(EMAIL, True))
    assert house.browser().get(path).status_code == 404
    submit(house.browser(), RESET, RESET, email=EMAIL)
    post.wait()
    assert len(post.sent) == 1
    house.ledger.run(people.SuspendPerson(EMAIL, False))
    house.clock.now += links.RESET_S
    assert house.browser().get(path).status_code == 404


def test_who_lost_password_and_phone_comes_back_with_the_mail_and_a_recovery_code(house: House, post: Post) -> None:
    owner, codes = house.member(), "/console/profile/codes"
    secret = pyotp.random_base32()
    fields = {"secret": secret, "code": pyotp.TOTP(secret).at(house.clock.now), "password": PASSWORD}
    shown = submit(owner, codes, codes, **fields).text
    recovery = re.findall(r"[0-9a-z]{4}(?:-[0-9a-z]{4}){3}", shown)[0]
    submit(house.browser(), RESET, RESET, email=EMAIL)
    path, browser = post.last_link(), house.browser()
    page = browser.get(path).text
    assert ["you still need a code" in page, "operator" in page] == [True, False]
    changed = submit(browser, path, path, new_password=NEW)
    assert changed.headers["location"] == SIGN_IN, "the mail alone does not open a session"
    assert browser.get("/console/profile").status_code == 303
    half = re.search(r'name="half" value="([^"]+)"', submit(browser, SIGN_IN, SIGN_IN, email=EMAIL, password=NEW).text)
    assert half is not None
    again = submit(browser, SIGN_IN, SIGN_IN, half=half[1], code=fields["code"])
    assert again.status_code == 403, "the code that turned codes on is used"
    assert submit(browser, SIGN_IN, SIGN_IN, half=half[1], code=recovery).headers["location"] == "/console/"


def test_the_host_of_a_request_does_not_choose_where_a_mailed_link_leads(house: House, post: Post) -> None:
    house.member()
    browser = house.browser()
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', browser.get(RESET).text)
    assert found is not None
    browser.post(RESET, data={"csrf": found[1], "email": EMAIL}, headers={"host": "evil.example"})
    assert "evil" not in post.sent[-1][2] if post.last_link() else False
    house.console.url = ""
    assert submit(house.browser(), SIGN_IN, RESET, email=EMAIL).status_code == 404
    assert "/console/reset" not in house.browser().get(SIGN_IN).text


def test_an_invitation_names_product_account_role_and_inviter_and_is_mailed(house: House, post: Post) -> None:
    owner, path = house.member(), f"/console/accounts/{house.account_id}/members"
    made = submit(owner, path, path, email="ben@example.org", role="billing")
    assert made.status_code == 201
    link = post.last_link()
    for text in (post.sent[-1][2], house.browser().get(link).text):
        for name in ("serve-app", "Ada&#39;s" if "<" in text else "Ada's", "billing", "Ada "):
            assert name in text, name
    assert "Ada" not in post.sent[-1][1], "strangers choose no subject"
    mailed = len(post.sent)
    for _ in range(OF_MAILS):
        submit(owner, path, path, email="ben@example.org", role="billing")
    post.wait()
    assert len(post.sent) == mailed + OF_MAILS - 1
    by_operator = house.browser().get(house.invite("cleo@example.org")).text
    assert "The operator of serve-app invites" in by_operator


def test_where_sign_up_is_closed_owners_bring_no_new_people_and_operators_do(house: House, post: Post) -> None:
    owner, path = house.member(), f"/console/accounts/{house.account_id}/members"
    house.console.signup = "closed"
    submit(owner, path, path, email="ben@example.org", role="member")
    link = post.last_link()
    assert "takes no new users" in house.browser().get(link).text
    assert submit(house.browser(), SIGN_IN, link, name="Ben", new_password=PASSWORD).status_code == 403
    assert house.member("cleo@example.org").get("/console/profile").status_code == 200


def make_first(house: House, token: str = "first") -> str:
    house.ledger.run(ways.MakeSignInLink(house.account_id, digest(token), house.clock.now + ways.LINK_S))
    return f"/console/first/{token}"


def test_the_first_link_makes_the_owner_who_is_an_operator_and_the_next_signs_in_at_once(house: House) -> None:
    path, browser = make_first(house), house.browser()
    fields = {"name": "Ada", "email": EMAIL, "new_password": PASSWORD}
    for wrong in ({"name": ""}, {"email": "x"}, {"new_password": "short"}):
        page = submit(browser, path, path, **{**fields, **wrong})
        assert (page.status_code, "is-invalid" in page.text) == (422, True)
    assert submit(browser, path, path, **fields).headers["location"] == "/console/"
    assert browser.get("/console/operator/accounts").status_code == 200
    assert browser.get(f"/console/accounts/{house.account_id}").status_code == 200
    assert house.browser().get(path).status_code == 404
    path, other = make_first(house, "second"), house.browser()
    assert EMAIL in other.get(path).text
    assert other.get(path).status_code == 200, "opening the page does not use it up"
    assert submit(other, path, path).headers["location"] == "/console/"
    assert other.get("/console/profile").status_code == 200
    assert house.browser().get(path).status_code == 404


def test_the_first_link_expires_and_takes_no_address_that_has_a_login(house: House) -> None:
    house.member()
    path = make_first(house)
    taken = submit(house.browser(), path, path, name="Eve", email=EMAIL, new_password=NEW)
    assert (taken.status_code, "has a login already" in taken.text) == (409, True)
    assert sign_in(house, EMAIL, NEW) == 403
    house.clock.now += ways.LINK_S
    assert house.browser().get(path).status_code == 404


def test_operators_read_their_reference_behind_sign_in(house: House) -> None:
    async def document() -> bytes:
        return b'{"openapi": "3.1.0"}'

    house.console.document = document
    browser = operator(house, "read-only", "olga@example.org")
    page = browser.get("/console/operator/api")
    assert "/console/operator/api.json" in page.text
    assert {"script-src 'self'", "font-src 'self'"} <= set(page.headers["content-security-policy"].split("; "))
    assert browser.get("/console/operator/api.json").json() == {"openapi": "3.1.0"}


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"signup": "open"}, "needs mail and url"),
        ({"signup": "open", "mail": {"host": "h", "sender": "a@b"}}, "needs mail and url"),
        ({"signup_credit": "5"}, "above signup_credit_per_day"),
        ({"url": "service.example"}, "url"),
    ],
)
def test_settings_that_can_not_work_are_refused(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        parse(ConsoleArgs, args, "args")
