"""Serves `/` and `/favicon.ico`. At `/`, browsers get a page and programs get JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from importlib.resources import files
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from serve_app import __version__
from serve_app.contracts.money import format_price
from serve_app.contracts.offers import Offer
from serve_app.gateway.backends import Catalogue

ICON_S: Final = 86_400
Page = tuple[bytes, dict[str, str]]  # body and headers of a page


def front_routes(
    describe: Callable[[], Awaitable[dict[str, Any]]], page: Callable[[str], Awaitable[Page | None]]
) -> list[Route]:
    """Returns the routes. `page` renders the page for the service's address, or returns None if there is no console."""

    async def show(request: Request) -> Response:
        base = address_of(request)
        if wants_page(request.headers.get("accept", "")):
            made = await page(base)
            response = RedirectResponse("/docs") if made is None else Response(*made[:1], headers=made[1])
        else:
            paths = {"models": "/v1/models", "documentation": "/docs", "openapi": "/openapi.json"}
            links = {name: base + path for name, path in paths.items()}
            about = {"name": "serve-app", "version": __version__, "base_url": f"{base}/v1"}
            response = JSONResponse(about | links | await describe())
        response.headers["vary"] = "accept"
        return response

    return [Route("/", show, methods=["GET"]), Route("/favicon.ico", icon, methods=["GET"])]


async def icon(_: Request) -> Response:
    content = (files("serve_app.console") / "static" / "favicon.ico").read_bytes()
    return Response(content, media_type="image/x-icon", headers={"cache-control": f"public, max-age={ICON_S}"})


def brand_style(accent: str) -> str:
    """Returns the style sheet for the brand's colour, which is given as `#RRGGBB`."""
    red, green, blue = (int(accent[at : at + 2], 16) for at in (1, 3, 5))
    return f":root, [data-bs-theme] {{ --tblr-primary: {accent}; --tblr-primary-rgb: {red}, {green}, {blue}; }}\n"


def wants_page(accept: str) -> bool:
    """Returns whether an `accept` header asks for HTML by name, as browsers do; `*/*` does not."""
    for part in accept.lower().split(","):
        kind, *parameters = (text.strip() for text in part.split(";"))
        if kind in ("text/html", "application/xhtml+xml"):
            return not any(one.replace(" ", "") in ("q=0", "q=0.0") for one in parameters)
    return False


def address_of(request: Request) -> str:
    """Returns the service's address, as the client sees it."""
    scheme = request.headers.get("x-forwarded-proto", request.url.scheme)
    return f"{'https' if scheme == 'https' else 'http'}://{request.url.netloc}"


def offers_of(catalogue: Catalogue, now: float) -> Iterator[Offer]:
    """Yields the service's models with their prices at `now`, in Unix seconds."""
    for name in catalogue.identifiers:
        model, price = catalogue[name], catalogue.price(name, now)
        prices = map(format_price, (price.input, price.cached_input, price.output))
        aliases = tuple(alias for alias in model.aliases if not alias.endswith("*"))
        yield Offer(name, aliases, model.context_length, model.max_output, *prices)
