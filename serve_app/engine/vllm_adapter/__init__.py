"""vLLM as an EnginePort. Only `start`, `vllm_engine` and `vllm_stats` import vLLM, which has its own environment."""
