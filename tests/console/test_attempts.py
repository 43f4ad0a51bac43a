"""Attempts at passwords are slowed down, and a person's own browser is not slowed down by what others try."""

from __future__ import annotations

import pytest

from serve_app.console.attempts import (
    KNOWN_S,
    OF_ADDRESS,
    OF_BROWSER,
    OF_CODES,
    OF_EMAIL,
    OF_PAIR,
    WINDOW_S,
    Attempts,
    browser_cookie,
    known_browser,
)
from serve_app.storage.sealing import SecretKeys

VICTIM = "ada@example.org"
KEYS = SecretKeys(b"a secret key")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def used_up(attempts: Attempts, *who: str | None) -> int:
    """Tries until it has to wait; the number of attempts."""
    made = 0
    while not attempts.begin(*who):  # type: ignore[arg-type]
        made += 1
    return made


def test_an_address_is_slowed_at_an_email_and_is_never_locked_out() -> None:
    clock = Clock()
    attempts = Attempts(clock)
    assert used_up(attempts, "there", VICTIM) == OF_PAIR
    assert attempts.begin("there", f" {VICTIM.upper()} ") == pytest.approx(WINDOW_S / OF_PAIR)
    clock.now += WINDOW_S / OF_PAIR
    assert used_up(attempts, "there", VICTIM) == 1
    assert attempts.begin("here", VICTIM) == 0, "the person is elsewhere"
    assert attempts.begin("there", "ben@example.org") == 0


@pytest.mark.parametrize("address", ["there", None])
def test_a_known_browser_passes_whatever_others_try(address: str | None) -> None:
    """Also without trusted proxies, where all clients may share an address."""
    attempts = Attempts(Clock())
    used_up(attempts, address, VICTIM)
    for number in range(2 * OF_EMAIL):
        attempts.begin(f"address {number}" if address else None, VICTIM)
    assert attempts.begin("new" if address else None, VICTIM) > 0
    assert used_up(attempts, address, VICTIM, "her laptop") == OF_BROWSER
    assert attempts.begin(address, VICTIM, "her phone") == 0


def test_where_addresses_are_not_known_only_the_email_counts() -> None:
    attempts = Attempts(Clock())
    assert used_up(attempts, None, VICTIM) == OF_EMAIL
    for number in range(2 * OF_ADDRESS):
        assert attempts.begin(None, f"{number}@example.org") == 0


def test_an_address_that_tries_many_emails_is_slowed() -> None:
    attempts = Attempts(Clock())
    for number in range(OF_ADDRESS):
        assert attempts.begin("there", f"{number}@example.org") == 0
    assert 0 < attempts.begin("there", VICTIM) <= WINDOW_S / OF_ADDRESS
    assert attempts.begin("here", VICTIM) == 0


def test_what_costs_no_password_check_evicts_no_limit_of_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.console.attempts.MAX_KEPT", 50)
    attempts = Attempts(Clock())
    used_up(attempts, None, VICTIM)
    for _ in range(OF_CODES):
        attempts.begin_code(VICTIM, None)
    for number in range(200):
        attempts.begin_mail(None, f"{number}@example.org")
        attempts.begin_passkey(None, str(number))
        attempts.begin_openid(None, str(number))
    assert attempts.begin(None, VICTIM) > 0
    assert attempts.begin_code(VICTIM, None) > 0


def test_codes_are_slowed_by_browser_or_email() -> None:
    attempts = Attempts(Clock())
    for _ in range(OF_CODES):
        assert attempts.begin_code(VICTIM, None) == 0
    assert attempts.begin_code(VICTIM, None) > 0
    assert attempts.begin_code(VICTIM, "her laptop") == 0


def test_a_browser_is_known_for_the_person_who_has_signed_in_there() -> None:
    cookie = browser_cookie(KEYS, VICTIM, "", 0.0)
    browser = known_browser(KEYS, VICTIM.upper(), cookie, 1.0)
    assert browser is not None
    assert known_browser(KEYS, "ben@example.org", cookie, 1.0) is None
    assert known_browser(KEYS, VICTIM, cookie, KNOWN_S) is None
    assert known_browser(SecretKeys(b"another"), VICTIM, cookie, 1.0) is None
    assert known_browser(SecretKeys(b"the next", KEYS.current), VICTIM, cookie, 1.0) == browser
    renewed = browser_cookie(KEYS, VICTIM, cookie, KNOWN_S - 1)
    assert known_browser(KEYS, VICTIM, renewed, KNOWN_S) == browser, "no sign-in begins its rate anew"
    assert not browser_cookie(KEYS, "ben@example.org", cookie, 1.0).startswith(browser)
    _, until, signature = cookie.split(".")
    for forged in (
        "",
        ".",
        "..",
        "a.b.c",
        f"another.{until}.{signature}",
        f"{browser}.9999999999.{signature}",
        "ü.1.ü",
    ):
        assert known_browser(KEYS, VICTIM, forged, 1.0) is None
