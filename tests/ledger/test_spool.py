"""What the spool has taken survives, in order, until it is settled."""

from __future__ import annotations

import json
import logging
import threading
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from serve_app.ledger import (
    InvalidValue,
    LedgerUnavailable,
    Settled,
    Settlement,
    SettlementRejected,
    SpoolBusy,
    SpoolFull,
    StoredReply,
)
from serve_app.ledger.spool import Spool, decode, encode

from .books import COST, Books, settlement, start


def one(request_id: str, **changed: Any) -> Settlement:
    return settlement(request_id, "acct", "key", **changed)


def ids(settlements: Sequence[Settlement]) -> list[str]:
    return [each.request_id for each in settlements]


class Sink:
    """A settle callable that can fail after some batches."""

    def __init__(self, batches: int = 1000) -> None:
        self.settled: list[str] = []
        self._batches = batches

    def __call__(self, batch: Sequence[Settlement]) -> list[Settled | SettlementRejected]:
        if self._batches == 0:
            raise LedgerUnavailable("still away")
        self._batches -= 1
        self.settled += ids(batch)
        return [Settled(each.request_id, 0, 0, 1) for each in batch]


def test_a_line_holds_a_settlement_and_shows_damage() -> None:
    line = encode(one("r1 é \u2028"))
    assert decode(line) == one("r1 é \u2028")
    assert line.count(b"\n") == 1
    for end in range(len(line) - 1):
        assert decode(line[:end]) is None
    assert decode(line.replace(b"smollm2", b"smollm3")) is None


def test_a_line_holds_the_reply_byte_by_byte() -> None:
    reply = StoredReply("retry-1", "sha256:0123", bytes(range(256)))
    with_reply = one("r1", reply=reply)
    line = encode(with_reply)
    assert decode(line) == with_reply
    assert line.count(b"\n") == 1


def test_a_line_without_a_reply_is_what_the_releases_before_wrote_and_read() -> None:
    body = json.dumps({name: value for name, value in asdict(one("r1")).items() if name != "reply"}).encode()
    assert decode(b"%08x %s\n" % (zlib.crc32(body), body)) == one("r1")
    assert b"reply" not in encode(one("r1"))


def test_a_reply_that_waited_in_the_spool_is_found_once_it_is_settled(books: Books, tmp_path: Path) -> None:
    reply = StoredReply("retry-1", "sha256:0123", "{“é”}".encode())
    spool = Spool(tmp_path, "gateway-1")
    spool.append(books.settlement("r1", reply=reply))
    spool.append(books.settlement("r2"))
    spool.close()
    spool = Spool(tmp_path, "gateway-1")  # after a crash
    assert spool.replay(books.ledger.settle) == 2
    spool.close()
    assert books.ledger.find_reply(books.account_id, "retry-1") == reply
    assert books.account.balance == 10**12 - 2 * COST


def test_what_was_spooled_is_settled_in_order_and_gone(books: Books, tmp_path: Path) -> None:
    spool = Spool(tmp_path, "gateway-1")
    for number in range(150):
        spool.append(books.settlement(f"r{number:03}"))
    assert ids(spool.pending()) == [f"r{number:03}" for number in range(150)]
    assert spool.replay(books.ledger.settle) == 150
    assert spool.pending() == []
    assert spool.size == 0
    assert spool.replay(books.ledger.settle) == 0
    assert books.account.balance == 10**12 - 150 * COST


def test_a_spool_outlives_its_process(tmp_path: Path) -> None:
    first = Spool(tmp_path, "gateway-1")
    first.append(one("r1"))
    first.close()
    second = Spool(tmp_path, "gateway-1")
    second.append(one("r2"))
    assert ids(second.pending()) == ["r1", "r2"]


def test_a_replay_that_is_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "gateway-1")
    for number in range(150):
        spool.append(one(f"r{number}"))
    sink = Sink(batches=1)
    with pytest.raises(LedgerUnavailable):
        spool.replay(sink)
    assert ids(spool.pending()) == [f"r{number}" for number in range(64, 150)]
    sink = Sink()
    assert spool.replay(sink) == 86
    assert sink.settled[0] == "r64"


def test_a_crash_in_the_middle_of_a_replay_settles_nothing_twice(books: Books, tmp_path: Path) -> None:
    spool = Spool(tmp_path, "gateway-1")
    for number in range(100):
        spool.append(books.settlement(f"r{number}"))
    before = (tmp_path / "gateway-1.spool").read_bytes()

    def crash(batch: Sequence[Settlement]) -> list[Settled | SettlementRejected]:
        books.ledger.settle(batch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spool.replay(crash)
    spool.close()
    assert (tmp_path / "gateway-1.spool").read_bytes() == before
    assert Spool(tmp_path, "gateway-1").replay(books.ledger.settle) == 100
    assert books.account.balance == 10**12 - 100 * COST


@pytest.mark.parametrize("cut", [1, 2, 50, 250])
def test_a_line_torn_by_a_crash_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    first = Spool(tmp_path, "gateway-1")
    for name in ("r1", "r2"):
        first.append(one(name))
    first.close()
    path = tmp_path / "gateway-1.spool"
    path.write_bytes(path.read_bytes()[:-cut])

    spool = Spool(tmp_path, "gateway-1")
    spool.append(one("r3"))  # must not be glued to the torn line
    with caplog.at_level(logging.WARNING):
        pending = ids(spool.pending())
    if cut == 1:  # only the line's end is missing: the settlement is whole
        assert pending == ["r1", "r2", "r3"]
    else:
        assert pending == ["r1", "r3"]
        assert "torn or damaged" in caplog.text
    sink = Sink()
    assert spool.replay(sink) == len(pending)
    assert sink.settled == pending
    assert spool.size == 0
    assert (tmp_path / "gateway-1.spool.refused").exists() == (cut != 1)  # kept for a human


def test_what_the_ledger_refuses_is_set_aside_and_blocks_nothing(books: Books, tmp_path: Path) -> None:
    spool = Spool(tmp_path, "gateway-1")
    spool.append(books.settlement("good1"))
    spool.append(books.settlement("bad", account_id="acct_none"))
    spool.append(books.settlement("good2"))
    assert spool.replay(books.ledger.settle) == 3
    assert spool.pending() == []
    kept = (tmp_path / "gateway-1.spool.refused").read_bytes()
    assert decode(kept) == books.settlement("bad", account_id="acct_none")
    assert books.account.balance == 10**12 - 2 * COST


def test_a_full_spool_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    line = len(encode(one("r0")))
    spool = Spool(tmp_path, "gateway-1", max_bytes=3 * line)
    for number in range(3):
        spool.append(one(f"r{number}"))
    with pytest.raises(SpoolFull):
        spool.append(one("r3"))
    assert ids(spool.pending()) == ["r0", "r1", "r2"]
    spool.replay(Sink())
    spool.append(one("r3"))
    assert ids(spool.pending()) == ["r3"]


def test_a_disk_that_fails_leaves_the_spool_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, "gateway-1")
    spool.append(one("r1"))
    with monkeypatch.context() as broken:

        def fsync(_: int) -> None:
            raise OSError(28, "No space left on device")

        broken.setattr("os.fsync", fsync)
        with pytest.raises(SpoolFull, match="No space left"):
            spool.append(one("r2"))
    with monkeypatch.context() as broken:
        broken.setattr("os.fsync", fsync)
        broken.setattr("os.ftruncate", lambda *_: fsync(0))
        with pytest.raises(SpoolFull):
            spool.append(one("r3"))
    spool.append(one("r4"))
    assert [name for name in ids(spool.pending()) if name != "r3"] == ["r1", "r4"]


def test_settlements_that_arrive_during_a_replay_are_not_lost(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "gateway-1")
    for number in range(100):
        spool.append(one(f"r{number:03}"))
    sink = Sink()
    writer = threading.Thread(target=lambda: [spool.append(one(f"r{number:03}")) for number in range(100, 200)])
    writer.start()
    while writer.is_alive():
        spool.replay(sink)
    spool.replay(sink)
    assert sink.settled == [f"r{number:03}" for number in range(200)]


def test_two_processes_cannot_have_the_same_spool(tmp_path: Path) -> None:
    process = start("spool", str(tmp_path), "gateway-1", "1")
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(SpoolBusy, match="gateway-1"):
        Spool(tmp_path, "gateway-1")
    process.kill()
    process.wait()
    assert ids(Spool(tmp_path, "gateway-1").pending()) == ["gateway-1-0"]


def test_the_spools_of_dead_processes_are_adopted_and_of_living_ones_are_not(tmp_path: Path) -> None:
    processes = {name: start("spool", str(tmp_path), name, "3") for name in ("dead", "alive")}
    for process in processes.values():
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
    processes["dead"].kill()
    processes["dead"].wait()

    spool = Spool(tmp_path, "mine")
    spool.append(one("r1"))
    assert ids(spool.adopt_orphans()) == ["dead-0", "dead-1", "dead-2"]
    assert spool.adopt_orphans() == []
    assert ids(spool.pending()) == ["dead-0", "dead-1", "dead-2", "r1"]
    with pytest.raises(SpoolBusy):
        Spool(tmp_path, "dead")
    sink = Sink()
    assert spool.replay(sink) == 4
    assert sink.settled == ["dead-0", "dead-1", "dead-2", "r1"]
    assert not (tmp_path / "dead.spool").exists()

    processes["alive"].kill()
    processes["alive"].wait()
    assert ids(spool.adopt_orphans()) == ["alive-0", "alive-1", "alive-2"]


def test_a_process_killed_while_it_spools_loses_nothing_it_has_acknowledged(tmp_path: Path) -> None:
    process = start("spool", str(tmp_path), "gateway", "100000")
    assert process.stdout is not None
    acknowledged = [process.stdout.readline().strip() for _ in range(50)]
    process.kill()
    acknowledged += process.stdout.read().split()
    process.wait()
    pending = ids(Spool(tmp_path, "gateway").pending())
    assert pending[: len(acknowledged)] == acknowledged
    assert len(pending) <= len(acknowledged) + 1


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a\n", "x" * 101])
def test_a_spool_name_is_a_plain_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidValue):
        Spool(tmp_path, name)
