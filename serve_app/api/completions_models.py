"""Models of text completions for the OpenAPI document. `completions_reply` writes the actual bytes.

A field with a default may be absent. The default value has no meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from serve_app.api.completions_request import MAX_CHOICES
from serve_app.api.reply_models import Count, Created, Fingerprint, Model, Usage

CompletionId = Annotated[str, Field(pattern="^cmpl-", description="Id of the reply, also in logs and exports.")]
CompletionReason = Annotated[
    Literal["stop", "length"],
    Field(
        description="`stop`: the model ended the text or generated a stop string. `length`: `max_tokens`, the context "
        "or the balance cut the text."
    ),
]
Ids = Annotated[list[Count], Field(description="Only with `return_token_ids`.")]
Logprob = Annotated[float, Field(le=0)]


class CompletionLogprobs(BaseModel):
    """The model's probabilities before temperature, penalties and `logit_bias`. All arrays have the same length.

    The token that ends the text is listed although it has no text. It is not billed.
    """

    tokens: list[str] = Field(
        description="Texts of the tokens. A part of a character is written as `bytes:` and its escaped bytes."
    )
    token_logprobs: list[Logprob | None] = Field(description="null for the first token of a prompt.")
    top_logprobs: list[dict[str, Logprob] | None] = Field(
        description="The most likely tokens at each position, and the token itself."
    )
    text_offset: list[Count] = Field(description="Number of characters of the text before each token.")


class CompletionChoice(BaseModel):
    """One text. With several prompts, `index` counts the choices of the first prompt, then those of the second."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionReason
    prompt_token_ids: Ids = []
    token_ids: Ids = []


class Completion(BaseModel):
    """A complete reply."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "cmpl-5d41402abc4b2a76b9719d911017c592",
                    "object": "text_completion",
                    "created": 1796040000,
                    "model": "svc-chat",
                    "choices": [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "stop"}],
                    "usage": {
                        "prompt_tokens": 5,
                        "completion_tokens": 2,
                        "total_tokens": 7,
                        "prompt_tokens_details": {"cached_tokens": 0},
                        "prompt_cache_hit_tokens": 0,
                        "prompt_cache_miss_tokens": 5,
                        "completion_tokens_details": {"reasoning_tokens": 0},
                    },
                    "system_fingerprint": "fp_1",
                }
            ]
        }
    )

    id: CompletionId
    object: Literal["text_completion"]
    created: Created
    model: Model
    choices: list[CompletionChoice] = Field(min_length=1, max_length=MAX_CHOICES)
    usage: Usage
    system_fingerprint: Fingerprint


class CompletionChunkChoice(BaseModel):
    """New text of one choice."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionReason | None = Field(description="null until the choice ends.")
    prompt_token_ids: Ids = []
    token_ids: Ids = []


class CompletionChunk(BaseModel):
    """One event of a stream."""

    id: CompletionId
    object: Literal["text_completion"]
    created: Created
    model: Model
    system_fingerprint: Fingerprint
    choices: list[CompletionChunkChoice] = Field(max_length=1, description="Empty in the chunk with the usage.")
    usage: Usage | None = Field(
        None, description="With `include_usage`: null except in the last chunk. Otherwise absent."
    )
