"""Programs renew their own parts of one document and leave each other's alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.engine import report as engine_report
from bench.gateway import report as gateway_report
from bench.harness import document
from tests.bench.test_gateway_report import results as gateway_results
from tests.bench.test_report import record, results


def engine_results() -> Any:
    return results(record("ours", 1, 0, 50.0), record("transformers", 1, 0, 10.0))


def test_only_what_stands_between_the_marks_is_renewed() -> None:
    text = document.renewed("before\n<a>\nold\n</a>\nafter\n", "<a>", "</a>", "new\n")
    assert text == "before\n<a>\n\nnew\n\n</a>\nafter\n"
    assert document.renewed(text, "<a>", "</a>", "new\n") == text


@pytest.mark.parametrize("text", ["", "<a>", "</a> <a>"])
def test_a_document_without_both_marks_in_order_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no place for results"):
        document.renewed(text, "<a>", "</a>", "new")


@pytest.mark.slow
@pytest.mark.parametrize("engine_first", [True, False])
def test_both_benchmarks_keep_each_others_sections(tmp_path: Path, engine_first: bool) -> None:
    places = [
        f"## Engine\n\n{engine_report.BEGIN}\nold\n{engine_report.END}\n",
        f"## Gateway\n\n{gateway_report.BEGIN}\nold\n{gateway_report.END}\n",
    ]
    path = tmp_path / "benchmarks.md"
    path.write_text(
        "# Benchmarks\n\n" + "\nwritten between\n".join(places if engine_first else places[::-1]) + "\nend\n"
    )
    engine_report.write_docs(path, engine_results())
    gateway_report.write_docs(path, gateway_results())
    once = path.read_text()
    engine_report.write_docs(path, engine_results())
    gateway_report.write_docs(path, gateway_results())
    assert path.read_text() == once
    assert "| serve-app | 50 |" in once
    assert "against the LiteLLM proxy" in once
    assert "written between" in once
    assert "old\n" not in once
    assert once.endswith("end\n")
