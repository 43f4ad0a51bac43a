"""The whole service on vLLM over HTTP, with the load of the part `service`.

The part `vllm` gives the same load to the engine alone.
"""

from __future__ import annotations

from bench.gpu_check import service
from bench.gpu_check.part import Options, Report


def run(options: Options, report: Report) -> None:
    """Measures the first shape."""
    from bench.gpu_check import models

    shape, streams, rounds, length = options.shapes[0], *service.load(options)
    report.doing(f"{shape}: writing the model")
    args = service.engine_args(str(models.model_folder(shape, options)), options)
    own = ("model", "dtype", "kv_cache_memory", "max_running", "max_waiting", "max_context", "prefix_reuse")
    report.add(shape=shape, streams=streams, requests=streams * rounds, reply_tokens=length)
    service.serve(options, report, {"engine": "vllm", **{name: args[name] for name in own}})
