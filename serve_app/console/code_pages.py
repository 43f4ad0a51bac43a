"""One-time codes of a person's authenticator, with a QR code, and recovery codes in case it is lost."""

from __future__ import annotations

import re
from typing import Final

import pyotp
import segno
from fastapi.responses import Response
from markupsafe import Markup

from serve_app.console.passwords import new_recovery_codes, recovery_digest, step_of
from serve_app.console.people_pages import WRONG_PASSWORD, change_person, check_password, is_confirmed
from serve_app.console.web import Refused, Visit
from serve_app.contracts import sign_in as ways
from serve_app.storage.sealing import of_totp, seal

_SECRET: Final = re.compile(r"[A-Z2-7]{32}")


async def show(visit: Visit) -> Response:
    return _page(visit, pyotp.random_base32())


async def turn_on(visit: Visit) -> Response:
    secret = visit.form.get("secret", "")
    if not _SECRET.fullmatch(secret):
        raise Refused(422, "This form is out of date: open its page again.")
    if not await is_confirmed(visit):
        return _page(visit, secret, 403, {"password": WRONG_PASSWORD})
    if (step := step_of(secret, visit.form.get("code", ""), visit.console.now())) is None:
        return _page(visit, secret, 422, {"code": "The code is wrong: type what your app shows now."})
    codes = new_recovery_codes()
    sealed = seal(secret, visit.console.secret_keys, of_totp(visit.me.user_id))
    await change_person(visit, {"totp_secret": sealed}, _digests(codes), step)
    return visit.page("recovery_codes.html", codes=codes, is_first=True)


async def turn_off(visit: Visit) -> Response:
    await check_password(visit)
    return await change_person(visit, {"totp_secret": None})


async def renew(visit: Visit) -> Response:
    """Replaces the recovery codes. The new ones are shown once."""
    await check_password(visit)
    codes = new_recovery_codes()
    await visit.console.books.run(ways.ReplaceRecoveryCodes(visit.me.user_id, _digests(codes), visit.audit))
    return visit.page("recovery_codes.html", codes=codes, is_first=False)


def _page(visit: Visit, secret: str, status: int = 200, errors: dict[str, str] | None = None) -> Response:
    address = pyotp.TOTP(secret).provisioning_uri(name=visit.me.email, issuer_name=visit.console.brand.name)
    picture = segno.make(address, micro=False).svg_inline(scale=5, border=4, dark="#000", light="#fff")
    spaced = " ".join(secret[at : at + 4] for at in range(0, len(secret), 4))
    return visit.page("codes.html", status, secret=secret, spaced=spaced, qr=Markup(picture), errors=errors or {})


def _digests(codes: list[str]) -> tuple[str, ...]:
    return tuple(filter(None, map(recovery_digest, codes)))
