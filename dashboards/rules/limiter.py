"""Rules about admission: whether requests are admitted, and by which limiter shard."""

from __future__ import annotations

from typing import Final

from dashboards.exported import DEPLOYMENT_STATUS
from dashboards.promql import SERVICE
from dashboards.rules.rule import Alert, Group, selector
from serve_app.contracts import metrics

SHARD: Final = f"{SERVICE}, deployment"
SHARDS: Final = selector(DEPLOYMENT_STATUS, 'application="gateway", deployment=~"Limiter(-[0-9]+)?"')

# In both parts, Ray's label `deployment` names the shard: `Limiter`, `Limiter-1`. The second part finds shards
# that Serve knows and that do not report.
ADMITS_NOTHING: Final = f"""\
max by ({SHARD}) ({metrics.LIMITER_EPOCH.exported}) == 0
or
group by ({SHARD}) ({SHARDS})
  unless on ({SHARD}) {metrics.LIMITER_EPOCH.exported}"""

RULES: Final = (
    Alert(
        "ServeAppLimiterDoesNotAdmit", "page", ADMITS_NOTHING,
        "The shard {{ $labels.deployment }} admits nothing",
        "All requests of its accounts get 503. With one shard, these are all accounts.",
        lasts="1m",
    ),
    Alert(
        # The threshold is the default of key_staleness_s.
        "ServeAppFeedStalled", "page",
        f"max by ({SERVICE}, shard) ({metrics.FEED_AGE_SECONDS.exported}) > 5",
        "Limiter shard {{ $labels.shard }} has not read changes of keys for {{ $value | humanizeDuration }}",
        "A key that is revoked works until `key_staleness_s`; then all keys get 503.",
        lasts="1m",
    ),
    Alert(
        "ServeAppHoldsExpired", "warn",
        f"sum by ({SERVICE}, shard) (increase({metrics.EXPIRED_HOLDS.exported}[15m])) > 0",
        "{{ $value | humanize }} holds expired on limiter shard {{ $labels.shard }}",
        "A gateway died or hung for longer than `lease_s`: its clients lost their connections.",
    ),
)  # fmt: skip

GROUPS: Final = (Group("serve-app-limiter", RULES),)
