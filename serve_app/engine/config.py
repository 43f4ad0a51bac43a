"""Settings of one engine: which model, where it runs and how much it may take on."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(value: object) -> int:
    """Turn `2147483648`, `"2GiB"`, `"2 gib"` or `"512MB"` into a number of bytes.

    Raises:
        ValueError: the text is not a number with an optional unit of kB, MB, GB, KiB, MiB or GiB.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", str(value), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{value!r} is not a size: write bytes or for example 2GiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


ByteSize = Annotated[int, BeforeValidator(parse_bytes)]


class EngineSettings(BaseModel):
    """Everything that shapes an engine. Immutable; a change means a new engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="A folder with safetensors, a GGUF file, or a name on the hub.")
    dtype: Literal["float32", "bfloat16", "int8"] = Field(
        default="float32", description="Of the matrices; int8 computes between them in float32."
    )
    fused: bool = Field(default=True, description="Take the fused forward pass for the models that it covers.")
    native: bool = Field(default=True, description="Run int8 on the CPU in C++, compiled once on each machine.")
    cuda_graphs: bool = Field(default=True, description="Replay decode steps from CUDA graphs where there is a GPU.")
    device_map: str | dict[str, int | str] = Field(
        default="cpu", description="What accelerate takes: cpu, cuda:0, auto, balanced, or module → device."
    )
    max_memory: dict[int | str, ByteSize] | None = Field(
        default=None, description="Most bytes of weights per device (0, 1, cpu), for device_map auto and its like."
    )
    offload_folder: str | None = Field(
        default=None, description="Where weights that go to disk are written; None: below cache_dir."
    )
    cache_dir: str | None = Field(
        default=None, description="Folder for what is prepared once; None: SERVE_APP_HOME/cache, else the user's cache."
    )
    kv_cache_memory: ByteSize = Field(default=2 * 2**30, gt=0, description="Bytes for K and V, all devices together.")
    block_size: int = Field(default=16, ge=1, le=256, description="Tokens per KV block.")
    max_running: int = Field(default=32, ge=1, description="Sequences decoded together.")
    max_waiting: int = Field(default=96, ge=0, description="Requests queued beyond the running ones.")
    max_context: int = Field(default=32768, ge=2, description="Tokens of prompt and reply together.")
    max_output: int = Field(default=4096, ge=1, description="Tokens of one reply, whatever the request asks for.")
    prefill_chunk: int = Field(default=512, ge=1, description="Prompt tokens per step while nothing is decoding.")
    prefill_chunk_busy: int | None = Field(
        default=None,
        ge=1,
        description="Prompt tokens per step while others stream; None: as many as keep a step within twice its "
        "time without them, by measurement.",
    )
    speculation_rows: int = Field(
        default=8,
        ge=0,
        description="Guessed tokens verified per step beside one stream, one less for each further one; 0: none.",
    )
    prefix_reuse: bool = Field(default=True, description="Take over a tenant's KV blocks where prompts begin alike.")
    fair_prompt_weight: float = Field(
        default=1.0, gt=0, description="What a computed prompt token counts against its tenant's fair share."
    )
    fair_output_weight: float = Field(default=2.0, gt=0, description="What a token of output counts against it.")
    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads; None: as many as torch takes, which Ray sets to the replica's num_cpus.",
    )

    @property
    def compute_dtype(self) -> str:
        """Name of the torch type of activations, and of the weights before any are quantized."""
        return "float32" if self.dtype == "int8" else self.dtype

    @model_validator(mode="after")
    def _busy_chunk_is_no_larger(self) -> EngineSettings:
        if self.prefill_chunk_busy is not None and self.prefill_chunk_busy > self.prefill_chunk:
            object.__setattr__(self, "prefill_chunk_busy", self.prefill_chunk)
        return self
