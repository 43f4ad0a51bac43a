"""The page at the service's root: models with their prices, the way in, and who runs the service."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from serve_app.console.landing import landing
from serve_app.contracts.offers import Front, Offer
from serve_app.settings import BrandSettings

from .conftest import House, words


def page(house: House, *identifiers: str, **facts: Any) -> str:
    offers = tuple(Offer(name, (), 8192, 1024, "0.27", "0.07", "1.10") for name in identifiers)
    front = Front("https://api.example.org", "/console", offers, "EUR", True)
    content, headers = landing(house.console, dataclasses.replace(front, **facts))
    assert headers["content-type"] == "text/html; charset=utf-8"
    return content.decode()


def test_each_model_has_its_purpose_its_limits_and_its_prices(house: House) -> None:
    text = words(page(house, "svc-chat", "svc-coder"))
    purpose = "Conversation and general text Also translation, data analysis and creative writing"
    assert f"svc-chat {purpose} 8K 1K €0.27 €0.07 €1.10" in text
    assert "svc-coder Programming and mathematics Settings for codex, Claude Code, opencode and aider 8K 1K" in text
    assert "EUR per million tokens" in text
    assert "https://api.example.org/v1" in text


def test_no_purpose_is_claimed_for_a_name_of_the_operators_choice(house: House) -> None:
    text = words(page(house, "acme-large"))
    assert "Model Context Max output" in text
    assert "acme-large 8K 1K €0.27" in text
    assert "No models are offered yet." in words(page(house))


def test_people_are_asked_to_sign_up_only_where_they_can(house: House) -> None:
    assert "/console/sign-up" not in page(house)
    house.console.signup, house.console.url = "open", "https://api.example.org/console"
    house.console.mailer = object()  # type: ignore[assignment]
    assert page(house).count('href="/console/sign-up"') == 2
    assert "Degraded" in words(page(house, is_ready=False))


def test_visitors_see_who_runs_the_service_and_its_terms(house: House) -> None:
    assert ">Terms</a>" not in page(house)
    house.console.seller = dataclasses.replace(house.console.seller, name="Nordlicht GmbH")
    house.console.brand = BrandSettings(terms_url="https://example.org/terms", contact="help@example.org")
    text = page(house)
    assert "Nordlicht GmbH" in text
    for shown in (text, house.browser().get("/console/sign-in").text):
        assert 'href="https://example.org/terms">Terms</a>' in shown
        assert 'href="mailto:help@example.org">Contact</a>' in shown
        assert ">Privacy</a>" not in shown


@pytest.mark.parametrize(
    "wrong", [{"terms_url": "javascript:alert(1)"}, {"status_url": "example.org"}, {"contact": "call us"}]
)
def test_a_link_that_leads_nowhere_is_refused_at_startup(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="BrandSettings"):
        BrandSettings(**wrong)
    assert BrandSettings(contact="https://example.org/help").links() == [("Contact", "https://example.org/help")]
