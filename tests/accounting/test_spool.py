"""Spooled settlements survive, in order, until they are settled."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from serve_app.contracts.books import Settled, Settlement, SettlementRejected, StoredReply, StoredResponse
from serve_app.contracts.commands import FindResponse
from serve_app.contracts.errors import InvalidValue, LedgerUnavailable, SpoolBusy, SpoolFull
from serve_app.storage.settlement_lines import from_line, reply_size, to_line
from serve_app.storage.spool import Settle, Spool
from serve_app.storage.spool_file import SpoolFile

from .books import COST, Books, settlement


def one(request_id: str, **changed: Any) -> Settlement:
    return settlement(request_id, "acct", "key", **changed)


def ids(settlements: Sequence[Settlement]) -> list[str]:
    return [each.request_id for each in settlements]


def pending(spool: Spool) -> list[Settlement]:
    """Returns the settlements still pending, adopted files first, each file in its order."""
    return [each for file in spool._files() for _, _, each in file.lines() if each is not None]


def replayed(spool: Spool, settle: Settle) -> int:
    """Replays the spool; how many settlements were settled or refused."""
    batches: list[int] = []

    def counted(batch: Sequence[Settlement]) -> Sequence[Settled | SettlementRejected]:
        results = settle(batch)
        batches.append(len(results))
        return results

    spool.replay(counted)
    return sum(batches)


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
    line = to_line(one("r1 é \u2028"))
    assert from_line(line) == one("r1 é \u2028")
    assert line.count(b"\n") == 1
    for end in range(len(line) - 1):
        assert from_line(line[:end]) is None
    assert from_line(line.replace(b"smollm2", b"smollm3")) is None


def test_a_line_holds_the_reply_byte_by_byte() -> None:
    reply = StoredReply("retry-1", "sha256:0123", bytes(range(256)))
    with_reply = one("r1", reply=reply)
    line = to_line(with_reply)
    assert from_line(line) == with_reply
    assert line.count(b"\n") == 1


def test_a_line_holds_a_stored_response_and_counts_its_bytes(books: Books, tmp_path: Path) -> None:
    response = StoredResponse("resp_1", bytes(range(256)), 2.0**33)
    sent = books.settlement("r1", response=response)
    assert from_line(to_line(sent)) == sent
    assert reply_size(sent) > 256
    spool = Spool(tmp_path / "spool", "gateway")
    spool.append(sent)
    assert replayed(spool, books.ledger.settle) == 1
    assert books.ledger.run(FindResponse(books.account_id, "resp_1")) == response
    spool.close()


def test_a_line_without_a_reply_has_the_format_of_earlier_releases() -> None:
    body = json.dumps({name: value for name, value in asdict(one("r1")).items() if name != "reply"}).encode()
    assert from_line(b"%08x %s\n" % (zlib.crc32(body), body)) == one("r1")
    assert b"reply" not in to_line(one("r1"))


def test_a_reply_that_waited_in_the_spool_is_found_once_it_is_settled(books: Books, tmp_path: Path) -> None:
    reply = StoredReply("retry-1", "sha256:0123", "{“é”}".encode())
    spool = Spool(tmp_path, "gateway-1")
    spool.append(books.settlement("r1", reply=reply))
    spool.append(books.settlement("r2"))
    spool.close()
    spool = Spool(tmp_path, "gateway-1")  # after a crash
    assert replayed(spool, books.ledger.settle) == 2
    spool.close()
    assert books.ledger.find_reply(books.account_id, "retry-1") == reply
    assert books.account.balance == 10**12 - 2 * COST


def test_spooled_settlements_are_settled_in_order_and_removed(books: Books, tmp_path: Path) -> None:
    spool = Spool(tmp_path, "gateway-1")
    for number in range(150):
        spool.append(books.settlement(f"r{number:03}"))
    assert ids(pending(spool)) == [f"r{number:03}" for number in range(150)]
    assert replayed(spool, books.ledger.settle) == 150
    assert pending(spool) == []
    assert spool.size == 0
    assert replayed(spool, books.ledger.settle) == 0
    assert books.account.balance == 10**12 - 150 * COST


def test_a_spool_outlives_its_process(tmp_path: Path) -> None:
    first = Spool(tmp_path, "gateway-1")
    first.append(one("r1"))
    first.close()
    second = Spool(tmp_path, "gateway-1")
    second.append(one("r2"))
    assert ids(pending(second)) == ["r1", "r2"]


def test_an_interrupted_replay_continues_where_it_stopped(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "gateway-1")
    for number in range(150):
        spool.append(one(f"r{number}"))
    sink = Sink(batches=1)
    with pytest.raises(LedgerUnavailable):
        spool.replay(sink)
    assert ids(pending(spool)) == [f"r{number}" for number in range(64, 150)]
    sink = Sink()
    assert replayed(spool, sink) == 86
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
    assert replayed(Spool(tmp_path, "gateway-1"), books.ledger.settle) == 100
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
    spool.append(one("r3"))  # must not be joined to the torn line
    with caplog.at_level(logging.WARNING):
        waiting = ids(pending(spool))
    if cut == 1:  # only the end of the line is missing: the settlement is complete
        assert waiting == ["r1", "r2", "r3"]
    else:
        assert waiting == ["r1", "r3"]
        assert "torn or damaged" in caplog.text
    sink = Sink()
    assert replayed(spool, sink) == len(waiting)
    assert sink.settled == waiting
    assert spool.size == 0
    assert (tmp_path / "gateway-1.spool.refused").exists() == (cut != 1)  # kept for an operator


def test_a_settlement_that_the_ledger_refuses_is_set_aside_and_blocks_no_other(books: Books, tmp_path: Path) -> None:
    spool = Spool(tmp_path, "gateway-1")
    spool.append(books.settlement("good1"))
    spool.append(books.settlement("bad", account_id="acct_none"))
    spool.append(books.settlement("good2"))
    assert replayed(spool, books.ledger.settle) == 3
    assert pending(spool) == []
    kept = (tmp_path / "gateway-1.spool.refused").read_bytes()
    assert from_line(kept) == books.settlement("bad", account_id="acct_none")
    assert books.account.balance == 10**12 - 2 * COST


def test_a_full_spool_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    line = len(to_line(one("r0")))
    spool = Spool(tmp_path, "gateway-1", max_bytes=3 * line)
    for number in range(3):
        spool.append(one(f"r{number}"))
    with pytest.raises(SpoolFull):
        spool.append(one("r3"))
    assert ids(pending(spool)) == ["r0", "r1", "r2"]
    spool.replay(Sink())
    spool.append(one("r3"))
    assert ids(pending(spool)) == ["r3"]


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
    assert [name for name in ids(pending(spool)) if name != "r3"] == ["r1", "r4"]


def test_what_is_appended_after_a_replay_that_the_disk_failed_is_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, "gateway-1")
    spool.append(one("r1"))

    def fsync(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("os.fsync", fsync)
        with pytest.raises(OSError, match="Input/output error"):
            spool.replay(Sink())
    spool.append(one("r2"))
    assert spool.waiting == 1
    assert ids(pending(spool)) == ["r2"]
    spool.replay(sink := Sink())
    assert sink.settled == ["r2"]


def test_a_spool_that_could_not_be_read_can_be_adopted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Spool(tmp_path, "gateway-1")
    dead.append(one("r1"))
    dead.close()
    spool = Spool(tmp_path, "gateway-2")

    def pread(*_: int) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("os.pread", pread)
        assert spool.adopt_orphans() == []
    assert ids(spool.adopt_orphans()) == ["r1"]


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


def test_the_spools_of_those_that_have_ended_are_adopted_and_of_others_are_not(tmp_path: Path) -> None:
    dead, alive = Spool(tmp_path, "dead"), Spool(tmp_path, "alive")
    for number in range(3):
        dead.append(one(f"dead-{number}"))
        alive.append(one(f"alive-{number}"))
    with pytest.raises(SpoolBusy, match="alive"):
        Spool(tmp_path, "alive")
    dead.close()

    spool = Spool(tmp_path, "mine")
    spool.append(one("r1"))
    assert ids(spool.adopt_orphans()) == ["dead-0", "dead-1", "dead-2"]
    assert spool.adopt_orphans() == []
    assert ids(pending(spool)) == ["dead-0", "dead-1", "dead-2", "r1"]
    with pytest.raises(SpoolBusy):
        Spool(tmp_path, "dead")
    sink = Sink()
    assert replayed(spool, sink) == 4
    assert sink.settled == ["dead-0", "dead-1", "dead-2", "r1"]
    assert not (tmp_path / "dead.spool").exists()

    alive.close()
    assert ids(spool.adopt_orphans()) == ["alive-0", "alive-1", "alive-2"]


#: Prints the id of each settlement that is on the disk.
ENDLESS = """
import itertools, sys
from serve_app.contracts.books import Outcome, Settlement
from serve_app.contracts.money import Price
from serve_app.storage.spool import Spool

spool = Spool(sys.argv[1], "gateway")
for number in itertools.count():
    name = f"r{number}"
    spool.append(Settlement(name, "acct", "key", "m", "b", Price(3, 1, 5), 10, 2, 4, Outcome.COMPLETED, 1.0, 2.0))
    print(name, flush=True)
"""


@pytest.mark.slow
def test_a_process_killed_while_it_spools_loses_nothing_it_has_acknowledged(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = [process.stdout.readline().strip() for _ in range(50)]
    with pytest.raises(SpoolBusy, match="gateway"):
        Spool(tmp_path, "gateway")
    spool = Spool(tmp_path, "mine")
    assert spool.adopt_orphans() == []
    process.kill()
    acknowledged += process.stdout.read().split()
    process.wait()
    waiting = ids(spool.adopt_orphans())
    assert waiting[: len(acknowledged)] == acknowledged
    assert len(waiting) <= len(acknowledged) + 1


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a\n", "x" * 101])
def test_a_spool_name_is_a_plain_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidValue):
        Spool(tmp_path, name)


def test_the_spool_shrinks_as_it_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a crash in the middle of a replay repeats only one file, however much was spooled."""
    monkeypatch.setattr("serve_app.storage.spool.FILE_BYTES", 64 * len(to_line(one("r000"))))
    spool = Spool(tmp_path, "gateway-1")
    names = [f"r{number:03}" for number in range(300)]
    for name in names:
        spool.append(one(name))
    full = spool.size
    assert spool.waiting == 300
    with pytest.raises(LedgerUnavailable):
        spool.replay(Sink(batches=3))
    assert spool.waiting == 300 - 3 * 64
    assert spool.size < 0.5 * full
    # New ones go behind the old ones.
    spool.append(one("r300"))
    spool.close()
    spool = Spool(tmp_path, "gateway-2")  # another one, after a crash
    assert ids(spool.adopt_orphans()) == [*names[3 * 64 :], "r300"]
    sink = Sink()
    spool.replay(sink)
    assert sink.settled == [*names[3 * 64 :], "r300"]
    assert (spool.size, spool.waiting, spool.oldest_at) == (0, 0, None)
    assert [path.name for path in tmp_path.iterdir()] == ["gateway-2.spool"]


def test_the_age_of_the_spool_is_that_of_its_oldest_settlement(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "gateway-1")
    for number in range(100):
        spool.append(one(f"r{number}", finished_at=1000.0 + number))
    assert spool.oldest_at == 1000.0
    with pytest.raises(LedgerUnavailable):
        spool.replay(Sink(batches=1))
    assert spool.oldest_at == 1064.0


def test_settlements_appended_together_share_one_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = len(to_line(one("r0")))
    spool = Spool(tmp_path, "gateway-1", max_bytes=5 * line)
    flushes: list[int] = []
    monkeypatch.setattr("os.fsync", flushes.append)
    assert spool.append_batch([one(f"r{number}") for number in range(8)]) == 5, "as many as there is room for"
    assert len(flushes) == 1
    assert ids(pending(spool)) == ["r0", "r1", "r2", "r3", "r4"]


def test_stored_replies_do_not_take_the_room_of_usage(tmp_path: Path) -> None:
    """Forty large replies during an outage would close admission for all accounts."""
    spool = Spool(tmp_path, "gateway-1", max_bytes=2**20)
    for number in range(40):
        spool.append(one(f"r{number}", reply=StoredReply(f"key{number}", "fingerprint", b"x" * 90_000)))
    assert spool.size < 0.3 * spool.max_bytes
    waiting = pending(spool)
    assert ids(waiting) == [f"r{number}" for number in range(40)], "all usage is kept"
    assert [one.request_id for one in waiting if one.reply] == ["r0", "r1"]
    spool.replay(Sink())
    spool.append(one("r40", reply=StoredReply("key40", "fingerprint", b"x" * 90_000)))
    assert pending(spool)[0].reply, "there is room again"


def test_a_line_of_a_later_release_is_read(tmp_path: Path) -> None:
    """A field that this release does not know is no reason to leave a usage unbilled."""
    fields = json.loads(to_line(one("r1", reply=StoredReply("key", "fingerprint", b"body")))[9:])
    newer = fields | {"colour": 7, "reply": fields["reply"] | {"kind": "new"}}
    body = json.dumps(newer | {"price": fields["price"] | {"image": 9}}).encode()
    line = b"%08x %s\n" % (zlib.crc32(body), body)
    assert from_line(line) == one("r1", reply=StoredReply("key", "fingerprint", b"body"))


def test_only_what_is_due_is_replayed(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "replica-1", suffix=".orphans", flushed=False)
    for number in range(10):
        spool.append(one(f"r{number}", finished_at=1000.0 + number))
    sink = Sink()
    spool.replay(sink, lambda each: each.finished_at < 1004)
    assert sink.settled == ["r0", "r1", "r2", "r3"]
    assert spool.waiting == 6
    spool.replay(sink, lambda each: True)
    assert ids(pending(spool)) == []


def test_what_is_not_flushed_survives_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushes: list[int] = []
    monkeypatch.setattr("os.fsync", flushes.append)
    spool = Spool(tmp_path, "replica-1", suffix=".orphans", flushed=False)
    for name in ("r1", "r2"):
        spool.append(one(name))
    assert not flushes
    spool.flush()
    assert len(flushes) == 2, "the file and, since it is new, its name in the folder"
    spool.flush()
    assert len(flushes) == 2, "nothing has changed"
    spool.append(one("r3"))
    spool.flush()
    assert len(flushes) == 3
    spool.close()
    # Neither a gateway's spool nor a release that knows no such files takes them.
    assert Spool(tmp_path, "gateway-1").adopt_orphans() == []
    assert ids(Spool(tmp_path, "replica-2", suffix=".orphans").adopt_orphans()) == ["r1", "r2", "r3"]


def test_what_a_disk_did_not_flush_is_flushed_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.storage.spool.FILE_BYTES", 1)  # a file for each settlement
    spool = Spool(tmp_path, "replica-1", suffix=".orphans", flushed=False)
    for name in ("r1", "r2", "r3"):
        spool.append(one(name))
    failing, tried, before = [True], [0], len(os.listdir("/proc/self/fd"))

    def fsync(_: int) -> None:
        tried[0] += 1
        if failing[0]:
            raise OSError("broken")

    monkeypatch.setattr("os.fsync", fsync)
    with pytest.raises(OSError, match="broken"):
        spool.flush()
    assert len(os.listdir("/proc/self/fd")) == before
    failing[0], tried[0] = False, 0
    spool.flush()
    assert tried[0] == 4, "three files and the folder that names them"
    spool.close()


def test_a_spool_that_cannot_be_read_keeps_no_other_one_from_being_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("dead-1", "dead-2", "dead-3"):
        dead = Spool(tmp_path, name)
        dead.append(one(name))
        dead.close()
    opened = SpoolFile.open_locked

    def refuses(path: Path, **options: Any) -> Any:
        if path.name.startswith("dead-2"):
            raise PermissionError(13, "Permission denied")
        return opened(path, **options)

    spool = Spool(tmp_path, "alive")
    monkeypatch.setattr(SpoolFile, "open_locked", refuses)
    with caplog.at_level(logging.ERROR):
        assert ids(spool.adopt_orphans()) == ["dead-1", "dead-3"]
    assert "dead-2.spool" in caplog.text
    spool.close()


def test_settlements_are_appended_while_a_large_spool_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = Spool(tmp_path, "dead")
    dead.append(one("r1"))
    dead.close()
    reads, go = threading.Event(), threading.Event()
    lines = SpoolFile.lines

    def slow(file: SpoolFile) -> Any:
        reads.set()
        assert go.wait(600)
        return lines(file)

    monkeypatch.setattr(SpoolFile, "lines", slow)
    spool = Spool(tmp_path, "alive")
    adopting = threading.Thread(target=spool.adopt_orphans)
    adopting.start()
    assert reads.wait(60)
    spool.append(one("meanwhile"))
    assert spool.waiting == 1
    go.set()
    adopting.join(60)
    assert not adopting.is_alive()
    assert spool.waiting == 2
    spool.close()


def test_a_batch_with_large_replies_fits_into_a_message(tmp_path: Path) -> None:
    """Settlements cross machines in messages of at most 8 MiB: a larger batch would never be settled."""
    spool, batches = Spool(tmp_path, "gateway-1"), list[list[str]]()
    bodies = [b"x" * (1024 * 1024 if number % 3 == 0 else 300_000) for number in range(12)]
    replies = [StoredReply(f"retry-{number}", "sha256:0123", body) for number, body in enumerate(bodies)]
    assert spool.append_batch([one(f"r{number:02}", reply=reply) for number, reply in enumerate(replies)]) == 12

    def settle(batch: Sequence[Settlement]) -> list[Settled | SettlementRejected]:
        assert sum(len(to_line(each)) for each in batch) < 8 * 2**20 // 2
        batches.append(ids(batch))
        return [Settled(each.request_id, 0, 0, 1) for each in batch]

    spool.replay(settle, most=256)
    assert [each for batch in batches for each in batch] == [f"r{number:02}" for number in range(12)]
    assert max(map(len, batches)) > 1
    assert spool.size == 0
