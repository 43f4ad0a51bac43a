"""`/` is a page for browsers and JSON for programs; without a console, browsers get the API reference."""

from __future__ import annotations

import httpx
import pytest

from serve_app.contracts.money import price_per_million
from serve_app.gateway.app import build_app
from serve_app.gateway.front import Page, front_routes, offers_of, wants_page
from tests.gateway.world import World

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def client(world: World, page: Page | None) -> httpx.AsyncClient:
    async def describe() -> dict[str, str]:
        return {"status": "ok"}

    async def show(base: str) -> Page | None:
        return None if page is None else (page[0] + base.encode(), page[1])

    app = build_app(world.services, world.authenticator, [], front=front_routes(describe, show))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service.test:8000")


async def test_browsers_get_the_page_and_programs_get_json(world: World) -> None:
    async with client(world, (b"<h1>Hello</h1>", {"content-type": "text/html; charset=utf-8"})) as http:
        page = await http.get("/", headers={"accept": BROWSER, "x-forwarded-proto": "https"})
        assert (page.status_code, page.text) == (200, "<h1>Hello</h1>https://service.test:8000")
        for accept in ("*/*", "application/json", "text/html;q=0, */*"):
            answer = await http.get("/", headers={"accept": accept})
            assert answer.headers["vary"] == "accept"
            about = answer.json()
            assert (about["status"], about["base_url"]) == ("ok", "http://service.test:8000/v1")
            assert about["documentation"] == "http://service.test:8000/docs"


async def test_without_a_console_browsers_get_the_reference(world: World) -> None:
    async with client(world, None) as http:
        answer = await http.get("/", headers={"accept": BROWSER})
        assert answer.headers["location"] == "/docs"


async def test_there_is_an_icon(world: World) -> None:
    async with client(world, None) as http:
        icon = await http.get("/favicon.ico")
    assert (icon.status_code, icon.headers["content-type"]) == (200, "image/x-icon")
    assert icon.content.startswith(b"\x00\x00\x01\x00")


@pytest.mark.parametrize(
    ("accept", "is_page"), [("", False), ("TEXT/HTML", True), ("application/json, text/html", True), ("text/*", False)]
)
def test_only_who_names_html_gets_the_page(accept: str, is_page: bool) -> None:
    assert wants_page(accept) == is_page


async def test_the_offers_are_those_of_the_catalogue_with_their_present_prices(world: World) -> None:
    catalogue = world.services.catalogue
    offers = {one.identifier: one for one in offers_of(catalogue, world.now)}
    assert list(offers) == list(catalogue.identifiers)
    for name, offer in offers.items():
        assert offer.context_length == catalogue[name].context_length
        assert price_per_million(offer.input_price) == catalogue[name].price.per_token().input
