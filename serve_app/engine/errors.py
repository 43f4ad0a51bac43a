"""Errors that the engine raises intentionally."""

from __future__ import annotations


class QueueFull(Exception):
    """The maximum number of requests is already waiting; nothing was queued."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        super().__init__(f"The queue is full: {waiting} requests are waiting.")


class ContextLengthExceeded(Exception):
    """The prompt leaves no room for a reply.

    `limit` is the maximum number of tokens of prompt and reply together. `prompt_tokens` is the exact number, or 0 if
    the text was too long to be tokenized. Such a text has more than `limit` tokens.
    """

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        found = prompt_tokens or f"more than {limit}"
        super().__init__(f"The prompt has {found} tokens, but prompt and reply together may have at most {limit}.")


class UnsupportedGrammar(ValueError):
    """The engine cannot enforce this grammar; the message names the unsupported feature or the mistake.

    If the fault is in a tool's schema, `alternative` is the index of that tool, from 0.
    """

    def __init__(self, message: str, alternative: int | None = None) -> None:
        self.alternative = alternative
        super().__init__(message)


class RequestRefused(ValueError):
    """The engine does not support the parameters of a request; nothing was generated.

    `param` is the field at fault; empty if it is unknown. The message does not end with a full stop.
    """

    def __init__(self, message: str, param: str = "") -> None:
        self.param = param
        super().__init__(message)


class UnknownAdapter(Exception):
    """The engine has no adapter of this name, or could not load it."""


class EngineClosed(Exception):
    """The engine was closed and accepts no more requests."""


class EngineFailed(Exception):
    """The engine accepts no more requests; its replica must be replaced."""


class DeviceLost(Exception):
    """The engine cannot compute anything more in this process; its replica must be replaced."""


class ModelError(Exception):
    """The model cannot be served; the message is one line with the remedy."""


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, without the full stop."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(". ")
