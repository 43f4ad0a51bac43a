"""The errors that the engine raises on purpose; their messages name the remedy."""

from __future__ import annotations


class QueueFull(Exception):
    """The most requests allowed wait already; nothing was queued."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        super().__init__(f"The queue is full: {waiting} requests are waiting.")


class ContextLengthExceeded(Exception):
    """The prompt leaves no room for a reply.

    `prompt_tokens` is exact, or a lower bound if the text was too long to be tokenized; `limit` is the most tokens
    that prompt and reply may have together.
    """

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        super().__init__(f"The prompt has {prompt_tokens} tokens, prompt and reply together may have {limit}.")


class UnsupportedGrammar(ValueError):
    """The engine can't enforce this grammar; the message names the feature or the mistake.

    `alternative` is the number of the tool call at fault, from 0, if the fault is in one of them.
    """

    def __init__(self, message: str, alternative: int | None = None) -> None:
        self.alternative = alternative
        super().__init__(message)


class EngineClosed(Exception):
    """The engine was closed and takes no more requests."""


class EngineFailed(Exception):
    """The engine takes no more requests; its replica has to be replaced."""


class DeviceLost(Exception):
    """The engine can compute nothing more in this process; its replica has to be replaced."""


class ModelError(Exception):
    """The model can't be served; the message is one line with the remedy."""


def first_line(error: BaseException) -> str:
    """The first line of another library's error, without the full stop."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(". ")
