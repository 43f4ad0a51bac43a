"""Settings that need more than a type and a range."""

from __future__ import annotations

import pytest

from serve_app.settings import GatewaySettings, SettingsError, parse


def test_a_gateway_needs_a_backend_with_a_weight() -> None:
    price = {"input": "0", "cached_input": "0", "output": "0"}
    with pytest.raises(SettingsError, match="weight above 0"):
        parse(GatewaySettings, {"models": {"svc-chat": {"backends": {"a": 0}, "price": price}}}, "user_config")


def test_a_price_written_as_a_yaml_number_is_what_was_written() -> None:
    price = {"input": 0.27, "cached_input": 0.07, "output": 1.1}
    settings = parse(GatewaySettings, {"models": {"svc-chat": {"backends": {"a": 1}, "price": price}}}, "user_config")
    assert settings.models["svc-chat"].price.per_token().input == 270
    assert settings.models["svc-chat"].price.per_token().output == 1100
