"""A service that is measured without a speed-up is without it, and the table follows from the records."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gateway import load, speedups
from bench.gateway.__main__ import main
from bench.gateway.without import sitecustomize
from bench.gateway.without.sitecustomize import REMOVABLE, SPEEDUPS
from bench.harness import command, document
from bench.harness.servers import ServerError
from tests.bench.test_gateway_report import audit, record

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", REMOVABLE)
def test_a_patch_without_its_target_fails(name: str) -> None:
    bare = SimpleNamespace(Line=object, RayMetrics=object, Generation=object, Observer=object)
    with pytest.raises(AttributeError):
        REMOVABLE[name].remove(bare)


def test_a_module_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = sitecustomize.Speedup("", "serve_app.contracts.gone", lambda module: None)
    monkeypatch.setitem(REMOVABLE, "gone", gone)
    with pytest.raises(ServerError, match="gone can't be taken out"):
        speedups.check("gone")


def test_a_patched_module_is_recognised() -> None:
    speedups.check("sockets")


def pairs(**rates: tuple[float, float]) -> Any:
    """Two rounds of one speed-up at each number of clients: with and without."""
    records = [
        record(f"{kind}-sockets", int(clients.removeprefix("at")), number, rate)
        for clients, both in rates.items()
        for kind, rate in zip(("with", "without"), both, strict=True)
        for number in range(2)
    ]
    machine = {
        "cpu": "a processor", "family": "family 1", "cores": 2, "memory_bytes": 2**34, "system": "Linux",
        "python": "3.11", "libraries": {"ray": "2"},
    }  # fmt: skip
    return {
        "machine": machine, "date": "2026-01-01", "seconds": 60.0, "rounds": 2, "window_s": 10, "warm_up_s": 5,
        "speedups": ["sockets"], "missing": {}, "records": records, "audits": [audit(server="with-sockets")],
    }  # fmt: skip


def test_the_table_has_the_rates_with_and_without_and_their_ratio() -> None:
    text = speedups.markdown(pairs(at16=(600.0, 400.0), at64=(700.0, 560.0)))
    assert "requests/s at 16 clients | without | ratio | requests/s at 64 clients | without | ratio |" in text
    assert "| 600 | 400 | 1.50 | 700 | 560 | 1.25 |" in text
    assert "compared with the replies 1 times; wrong: none" in text


def test_what_gives_a_tenth_at_neither_number_of_clients_is_named() -> None:
    assert speedups.too_small(pairs(at16=(105.0, 100.0), at64=(109.0, 100.0))) == ["sockets"]
    assert speedups.too_small(pairs(at16=(105.0, 100.0), at64=(111.0, 100.0))) == []
    assert "sockets gains less than 10%" in speedups.markdown(pairs(at16=(100.0, 100.0), at64=(100.0, 100.0)))


def test_a_load_with_a_problem_is_left_out_and_named() -> None:
    results = pairs(at16=(600.0, 400.0))
    results["records"][0]["problems"] = ["3 replies that were not 2xx"]
    assert "Left out: with-sockets, 16 clients, round 1" in speedups.markdown(results)


def test_the_document_has_a_place_with_a_row_for_each_speedup(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    document.check(text, speedups.BEGIN, speedups.END)
    _, _, rest = text.partition(speedups.BEGIN)
    table, _, _ = rest.partition(speedups.END)
    assert all(f"| `{name}` |" in table for name in SPEEDUPS)
    path = tmp_path / "benchmarks.md"
    path.write_text(text)
    speedups.write_docs(path, pairs(at16=(600.0, 400.0)))
    assert "| 600 | 400 | 1.50 |" in path.read_text()


@pytest.mark.parametrize(("arguments", "names"), [([], list(SPEEDUPS)), (["sockets"], ["sockets"])])
def test_the_command_measures_the_named_speedups_or_all(
    arguments: list[str], names: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[Any] = []

    def measure(folder: Path, chosen: list[str], scope: Any) -> Any:
        measured.append((chosen, scope.clients, scope.rounds))
        return {"speedups": chosen, "missing": {}, "records": [record("with-sockets", 16, 0, 1.0)], "audits": []}

    monkeypatch.setattr(speedups, "measure", measure)
    monkeypatch.setattr(load, "check_wrk", lambda: None)
    monkeypatch.setattr(command, "become_subreaper", lambda: None)  # it would change this whole process
    assert main(["--without", *arguments]) == 0
    assert measured == [(names, (16, 64), 2)]
    assert "| `sockets` |" in capsys.readouterr().out
