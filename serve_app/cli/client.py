"""The service's admin API over HTTP: the only thing that the commands talk to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from serve_app import __version__
from serve_app.cli.connection import Connection
from serve_app.cli.errors import CommandError

TIMEOUT_S = 30.0
RETRY_DELAYS_S = (0.1, 0.4)
PAGE_SIZE = 200

Json = dict[str, Any]


class AdminClient:
    """Calls `/admin` with the operator key and turns every failure into one line that says what to do.

    Calls that can be repeated without doing something twice (reads, settings, and anything with an idempotency
    key) are repeated after a lost connection; others only when the service was never reached.
    """

    def __init__(self, connection: Connection, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.url = connection.url
        self._connection = connection
        self._sleep = sleep
        # A proxy from the environment has no business between this machine and itself.
        self._http = httpx.Client(
            timeout=TIMEOUT_S,
            trust_env=not connection.is_local,
            headers={"user-agent": f"serve-app/{__version__}", "accept": "application/json"},
        )

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, *path: str, **query: str | int | None) -> Json:
        """Read. Query values of None are left out; a trailing underscore frees a Python keyword (`from_`)."""
        given = {name.rstrip("_"): str(value) for name, value in query.items() if value is not None}
        return self._call("GET", path, query=given, repeatable=True)

    def post(
        self, *path: str, body: Json | None = None, idempotency_key: str | None = None, repeat_with: str = ""
    ) -> Json:
        """Create or book. Repeated after a lost connection only with an idempotency key.

        `repeat_with` are options that a person who repeats it by hand has to give as they were meant this time.
        """
        try:
            return self._call("POST", path, body=body or {}, idempotency_key=idempotency_key)
        except CommandError as error:
            if repeat_with and error.code == "connection_lost":
                error.message += f"; give {repeat_with}"
            raise

    def patch(self, *path: str, body: Json) -> Json:
        """Set the given fields, leaving the others."""
        return self._call("PATCH", path, body=body, repeatable=True)

    def delete(self, *path: str) -> Json:
        """Revoke: doing it twice is the same as once."""
        return self._call("DELETE", path, repeatable=True)

    def accounts(self) -> Iterator[Json]:
        """Every account, page after page."""
        for page in self.pages("accounts", limit=PAGE_SIZE):
            yield from page

    def pages(self, *path: str, limit: int, **query: str | int | None) -> Iterator[list[Json]]:
        """Page after page of up to `limit` rows; no more than one is kept."""
        after: str | int | None = None
        while True:
            page = self.get(*path, limit=limit, after=after, **query)
            yield page["data"]
            after = page.get("next")
            if after is None:
                return

    def probe(self, path: str) -> tuple[int, float]:
        """Status and seconds of an open route such as `/ready`, without the operator key."""
        start = time.perf_counter()
        response = self._send(httpx.Request("GET", self.url + path), repeatable=False)
        return response.status_code, time.perf_counter() - start

    def _call(
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
        url = self.url + "/admin/" + "/".join(quote(part, safe="") for part in path)
        request = self._http.build_request(method, url, params=query or None, json=body, headers=headers)
        response = self._send(request, repeatable=repeatable or idempotency_key is not None)
        if not response.is_success:
            raise _refusal(response, self.url)
        return _document(response, self.url)

    def _send(self, request: httpx.Request, *, repeatable: bool) -> httpx.Response:
        for delay in (*RETRY_DELAYS_S, None):
            try:
                return self._http.send(request)
            except httpx.TransportError as error:
                unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if delay is None or not (repeatable or unsent):
                    raise _unreachable(error, request, self.url) from None
            self._sleep(delay)
        raise AssertionError("the last attempt returns or raises")


def _unreachable(error: httpx.TransportError, request: httpx.Request, url: str) -> CommandError:
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
        advice = f"it may or may not have been done: repeat with --idempotency-key {key}, which can't do it twice"
    elif request.method == "POST":
        advice = "it may or may not have been done: look before you repeat it"
    return CommandError(f"{url} {what}: {advice}", code="connection_lost")


def _refusal(response: httpx.Response, url: str) -> CommandError:
    """The service's own error, in one line."""
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


def _document(response: httpx.Response, url: str) -> Json:
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise CommandError(
            f"{url} did not answer with JSON: is a serve-app service there?",
            code="not_serve_app",
            status=response.status_code,
        )
    return document
