"""What the engine refuses, and why: errors that say what the caller can do."""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose."""


class QueueFull(EngineError):
    """As many requests wait as may: try again later. Nothing was queued."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        super().__init__(f"The queue is full: {waiting} requests are waiting.")


class ContextLengthExceeded(EngineError):
    """The prompt leaves no room for a reply.

    `prompt_tokens` is exact, or a lower bound when the text was too long to be worth tokenizing; `limit` is the
    most tokens that prompt and reply may have together.
    """

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        super().__init__(f"The prompt has {prompt_tokens} tokens, prompt and reply together may have {limit}.")


class UnsupportedGrammar(EngineError, ValueError):
    """The engine can't hold a reply to this grammar; the message names the feature or the mistake.

    `alternative` counts from 0 which of a grammar's tool calls is at fault, where it is one of them.
    """

    def __init__(self, message: str, alternative: int | None = None) -> None:
        self.alternative = alternative
        super().__init__(message)


class EngineClosed(EngineError):
    """The engine was closed and takes no more requests."""


class ModelError(EngineError):
    """The model can't be served; the message is one line that says what to change."""


def first_line(error: BaseException) -> str:
    """What an error of another library says, as far as it fits on a line: its first one, without the full stop."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(". ")
