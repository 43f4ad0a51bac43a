"""The whole service where the clients' tests expect a gateway: `make test-vllm` runs them over both."""

from __future__ import annotations

import pytest

from serve_app.contracts.money import format_amount
from tests.service.harness import Service


class Whole:
    """The part of `Served` that the tests use. Tests that look into the gateway's process are skipped."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.url = service.base_url
        self.base_url = f"{self.url}/v1"
        self.key = self.account()

    def account(self, credit: int = 1000 * 10**9, **limits: int) -> str:
        """The key of a new account with this balance, in nano-units."""
        limits = {"rpm": 3000, **limits}
        return self._service.account("client", format_amount(credit) if credit else None, **limits).key

    @property
    def world(self) -> None:
        pytest.skip("looks into the gateway's process")
