"""A client of the service's admin API over HTTP."""

from __future__ import annotations

import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import httpx

from serve_app import __version__
from serve_app.cli.connection import Connection
from serve_app.cli.output import CommandError

TIMEOUT_S = 30.0
RETRY_DELAYS_S = (0.1, 0.4)
PAGE_SIZE = 200

Json = dict[str, Any]
Query = Mapping[str, str | int | None]


class AdminClient:
    """Calls `/admin` with the operator key. Every failure becomes a one-line error that says what to do.

    After a lost connection, the client repeats calls that are safe to repeat: reads, settings, and anything with an
    idempotency key. It repeats other calls only if they never reached the service.
    """

    def __init__(self, connection: Connection, *, timeout_s: float | None = None, retries: bool = True) -> None:
        self.url = connection.url
        self._delays = RETRY_DELAYS_S if retries else ()
        self._connection = connection
        # The environment's proxy must not be used for a service on this machine.
        self._http = httpx.Client(
            timeout=TIMEOUT_S if timeout_s is None else timeout_s,
            trust_env=not connection.is_local,
            verify=True if connection.authority is None else ssl.create_default_context(cafile=connection.authority),
            headers={"user-agent": f"serve-app/{__version__}", "accept": "application/json"},
        )

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def api_get(self, *path: str, query: Query | None = None) -> Json:
        """Reads a resource. Leaves out query values that are None."""
        given = {name: str(value) for name, value in (query or {}).items() if value is not None}
        return self._exchange("GET", path, query=given, repeatable=True)

    def api_post(self, *path: str, body: Json | None = None) -> Json:
        return self._exchange("POST", path, body=body or {})

    def book(self, *path: str, body: Json, idempotency_key: str | None, repeat_with: str = "") -> Json:
        """Sends a POST that moves money. Without an `idempotency_key`, generates one.

        If the connection is lost, the error tells the operator to repeat the command with the option `repeat_with`
        instead of the original one.
        """
        try:
            return self._exchange("POST", path, body=body, idempotency_key=idempotency_key or secrets.token_hex(16))
        except CommandError as error:
            if repeat_with and error.code == "connection_lost":
                error.message += f". When you repeat it, use {repeat_with} instead of the original option"
            raise

    def api_patch(self, *path: str, body: Json) -> Json:
        """Sets the given fields and leaves the others unchanged."""
        return self._exchange("PATCH", path, body=body, repeatable=True)

    def api_delete(self, *path: str) -> Json:
        return self._exchange("DELETE", path, repeatable=True)

    def pages(self, *path: str, page_size: int, query: Query) -> Iterator[list[Json]]:
        """Yields pages of up to `page_size` rows; only one page is kept in memory."""
        after: str | int | None = None
        while True:
            page = self.api_get(*path, query={**query, "limit": page_size, "after": after})
            yield page["data"]
            after = page.get("next")
            if after is None:
                return

    def first_rows(
        self, *path: str, limit: int | None, query: Query | None = None, say: Callable[[str], None] | None = None
    ) -> list[Json]:
        """Returns the first `limit` rows; None: all rows. Between pages, calls `say` with the number of rows so far."""
        page_size = PAGE_SIZE if limit is None else min(limit, PAGE_SIZE)
        rows: list[Json] = []
        for page in self.pages(*path, page_size=page_size, query=query or {}):
            rows += page
            if limit is not None and len(rows) >= limit:
                break
            if say is not None:
                say(f"{len(rows):,} rows")
        return rows[:limit]

    def probe(self, path: str) -> tuple[int, float]:
        """Calls a route that needs no key, such as `/ready`. Returns the status and the seconds that the call took."""
        start = time.perf_counter()
        response = self._send_with_retries(httpx.Request("GET", self.url + path), repeatable=False)
        return response.status_code, time.perf_counter() - start

    def _exchange(
        self,
        method: str,
        path: tuple[str, ...],
        *,
        query: dict[str, str] | None = None,
        body: Json | None = None,
        idempotency_key: str | None = None,
        repeatable: bool = False,
    ) -> Json:
        headers = {"authorization": f"Bearer {self._connection.operator_key()}"}
        if self._connection.operator:
            headers["x-operator"] = self._connection.operator
        if idempotency_key is not None:
            headers["idempotency-key"] = idempotency_key
        try:
            url = self.url + "/admin/" + "/".join(quote(part, safe="") for part in path)
            request = self._http.build_request(method, url, params=query or None, json=body, headers=headers)
        except UnicodeEncodeError as error:  # Python decodes invalid bytes of the command line to surrogates
            raise CommandError(f"an argument is not valid UTF-8: {error.object!r}", code="usage") from None
        response = self._send_with_retries(request, repeatable=repeatable or idempotency_key is not None)
        if not response.is_success:
            raise _reported_error(response, self.url)
        try:
            document = response.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise CommandError(
                f"{self.url} did not answer with JSON: is a serve-app service there?",
                code="not_serve_app",
                status=response.status_code,
            )
        return document

    def _send_with_retries(self, request: httpx.Request, *, repeatable: bool) -> httpx.Response:
        for delay in (*self._delays, None):
            try:
                return self._http.send(request)
            except httpx.TransportError as error:
                unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if delay is None or not (repeatable or unsent):
                    raise _transport_error(error, request, self.url) from None
            time.sleep(delay)
        raise AssertionError("the last attempt returns or raises")


def _transport_error(error: httpx.TransportError, request: httpx.Request, url: str) -> CommandError:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        reason = str(error) or "it did not answer"
        if "CERTIFICATE" in reason.upper():
            return CommandError(f"{url}: its TLS certificate is not accepted ({reason})", code="tls")
        return CommandError(
            f"no service at {url}: is it running? Start it with `make serve`, or set --url", code="unreachable"
        )
    what = "did not answer in time" if isinstance(error, httpx.TimeoutException) else "closed the connection"
    advice = "try again"
    key = request.headers.get("idempotency-key")
    if key is not None:
        advice = f"the outcome is unknown: repeat the command with --idempotency-key {key}; it is applied only once"
    elif request.method == "POST":
        advice = "the outcome is unknown: check before you repeat the command"
    return CommandError(f"{url} {what}: {advice}", code="connection_lost")


def _reported_error(response: httpx.Response, url: str) -> CommandError:
    """Returns the error of an unsuccessful response, as one line."""
    status = response.status_code
    request_id = response.headers.get("x-request-id")
    if response.is_redirect:
        target = response.headers.get("location", "elsewhere")
        return CommandError(
            f"{url} redirects to {target}: set --url to the final address", code="redirect", status=status
        )
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), str(error.get("code") or error.get("type") or "error")
    except (ValueError, KeyError, TypeError, AttributeError):
        return CommandError(
            f"{url} answered {status} without saying why: is a serve-app service there?",
            code="not_serve_app",
            status=status,
            request_id=request_id,
        )
    if status in (401, 403):
        message = f"operator key not accepted by {url}: pass the right one with --operator-key-file ({message})"
    elif status >= 500:
        message = f"the service failed with {status}: {message} (request {request_id or 'without an id'})"
    return CommandError(message, code=code, status=status, request_id=request_id)
