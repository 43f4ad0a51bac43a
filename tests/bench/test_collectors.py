"""Tests that the collector benchmark uses a collector that always hangs, and that its verdict can go both ways."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from bench.gateway.collectors import is_kept, markdown, silent_listener
from bench.gateway.session import WORKLOAD


def results(requests_per_s: float, p90_ms: float) -> dict[str, Any]:
    def record(server: str, number: int, rate: float, late: float) -> dict[str, Any]:
        figures = {"requests_per_s": rate, "p90_ms": late, "p99_ms": 2 * late}
        return {"server": server, "workload": WORKLOAD, "clients": 16, "round": number, "problems": [], **figures}

    records = [record("none", number, 500, 20) for number in range(2)]
    records += [record("silent", number, requests_per_s, p90_ms) for number in range(2)]
    return {"servers": {"none": {"title": "no collector"}, "silent": {"title": "never answers"}}, "records": records}


def test_a_silent_listener_takes_connections_and_answers_nothing() -> None:
    with silent_listener() as url:
        address = urlsplit(url)
        for _ in range(3):
            with socket.create_connection((address.hostname or "", address.port or 0), timeout=0.2) as client:
                client.sendall(b"POST / HTTP/1.1\r\n\r\n")
                with pytest.raises(TimeoutError):
                    client.recv(1)


@pytest.mark.parametrize(
    ("requests_per_s", "p90_ms", "kept"),
    [(500, 20, True), (476, 20.9, True), (474, 20, False), (500, 21.1, False), (600, 10, True)],
)
def test_throughput_and_late_replies_may_change_by_a_twentieth(
    requests_per_s: float, p90_ms: float, kept: bool
) -> None:
    assert is_kept(results(requests_per_s, p90_ms)) is kept


def test_nothing_measured_is_no_promise_kept() -> None:
    assert not is_kept({**results(1, 1), "records": []})


def test_the_report_has_each_figure_and_its_ratio() -> None:
    text = markdown(results(475, 21))
    assert "| never answers | 16 | 0.95 | 1.05 | 1.05 |" in text
