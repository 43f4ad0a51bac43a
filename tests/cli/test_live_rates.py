"""Figures of gateways: the same whether a Prometheus computes rates or two reads of exporters do."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import promql_parser
import pytest

from serve_app.cli.grafana.address import parse_address
from serve_app.cli.live.exporters import EXPORT_S, RAY_TARGETS, Exporters, local_addresses
from serve_app.cli.live.prometheus import Prometheus, expression
from serve_app.cli.live.rates import COUNTED, Rates, quantile, series_of
from serve_app.contracts import metrics

from .live_service import Counts, FakeExporter, FakePrometheus
from .local_http import Answer, Drop


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def exporter() -> Iterator[FakeExporter]:
    with FakeExporter() as exporter:
        yield exporter


@pytest.fixture
def prometheus() -> Iterator[FakePrometheus]:
    with FakePrometheus() as prometheus:
        yield prometheus


@pytest.fixture
def reading(clock: Clock) -> Callable[..., Exporters]:
    def reading(*exporters: FakeExporter, all_count: bool = True) -> Exporters:
        addresses = [f"{exporter.url}/metrics" for exporter in exporters]
        return Exporters(lambda: addresses, all_count=all_count, clock=clock)

    return reading


# Quantiles


@pytest.mark.parametrize(
    ("of", "buckets", "value"),
    [
        (0.5, {1.0: 0, 2.0: 10, inf: 10}, 1.5),
        (0.95, {1.0: 0, 2.0: 10, inf: 10}, 1.95),
        (0.5, {1.0: 10, 2.0: 10, inf: 10}, 0.5),
        (0.75, {1.0: 5, 2.0: 10, inf: 10}, 1.5),
        (0.5, {2.0: 4, 1.0: 2, inf: 8}, 2.0),
        (0.95, {1.0: 2, 2.0: 4, inf: 8}, 2.0),  # above the highest bound it is not known by how much
        (0.5, {1.0: 0, inf: 0}, None),
        (0.5, {}, None),
    ],
)
def test_a_quantile_lies_within_its_bucket_as_prometheus_has_it(
    of: float, buckets: dict[float, float], value: float | None
) -> None:
    assert quantile(of, buckets) == (None if value is None else pytest.approx(value))


# Exporters


def test_rates_are_differences_between_two_reads(
    exporter: FakeExporter, reading: Callable[..., Exporters], clock: Clock
) -> None:
    for _ in range(1000):
        exporter.counts.serve(3.0)
    source = reading(exporter)
    first = source.read()
    assert (first.values, first.notes) == (None, ("requests/s and the like come in 10 s",))
    for _ in range(30):
        exporter.counts.serve(0.3)
    exporter.counts.serve(0.3, backend="new")
    for _ in range(4):
        exporter.counts.refuse("tokens")
    exporter.counts.refuse("overloaded_error", backend="old")
    clock.now += 20
    rates = source.read()
    assert rates.over_s == 20
    assert rates.of(metrics.REQUESTS, "svc-chat", "old") == pytest.approx(31 / 20)
    assert rates.of(metrics.REQUESTS, "svc-chat") == rates.of(metrics.REQUESTS) == pytest.approx(36 / 20)
    assert rates.by_last(metrics.REFUSALS, "svc-chat") == {"tokens": 4 / 20, "overloaded_error": 1 / 20}
    assert rates.of(metrics.COMPLETION_TOKENS, "svc-chat", "old") == pytest.approx(300 / 20)
    assert rates.of(metrics.REQUESTS, "svc-coder") == 0.0
    # Between 0.25 and 0.5 s lie all that came since, and none of the thousand before.
    assert rates.quantile(0.5, metrics.FIRST_TOKEN_SECONDS, "svc-chat", "old") == pytest.approx(0.375)
    assert rates.quantile(0.5, metrics.FIRST_TOKEN_SECONDS, "svc-coder") is None
    assert rates.notes == ()


def test_there_are_no_rates_until_ray_has_exported_once_more(
    exporter: FakeExporter, reading: Callable[..., Exporters], clock: Clock
) -> None:
    exporter.counts.serve(0.1)
    source = reading(exporter)
    source.read()
    clock.now += EXPORT_S - 2
    assert source.read().notes == ("requests/s and the like come in 2 s",)
    clock.now += 2
    assert source.read().values is not None


def test_rates_are_those_of_the_last_minute(
    exporter: FakeExporter, reading: Callable[..., Exporters], clock: Clock
) -> None:
    exporter.counts.serve(0.1)
    source = reading(exporter)
    source.read()
    for _ in range(10):
        clock.now += 20
        for _ in range(40):
            exporter.counts.serve(0.1)
        source.read()
    for _ in range(3):
        clock.now += 20
        rates = source.read()
    assert (rates.over_s, rates.of(metrics.REQUESTS)) == (60, 0.0)
    clock.now += 300
    exporter.counts.serve(0.1)
    assert source.read().of(metrics.REQUESTS) == pytest.approx(1 / 300), "with reads that are further apart"


def test_a_gateway_that_comes_goes_or_begins_again_counts_from_its_start(
    exporter: FakeExporter, reading: Callable[..., Exporters], clock: Clock
) -> None:
    counts = exporter.counts
    for _ in range(50):
        counts.serve(0.1)
    source = reading(exporter)
    source.read()
    clock.now += 10
    counts.serve(0.1)
    counts.worker = "w2"
    for _ in range(4):
        counts.serve(0.1)
    assert source.read().of(metrics.REQUESTS) == pytest.approx(5 / 10)
    exporter.counts = Counts("w1")  # without w2, and w1 anew
    for _ in range(10):
        exporter.counts.serve(0.1)
    clock.now += 10
    assert source.read().of(metrics.REQUESTS) == pytest.approx(15 / 20)


def test_gateways_of_several_machines_are_summed_and_one_that_is_away_is_named(
    exporter: FakeExporter, reading: Callable[..., Exporters], clock: Clock
) -> None:
    with FakeExporter() as other:
        source = reading(exporter, other)
        for one in (exporter, other):
            one.counts.serve(0.1)
        source.read()
        clock.now += 10
        for one in (exporter, other):
            one.counts.serve(0.1)
        rates = source.read()
        assert rates.of(metrics.REQUESTS) == pytest.approx(2 / 10)
        assert rates.source == f"metrics at {exporter.url}/metrics, {other.url}/metrics"
    clock.now += 10
    rates = source.read()
    assert rates.of(metrics.REQUESTS) == pytest.approx(1 / 20)
    [note] = rates.notes
    assert note.startswith(f"{other.url}/metrics: ")


def test_of_a_local_service_exporters_without_gateways_may_be_off(
    exporter: FakeExporter, reading: Callable[..., Exporters], clock: Clock
) -> None:
    with FakeExporter() as off, FakeExporter() as empty:
        off.stop()
        source = reading(off, empty, exporter, all_count=False)
        exporter.counts.serve(0.1)
        source.read()
        clock.now += 10
        exporter.counts.serve(0.1)
        rates = source.read()
        assert (rates.of(metrics.REQUESTS), rates.notes) == (pytest.approx(0.1), ())
        assert rates.source == f"metrics at {exporter.url}/metrics"


@pytest.mark.parametrize(
    "answer", [Drop(), Answer(500, "down"), Answer(200, "<html>another page</html>"), Answer(200, "")]
)
def test_what_is_no_exporter_is_named(
    exporter: FakeExporter, reading: Callable[..., Exporters], answer: Answer | Drop
) -> None:
    exporter.next.append(answer)
    rates = reading(exporter).read()
    assert rates.values is None
    assert any(exporter.url in note for note in rates.notes)


def test_a_text_that_is_cut_is_named_and_counts_for_nothing(
    exporter: FakeExporter, reading: Callable[..., Exporters], clock: Clock
) -> None:
    source = reading(exporter)
    for _ in range(7):
        exporter.counts.serve(0.1)
    source.read()
    clock.now += 10
    exporter.next.append(Answer(200, f'{series_of(metrics.REQUESTS)}{{model="svc-chat'))
    assert source.read().values is None
    clock.now += 10
    assert source.read().of(metrics.REQUESTS) == 0.0


def test_the_addresses_of_a_local_service_are_those_that_ray_keeps(tmp_path: Path) -> None:
    assert local_addresses(tmp_path) == []
    session = tmp_path / "ray" / "session_latest"
    (session / "logs").mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "ray").symlink_to(session / "logs")
    assert local_addresses(tmp_path) == []
    targets = '[{"labels": {"job": "ray"}, "targets": ["127.0.0.1:4000", "127.0.0.1:44227"]}]'
    (session / RAY_TARGETS).write_text(targets, encoding="utf-8")
    assert local_addresses(tmp_path) == ["http://127.0.0.1:4000/metrics", "http://127.0.0.1:44227/metrics"]
    (session / RAY_TARGETS).write_text("[{", encoding="utf-8")
    assert local_addresses(tmp_path) == []


# Prometheus


def read(prometheus: FakePrometheus, url: str | None = None, **service: str) -> Rates:
    return Prometheus(parse_address(url or prometheus.url), service, trust_env=False).read()


def test_every_query_is_promql_over_a_declared_metric_and_its_labels() -> None:
    for metric, labels in COUNTED.items():
        assert set(labels) - {"le"} <= set(metric.labels)
        parsed = promql_parser.parse(expression(metric, {"cluster": 'a"\\b', "namespace": "n"}))
        assert parsed.modifier.labels == ["cluster", "namespace", *labels]
        selector = parsed.expr.args[0].vector_selector
        assert selector.name == series_of(metric)
        assert {(one.name, one.value) for one in selector.matchers.matchers} == {
            ("cluster", 'a"\\b'),
            ("namespace", "n"),
        }


def test_prometheus_rates_are_shown_by_model_and_backend(prometheus: FakePrometheus) -> None:
    served = {"cluster": "prod", "namespace": "chat", "model": "svc-chat", "backend": "old"}
    prometheus.rows = {
        series_of(metrics.REQUESTS): [(served, 12.5), ({**served, "backend": "none"}, 0.5)],
        series_of(metrics.REFUSALS): [({**served, "reason": "tokens"}, 0.5)],
        series_of(metrics.FIRST_TOKEN_SECONDS): [
            ({**served, "le": "0.25"}, 0.0), ({**served, "le": "0.5"}, 5.0), ({**served, "le": "+Inf"}, 5.0)
        ],
    }  # fmt: skip
    rates = read(prometheus, cluster="prod")
    assert rates.of(metrics.REQUESTS, "svc-chat", "old") == 12.5
    assert rates.of(metrics.REQUESTS, "svc-chat") == 13.0
    assert rates.of(metrics.REFUSALS) == 0.5
    assert rates.of(metrics.PROMPT_TOKENS) == 0.0
    assert rates.quantile(0.5, metrics.FIRST_TOKEN_SECONDS) == pytest.approx(0.375)
    assert (rates.over_s, rates.notes) == (60, ())
    assert all('{cluster="prod"}[60s]' in query for query in prometheus.queries)


def test_sums_over_several_services_are_named(prometheus: FakePrometheus) -> None:
    row = {"namespace": "chat", "model": "svc-chat", "backend": "old"}
    prometheus.rows = {series_of(metrics.REQUESTS): [({**row, "cluster": name}, 1.0) for name in ("a", "b")]}
    rates = read(prometheus)
    assert rates.of(metrics.REQUESTS) == 2.0
    assert rates.notes == ("these are sums of 2 services: choose one with --cluster and --namespace",)


def test_a_prometheus_that_knows_nothing_of_the_service_is_named(prometheus: FakePrometheus) -> None:
    rates = read(prometheus, cluster="prod", namespace="chat")
    assert rates.values is None
    [note] = rates.notes
    assert 'with cluster="prod", namespace="chat"' in note


def test_a_login_goes_as_basic_authentication_and_is_never_shown(prometheus: FakePrometheus) -> None:
    rates = read(prometheus, prometheus.url.replace("://", "://ada:pass%40word@"))
    sent = prometheus.requests[-1].headers["authorization"]
    assert base64.b64decode(sent.removeprefix("Basic ")) == b"ada:pass@word"
    assert "pass" not in rates.source + "".join(rates.notes)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Drop(), "Prometheus at"),
        (Answer(401, "who are you?"), "answered 401: is a Prometheus there?"),
        (Answer(200, "<html>another page</html>"), "is a Prometheus there?"),
        (Answer(422, {"status": "error", "error": "too many samples"}), "too many samples"),
        (Answer(200, {"status": "success", "data": {}}), "is a Prometheus there?"),
        (Answer(200, ["no", "object"]), "is a Prometheus there?"),
    ],
)
def test_a_prometheus_that_does_not_answer_is_named(
    prometheus: FakePrometheus, answer: Answer | Drop, says: str
) -> None:
    prometheus.next.append(answer)
    rates = read(prometheus)
    assert rates.values is None
    [note] = rates.notes
    assert prometheus.url in note
    assert says in note
