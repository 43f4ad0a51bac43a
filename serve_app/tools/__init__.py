"""Tools and reasoning: what goes into a model's messages, and what its replies mean. Pure code, over text and dicts."""

from serve_app.tools.families import FAMILIES, Family, detect
from serve_app.tools.forced import Forced, arguments_schema, forced, optional
from serve_app.tools.messages import Conversation, conversation
from serve_app.tools.parser import Parser
from serve_app.tools.parts import CallArguments, CallEnded, CallStarted, Ending, Part, Reasoning, Text
from serve_app.tools.reasoning import Markers, ReasoningSplitter
from serve_app.tools.reasoning import detect as detect_reasoning
from serve_app.tools.reply import ReplyReader

__all__ = [
    "FAMILIES",
    "CallArguments",
    "CallEnded",
    "CallStarted",
    "Conversation",
    "Ending",
    "Family",
    "Forced",
    "Markers",
    "Parser",
    "Part",
    "Reasoning",
    "ReasoningSplitter",
    "ReplyReader",
    "Text",
    "arguments_schema",
    "conversation",
    "detect",
    "detect_reasoning",
    "forced",
    "optional",
]
