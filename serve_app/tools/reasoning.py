"""Tells a reply's reasoning from its content, as it arrives.

Reasoning stands at the beginning of the reply between two markers, of which the template may have written the first
one already. Later markers are content: a model that explains them isn't thinking. White space next to a marker belongs
to it and is dropped; every other character comes out exactly once. Sources: the chat templates of Qwen/Qwen3-8B and
QwQ-32B, deepseek-ai/DeepSeek-R1 and DeepSeek-V3.1, mistralai/Magistral-Small-2509 and CohereForAI/c4ai-command-r7b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from serve_app.tools.parts import Part, Reasoning, Text, merged
from serve_app.tools.source import Source, Steps

_SPACE: Final = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Markers:
    """What encloses reasoning."""

    begin: str
    end: str

    def left_open(self, prompt: str) -> bool:
        """Whether a rendered prompt ends within reasoning, so that the reply begins there.

        The last word counts: templates that switch reasoning off write an empty pair.
        """
        return prompt.rstrip(_SPACE).endswith(self.begin)


MARKERS: Final = (
    Markers("<think>", "</think>"),
    Markers("[THINK]", "[/THINK]"),
    Markers("<seed:think>", "</seed:think>"),
    Markers("<|START_THINKING|>", "<|END_THINKING|>"),
)


def detect(chat_template: str | None) -> Markers | None:
    """The markers that the Jinja text of a chat template mentions; None for a model that doesn't reason.

    `Markers.left_open` says of each rendered prompt whether it has begun the reasoning.
    """
    found = (markers for markers in MARKERS if markers.end in (chat_template or ""))
    return next(found, None)


class ReasoningSplitter:
    """Reads one reply into `Reasoning` and `Text`. `left_open` says that the prompt has written the first marker."""

    def __init__(self, markers: Markers, left_open: bool = False) -> None:
        self._markers = markers
        self._left_open = left_open
        self._source = Source()
        self._parts: list[Part] = []
        self._grammar = self._reply()
        next(self._grammar)

    def push(self, text: str) -> list[Part]:
        """What is certain now that `text` has come."""
        self._source.append(text)
        return self._proceed()

    def finish(self) -> list[Part]:
        """What was held back, at the end of the reply."""
        self._source.ended = True
        return self._proceed()

    def _proceed(self) -> list[Part]:
        next(self._grammar, None)
        parts = merged(self._parts)
        self._parts.clear()
        return parts

    def _reply(self) -> Steps[None]:
        source = self._source
        # Models repeat a marker that their prompt ends with.
        yield from source.space()
        if self._left_open:
            source.take_held()
        marker = yield from source.any_of((self._markers.begin, self._markers.end))
        if marker == self._markers.begin:
            yield from source.space()
            source.take_held()
            yield from self._reasoning()
        elif self._left_open and marker:
            yield from source.space()
            source.take_held()
        elif self._left_open:
            yield from self._reasoning()
        while True:
            source.at = len(source.text)
            self._parts.append(Text(source.take_held()))
            if not (yield from source.more()):
                return

    def _reasoning(self) -> Steps[None]:
        source, end = self._source, self._markers.end
        while (yield from source.more()):
            found = source.text.find(end[0], source.at)
            until = found if found >= 0 else len(source.text)
            solid = source.at + len(source.text[source.at : until].rstrip(_SPACE))
            if solid > source.at:
                source.at = solid
                self._parts.append(Reasoning(source.take_held()))
            source.at = until
            if found >= 0:
                if (yield from source.constant(end)):
                    yield from source.space()
                    source.take_held()
                    return
                self._parts.append(Reasoning(source.take_held()))
        self._parts.append(Reasoning(source.take_held()))
