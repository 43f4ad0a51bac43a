"""Rules about serving: whether requests find a gateway, a replica and a place in its queue."""

from __future__ import annotations

from typing import Final

from dashboards.exported import APPLICATION_STATUS, REPLICA_HEALTHY, REPLICA_STARTS, TARGET_REPLICAS
from dashboards.promql import SERVICE
from dashboards.rules.rule import Alert, Group, Recording, selector
from serve_app.contracts import metrics

# A metric of cert-manager. Without cert-manager, its alerts never fire.
CERTIFICATE_EXPIRES: Final = "certmanager_certificate_expiration_timestamp_seconds"

# The controller exports the application's status from its deployment on, even while no gateway is ready.
KNOWN: Final = selector(APPLICATION_STATUS, 'application="gateway"')
GATEWAYS: Final = selector(REPLICA_HEALTHY, 'application="gateway", deployment="Gateway"')
TARGETS: Final = selector(TARGET_REPLICAS, 'deployment="Model"')
RUNNING: Final = f"{selector(APPLICATION_STATUS)} == 6"
MODELS: Final = selector(REPLICA_HEALTHY, 'deployment="Model"')
OVERLOADED: Final = selector(metrics.REFUSALS, 'reason="overloaded_error"')

# No healthy gateway; or the application was known within a day and no gateway reports now; or it was never seen. While
# the controller restarts, no process reports health, but a gateway's own metrics show that it is alive.
NO_GATEWAY: Final = f"""\
sum by ({SERVICE}) ({GATEWAYS}) == 0
or
group by ({SERVICE}) (last_over_time({KNOWN}[1d]))
  unless on ({SERVICE}) {GATEWAYS}
  unless on ({SERVICE}) {metrics.BACKEND_WEIGHT.exported}
or
absent(last_over_time({KNOWN}[1d]))"""

# A replica that never started has no series, so the weights show which backends must exist. `qwen:law` is an adapter
# of the application `qwen`. A running application with a target of 0 has scaled to zero. While the controller restarts,
# no process reports health, so the alert also needs KNOWN, which the controller exports.
NO_REPLICA: Final = f"""\
label_replace(
  max by ({SERVICE}, backend) ({metrics.BACKEND_WEIGHT.exported}) > 0,
  "application", "$1", "backend", "([^:]+).*"
)
unless on ({SERVICE}, application) (
  sum by ({SERVICE}, application) ({MODELS}) > 0
)
unless on ({SERVICE}, application) (
  max by ({SERVICE}, application) ({TARGETS}) == 0
  and on ({SERVICE}, application) {RUNNING}
)
and on ({SERVICE}) {KNOWN}"""

# An automatic rollback may end the ejection before Prometheus sees it, so the counter is checked as well.
EJECTED: Final = f"""\
sum by ({SERVICE}, model, backend) (increase({metrics.BACKEND_EJECTIONS.exported}[10m])) > 0
or
max by ({SERVICE}, model, backend) ({metrics.BACKEND_EJECTED.exported}) > 0"""

# Each replica has its own series, which starts with 1, so starts are series that did not exist an hour ago.
DEPLOYMENT: Final = f"{SERVICE}, application, deployment"
STARTS: Final = Recording(
    "serve_app:replica_starts:count1h",
    f"""\
count by ({DEPLOYMENT}) (
  last_over_time({REPLICA_STARTS.exported}[1h])
  unless on ({DEPLOYMENT}, replica)
  last_over_time({REPLICA_STARTS.exported}[5m] offset 1h)
)""",
)
# An update or a scale-up may start as many replicas as there are.
RESTARTS: Final = f"""\
{STARTS.name} > 3
unless on ({DEPLOYMENT}) (
  {STARTS.name}
    <= on ({DEPLOYMENT}) 2 * sum by ({DEPLOYMENT}) ({REPLICA_HEALTHY.exported})
)"""

# A full cache preempts sequences: its use falls by a third and rises again every few seconds, so the peaks count.
KV_USE: Final = f"""\
sum by ({SERVICE}, application) (max_over_time({metrics.KV_BLOCKS_USED.exported}[15m]))
  / sum by ({SERVICE}, application) ({metrics.KV_BLOCKS_TOTAL.exported}) > 0.95
and sum by ({SERVICE}, application) (avg_over_time({metrics.WAITING.exported}[15m])) > 1"""

EXPIRES_IN: Final = f"min by ({SERVICE}, exported_namespace, name) ({CERTIFICATE_EXPIRES} > 0) - time()"
EXPIRES: Final = "The certificate {{ $labels.name }} expires in {{ $value | humanizeDuration }}"
EXPIRED: Final = "Once it has expired, every client refuses the connection. cert-manager should have renewed it."

GATEWAY_RULES: Final = (
    Alert(
        "ServeAppNoGateway", "page", NO_GATEWAY,
        "No gateway is up, or Prometheus does not see it",
        "No request is answered, unless it is Prometheus that does not reach the service.",
        lasts="2m",
    ),
    Alert(
        "ServeAppBackendDown", "page", NO_REPLICA,
        "The backend {{ $labels.backend }} has weight and no healthy replica",
        "Requests for this backend get 503.",
        lasts="2m",
    ),
    Alert(
        "ServeAppBackendEjected", "warn", EJECTED,
        "{{ $labels.model }}: gateways have ejected the backend {{ $labels.backend }}",
        "Some requests failed or began late. Other backends reply now, with less capacity.",
    ),
    STARTS,
    Alert(
        "ServeAppReplicaRestarts", "warn", RESTARTS,
        "{{ $value }} replicas of {{ $labels.application }}:{{ $labels.deployment }} were started in an hour",
        "Each restart of a model replica cuts its streams; other deployments answer with 503 or late meanwhile.",
    ),
    Alert(
        "ServeAppCertificateExpires", "warn", f"{EXPIRES_IN} < 14 * 86400", EXPIRES, EXPIRED, lasts="1h",
    ),
    Alert(
        "ServeAppCertificateExpires", "page", f"{EXPIRES_IN} < 3 * 86400", EXPIRES, EXPIRED, lasts="5m",
    ),
)  # fmt: skip

CAPACITY_RULES: Final = (
    Alert(
        "ServeAppQueueOld", "warn",
        f"max by ({SERVICE}, application) ({metrics.OLDEST_WAIT.exported}) > 10",
        "A request has waited for {{ $value | humanizeDuration }} in the queue of {{ $labels.application }}",
        "Replies begin late. A request that would wait for 40 s gets 503.",
        lasts="5m",
    ),
    Alert(
        "ServeAppQueueFull", "warn",
        f"sum by ({SERVICE}, model) (rate({OVERLOADED}[5m])) > 0.1",
        "{{ $labels.model }}: {{ $value | humanize }} requests per second are refused with 503",
        "Clients get 503 with `retry-after`: there is no capacity, or a part of the service is restarting.",
        lasts="5m",
    ),
    Alert(
        # Pressure is kept near 1 while demand exceeds capacity, and is 0 while nothing waits, so its mean is compared.
        "ServeAppPressure", "warn",
        f"max by ({SERVICE}, backend) (avg_over_time({metrics.PRESSURE.exported}[15m])) > 0.5",
        "{{ $labels.backend }}: capacity is missing, so limits have been lowered for 15 minutes",
        "Accounts get fewer tokens per minute than their contract says: clients get 429 `tokens`.",
        lasts="5m",
    ),
    Alert(
        "ServeAppKvCacheFull", "warn", KV_USE,
        "{{ $labels.application }}: the KV cache fills to {{ $value | humanizePercentage }} and sequences wait",
        "Replies begin late, and running ones are interrupted and computed again.",
        lasts="10m",
    ),
)  # fmt: skip

GROUPS: Final = (Group("serve-app-serving", GATEWAY_RULES), Group("serve-app-capacity", CAPACITY_RULES))
