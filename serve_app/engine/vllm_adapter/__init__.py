"""vLLM as an EnginePort. Only `start` and the modules `vllm_engine`, `vllm_processes` and `vllm_stats` import vLLM."""
