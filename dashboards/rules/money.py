"""Rules about money: delivered usage that might never be billed, and books that do not add up."""

from __future__ import annotations

from typing import Final

from dashboards.promql import SERVICE
from dashboards.rules.rule import Alert, Group, quantile_99, selector
from serve_app.contracts import metrics

SPOOL: Final = selector(metrics.SPOOL_BYTES, 'holder="gateway"')
REJECTED: Final = selector(metrics.SETTLEMENTS, 'outcome="rejected"')

SETTLEMENT_RULES: Final = (
    Alert(
        "ServeAppSlowSettlement", "warn",
        f"{quantile_99(metrics.SETTLEMENT_SECONDS)} > 1",
        "p99 of settling usage is {{ $value | humanizeDuration }}",
        "The last chunk of every reply waits for its settlement, so replies end late.",
        lasts="5m",
    ),
    Alert(
        "ServeAppLedgerLag", "warn",
        f"{quantile_99(metrics.LEDGER_LAG)} > 30",
        "p99 from the end of a request to its commit in the ledger is {{ $value | humanizeDuration }}",
        "Balances and usage are shown late. Holds stay until then, so accounts with little balance are refused.",
        lasts="10m",
    ),
    Alert(
        "ServeAppSpoolOld", "page",
        f"max by ({SERVICE}, holder) ({metrics.SPOOL_AGE.exported}) > 60",
        "A settlement has waited on the disk of a {{ $labels.holder }} for {{ $value | humanizeDuration }}",
        "The ledger is unavailable. Users notice nothing at first; new requests are refused within seconds or minutes, "
        "by `key_staleness_s` and `outage_grace_s`.",
        lasts="1m",
    ),
    Alert(
        # The threshold is a quarter of the default spool_max_bytes.
        "ServeAppSpoolGrows", "page",
        f"max by ({SERVICE}) (deriv({SPOOL}[5m])) > 0\n"
        f"and max by ({SERVICE}) ({SPOOL}) > 16 * 1024 * 1024",
        "The spool of a gateway has {{ $value | humanize1024 }}B more each second",
        "The ledger is unavailable or slower than the traffic. At nine tenths of `spool_max_bytes` a gateway admits "
        "nothing: clients get 503.",
        lasts="5m",
    ),
    Alert(
        "ServeAppSpoolDeep", "warn",
        f"sum by ({SERVICE}, holder) ({metrics.SPOOL_SETTLEMENTS.exported}) > 10000",
        "{{ $value | humanize }} settlements wait in the spools of {{ $labels.holder }}s",
        "Their money is held until they are settled, so accounts with little balance are refused.",
        lasts="1m",
    ),
)  # fmt: skip

BOOKS_RULES: Final = (
    Alert(
        "ServeAppSettlementsStuck", "page",
        f"max by ({SERVICE}) ({metrics.STUCK.exported}) > 0",
        "{{ $value }} settlements could not be settled and are kept for you",
        "Users have their replies, which are not billed.",
    ),
    Alert(
        "ServeAppSettlementRejected", "page",
        f"sum by ({SERVICE}) (increase({REJECTED}[15m])) > 0",
        "The ledger did not settle what was delivered",
        "Users got an error at the end of their reply, which is not billed.",
    ),
    Alert(
        "ServeAppUncollected", "page",
        f"sum by ({SERVICE}) (increase({metrics.UNCOLLECTED.exported}[15m])) > 0",
        "Replies worth {{ $value | humanize }} units of currency were delivered and no balance covered them",
        "Users notice nothing. The service has given away what it should have held money for.",
    ),
    Alert(
        "ServeAppBooksUnbalanced", "page",
        f"max by ({SERVICE}) ({metrics.BOOKS_DIFFERENCES.exported}) > 0",
        "The last check of the books found {{ $value }} differences",
        "A balance, a daily sum or a budget that users see may be wrong.",
    ),
    Alert(
        # The second part finds checks that have failed since accounting started, and so have no time of a last success.
        "ServeAppBooksUnchecked", "warn",
        f"time() - max by ({SERVICE}) ({metrics.BOOKS_CHECKED.exported}) > 3600\n"
        "or\n"
        f"group by ({SERVICE}) ({metrics.STUCK.exported})\n"
        f"  unless on ({SERVICE}) {metrics.BOOKS_CHECKED.exported}",
        "The books have not been checked for more than an hour",
        "Users notice nothing. A difference in the books would not be found.",
        lasts="1h",
    ),
)  # fmt: skip

GROUPS: Final = (Group("serve-app-settlement", SETTLEMENT_RULES), Group("serve-app-books", BOOKS_RULES))
