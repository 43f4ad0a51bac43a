"""A whole run against a server of the test's own: windows, an attack in a process, the control, smuggling."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.attack import report, session, smuggling
from bench.attack.hostile import Target
from bench.attack.service import Accounts, Attacked
from bench.attack.session import Scope, Session
from serve_app import secret_files

STREAM = (
    b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
    b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers chat requests with a stream, those without an ordinary key with 401, all others with 200."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            fields = dict(re.findall(r"\r\n([\w-]+): *([^\r\n]*)", head))
            await reader.readexactly(int(fields.get("content-length", 0)))
            own = f"x-request-id: {fields['x-request-id']}\r\n" if "x-request-id" in fields else ""
            if "Bearer right" in head:
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + STREAM)
                break
            status = "200 OK" if head.startswith("GET") else "401 Unauthorized"
            writer.write(f"HTTP/1.1 {status}\r\n{own}content-length: 0\r\n\r\n".encode())
            if "connection: close" in head:
                break
        await writer.drain()
    writer.close()


@pytest.mark.slow
async def test_a_run_measures_each_window_and_ends_what_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(session, "WARM_UP_S", 0.2)
    monkeypatch.setattr(session, "LOOK_BACK_S", 0.5)
    secret_files.secret_file(tmp_path, "operator-key", "operator")
    honest = smuggling.PREFIX + "0"
    monkeypatch.setattr(session.smuggling_cases, "_CASES", session.smuggling_cases._CASES[:2])
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    fake: Any = SimpleNamespace(
        port=port, home=tmp_path, tree=SimpleNamespace(cpu_s=lambda: 0.0), account_names=lambda: [honest]
    )
    accounts = Accounts(("right-1", "right-2"), ("right-3",) * 100, Target(port, "right", "broke"))
    scope = Scope(("broke", session.SMUGGLING), per_s=40, calm_s=1, attack_s=1, recovery_s=0.5, control_s=1)
    try:
        found = await asyncio.wait_for(Session(cast(Attacked, fake), accounts, scope).run(), 120)
    finally:
        server.close()
    record = found["records"]["broke"]
    assert set(record["windows"]) == {"calm", "attack", "recovery", "control"}
    for window in record["windows"].values():
        assert window["samples"] > 0
        assert window["failed"] == 0
    assert record["windows"]["calm"]["new_keys"] >= 1
    assert record["health"]["attack"]["sent"] >= 2
    assert record["attacker"]["statuses"].keys() == {"200"}
    assert record["control_share"] is not None
    assert record["factor"] is not None
    assert [row["problems"] for row in found["smuggling"]] == [[], []]
    assert "empty balance" in report.latencies(found) + report.attackers(found)
