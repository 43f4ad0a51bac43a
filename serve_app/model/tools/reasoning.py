"""Separates a reply's reasoning from its content, as it arrives.

Reasoning is at the beginning of the reply, between two markers. The template may have written the first marker already.
Markers after the reasoning are content, because the model may explain them. White space next to a marker is dropped
with it; every other character is returned exactly once. Sources: the chat templates of Qwen/Qwen3-8B and QwQ-32B,
deepseek-ai/DeepSeek-R1 and DeepSeek-V3.1, mistralai/Magistral-Small-2509 and CohereForAI/c4ai-command-r7b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from serve_app.contracts.generation import Part, Reasoning
from serve_app.model.tools.source import Source, Steps


@dataclass(frozen=True, slots=True)
class Markers:
    """The markers that enclose reasoning."""

    begin: str
    end: str

    def left_open(self, prompt: str) -> bool:
        """Returns whether a rendered prompt ends within reasoning, which the reply then continues.

        Only the end of the prompt counts, because templates that turn reasoning off write both markers.
        """
        return prompt.rstrip().endswith(self.begin)


MARKERS: Final = (
    Markers("<think>", "</think>"),
    Markers("[THINK]", "[/THINK]"),
    Markers("<seed:think>", "</seed:think>"),
    Markers("<|START_THINKING|>", "<|END_THINKING|>"),
)


def markers_of(chat_template: str | None) -> Markers | None:
    """Returns the markers in the Jinja text of a chat template; None for a model that does not reason."""
    return next((markers for markers in MARKERS if markers.end in (chat_template or "")), None)


def read_reasoning(source: Source, markers: Markers, left_open: bool, parts: list[Part]) -> Steps[None]:
    """Reads the reasoning of a reply, if it has any, into `parts`. Afterwards, the source is at the content.

    `left_open`: the prompt already contains the first marker.
    """
    yield from source.skip_space()
    if left_open:
        source.take_held()
    marker = yield from source.skip_any((markers.begin, markers.end))
    if marker == markers.begin or (left_open and marker):  # a model may repeat the marker that ends its prompt
        yield from source.skip_space()
        source.take_held()
    elif not left_open:
        source.put_back_held()
        return
    if marker == markers.end:
        return
    while (yield from source.more()):
        found = source.text.find(markers.end[0], source.at)
        parts.append(Reasoning(source.take_text(found if found >= 0 else len(source.text))))
        if found >= 0:
            if (yield from source.skip(markers.end)):
                yield from source.skip_space()
                source.take_held()
                return
            parts.append(Reasoning(source.take_held()))
    parts.append(Reasoning(source.take_held()))
