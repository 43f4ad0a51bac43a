"""The attacked service, started as a user would start it, and the accounts of both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from bench.attack.customer import MEASURED
from bench.attack.hostile import Target
from bench.harness.servers import OneReplica, deployment
from bench.harness.stub_request import BACKEND, stub_application

ORDINARY: Final = 4  # number of accounts with ordinary traffic


class Attacked(OneReplica):
    """The attacked service. A stub answers requests for the model MEASURED, and replies immediately."""

    name = "attack"

    def config(self) -> dict[str, Any]:
        config = super().config()
        deployment(config, "Gateway")["user_config"]["models"][MEASURED]["backends"] = {BACKEND: 100}
        config["applications"].append(stub_application())
        return config

    def account_names(self) -> list[str]:
        names: list[str] = []
        after = ""
        while True:
            page = self.admin(f"/admin/accounts?limit=100{after}")
            names += [account["name"] for account in page["data"]]
            if not page.get("next"):
                return names
            after = f"&after={page['next']}"


@dataclass(frozen=True, slots=True)
class Accounts:
    """Keys of the ordinary clients (`new_keys`: not used yet) and of the customer, and the attackers' target."""

    keys: tuple[str, ...]
    new_keys: tuple[str, ...]
    customer: str
    target: Target


def make_accounts(server: Attacked, new_keys: int) -> Accounts:
    """Creates the accounts. Only the attacker's accounts have the default limits.

    Raises:
        urllib.error.URLError: the service refuses a request.
    """
    lifted = {"rpm": 10**6, "tpm": 10**9, "concurrency": 1000}
    made = [server.new_account(f"ordinary-{number}", "1000", **lifted) for number in range(ORDINARY)]
    unused = [
        str(server.admin(f"/admin/accounts/{made[number % ORDINARY][0]}/keys", {"name": f"new-{number}"})["key"])
        for number in range(new_keys)
    ]
    _, customer = server.new_account("customer", "1000", **lifted)
    _, key = server.new_account("attacker", "1000")
    broke = str(server.admin("/admin/accounts", {"name": "broke"})["id"])
    broke_key = str(server.admin(f"/admin/accounts/{broke}/keys", {"name": "attack"})["key"])
    return Accounts(tuple(key for _, key in made), tuple(unused), customer, Target(server.port, key, broke_key))
