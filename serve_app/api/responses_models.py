"""Models of responses for the OpenAPI document. `responses_reply` writes the actual bytes.

A field with a default may be absent. The default value has no meaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serve_app.api.reply_models import Count, TokenLogprob

Status = Literal["completed", "incomplete", "in_progress"]


class ResponseInputDetails(BaseModel):
    """Breakdown of the input tokens."""

    cached_tokens: Count = Field(description="Input tokens served from the cache, at a lower price.")
    cache_write_tokens: Count = Field(description="Always 0: writing to the cache is not billed.")


class ResponseOutputDetails(BaseModel):
    """Breakdown of the output tokens."""

    reasoning_tokens: Count = Field(description="Tokens of the reasoning.")


class ResponseUsage(BaseModel):
    """The billed tokens."""

    input_tokens: Count
    input_tokens_details: ResponseInputDetails
    output_tokens: Count
    output_tokens_details: ResponseOutputDetails
    total_tokens: Count


class ResponseOutputText(BaseModel):
    """Text of the reply."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0, description="Always empty.")
    logprobs: list[TokenLogprob] = Field(description="Empty unless the request asks for them.")


class ResponseReasoningText(BaseModel):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ResponseMessage(BaseModel):
    """A message that the model wrote."""

    id: Annotated[str, Field(pattern="^msg_")]
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[ResponseOutputText]


class ResponseReasoning(BaseModel):
    """The model's reasoning."""

    id: Annotated[str, Field(pattern="^rs_")]
    type: Literal["reasoning"]
    status: Status
    summary: list[Any] = Field(max_length=0, description="Always empty.")
    content: list[ResponseReasoningText]


class ResponseFunctionCall(BaseModel):
    """A call of a function that the model requests."""

    id: Annotated[str, Field(pattern="^fc_")]
    type: Literal["function_call"]
    status: Status
    call_id: str = Field(description="The item with the output has the same `call_id`.")
    name: str
    arguments: str = Field(description="JSON in a string; incomplete if the call was cut short.")
    namespace: str = Field("", description="The namespace of the function. Absent without one.")


class ResponseCustomToolCall(BaseModel):
    """A call of a custom tool that the model requests."""

    id: Annotated[str, Field(pattern="^ctc_")]
    type: Literal["custom_tool_call"]
    status: Status
    call_id: str = Field(description="The item with the output has the same `call_id`.")
    name: str
    input: str
    namespace: str = Field("", description="The namespace of the tool. Absent without one.")


class ResponseFault(BaseModel):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class ResponseIncomplete(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "content_filter"]


class ResponseReasoningOptions(BaseModel):
    """The options as in the request."""

    effort: str | None
    summary: str | None


class Response(BaseModel):
    """A response. It repeats fields of the request."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "resp_5d41402abc4b2a76b9719d911017c592",
                    "object": "response",
                    "created_at": 1796040000,
                    "status": "completed",
                    "background": False,
                    "error": None,
                    "incomplete_details": None,
                    "instructions": None,
                    "max_output_tokens": None,
                    "max_tool_calls": None,
                    "metadata": {},
                    "model": "svc-chat",
                    "output": [
                        {
                            "id": "msg_5d41402abc4b2a76b9719d911017c592",
                            "type": "message",
                            "status": "completed",
                            "role": "assistant",
                            "content": [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}],
                        }
                    ],
                    "parallel_tool_calls": True,
                    "previous_response_id": None,
                    "prompt_cache_key": None,
                    "reasoning": {"effort": None, "summary": None},
                    "safety_identifier": None,
                    "service_tier": "default",
                    "store": True,
                    "system_fingerprint": "fp_1",
                    "temperature": 1.0,
                    "text": {"format": {"type": "text"}, "verbosity": "medium"},
                    "tool_choice": "auto",
                    "tools": [],
                    "top_logprobs": 0,
                    "top_p": 1.0,
                    "truncation": "disabled",
                    "usage": {
                        "input_tokens": 12,
                        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                        "output_tokens": 2,
                        "output_tokens_details": {"reasoning_tokens": 0},
                        "total_tokens": 14,
                    },
                    "user": None,
                }
            ]
        }
    )

    id: Annotated[str, Field(pattern="^resp_", description="Id of the response, also in logs and exports.")]
    object: Literal["response"]
    created_at: int = Field(description="Unix time in seconds.")
    status: Literal["completed", "incomplete", "failed", "cancelled", "in_progress", "queued"]
    background: bool
    error: ResponseFault | None = Field(description="For status `failed`.")
    incomplete_details: ResponseIncomplete | None = Field(description="For status `incomplete`.")
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str = Field(description="The requested model.")
    output: list[ResponseMessage | ResponseReasoning | ResponseFunctionCall | ResponseCustomToolCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoningOptions
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool = Field(description="Whether the response is stored.")
    system_fingerprint: str = Field(description="Changes when a different backend answers.")
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]] = Field(description="The tools that the model could call.")
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    omitted_tools: list[str] = Field([], description="Types of tools that were left out. Absent if there are none.")


class ResponseItemList(BaseModel):
    """A page of input items."""

    object: Literal["list"]
    data: list[dict[str, Any]] = Field(
        description="Items as they were sent, with an `id` and all required fields.",
        examples=[
            [
                {
                    "id": "msg_0cc175b9c0f1b6a831c399e269772661",
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "Say hello."}],
                }
            ]
        ],
    )
    first_id: str = Field(description="Empty if there are no items.", examples=["msg_0cc175b9c0f1b6a831c399e269772661"])
    last_id: str = Field(description="Empty if there are no items.", examples=["msg_0cc175b9c0f1b6a831c399e269772661"])
    has_more: bool = Field(description="Whether there are more items after `last_id`.", examples=[False])


class ResponseInputTokens(BaseModel):
    """The number of tokens that a request would be billed for as input."""

    object: Literal["response.input_tokens"]
    input_tokens: Count = Field(examples=[12])


class ResponseEventData(BaseModel):
    """The data of one event of a stream. Other fields depend on its type."""

    type: str = Field(description="The same as the event's name.", examples=["response.output_text.delta"])
    sequence_number: Count
