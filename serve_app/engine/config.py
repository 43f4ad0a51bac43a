"""Settings of one engine: its model, its devices and its limits."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# On a GPU every step would have to expand each int8 matrix: slower than bfloat16, without saving memory.
INT8_REMEDY = "set dtype to bfloat16, or device_map to cpu"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(value: object) -> int:
    """Number of bytes in a size such as `2147483648`, `"2GiB"`, `"2 gib"` or `"512MB"`.

    Raises:
        ValueError: the text is not a number with an optional unit of kB, MB, GB, KiB, MiB or GiB.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", str(value), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{value!r} is not a size: write bytes or for example 2GiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def _parse_size_or_auto(value: object) -> object:
    if value == "auto":
        return value
    if (size := parse_bytes(value)) <= 0:
        raise ValueError(f"{value!r} is not more than 0")
    return size


ByteSize = Annotated[int, BeforeValidator(parse_bytes)]
SizeOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_parse_size_or_auto)]


class EngineSettings(BaseModel):
    """Immutable; a change requires a new engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="A folder with safetensors, a GGUF file, or a name on the hub.")
    revision: str | None = Field(
        default=None, min_length=1, description="Of a model on the hub: a commit, tag or branch; None: the main branch."
    )
    fingerprint: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{12}$",
        description="What replies' system_fingerprint ends with: files with another one are refused.",
    )
    dtype: Literal["float32", "bfloat16", "int8"] = Field(
        default="float32", description="Of the matrices; int8, on the CPU alone, computes between them in float32."
    )
    fused: bool = Field(default=True, description="Run llama-like models through the engine's own forward pass.")
    native: bool = Field(default=True, description="Run int8 on the CPU in C++, compiled once on each machine.")
    cuda_graphs: bool = Field(default=True, description="Accepted, without effect: there are no CUDA graphs any more.")
    device_map: str | dict[str, int | str] = Field(
        default="cpu", description="What accelerate takes: cpu, cuda:0, auto, balanced, or module → device."
    )
    max_memory: dict[int | str, ByteSize] | None = Field(
        default=None, description="Most bytes of weights per device (0, 1, cpu), for device_map auto and its like."
    )
    offload_folder: str | None = Field(
        default=None, description="Folder for weights that are offloaded to disk; None: below cache_dir."
    )
    cache_dir: str | None = Field(
        default=None, description="Folder for prepared files; None: SERVE_APP_HOME/cache, else the user's cache folder."
    )
    kv_cache_memory: SizeOrAuto = Field(
        default=2 * 2**30,
        description="Bytes for K and V, all devices together; auto: what the weights and a step leave free.",
    )
    block_size: int = Field(default=16, ge=1, le=256, description="Tokens per KV block.")
    max_running: int = Field(default=32, ge=1, description="Sequences decoded together.")
    max_waiting: int = Field(default=96, ge=0, description="Requests queued beyond the running ones.")
    max_context: int = Field(default=32768, ge=2, description="Tokens of prompt and reply together.")
    max_output: int = Field(default=4096, ge=1, description="Tokens of one reply, whatever the request asks for.")
    prefill_chunk: int = Field(default=512, ge=1, description="Most prompt tokens per step.")
    prefill_chunk_busy: int | None = Field(
        default=None,
        ge=1,
        description="Prompt tokens per step while others stream; None: as many as keep a step within twice its "
        "time without them, and a step of long prompts alone at about 40 ms, as measured.",
    )
    speculation_rows: int = Field(
        default=8,
        ge=0,
        description="Guessed tokens verified per step beside one stream, one less for each further one; 0: none.",
    )
    prefix_reuse: bool = Field(default=True, description="Reuse a tenant's KV blocks for prompts with the same start.")
    fair_prompt_weight: float = Field(
        default=1.0, gt=0, description="Cost of a computed prompt token in its tenant's fair share."
    )
    fair_output_weight: float = Field(default=2.0, gt=0, description="Cost of a token of output in it.")
    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads; None: torch's own number, which Ray sets to the replica's num_cpus.",
    )

    @property
    def kv_cache_bytes(self) -> int:
        """`kv_cache_memory` in bytes, after the loader has resolved `auto`."""
        if self.kv_cache_memory == "auto":
            raise ValueError("kv_cache_memory auto is decided while the model is loaded")
        return self.kv_cache_memory

    @property
    def compute_dtype(self) -> str:
        """Name of the torch type of activations and of weights that are not quantized."""
        return "float32" if self.dtype == "int8" else self.dtype

    @model_validator(mode="after")
    def _int8_is_for_the_cpu(self) -> EngineSettings:
        devices = [self.device_map] if isinstance(self.device_map, str) else self.device_map.values()
        if self.dtype == "int8" and any(isinstance(one, int) or one.startswith("cuda") for one in devices):
            raise ValueError(f"dtype int8 is for the CPU, and device_map names a GPU: {INT8_REMEDY}")
        return self

    @model_validator(mode="after")
    def _busy_chunk_is_no_larger(self) -> EngineSettings:
        if self.prefill_chunk_busy is not None and self.prefill_chunk_busy > self.prefill_chunk:
            object.__setattr__(self, "prefill_chunk_busy", self.prefill_chunk)
        return self
