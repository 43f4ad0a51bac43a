"""Boards drawn from a Prometheus' answers: every panel asks its own queries, and shows them with units and colours."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from dashboards import boards, pictures
from dashboards.drawing import COLOURS, EMPTY, colour
from dashboards.expressions import panels
from dashboards.query import Prometheus, Series, filled
from dashboards.units import shown

BEGAN = 1_790_000_000.0
TIME = pictures.Time(BEGAN, BEGAN + 600)
STEPS = [{"color": "green", "value": None}, {"color": "yellow", "value": 2}, {"color": "red", "value": 5}]


class Answering:
    """In the place of a Prometheus: the same series to each question, which it keeps."""

    def __init__(self, *labels: dict[str, str]) -> None:
        self.asked: list[str] = []
        self._labels = labels

    def __call__(self, request: httpx.Request) -> httpx.Response:
        query = dict(request.url.params)
        self.asked.append(query["query"])
        moments = [float(query.get("time") or query["start"]) + 5 * number for number in range(4)]
        points = [[moment, str(number)] for number, moment in enumerate(moments)]
        is_range = request.url.path.endswith("query_range")
        found = [
            {"metric": labels, **({"values": points} if is_range else {"value": points[3]})} for labels in self._labels
        ]
        return httpx.Response(200, json={"status": "success", "data": {"result": found}})

    @property
    def prometheus(self) -> Prometheus:
        return Prometheus("http://prometheus", transport=httpx.MockTransport(self))


MANY = [{"model": "svc-chat", "replica": str(one)} for one in range(9)]
UIDS = [board["uid"] for board in boards.documents()]


DRAWN = [
    (UIDS[0], []),
    *(pytest.param(uid, MANY, marks=pytest.mark.long) for uid in UIDS),
]


@pytest.mark.slow  # to draw a board takes a second
@pytest.mark.parametrize(("uid", "labels"), DRAWN)
def test_each_board_is_one_small_picture_of_the_answers_to_all_its_queries(
    uid: str, labels: list[dict[str, str]], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    answering = Answering(*labels)
    path = tmp_path / "boards" / "one.png"
    pictures.draw(answering.prometheus, uid, path, TIME, {"cluster": "north"})
    [board] = [one for one in boards.documents() if one["uid"] == uid]
    queries = [target["expr"] for panel in panels(board) for target in panel["targets"]]
    assert answering.asked == [filled(query, {"cluster": "north"}, shown="600s") for query in queries]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 400_000


def test_only_the_first_rows_are_drawn_where_that_is_asked_for() -> None:
    board = boards.documents()[0]
    shown = pictures.first_rows(board, 1)
    assert [panel["type"] for panel in shown] == ["row"] + ["stat"] * (len(shown) - 1)
    assert pictures.first_rows(board, 99) == board["panels"]


def test_a_query_has_the_values_that_are_chosen_and_all_others_of_the_rest() -> None:
    expression = 'rate(a{cluster=~"$cluster", backend=~"($backend)(:.+)?"}[$__rate_interval]) + rate(b[$__range])'
    wanted = 'rate(a{cluster=~"north", backend=~"(.*)(:.+)?"}[1m]) + rate(b[600s])'
    assert filled(expression, {"cluster": "north"}, shown="600s") == wanted


def test_no_query_of_a_board_keeps_a_variable() -> None:
    queries = [target["expr"] for board in boards.documents() for panel in panels(board) for target in panel["targets"]]
    assert not [query for query in queries if re.search(r"\$", filled(query))]


def test_an_expression_that_prometheus_refuses_is_an_error() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"status": "error", "error": "no such function"})

    with pytest.raises(ValueError, match="no such function"):
        Prometheus("http://prometheus", transport=httpx.MockTransport(refuse)).ask("nothing()")


@pytest.mark.parametrize(("value", "name"), [(0, "green"), (1.99, "green"), (2, "yellow"), (5, "red"), (7, "red")])
def test_a_number_has_the_colour_of_the_threshold_that_it_has_reached(value: float, name: str) -> None:
    assert colour(STEPS, value) == COLOURS[name] != EMPTY


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.9995, "percentunit", "99.95%"),
        (1, "percentunit", "100%"),
        (0, "percentunit", "0%"),
        (37.5, "percent", "37.5%"),
        (0.0123, "s", "12.3 ms"),
        (90, "s", "1.5 min"),
        (0, "s", "0 s"),
        (12, "ms", "12 ms"),
        (1536, "bytes", "1.5 KiB"),
        (12_300, "short", "12.3K"),
        (0.5, "reqps", "0.5/s"),
        (3, "ops", "3/s"),
        (math.nan, "s", "–"),
        (3, "lightyears", "3 lightyears"),
    ],
)
def test_numbers_are_shown_in_the_units_of_the_board(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_a_legend_has_the_labels_that_it_names() -> None:
    series = Series({"model": "svc-chat", "status": "200"}, ())
    assert series.legend("{{status}} {{ model }} {{backend}}") == "200 svc-chat"


def test_the_command_writes_a_file_for_each_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    answering: Any = Answering({"model": "svc-chat"})
    monkeypatch.setattr(pictures, "Prometheus", lambda url: answering.prometheus)
    command = ["--prometheus", "http://prometheus", "--out", str(tmp_path), "--rows", "1", "--format", "svg"]
    assert pictures.main([*command, "--boards", "users", "money"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"users.svg", "money.svg"}
