"""Settings of one engine: its model, its devices and its limits."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# On a GPU, each step would have to expand all int8 matrices, which is slower than bfloat16 and saves no memory.
INT8_REMEDY = "set dtype to bfloat16, or device_map to cpu"
_STEP_TIMEOUT_S = {True: 300.0, False: 20.0}  # default of `step_timeout_s`; True: the model runs on a CPU
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

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: str = Field(min_length=1)
    """Model to serve: `bundled`, a folder with safetensors, a `.gguf` file, or a name on the Hugging Face hub."""
    revision: str | None = Field(default=None, min_length=1)
    """Commit, tag or branch of a model on the hub. Default: its main branch."""
    fingerprint: str | None = Field(default=None, pattern=r"^[0-9a-f]{12}$")
    """Twelve hexadecimal digits, as at the end of `system_fingerprint`. A replica with a different fingerprint does
    not start, so all replicas serve the same weights. The fingerprint also depends on the release and on `dtype`."""
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Number type of the weights. `int8` is for the CPU only; outside of matrix products, it computes in float32."""
    fused: bool = True
    """Whether llama-like models use the engine's own forward pass instead of the code in transformers."""
    native: bool = True
    """Whether int8 on the CPU uses C++ code, which each machine compiles once."""
    device_map: str | dict[str, int | str] = "cpu"
    """`cpu`, `cuda:0`, `auto`, `balanced`, `balanced_low_0`, `sequential`, or a mapping of modules to devices."""
    max_memory: dict[int | str, ByteSize] | None = None
    """Maximum bytes of weights per device when weights are spread over devices: `{0: 70GiB, cpu: 100GiB}`."""
    offload_folder: str | None = None
    """Folder for weights that are offloaded to disk. Default: below `cache_dir`."""
    cache_dir: str | None = None
    """Folder for prepared files. Default: `cache` in `SERVE_APP_HOME`, else the user's cache folder."""
    kv_cache_memory: SizeOrAuto = 2 * 2**30
    """Bytes of the KV cache, all devices together, for example `2GiB`; on a CPU, memory is allocated as needed. `auto`:
    the memory that weights and activations leave free, at most as much as `max_running` full contexts need."""
    block_size: int = Field(default=16, ge=1, le=256)
    """Tokens per KV block."""
    max_running: int = Field(default=32, ge=1)
    """Maximum number of running requests. Default with `engine: vllm`: vLLM's default for the GPU."""
    max_waiting: int = Field(default=96, ge=0)
    """Maximum number of waiting requests. Further requests get 503, except from accounts below their even share of the
    queue: their requests are admitted up to twice `max_waiting` in total."""
    max_context: int = Field(default=32768, ge=2)
    """Maximum tokens of prompt and reply together."""
    max_output: int = Field(default=4096, ge=1)
    """Maximum tokens of a reply."""
    prefill_chunk: int = Field(default=512, ge=1)
    """Maximum prompt tokens per step."""
    prefill_chunk_busy: int | None = Field(default=None, ge=1)
    """Maximum prompt tokens per step while other requests stream. By default, the engine chooses it by measuring steps:
    a step with prompt tokens takes on average at most twice as long as one without. When nothing streams, the engine
    limits long prompts to about 20 ms per step. A fixed value turns both off."""
    speculation_rows: int = Field(default=8, ge=0)
    """Guessed tokens to verify per step with a single stream; one less for each further stream. 0 disables guessing."""
    prefix_reuse: bool = True
    """Whether prompts reuse the computed prefixes of earlier requests from the same account."""
    fair_prompt_weight: float = Field(default=1.0, gt=0)
    """Cost of a computed prompt token in the fair queue."""
    fair_output_weight: float = Field(default=2.0, gt=0)
    """Cost of an output token in the fair queue."""
    step_timeout_s: float | None = Field(default=None, gt=0)
    """Maximum duration of a step, in seconds. After that, the engine counts as hung: its requests get 503, and Serve
    replaces the replica. Default: 20 with GPUs, 300 on a CPU, where a step of a large model takes longer."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads. Default: torch's number, which Ray sets to the replica's `num_cpus`."""

    @property
    def kv_cache_bytes(self) -> int:
        """`kv_cache_memory` in bytes. Raises ValueError for `auto`, which the loader replaces with a size."""
        if self.kv_cache_memory == "auto":
            raise ValueError("kv_cache_memory auto is decided while the model is loaded")
        return self.kv_cache_memory

    def step_limit_s(self, on_cpu: bool) -> float:
        """Maximum seconds of a step: `step_timeout_s`, or the default for a CPU or a GPU."""
        return self.step_timeout_s or _STEP_TIMEOUT_S[on_cpu]

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
