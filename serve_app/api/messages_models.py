"""Models of replies in the Messages format for the OpenAPI document. `messages_reply` writes the actual bytes.

A field with a default may be absent. The default value has no meaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
StopReason = Annotated[
    Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"],
    Field(
        description="`end_turn`: the model ended the reply. `max_tokens`: `max_tokens`, the context or the balance cut "
        "the reply, or its last call is incomplete. `stop_sequence`: a stop sequence ended it. `tool_use`: the model "
        "waits for the results of its calls."
    ),
]
StopSequence = Annotated[str | None, Field(description="The stop sequence that ended the reply; null: none.")]


class OutputTokensDetails(BaseModel):
    """Breakdown of the output tokens."""

    thinking_tokens: Count = Field(description="Tokens of reasoning, even if the reply does not show it.")


class MessageUsage(BaseModel):
    """The billed tokens. The prompt is the sum of the first three."""

    input_tokens: Count = Field(description="Prompt tokens that were not in the cache.")
    cache_creation_input_tokens: Literal[0] = Field(description="The cache has no separate price for writing.")
    cache_read_input_tokens: Count = Field(description="Prompt tokens served from the cache, at a lower price.")
    output_tokens: Count
    output_tokens_details: OutputTokensDetails


class ReplyTextBlock(BaseModel):
    """Text."""

    type: Literal["text"]
    text: str


class ReplyThinkingBlock(BaseModel):
    """The model's reasoning, if the request shows it."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class ReplyToolUseBlock(BaseModel):
    """A call that the model requests."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(description="Arguments. In an incomplete call: the arguments that are complete.")


ReplyBlock = Annotated[
    ReplyTextBlock | ReplyThinkingBlock | ReplyToolUseBlock,
    Field(discriminator="type"),
]


class MessageHead(BaseModel):
    """The fields of a reply that are known before its first token."""

    id: str = Field(pattern="^msg_", description="Id of the reply, also in logs and exports.")
    type: Literal["message"]
    role: Literal["assistant"]
    model: str = Field(description="The requested model.")
    usage: MessageUsage


class MessageReply(MessageHead):
    """A complete reply."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "msg_5d41402abc4b2a76b9719d911017c592",
                    "type": "message",
                    "role": "assistant",
                    "model": "svc-chat",
                    "content": [{"type": "text", "text": "Hello! How can I help?"}],
                    "stop_reason": "end_turn",
                    "stop_sequence": None,
                    "usage": {
                        "input_tokens": 9,
                        "cache_creation_input_tokens": 0,
                        "cache_read_input_tokens": 0,
                        "output_tokens": 7,
                        "output_tokens_details": {"thinking_tokens": 0},
                    },
                }
            ]
        }
    )

    content: list[ReplyBlock]
    stop_reason: StopReason
    stop_sequence: StopSequence


class BegunMessage(MessageHead):
    """The beginning of a streamed reply. Its usage has the prompt and no output."""

    content: list[ReplyBlock] = Field(max_length=0)
    stop_reason: None
    stop_sequence: None


class MessageStart(BaseModel):
    """The first event."""

    type: Literal["message_start"]
    message: BegunMessage


class ContentBlockStart(BaseModel):
    """A block begins, without its content."""

    type: Literal["content_block_start"]
    index: Count
    content_block: ReplyBlock


class TextDelta(BaseModel):
    """More text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(BaseModel):
    """More reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(BaseModel):
    """The end of reasoning."""

    type: Literal["signature_delta"]
    signature: Literal[""]


class InputJsonDelta(BaseModel):
    """More of a call's arguments. All pieces together are JSON."""

    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(BaseModel):
    """More of a block."""

    type: Literal["content_block_delta"]
    index: Count
    delta: Annotated[
        TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta,
        Field(discriminator="type"),
    ]


class ContentBlockStop(BaseModel):
    """A block ends."""

    type: Literal["content_block_stop"]
    index: Count


class MessageEnd(BaseModel):
    """The reason why the reply ended."""

    stop_reason: StopReason
    stop_sequence: StopSequence


class MessageDelta(BaseModel):
    """The end of the reply, with its usage."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(BaseModel):
    """The last event."""

    type: Literal["message_stop"]


class Ping(BaseModel):
    """Shows that the stream is alive while there is no other event."""

    type: Literal["ping"]


class TokenCount(BaseModel):
    """The number of prompt tokens that a message would be billed for, including cached tokens."""

    input_tokens: Count = Field(examples=[9])


EVENTS = (
    MessageStart,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDelta,
    MessageStop,
    Ping,
)
