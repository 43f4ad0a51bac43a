"""Models of chat replies for the OpenAPI document. `chat_reply` writes the actual bytes.

A field with a default may be absent. The default value has no meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

Count = Annotated[int, Field(ge=0)]
FinishReason = Annotated[
    Literal["stop", "length", "tool_calls", "content_filter"],
    Field(
        description="`stop`: the model ended the reply or generated a stop string. `length`: `max_tokens`, the "
        "context or the balance cut the reply. `tool_calls`: the model waits for the results of its calls."
    ),
]
Id = Annotated[str, Field(pattern="^chatcmpl-", description="Id of the reply, also in logs and exports.")]
Created = Annotated[int, Field(description="Unix time in seconds.")]
Model = Annotated[str, Field(description="The requested model.")]
Fingerprint = Annotated[str, Field(description="Changes when a different backend answers.")]


class PromptTokensDetails(BaseModel):
    """Breakdown of the prompt tokens."""

    cached_tokens: Count = Field(description="Prompt tokens served from the cache, at a lower price.")


class CompletionTokensDetails(BaseModel):
    """Breakdown of the output tokens."""

    reasoning_tokens: Count = Field(description="Tokens of `reasoning_content`.")


class Usage(BaseModel):
    """The billed tokens of all choices together. The prompt counts once."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    prompt_cache_hit_tokens: Count
    prompt_cache_miss_tokens: Count = Field(description="Prompt tokens that were not in the cache.")
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(BaseModel):
    """One candidate token."""

    token: str = Field(description="Text of the token. U+FFFD stands for part of a character.")
    logprob: float = Field(le=0, description="Natural logarithm of the probability; -9999.0 for zero probability.")
    bytes: list[Annotated[int, Field(ge=0, le=255)]] = Field(description="UTF-8 bytes of the token.")


class TokenLogprob(TopLogprob):
    """One token of the reply."""

    top_logprobs: list[TopLogprob] = Field(max_length=20, description="Most likely tokens here, most likely first.")


class ChoiceLogprobs(BaseModel):
    """The model's probabilities before temperature, penalties and `logit_bias`."""

    content: list[TokenLogprob]
    refusal: None


class ReplyFunction(BaseModel):
    """A function and the arguments to call it with."""

    name: str
    arguments: str = Field(description="JSON in a string; incomplete if the call was cut short.")


class ReplyToolCall(BaseModel):
    """A call that the model requests."""

    id: str
    type: Literal["function"]
    function: ReplyFunction


class ReplyMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None = Field(description="null if the model only calls tools.")
    reasoning_content: str = Field("", description="The model's reasoning before the answer. Absent if there is none.")
    tool_calls: list[ReplyToolCall] = Field([], min_length=1, description="Absent without calls.")


class Choice(BaseModel):
    """One of `n` replies."""

    index: Count
    message: ReplyMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """A complete reply."""

    id: Id
    object: Literal["chat.completion"]
    created: Created
    model: Model
    choices: list[Choice] = Field(min_length=1, max_length=8)
    usage: Usage
    system_fingerprint: Fingerprint


class DeltaFunction(BaseModel):
    """The next part of a call: the name once, the arguments in pieces."""

    name: str = ""
    arguments: str


class DeltaToolCall(BaseModel):
    """The next part of a call. `index` identifies the call. The first part has `id`, `type` and the name."""

    index: Count
    id: str = ""
    type: Literal["function"] = "function"
    function: DeltaFunction


class Delta(BaseModel):
    """The new part of the message."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field("", description="null in the first chunk of a choice that begins with a call.")
    reasoning_content: str = ""
    tool_calls: list[DeltaToolCall] = Field([], min_length=1)


class ChunkChoice(BaseModel):
    """An update to one of `n` replies."""

    index: Count
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None = Field(description="null until the choice ends.")


class ChatCompletionChunk(BaseModel):
    """One event of a stream. A choice's first event has its role, its last event the finish reason."""

    id: Id
    object: Literal["chat.completion.chunk"]
    created: Created
    model: Model
    system_fingerprint: Fingerprint
    choices: list[ChunkChoice] = Field(max_length=8, description="Empty in the chunk with the usage.")
    usage: Usage | None = Field(
        None,
        description="In the last chunk with choices. With `include_usage`: null except in the last chunk, which has no "
        "choices. With `continuous_usage_stats`: the usage so far, in each chunk.",
    )
