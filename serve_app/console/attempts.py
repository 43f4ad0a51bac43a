"""Limits the rates of sign-in attempts and of requests for mails, in this process.

Nobody is locked out permanently: after a burst, the next attempt is possible once a part of the window has passed. A
browser in which a person has signed in before has a signed cookie and its own rate. Attempts from
elsewhere can therefore not delay a person at their usual browser.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from typing import Final

from serve_app.contracts.rates import Rates
from serve_app.contracts.units import DAY_S
from serve_app.storage.sealing import SecretKeys

#: The limits count attempts within WINDOW_S. At the limit, one more attempt is possible every WINDOW_S / limit seconds.
WINDOW_S: Final = 900.0
OF_BROWSER: Final = 10  # sign-ins per known browser
OF_PAIR: Final = 10  # per pair of network address and e-mail address; this and the next two are for unknown browsers
OF_EMAIL: Final = 50  # per e-mail address
OF_ADDRESS: Final = 100  # per network address; sign-ins with a passkey or OpenID count, too
OF_SIGNED_IN: Final = 5  # per person who confirms a change with the password
OF_CODES: Final = 5  # one-time codes after a right password
OF_MAILS: Final = 3  # mails to one e-mail address, requested by anyone
OF_MAILS_TO_ALL: Final = 300  # sign-up mails to all e-mail addresses together
OF_MAILS_OF_ADDRESS: Final = 20  # mails requested from a network address
#: Maximum number of counters. Each attempt takes as long as a password check, so a flood can't evict a recent counter.
MAX_KEPT: Final = 60_000
KNOWN_S: Final = 180 * DAY_S


class Attempts:
    """Counts attempts when they begin. Successful ones count, too: each stores a session. `clock` returns seconds.

    `address` is None without trusted proxies: the address that is seen may be shared, or chosen by the client.
    `browser` is the id of a known browser, or None.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._rates = Rates(clock, MAX_KEPT, WINDOW_S)
        # Attempts without a password check have separate counters, which can't evict the counters that limit guesses.
        self._mails = Rates(clock, MAX_KEPT, WINDOW_S)
        self._used = Rates(clock, MAX_KEPT, WINDOW_S)

    def begin(self, address: str | None, email: str, browser: str | None = None) -> float:
        """Counts an attempt to sign in. Returns 0, or the seconds to wait before the attempt may be made."""
        if browser is not None:
            return self._rates.count((f"browser {browser}", OF_BROWSER))
        limits = [(f"email {_normal(email)}", OF_EMAIL)]
        if address is not None:
            limits += [(f"pair {address} {_normal(email)}", OF_PAIR), (f"address {address}", OF_ADDRESS)]
        return self._rates.count(*limits)

    def begin_code(self, email: str, browser: str | None) -> float:
        """Counts a one-time code after a right password, like `begin`."""
        return self._rates.count((f"code {browser or _normal(email)}", OF_CODES))

    def begin_signed_in(self, user_id: str) -> float:
        """Counts an attempt of a person who is signed in, like `begin`."""
        return self._rates.count((f"person {user_id}", OF_SIGNED_IN))

    def begin_mail(self, address: str | None, email: str, *, is_sign_up: bool = False) -> float:
        """Counts a request for a mail, like `begin`, whether or not the address has a login."""
        limits = [(f"mail {_normal(email)}", OF_MAILS)]
        if address is not None:
            limits.append((f"mails of {address}", OF_MAILS_OF_ADDRESS))
        if is_sign_up:
            limits.append(("mails of sign-up", OF_MAILS_TO_ALL))
        return self._mails.count(*limits)

    def begin_link(self, email: str) -> float:
        """Counts a new password that is set with a link to this e-mail address, like `begin`."""
        return self._rates.count((f"link {_normal(email)}", OF_PAIR))

    def begin_passkey(self, address: str | None, challenge: str) -> float:
        """Counts the use of a challenge, like `begin`. The challenge expires before the window allows a second use."""
        return self._once(address, f"challenge {challenge}", 1)

    def begin_openid(self, address: str | None, state: str) -> float:
        """Counts a visitor who returns from the provider with this `state`, like `begin`."""
        return self._once(address, f"openid {state[-200:]}", OF_PAIR)

    def _once(self, address: str | None, name: str, limit: int) -> float:
        wait = 0.0 if address is None else self._rates.count((f"address {address}", OF_ADDRESS))
        return wait or self._used.count((name, limit))

    def wait_of(self, email: str) -> float:
        """Returns the seconds that a person must wait before the next attempt in an unknown browser."""
        return self._rates.waits(lambda name: _is_of(name, email))

    def forget(self, email: str) -> None:
        """Lets a person try again immediately, unless their whole network address has to wait."""
        self._rates.forget(lambda name: _is_of(name, email))


def _is_of(name: str, email: str) -> bool:
    """Returns whether a name in the rates belongs to this e-mail address."""
    normal = _normal(email)
    return name in (f"email {normal}", f"code {normal}") or (name.startswith("pair ") and name.endswith(f" {normal}"))


def browser_cookie(keys: SecretKeys, email: str, earlier: str, now: float) -> str:
    """Returns the cookie of a browser in which this person has signed in. Valid for KNOWN_S.

    `earlier` is the browser's present cookie. A known browser keeps its id, and so the rate of its attempts.
    """
    browser = known_browser(keys, email, earlier, now) or secrets.token_hex(16)
    text = f"{browser}.{int(now + KNOWN_S)}"
    return f"{text}.{keys.derive(_signed(email, text))}"


def known_browser(keys: SecretKeys, email: str, cookie: str, now: float) -> str | None:
    """Returns the id of the browser with this cookie; None unless this person has signed in there."""
    text, _, given = cookie.rpartition(".")
    browser, _, until = text.partition(".")
    if not any(hmac.compare_digest(given.encode(), token.encode()) for token in keys.derive_all(_signed(email, text))):
        return None
    return browser if int(until) > now else None


def _signed(email: str, text: str) -> str:
    return f"known browser of {_normal(email)}\0{text}"


def _normal(email: str) -> str:
    return email.strip().lower()[:200]
