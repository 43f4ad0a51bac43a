"""Rules between the objects of a set: times, connections, volumes, budgets, replicas."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from urllib.parse import parse_qs, urlsplit

from serve_app.times import longest_reply_s

from .checks import CLUSTER, DRAIN, HARD_STOP, Document
from .gateway_rules import least, most
from .manifests import Manifests, Pool, selects

RAYSERVICE = "RayService/serve-app"
DEAD = ("serviceUnhealthySecondThreshold", "deploymentUnhealthySecondThreshold")


def longest_reply(serve: Document) -> float:
    """In seconds."""
    return longest_reply_s(serve["applications"][0]["deployments"][0]["user_config"])


def time_problems(manifests: Manifests) -> Iterator[str]:
    """Each may only end what the one before it lets run."""
    serve, spec = manifests.serve, manifests.rayservice["spec"]
    shutdown: dict[str, dict[str, float]] = {"Model": {}, "Gateway": {}}
    for application, one in manifests.deployments():
        if one["name"] in shutdown:
            shutdown[one["name"]][f"{RAYSERVICE} {application['name']}"] = one.get("graceful_shutdown_timeout_s", 20)
    pools = manifests.pools
    chain = [
        ("the longest reply", {RAYSERVICE: longest_reply(serve)}),
        ("graceful_shutdown_timeout_s of Model", shutdown["Model"]),
        ("graceful_shutdown_timeout_s of Gateway", shutdown["Gateway"]),
        (HARD_STOP, {pool.where: _seconds(pool, HARD_STOP, 120) for pool in pools}),
        (DRAIN, {pool.where: _seconds(pool, DRAIN, 30) for pool in pools}),
        (
            "the end of pods and old clusters",
            {pool.where: pool.spec.get("terminationGracePeriodSeconds", 30) for pool in pools}
            | {f"{RAYSERVICE} rayClusterDeletionDelaySeconds": spec.get("rayClusterDeletionDelaySeconds", 60)},
        ),
    ]
    for index, (name, earlier) in enumerate(chain[:-1]):
        later_name, later = chain[index + 1]
        for where, seconds in later.items():
            if seconds <= max(earlier.values()):
                yield f"{where}: {later_name} ({seconds:g} s) is not longer than {name} ({max(earlier.values()):g} s)"
    needed = max(shutdown["Model"].values())
    for where, seconds in _timeouts(manifests):
        if 0 < seconds <= needed:
            yield f"{where}: {seconds:g} s would cut replies, which may take {needed:g} s"


def _seconds(pool: Pool, name: str, default: float) -> float:
    return float(pool.env.get(name, {}).get("value", default))


def _timeouts(manifests: Manifests) -> Iterator[tuple[str, float]]:
    for route in manifests.of("HTTPRoute"):
        for rule in route["spec"]["rules"]:
            where = f"HTTPRoute/{route['metadata']['name']}"
            if "backendRefs" in rule:
                # Without one, what is the implementation's default: 15 s of Envoy's, for one.
                given = rule.get("timeouts", {"request": "15s"})
                yield from ((f"{where} timeouts.{name}", _duration(text)) for name, text in given.items())
    for policy in manifests.of("GCPBackendPolicy"):
        default = policy["spec"]["default"]
        yield f"GCPBackendPolicy/{policy['metadata']['name']}", default["timeoutSec"]


def _duration(text: str) -> float:
    unit = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    return sum(int(number) * unit[name] for number, name in re.findall(r"(\d+)(ms|h|m|s)", text))


def replica_problems(manifests: Manifests) -> Iterator[str]:
    """Every deployment has pods that may run it, and enough of them."""
    for application, deployment in manifests.deployments():
        where = f"{RAYSERVICE} {application['name']}.{deployment['name']}"
        options = deployment.get("ray_actor_options", {})
        pools = manifests.pools_of(deployment)
        if not pools:
            yield f"{where}: no pool offers {options.get('resources', {})}"
            continue
        for pool in pools:
            limits = pool.container["resources"].get("limits", {"cpu": 0})
            if options.get("num_cpus", 1) > float(limits["cpu"]):
                yield f"{where}: a pod of {pool.name} has too few CPUs"
            gpus = float(limits.get("nvidia.com/gpu", 0))
            if options.get("num_gpus", 0) > gpus:
                yield f"{where}: a pod of {pool.name} has too few GPUs"
            elif options.get("num_gpus", 0) < gpus:
                yield f"{where}: a pod of {pool.name} has {gpus:g} GPUs, and its replica uses {options['num_gpus']}"
        replicas, places = most(deployment), sum(pool.most * pool.places(deployment) for pool in pools)
        if replicas > places or least(deployment) > replicas:
            names, pods = ", ".join(pool.name for pool in pools), sum(pool.most for pool in pools)
            yield f"{where}: up to {replicas} replicas, and {names} may have {pods} pods with {places} places"
    for application in manifests.serve["applications"]:
        for name in ("Limiter", "Accounting"):
            if application["import_path"].endswith(":gateway") and not any(
                one["name"] == name for one in application["deployments"]
            ):
                yield f"{RAYSERVICE} {application['name']}: {name} is not tied to a pool"
        if manifests.production and application["import_path"].endswith(":gateway"):
            yield from _shared_fates(application)


def _shared_fates(application: Document) -> Iterator[str]:
    """No pod may have all shards of accounting: without one, no key can be confirmed."""
    shards = [one for one in application["deployments"] if one["name"].startswith("Accounting")]
    where = f"{RAYSERVICE} {application['name']}"
    if len(shards) < 2 or application["args"].get("accounting_shards") != len(shards):
        yield f"{where}: accounting has less than two shards"
    if any(one["ray_actor_options"]["resources"].get("accounting", 0) <= 0.5 for one in shards):
        yield f"{where}: one pod has room for two shards of accounting"


def version_problems(manifests: Manifests) -> Iterator[str]:
    ray = re.search(r"^ray==([^\s;\\]+)", (CLUSTER.parent / "constraints.txt").read_text(), re.MULTILINE)
    if ray is None or manifests.cluster["rayVersion"] != ray[1]:
        yield f"{RAYSERVICE}: rayVersion {manifests.cluster['rayVersion']} is not that of constraints.txt"
    if manifests.rayservice["spec"].get("upgradeStrategy", {}).get("type") != "NewCluster":
        # The other kind divides requests between the clusters for minutes, and opens /admin to the Gateway it makes.
        yield f"{RAYSERVICE}: upgradeStrategy is not NewCluster: two limiters would get requests, and one admits"
    for name in DEAD:
        if name in manifests.rayservice["spec"]:
            yield f"{RAYSERVICE}: {name} is a dead field: KubeRay 1.7 ignores it"
    if manifests.cluster.get("authOptions", {}).get("mode") != "token":
        yield f"{RAYSERVICE}: authOptions: Ray takes calls without a token"


def database_problems(manifests: Manifests) -> Iterator[str]:
    """TLS with a verified name, the CA on the disk of the pods that use it, and no password in the address."""
    config = manifests.named("ConfigMap", "serve-app-database") or {"data": {}}
    where, url = "ConfigMap/serve-app-database", urlsplit(config["data"].get("SERVE_APP_DATABASE_URL", ""))
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    if url.scheme != "postgresql+psycopg" or url.password:
        yield f"{where}: SERVE_APP_DATABASE_URL must be postgresql+psycopg://USER@HOST:5432/…, without a password"
    if query.get("sslmode") != "verify-full":
        yield f"{where}: sslmode is {query.get('sslmode')}, so the database's name is not verified"
    if "sslrootcert" not in query:
        yield f"{where}: no sslrootcert: verify-full needs the database's CA"
    for pool in manifests.pools:
        if "serve-app-database" in pool.sources("configMap") and "sslrootcert" in query:
            yield from _ca_problems(pool, query["sslrootcert"])


def redis_problems(manifests: Manifests) -> Iterator[str]:
    """With Redis, the head may fail; with a password and TLS, nobody else reads Ray's state."""
    options = manifests.cluster.get("gcsFaultToleranceOptions")
    if options is None:
        if manifests.production:
            yield f"{RAYSERVICE}: no gcsFaultToleranceOptions: if the head fails, everything stops"
        return
    if not options.get("redisAddress", "").startswith("rediss://"):
        yield f"{RAYSERVICE}: redisAddress is not rediss://, so Ray's state travels as plain text"
    reference = (options.get("redisPassword") or {}).get("valueFrom", {}).get("secretKeyRef", {})
    secret = manifests.named("Secret", reference.get("name", ""))
    if secret is None or reference.get("key") not in secret["stringData"]:
        yield f"{RAYSERVICE}: redisPassword is not from a Secret that there is"
    config = manifests.named("ConfigMap", "serve-app-redis") or {"data": {}}
    head = manifests.pools[0]
    if "RAY_REDIS_CA_CERT" not in config["data"] or "serve-app-redis" not in head.sources("configMap"):
        yield f"{head.where}: RAY_REDIS_CA_CERT is missing: Redis' certificate can't be verified"
    else:
        yield from _ca_problems(head, config["data"]["RAY_REDIS_CA_CERT"])


def _ca_problems(pool: Pool, path: str) -> Iterator[str]:
    volume = pool.mounts.get(str(PurePosixPath(path).parent), {})
    if not {"configMap", "secret"} & volume.keys():
        yield f"{pool.where}: no volume with the CA at {path}"


def storage_problems(manifests: Manifests) -> Iterator[str]:
    """Claims exist, and the weights that GPU pods read are fetched by the Job."""
    claims = {one["metadata"]["name"]: one for one in manifests.of("PersistentVolumeClaim")}
    for pool in manifests.pools:
        for volume in pool.mounts.values():
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim is not None and claim not in claims:
                yield f"{pool.where}: there is no PersistentVolumeClaim {claim}"
        if pool.role == "model" and manifests.production:
            yield from _weights_problems(pool, claims)
    fetched = " ".join(str(one["spec"]["template"]["spec"]["containers"][0]["args"]) for one in manifests.of("Job"))
    for application in manifests.serve["applications"] if manifests.production else ():
        model = application["args"].get("model")
        if model is not None and model not in fetched:
            yield f"Job/fetch-models: does not fetch {model}"


def _weights_problems(pool: Pool, claims: dict[str, Document]) -> Iterator[str]:
    path = pool.env.get("HF_HOME", {}).get("value", "")
    volume = pool.mounts.get(path, {})
    claim = claims.get(volume.get("persistentVolumeClaim", {}).get("claimName", ""))
    if claim is None or not {"ReadWriteMany", "ReadOnlyMany"} & set(claim["spec"]["accessModes"]):
        yield f"{pool.where}: the weights at {path} are not on a shared volume"
    elif not volume["mount"].get("readOnly") or pool.env.get("HF_HUB_OFFLINE", {}).get("value") != "1":
        yield f"{pool.where}: the shared weights are not read-only (readOnly, HF_HUB_OFFLINE)"


def budget_problems(manifests: Manifests) -> Iterator[str]:
    """Yields problems of disruption budgets: of two pods with the same role, one must stay during a drain."""
    budgets = manifests.of("PodDisruptionBudget")
    for budget in budgets:
        name = f"PodDisruptionBudget/{budget['metadata']['name']}"
        covered = [pool for pool in manifests.pools if selects(budget["spec"]["selector"], pool.labels)]
        kept = budget["spec"].get("minAvailable")
        if not isinstance(kept, int) or not 0 < kept < sum(pool.least for pool in covered):
            yield f"{name}: minAvailable must be a number above 0 and below that of its pods"
    for pool in manifests.pools[1:] if manifests.production else ():
        if pool.least > 0 and not any(selects(budget["spec"]["selector"], pool.labels) for budget in budgets):
            yield f"{pool.where}: no PodDisruptionBudget covers it"
