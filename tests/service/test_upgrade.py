"""The release before and this one, side by side on one ledger: clients go over while both run, and back."""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from tests.service.chaos import session
from tests.service.chaos.session import Session
from tests.service.chaos.stand import ROOT, Customer, Shape, Stand
from tests.service.sdk_clients import Clients

pytestmark = [
    pytest.mark.service,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("git") is None, reason="the release before is read from the history by git"),
]

#: The last commit of the release before.
PREVIOUS = "3a1bf8f2"
MONEY = 10**12  # nano-units


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the source of the release before."""
    packed = subprocess.run(["git", "archive", PREVIOUS], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"this copy of the source has no history: {packed.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("previous")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
        files.extractall(folder, filter="data")
    return str(folder)


def schema(database_url: str) -> str:
    """The ledger's last migration."""
    engine = create_engine(database_url)
    try:
        with engine.connect() as connection:
            return str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one())
    finally:
        engine.dispose()


def newest_schema(tree: str) -> str:
    """The last migration that a release knows."""
    files = Path(tree, "serve_app/accounting/migrations/versions").glob("[0-9]*.py")
    return max(file.name for file in files).partition("_")[0]


@contextlib.asynccontextmanager
async def beside(old: Stand) -> AsyncIterator[Stand]:
    """This release on the ledger of the one before, while the clients go on."""
    new = Stand(Shape("postgresql", stub=True), beside=old)
    await asyncio.to_thread(new.__enter__)
    try:
        yield new
    finally:
        await asyncio.to_thread(new.stop)


async def test_clients_go_from_the_release_before_to_this_one_and_back_without_a_failure(previous: str) -> None:
    """As between two clusters during an upgrade. The ledger gets this release's schema when the second one starts."""
    with Stand(Shape("postgresql", stub=True, tree=previous)) as old:
        assert schema(old.database_url) == newest_schema(previous)
        clients = Clients(old, await asyncio.to_thread(Customer, old, "with the SDK", MONEY))

        async def upgrade(running: Session) -> None:
            async def go_to(stand: Stand) -> None:
                running.load.move(stand.base_url)
                clients.move(stand)
                await clients.more()
                await running.more(20)

            async with asyncio.TaskGroup() as group:
                group.create_task(clients.run())
                async with beside(old) as new:
                    assert schema(old.database_url) == newest_schema(str(ROOT))
                    await go_to(new)
                    await go_to(old)
                clients.end()

        report = await session.run(old, upgrade, mode="upgrade", seed=7, clients=4, credit=MONEY, top_up=0)
        old.keep = bool(report.problems or clients.failures)
    assert clients.failures == []
    assert report.problems == [], report.text()
