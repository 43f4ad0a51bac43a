"""Settings of a backend that apply only to vLLM; all other settings are in EngineSettings."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from serve_app.engine.config import EngineSettings

#: Maximum number of sequences that vLLM runs by default, on any GPU.
MAX_SEQUENCES = 1024
SPARE = 8  # one additional sequence per this number of slots, for tenants without a running sequence
#: vLLM's arguments that follow from the service's settings, mapped to the setting to use instead.
INSTEAD = {
    "model": "model",
    "revision": "revision",
    "dtype": "dtype",
    "max_model_len": "max_context",
    "max_num_seqs": "max_running",
    "enable_prefix_caching": "prefix_reuse",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "enable_lora": "vllm.max_loras",
    "adapters": "adapters in the user_config of Model",
}
#: vLLM's arguments that the service sets itself.
FIXED = {
    "skip_tokenizer_init", "tokenizer", "structured_outputs_config", "logprobs_mode", "max_logprobs",
    "disable_log_stats", "enable_log_requests", "served_model_name", "generation_config", "data_parallel_size",
    "reasoning_parser", "scheduling_policy",
}  # fmt: skip
#: Settings of the native engine that have no meaning for vLLM.
NATIVE_ONLY = {
    "fused", "native", "device_map", "max_memory", "offload_folder", "block_size", "prefill_chunk",
    "prefill_chunk_busy", "speculation_rows", "num_threads",
}  # fmt: skip


class VllmSettings(BaseModel):
    """Options of vLLM. Any other key is an argument of vLLM's AsyncEngineArgs, checked when the replica starts."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of GPUs that compute each layer together."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Number of groups of GPUs; each group has a part of the layers. `num_gpus` is the product of both sizes."""
    quantization: str | None = None
    """vLLM's name of a quantization method, such as fp8_per_tensor or awq."""
    max_loras: int = Field(default=0, ge=0)
    """Maximum number of LoRA adapters on the GPU, and therefore in one step. 0: no adapters."""
    max_cpu_loras: int | None = Field(default=None, ge=1)
    """Maximum number of loaded adapters. Adapters that are not on the GPU are in the machine's memory. Default:
    `max_loras`."""
    max_lora_rank: int = Field(default=16, ge=1, le=512)
    """Maximum rank of an adapter. vLLM reserves GPU memory for `max_loras` adapters of this rank."""
    further: SkipJsonSchema[dict[str, Any]] = {}  # all other keys

    @property
    def gpus(self) -> int:
        """Number of GPUs of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def max_adapters(self) -> int:
        """Maximum number of loaded adapters."""
        return (self.max_cpu_loras or self.max_loras) if self.max_loras else 0

    @model_validator(mode="before")
    @classmethod
    def _collect_further(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "further" in value:
            return value
        own = {name: part for name, part in value.items() if name in cls.model_fields}
        return own | {"further": {name: part for name, part in value.items() if name not in own}}


def problem(settings: EngineSettings, vllm: VllmSettings) -> str | None:
    """A problem with the settings or with vLLM's options; None if no problem is known."""
    if odd := sorted(NATIVE_ONLY & settings.model_fields_set):
        return f"{odd[0]} is a setting of the native engine: leave it out with engine: vllm"
    if settings.dtype == "int8":
        return "dtype int8 is only for the native engine: set vllm.quantization, or dtype to bfloat16"
    if vllm.max_cpu_loras is not None and not vllm.max_loras:
        return "vllm.max_cpu_loras: also set max_loras, the number of adapters on the GPU"
    if vllm.max_cpu_loras is not None and vllm.max_cpu_loras < vllm.max_loras:
        return f"vllm.max_cpu_loras is less than max_loras: set it to {vllm.max_loras} or more"
    for name in vllm.further:
        if name in INSTEAD:
            return f"vllm.{name}: write the setting {INSTEAD[name]} instead"
        if name in FIXED:
            return f"vllm.{name}: the service sets it itself; leave it out"
    return None


def max_sequences(settings: EngineSettings) -> int | None:
    """Number of sequences that vLLM may run together, including the spare ones. None: vLLM chooses for the GPU."""
    if "max_running" not in settings.model_fields_set:
        return None
    return settings.max_running + max(1, settings.max_running // SPARE)
