"""Sixty days of data for the console's pictures and measurements, written by the ledger's own commands."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from random import Random
from typing import Any, Final, NamedTuple

from bench.console.service import PASSWORD
from serve_app.accounting.ledger import Ledger
from serve_app.console.passwords import hashed
from serve_app.contracts import commands, notices, operators, people
from serve_app.contracts import key_format as keys
from serve_app.contracts.billing import BillingDetails, SetBillingDetails
from serve_app.contracts.books import Audit, Outcome, Settlement, SettlementRejected
from serve_app.contracts.commands import Command
from serve_app.contracts.management import CreateManagementKey
from serve_app.contracts.money import NANO_PER_UNIT, Price
from serve_app.contracts.sign_in import MakeSignInLink, UseSignInLink
from serve_app.contracts.units import DAY_S, HOUR_S

DAYS: Final = 60
BATCH: Final = 250  # settlements per call to the ledger
PRICE: Final = Price(270, 70, 1100)  # as in config.yaml, in nano-units per token
WEEK: Final = (1.0, 1.1, 1.15, 1.05, 0.9, 0.35, 0.3)  # relative number of requests on each day, from Monday
HOURS: Final = (0.3,) * 7 + (0.6, 1.0) + (1.4,) * 8 + (1.0, 0.8) + (0.5,) * 5
OWNER, OPERATOR, SECOND = "mira@acme-robotics.example", "lena@example.com", "omar@example.com"
BY_OWNER, BY_OPERATOR, BY_SECOND, BY_SETUP = Audit(OWNER), Audit(OPERATOR), Audit(SECOND), Audit("setup")
NAMES: Final = {OWNER: "Mira Okafor", OPERATOR: "Lena Fischer", SECOND: "Omar Haddad"}
JONAS, PRIYA, TOMAS = ("Jonas Weber", "member"), ("Priya Nair", "billing"), ("Tomas Silva", "member")
MEMBERS: Final = {"jonas": JONAS, "priya": PRIYA, "tomas": TOMAS}
#: Keys of the account in the pictures: name, creator, share of the requests, share of these that use svc-coder, terms.
KEYS: Final[tuple[tuple[str, str, float, float, dict[str, Any]], ...]] = (
    ("production", OWNER, 0.55, 0.1, {"tags": ("prod", "support"), "budget": 120, "budget_period": "month"}),
    ("batch jobs", "jonas", 0.25, 0.35, {"tags": ("batch",), "budget": 60, "budget_period": "month", "rpm": 120}),
    ("notebooks", "tomas", 0.12, 0.7, {"tags": ("research",), "budget": 15, "budget_period": "month", "rpm": 10}),
    ("code review", "jonas", 0.08, 1.0, {"tags": ("ci", "prod"), "models": ("svc-coder",)}),
    ("old laptop", "tomas", 0.0, 0.5, {}),
)
#: Other accounts: name, requests on the last Monday, payment in units of the currency.
HELIOS, NORTHWIND, HARBOR = ("Helios Labs", 380, 400), ("Northwind", 260, 250), ("Blue Harbor", 150, 120)
OTHERS: Final = (HELIOS, NORTHWIND, HARBOR, ("Juniper Health", 80, 60), ("Quiet Fox", 60, 25))
#: Owners of other accounts. Juniper Health has none yet: its first person gets a link.
OWNERS: Final = {
    "Helios Labs": ("noor@helios-labs.example", "Noor Hadid"),
    "Northwind": ("erik@northwind.example", "Erik Lund"),
    "Blue Harbor": ("grace@blue-harbor.example", "Grace Kim"),
    "Quiet Fox": ("sam@quiet-fox.example", "Sam Reyes"),
}
ACME_REQUESTS: Final = 1100


class Life(NamedTuple):
    """The ids and link tokens in the paths of pages, and the API keys in the order of their creation."""

    account_id: str
    key_id: str
    person_id: str
    invitation: str
    first: str
    reset: str
    request_id: str
    api_keys: tuple[str, ...]


class _Source(NamedTuple):
    """A key that sends requests, until `until` days ago."""

    account_id: str
    key_id: str
    requests: float
    coder: float = 0.3
    until: float = 0.0


class _Past:
    """A ledger whose clock advances from DAYS ago to now."""

    def __init__(self, url: str) -> None:
        self.rng, self.end = Random("the console's data"), time.time()
        self.now = self.end - DAYS * DAY_S
        self.ledger = Ledger(url, now=lambda: self.now, currency="USD")
        self.api_keys: list[str] = []
        self.password = asyncio.run(hashed(PASSWORD))

    def staff(self) -> None:
        """Opens the operators' account. Its first owner signs in with a link and invites the second."""
        account_id = self.ledger.run(commands.OpenAccount("Staff", audit=BY_SETUP)).account_id
        self.ledger.run(MakeSignInLink(account_id, keys.digest("staff"), self.now + HOUR_S, BY_SETUP))
        self.now += 60
        self.ledger.run(UseSignInLink(keys.digest("staff"), OPERATOR, NAMES[OPERATOR], self.password))
        self.member(account_id, SECOND, NAMES[SECOND], "owner", OPERATOR)
        self.ledger.run(operators.SetOperatorRole(SECOND, "finance", account_id, BY_OPERATOR))

    def account(self, name: str, paid: int, owner: str = "", owner_name: str = "") -> str:
        """Opens an account, which is paid for an hour later."""
        self.now += 600
        account_id = self.ledger.run(commands.OpenAccount(name, audit=BY_OPERATOR)).account_id
        if owner:
            self.member(account_id, owner, owner_name, "owner", OPERATOR)
        self.now += HOUR_S
        self.ledger.run(payment(account_id, paid, self.rng))
        return account_id

    def key(self, account_id: str, name: str, maker: str = OPERATOR, **terms: Any) -> str:
        self.now += 600
        self.api_keys.append(made := keys.new_key(bits=self.rng.getrandbits(256)))
        if "budget" in terms:
            terms["budget"] *= NANO_PER_UNIT
        command = commands.CreateKey(account_id, name, keys.digest(made), keys.hint(made), terms, Audit(maker))
        return self.ledger.run(command).key_id

    def member(self, account_id: str, email: str, name: str, role: str, inviter: str = OWNER) -> str:
        self.now += 60
        self.invite(account_id, email, role, token := keys.digest(email), inviter)
        self.now += 60
        return self.ledger.run(people.AcceptInvitation(keys.digest(token), name, self.password)).user_id

    def invite(self, account_id: str, email: str, role: str, token: str, inviter: str = OWNER) -> None:
        rest = (keys.digest(token), self.now + 7 * DAY_S, Audit(inviter), inviter == OWNER, NAMES[inviter])
        self.ledger.run(people.InvitePerson(account_id, email, role, *rest))

    def day(self, ago: int, sources: list[_Source]) -> None:
        """Settles the requests of one day."""
        begins = self.end // DAY_S * DAY_S - ago * DAY_S
        growth = (0.35 + 0.65 * (1 - ago / DAYS)) * WEEK[time.gmtime(begins).tm_wday] * self.rng.uniform(0.85, 1.15)
        made = [
            self._request(one, begins)
            for one in sources
            if ago >= one.until
            for _ in range(round(one.requests * growth * self.rng.uniform(0.8, 1.2)))
        ]
        made = sorted((one for one in made if one.finished_at < self.end), key=lambda one: one.finished_at)
        for at in range(0, len(made), BATCH):
            batch = made[at : at + BATCH]
            self.now = max(self.now, batch[-1].finished_at + 0.05)
            refused = [one for one in self.ledger.settle(batch) if isinstance(one, SettlementRejected)]
            assert not refused, refused[0]

    def _request(self, source: _Source, day: float) -> Settlement:
        rng = self.rng
        started = day + (rng.choices(range(24), HOURS)[0] + rng.random()) * HOUR_S
        prompt = min(30_000, round(rng.lognormvariate(8.9, 0.9)))
        completion = min(8_000, round(rng.lognormvariate(6.7, 0.7)))
        failing = 6 if day < self.end - 2 * DAY_S else 0  # recent failures would have to be in the gateway's log, too
        [outcome] = rng.choices((Outcome.COMPLETED, Outcome.CANCELLED, Outcome.FAILED), (980 - failing, 20, failing))
        completion //= {Outcome.COMPLETED: 1, Outcome.CANCELLED: 3, Outcome.FAILED: 10_000}[outcome]
        return Settlement(
            f"chatcmpl-{rng.getrandbits(128):032x}", source.account_id, source.key_id,
            "svc-coder" if rng.random() < source.coder else "svc-chat", "smollm2", PRICE,
            prompt, round(prompt * rng.choice((0, 0, 0.4, 0.8))), completion, outcome,
            started, started + 0.3 + prompt / 20_000 + completion / rng.uniform(180, 260),
        )  # fmt: skip


def payment(account_id: str, amount: int, rng: Random) -> commands.AddCredit:
    """Returns a payment as the payment provider's webhook would book it."""
    key = f"stripe pi_{rng.getrandbits(96):024x}"
    return commands.AddCredit(account_id, amount * NANO_PER_UNIT, "top_up", key, key, audit=Audit("stripe"))


def fill(url: str) -> Life:
    """Fills an empty ledger with the account in the pictures, other accounts, and two operators."""
    past = _Past(url)
    with past.ledger as ledger:
        past.staff()
        acme = past.account("Acme Robotics", 100, OWNER, NAMES[OWNER])
        emails = {one: f"{one}@acme-robotics.example" for one in MEMBERS} | {OWNER: OWNER}
        ids = {one: past.member(acme, emails[one], *MEMBERS[one]) for one in MEMBERS}
        made = {key[0]: past.key(acme, key[0], emails[key[1]], **key[4]) for key in KEYS}
        sources = [_Source(acme, made[key[0]], ACME_REQUESTS * key[2], key[3]) for key in KEYS]
        others = {name: past.account(name, paid, *OWNERS.get(name, ())) for name, _, paid in OTHERS}
        for name, requests, _ in OTHERS:
            until = 9 if name == "Quiet Fox" else 0
            sources.append(_Source(others[name], past.key(others[name], "main"), requests, until=until))
        happened = _events(past, acme, made, others)
        for ago in range(DAYS, -1, -1):
            morning = past.end // DAY_S * DAY_S + (9 - 24 * ago) * HOUR_S
            for command in happened.get(ago, ()):
                past.now = min(max(past.now + 60, morning), past.end)
                ledger.run(command)
            past.day(ago, sources)
        past.now = past.end
        lea, first, reset = keys.new_id(""), keys.new_id(""), people.new_reset_token(emails["tomas"])
        past.invite(acme, "lea@acme-robotics.example", "member", lea)
        ledger.run(MakeSignInLink(others["Juniper Health"], keys.digest(first), past.end + HOUR_S))
        ledger.run(people.ResetPerson(emails["tomas"], people.reset_text(reset, past.end + HOUR_S)))
        latest = ledger.run(commands.ListRecent(acme, limit=1)).rows[0].request_id
    return Life(acme, made["notebooks"], ids["jonas"], lea, first, reset, latest, tuple(past.api_keys))


def _events(past: _Past, acme: str, made: dict[str, str], others: dict[str, str]) -> dict[int, list[Command[Any]]]:
    """Returns people's commands, by number of days ago."""
    unit, end, rng = NANO_PER_UNIT, past.end, past.rng
    fox, northwind, helios, harbor = (others[name] for name in ("Quiet Fox", "Northwind", "Helios Labs", "Blue Harbor"))
    alerts = (("balance", 50, OWNER), ("day", 25, OWNER), ("month", 400, "priya@acme-robotics.example"))
    details = BillingDetails("Acme Robotics Inc.", "12 Foundry Lane\nPortland, OR 97209", email=OWNER)
    welcome = commands.AddCredit(acme, 50 * unit, "grant", None, "Welcome credit", end + 30 * DAY_S, BY_OPERATOR)
    referral = replace(welcome, amount=25 * unit, memo="Referral credit", expires_at=end + 57 * DAY_S)
    credit = operators.AskCredit(northwind, 150 * unit, "grant", "Outage last week", BY_OPERATOR)
    notice = operators.PublishAnnouncement("svc-coder is slow today. A fix is under way.", "warning", BY_OPERATOR)
    maintenance = replace(notice, text="Maintenance on Sunday, 06:00 to 06:30 UTC.", level="info", account_id=northwind)
    return {
        59: [welcome, SetBillingDetails(acme, details)],
        55: [notices.CreateAlert(acme, kind, limit * unit, to, "secret", BY_OWNER) for kind, limit, to in alerts],
        45: [commands.SetLimits(acme, {"rpm": 1200, "tpm": 2_000_000}, BY_OPERATOR)],
        38: [payment(acme, 150, rng), payment(helios, 300, rng)],
        30: [operators.AddNote(acme, "Asked for higher limits before their launch; raised.", BY_SECOND)],
        21: [commands.RevokeKey(made["old laptop"], BY_OWNER), replace(notice, ends_at=end - 20 * DAY_S)],
        16: [payment(acme, 250, rng), payment(northwind, 100, rng)],
        9: [
            commands.SetActive(fox, False, BY_OPERATOR),
            operators.AddNote(fox, "Stolen card: suspended.", BY_OPERATOR),
        ],
        6: [commands.AddCredit(harbor, 20 * unit, "grant", memo="Goodwill", audit=BY_SECOND)],
        3: [referral, CreateManagementKey(acme, "export", keys.digest("export"), "mk-4fGh…x9Qz", audit=BY_OWNER)],
        1: [credit, replace(credit, account_id=helios, amount=500 * unit, memo="Start of the annual contract")],
        0: [replace(maintenance, ends_at=end + 2 * DAY_S)],
    }
