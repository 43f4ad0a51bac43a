"""Formats audit records as sentences: "raised the limit of Acme from 600 to 1,200 requests per minute"."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from serve_app.console.formats import minute
from serve_app.contracts.books import AuditRecord
from serve_app.contracts.limits import ACCOUNT_LIMITS
from serve_app.contracts.money import format_amount, format_price

NONE: Final = "none"
DEFAULT: Final = "the default"
UNITS: Final[Mapping[str, str]] = {
    "rpm": "requests per minute",
    "tpm": "tokens per minute",
    "concurrency": "concurrent requests",
    "weight": "weight in the queue",
}
CREDITS: Final = {"top_up": "a payment", "grant": "a credit"}
ALERTS: Final[Mapping[str, str]] = {
    "balance": "the balance falls below {}",
    "day": "daily spend reaches {}",
    "month": "monthly spend reaches {}",
    "unusual": "daily spend reaches {} and three times the 7-day average",
}
#: Names of actors that are not known people. Earlier releases recorded setup as "make serve".
PROGRAMS: Final[Mapping[str, str]] = {
    "unknown": "Someone unknown",
    "deployment": "Configuration file",
    "stripe": "Stripe",
    "recharge": "Automatic recharge",
    "rule": "Automatic rollback",
    "sign-up": "Sign-up",
    "setup": "Setup",
    "make serve": "Setup",
}
_BY_KEY: Final = re.compile(r"(?:(.+) )?key:([0-9a-f]{12})")  # as `/admin` names an operator

Detail = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sentence:
    """A record in words: `actor` did `text`. The account's name is in the text."""

    actor: str
    text: str


def sentence(record: AuditRecord, names: Mapping[str, str], currency: str = "") -> Sentence:
    """Returns the record as a sentence. `names` are names and addresses by id; amounts are in `currency`."""
    teller = _Teller(record, names, currency)
    tell = ACTIONS.get(record.action)
    return Sentence(actor_name(record.actor), tell(teller) if tell is not None else teller.any_other())


def actor_name(actor: str) -> str:
    """Returns the name of an actor: an e-mail address, "ada (operator key)", or a program such as "Setup"."""
    named = _BY_KEY.fullmatch(actor)
    if named is None:
        return PROGRAMS.get(actor, actor)
    if not named[1]:
        return f"Operator key {named[2]}"
    return PROGRAMS.get(named[1], f"{named[1]} (operator key)")


def ids_in(records: Collection[AuditRecord]) -> tuple[str, ...]:
    """Returns the ids that the sentences of these records name."""
    ids = [one for record in records for one in (record.account_id, record.subject)]
    return tuple(dict.fromkeys(one for one in ids if one))


class _Teller:
    def __init__(self, record: AuditRecord, names: Mapping[str, str], currency: str) -> None:
        self._record, self._names, self._currency = record, names, currency
        self.detail = record.detail
        self.subject = names.get(record.subject, record.subject)
        self.account = names.get(record.account_id, record.account_id) or "the service"

    def any_other(self) -> str:
        words = self._record.action.replace("_", " ")
        about = f" of {self.account}" if self._record.account_id else f" for {self.subject}"
        return f"{words}{about}"

    def money(self, name: str = "amount") -> str:
        amount = self.detail.get(name)
        return f"{format_amount(abs(amount))} {self._currency}".rstrip() if isinstance(amount, int) else "an amount"

    def text(self, name: str) -> str:
        return str(self.detail.get(name) or "")

    def because(self, name: str) -> str:
        return f" ({self.text(name)})" if self.text(name) else ""

    def until(self, name: str = "expires_at") -> str:
        at = self.detail.get(name)
        return f" until {minute(at)}" if isinstance(at, int | float) else ""

    def change(self, name: str) -> tuple[Any, Any]:
        one = self.detail.get(name)
        return (one.get("was"), one.get("is")) if isinstance(one, Mapping) else (None, one)

    def limits(self) -> str:
        """Describes the changed limits. If there is only one, the verb says whether it was raised or lowered."""
        parts = [(name, *self.change(name)) for name in ACCOUNT_LIMITS if name in self.detail]
        if not parts:
            return f"set the limits of {self.account}"
        if len(parts) == 1:
            name, was, now = parts[0]
            both = isinstance(was, int) and isinstance(now, int)
            verb = "changed" if not both else "raised" if now > was else "lowered"
            if name == "weight":
                return f"{verb} the weight in the queue of {self.account} from {_number(was)} to {_number(now)}"
            return f"{verb} the limit of {self.account} from {_number(was)} to {_number(now)} {UNITS.get(name, name)}"
        told = [f"{UNITS.get(name, name)} from {_number(was)} to {_number(now)}" for name, was, now in parts]
        return f"changed the limits of {self.account}: {', '.join(told)}"

    def active(self) -> str:
        return f"{'reactivated' if self.change('active')[1] else 'suspended'} the account {self.account}"

    def value(self, name: str, value: Any) -> str:
        is_amount = name == "budget" and isinstance(value, int)
        return f"{format_amount(value)} {self._currency}".rstrip() if is_amount else _value(name, value)

    def key_changes(self) -> str:
        told = []
        for name in self.detail:
            was, now = (self.value(name, one) for one in self.change(name))
            told.append(f"{UNITS.get(name, name.replace('_', ' '))} from {was} to {now}")
        return f"changed the API key “{self.subject}” of {self.account}: {', '.join(told) or 'nothing'}"

    def role(self, what: str) -> str:
        was, now = self.change("role")
        if now is None:
            return f"took the {what} {was or NONE} from {self.subject}"
        return f"gave {self.subject} the {what} {now}" + (f" instead of {was}" if was else "")

    def weights(self) -> str:
        was, now = self.change("weights")
        return f"from {_weights(was)} to {_weights(now)}{self.because('reason')}"

    def price(self) -> str:
        words = {"input": "input", "cached_input": "cached input", "output": "output"}
        told = []
        for name, word in words.items():
            was, now = self.change(name)
            if now is not None:
                before = f"from {format_price(was)} " if isinstance(was, int) and was != now else ""
                told.append(f"{word} {before}{'to ' if before else ''}{format_price(now)}")
        at = self.detail.get("effective_at")
        since = f", effective {minute(at)}" if isinstance(at, int | float) else ""
        unit = f" in {self._currency}" if self._currency else ""
        return f"set the price of {self.subject}{unit} per million tokens: {', '.join(told)}{since}"

    def decision(self) -> str:
        is_own = self.text("asked_by") == self._record.actor
        word = "approved" if self.detail.get("approved") else "withdrew" if is_own else "rejected"
        kind = CREDITS.get(self.text("kind"), "a credit")
        return f"{word} {kind} of {self.money()} for {self.account}, requested by {actor_name(self.text('asked_by'))}"

    def alert(self) -> str:
        told = ALERTS.get(self.text("kind"), "the threshold is {}").format(self.money("threshold"))
        return f"created an alert for {self.account}: {told}"

    def corrected(self) -> str:
        amount = self.detail.get("amount")
        word = "subtracted" if isinstance(amount, int) and amount < 0 else "added"
        return f"corrected the balance of {self.account}: {word} {self.money()}{self.because('memo')}"

    def reset(self) -> str:
        if self.detail.get("password"):
            return f"reset the password of {self.subject} and ended all sessions"
        return f"turned off two-factor authentication for {self.subject}"

    def suspended(self) -> str:
        return f"{'suspended' if self.change('suspended')[1] else 'reactivated'} {self.subject}"

    def read(self, what: str, verb: str = "read") -> str:
        return f"{verb} {what} of {self.account if self._record.account_id else 'all accounts'}"


#: The sentence of each action, in the order of the filter's menu.
ACTIONS: Final[Mapping[str, Callable[[_Teller], str]]] = {
    "create_account": lambda one: f"created the account {one.account}",
    "set_limits": _Teller.limits,
    "set_active": _Teller.active,
    "add_note": lambda one: f"added a note about {one.account}",
    "credit": lambda one: (
        f"booked {CREDITS.get(one.text('kind'), 'a credit')} of {one.money()} to {one.account}{one.until()}"
        f"{one.because('memo')}"
    ),
    "ask_credit": lambda one: (
        f"requested {CREDITS.get(one.text('kind'), 'a credit')} of {one.money()} for {one.account}{one.because('memo')}"
    ),
    "decide_credit": _Teller.decision,
    "correct": _Teller.corrected,
    "take_back": lambda one: f"took back {one.money()} of a credit to {one.account}{one.because('memo')}",
    "return_not_covered": lambda one: (
        f"booked a refund or chargeback of {one.money()} for {one.account}; "
        f"the balance did not cover {one.money('lost')}"
    ),
    "return_unmatched": lambda one: (
        f"received a refund or chargeback of {one.money()} for {one.account}, but its payment is not in the ledger"
    ),
    "create_key": lambda one: f"created the API key “{one.text('name')}” of {one.account}",
    "update_key": _Teller.key_changes,
    "rotate_key": lambda one: f"rotated the API key “{one.subject}” of {one.account}",
    "revoke_key": lambda one: f"revoked the API key “{one.subject}” of {one.account}",
    "create_management_key": lambda one: f"created the management key “{one.text('name')}” of {one.account}",
    "revoke_management_key": lambda one: f"revoked a management key of {one.account}",
    "set_billing_details": lambda one: f"changed the billing details of {one.account}",
    "create_alert": _Teller.alert,
    "remove_alert": lambda one: f"removed an alert of {one.account}",
    "set_recharge": lambda one: f"changed the automatic recharge of {one.account}",
    "ask_payment_method": lambda one: f"asked for a payment method of {one.account}",
    "recharge_on": lambda one: f"turned on the automatic recharge of {one.account}",
    "recharge_off": lambda one: f"turned off the automatic recharge of {one.account}",
    "pause_recharge": lambda one: f"paused the automatic recharge of {one.account}{one.because('reason')}",
    "resume_recharge": lambda one: f"resumed the automatic recharge of {one.account}",
    "begin_recharge": lambda one: f"began to charge {one.money()} to the payment method of {one.account}",
    "end_recharge": lambda one: (
        f"ended the recharge of {one.money()} of {one.account}: {one.text('state')}{one.because('error')}"
    ),
    "invite_person": lambda one: f"invited {one.text('email')} to {one.account} as {one.text('role')}",
    "accept_invitation": lambda one: f"joined {one.account} as {one.text('role')}",
    "revoke_invitation": lambda one: f"revoked an invitation to {one.account}",
    "set_membership": lambda one: f"{one.role('role')} in {one.account}",
    "set_operator_role": lambda one: one.role("operator role"),
    "sign_in": lambda one: "signed in",
    "end_session": lambda one: f"ended a session of {one.subject}",
    "change_password": lambda one: f"changed the password of {one.subject}",
    "totp_on": lambda one: f"turned on two-factor authentication for {one.subject}",
    "totp_off": lambda one: f"turned off two-factor authentication for {one.subject}",
    "set_recovery_codes": lambda one: f"created recovery codes for {one.subject}",
    "use_recovery_code": lambda one: f"used a recovery code of {one.subject}",
    "add_passkey": lambda one: f"added the passkey {one.text('name')} for {one.subject}",
    "remove_passkey": lambda one: f"removed a passkey of {one.subject}",
    "make_sign_in_link": lambda one: f"made a sign-in link for an administrator of {one.account}",
    "use_sign_in_link": lambda one: f"signed in to {one.account} with a sign-in link",
    "sign_up": lambda one: f"signed up with the account {one.account}",
    "reset_person": _Teller.reset,
    "allow_sign_in": lambda one: f"unlocked the sign-in of {one.subject}",
    "suspend_person": _Teller.suspended,
    "link_identity": lambda one: f"linked {one.subject} to {one.text('issuer')}",
    "unlink_identities": lambda one: f"unlinked {one.subject} from {one.text('issuer')}",
    "failed_login": lambda one: f"tried a wrong operator or management key {_number(one.detail.get('tries'))} times",
    "set_traffic": lambda one: f"shifted the traffic of {one.subject} {one.weights()}",
    "roll_back_traffic": lambda one: f"rolled back the traffic of {one.subject} {one.weights()}",
    "set_price": _Teller.price,
    "schedule_price": _Teller.price,
    "create_model": lambda one: f"created the model {one.subject}",
    "update_model": lambda one: f"changed the model {one.subject}: {', '.join(one.detail) or 'nothing'}",
    "remove_model": lambda one: f"removed the model {one.subject}",
    "deploy_backend": lambda one: f"deployed the backend {one.subject}",
    "retire_backend": lambda one: f"retired the backend {one.subject}",
    "publish_notice": lambda one: (
        f"published a notice to {one.account if one.account != 'the service' else 'all accounts'}: {one.text('text')}"
    ),
    "end_notice": lambda one: f"ended the notice: {one.text('text')}",
    "retry_stuck": lambda one: f"retried the charge of the request {one.text('request_id')} of {one.account}",
    "read_account": lambda one: f"opened the page of {one.account}",
    "read_person": lambda one: f"opened the page of {one.subject}",
    "read_people": lambda one: one.read("the people"),
    "read_keys": lambda one: one.read("the API keys"),
    "read_usage": lambda one: one.read("individual requests"),
    "read_request": lambda one: f"read the request {one.subject} of {one.account}",
    "read_refusals": lambda one: one.read("the recent errors"),
    "export_usage": lambda one: one.read("the requests", "exported"),
}


#: Labels in the filter for actions whose stored name is unclear. All others use the stored name.
LABELS: Final = {
    "set_active": "Suspend or reactivate account",
    "credit": "Book credit or payment",
    "ask_credit": "Request credit",
    "decide_credit": "Approve or reject credit",
    "correct": "Correct balance",
    "take_back": "Take back credit",
    "return_not_covered": "Refund or chargeback not covered",
    "return_unmatched": "Refund or chargeback of an unknown payment",
    "ask_payment_method": "Request payment method",
    "set_recharge": "Change automatic recharge",
    "recharge_on": "Turn on automatic recharge",
    "recharge_off": "Turn off automatic recharge",
    "totp_on": "Turn on two-factor authentication",
    "totp_off": "Turn off two-factor authentication",
    "make_sign_in_link": "Create sign-in link",
    "reset_person": "Reset password or two-factor authentication",
    "allow_sign_in": "Unlock sign-in",
    "failed_login": "Wrong key",
    "retry_stuck": "Retry failed charge",
    "read_account": "View account",
    "read_person": "View person",
    "read_people": "View people",
    "read_keys": "View API keys",
    "read_usage": "View requests",
    "read_request": "View request",
    "read_refusals": "View errors",
    "export_usage": "Export requests",
}


def label(action: str) -> str:
    """Returns an action's name in the filter: "Set limits"."""
    return LABELS.get(action) or action.replace("_", " ").capitalize()


def _number(value: Any) -> str:
    return DEFAULT if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _weights(value: Any) -> str:
    if not isinstance(value, Mapping) or not value:
        return "the configured weights"
    whole = max(1, sum(value.values()))
    return ", ".join(f"{name} {100 * weight / whole:.4g}%" for name, weight in value.items())


def _value(name: str, value: Any) -> str:
    if value is None or value in ([], ()):
        return NONE
    if name == "expires_at" and isinstance(value, int | float):
        return minute(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        f"{value:,}"
        if isinstance(value, int)
        else ", ".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )
