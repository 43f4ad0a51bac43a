"""Calls that Serve makes on a replica, apart from its requests."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from deployments.model import Model
from serve_app.engine.errors import UnknownAdapter
from serve_app.settings import SettingsError
from tests.engine.fakes import FakeRunner, fake_engine


class Engine:
    fingerprint = "of the model"

    def __init__(self) -> None:
        self.adapters: Mapping[str, str] = {"earlier": "/models/earlier"}

    def set_adapters(self, adapters: Mapping[str, str]) -> None:
        self.adapters = adapters

    def fingerprint_of(self, adapter: str) -> str:
        return f"of {self.adapters[adapter]}"


async def test_the_adapters_of_user_config_reach_the_engine() -> None:
    replica = SimpleNamespace(_engine=Engine())
    Model.func_or_class.reconfigure(replica, {"adapters": {"law": "/models/law"}})
    assert replica._engine.adapters == {"law": "/models/law"}
    assert await Model.func_or_class.fingerprint(replica, "law") == "of /models/law"
    assert await Model.func_or_class.fingerprint(replica) == "of the model"
    with pytest.raises(SettingsError, match=r"^Model\.user_config\.adapter: unknown key$"):
        Model.func_or_class.reconfigure(replica, {"adapter": {}})
    Model.func_or_class.reconfigure(replica, {})
    assert replica._engine.adapters == {}


def test_adapters_of_the_native_engine_are_reported_and_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = fake_engine(FakeRunner())
    Model.func_or_class.reconfigure(SimpleNamespace(_engine=engine), {"adapters": {"law": "/models/law"}})
    assert "The native engine has no adapters: remove law from user_config." in caplog.messages
    with pytest.raises(UnknownAdapter):
        engine.fingerprint_of("law")
    engine.check_health()
    engine.close()
