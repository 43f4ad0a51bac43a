"""Compares the whole service over HTTP with its bare engine: the same model and load, in the same run.

`python -m bench.gpu_check.service OPTIONS` measures the bare engine.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.gpu_check.part import Options, Report, Skip
from bench.gpu_check.parts import ROOT, vllm_python
from bench.harness.results import percentile

STREAMS, ROUNDS, LENGTH = 64, 2, 256
QUESTION = "Tell me of the river, the mill, the bridge and the old harbour in winter. " * 2


def run(options: Options, report: Report) -> None:
    """Measures the bare engine first, in a separate process, so that the GPU is free for the service."""
    from bench.gpu_check import models

    shape, streams, rounds, length = options.shapes[0], *load(options)
    report.doing(f"{shape}: writing the model")
    args = engine_args(str(models.model_folder(shape, options)), options)
    report.add(shape=shape, streams=streams, requests=streams * rounds, reply_tokens=length)
    report.doing(f"{shape}: the bare engine")
    given = json.dumps({"args": args, "streams": streams, "rounds": rounds, "length": length})
    command = [sys.executable, "-m", "bench.gpu_check.service", given]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the bare engine ended with status {done.returncode}")
    report.add(bare=json.loads(done.stdout.splitlines()[-1]))
    serve(options, report, args)
    report.add(share=report.figures["service"]["tokens_s"] / report.figures["bare"]["tokens_s"])


def serve(
    options: Options, report: Report, args: dict[str, Any], then: Callable[[Any], None] = lambda server: None
) -> None:
    """Starts the service with this backend, measures it, calls `then(server)` and stops the service."""
    shape, streams, rounds, length = options.shapes[0], *load(options)
    report.doing(f"{shape}: starting the service")
    server = make_server(args, options)
    began = time.monotonic()
    try:
        server.start()
        _, server.key = server.new_account("bench", "1000")
        report.add(start_s=round(time.monotonic() - began, 1))
        report.doing(f"{shape}: the service, warming up")
        asyncio.run(measure_http(server, streams, 1, 8))
        report.doing(f"{shape}: the service, {streams} streams")
        report.add(service=asyncio.run(measure_http(server, streams, rounds, length)))
        then(server)
    finally:
        home = options.work / f"{server.name}-home" / "logs"
        logs = [*home.glob("ray*/serve/replica_*Model*.log"), *home.glob("ray*/worker-*.err")]
        for log in [*sorted(logs), options.work / "logs" / f"{server.name}.log"]:
            if log.is_file() and (text := log.read_text(errors="replace").strip()):
                print(f"--- {log.name}", text[-4000:], sep="\n", flush=True)
        report.doing(f"{shape}: stopping the service")
        server.stop()
    figures = report.figures["service"]
    if failed := figures["failed"]:
        report.problem(f"{failed} replies failed: {figures['problems'][0]}")


def load(options: Options) -> tuple[int, int, int]:
    """Returns the numbers of streams, of requests per stream, and of tokens per reply."""
    return (STREAMS, ROUNDS, LENGTH) if options.on_gpu else (4, 1, 16)


def engine_args(folder: str, options: Options) -> dict[str, Any]:
    """Settings of the backend and of the bare engine."""
    from bench.gpu_check.models import kv_cache_memory

    args: dict[str, Any] = {"model": folder, "dtype": options.dtype, "device_map": options.device}
    args |= {"kv_cache_memory": kv_cache_memory(options), "max_running": 64, "max_waiting": 64, "max_context": 2048}
    return {**args, "prefix_reuse": False, "speculation_rows": 0, "prefill_chunk": 4096, "prefill_chunk_busy": 2048}


def config(args: dict[str, Any], *, gpu: bool) -> dict[str, Any]:
    """Returns config.yaml with one replica of this model, and with limits that the load does not reach."""
    from bench.harness.servers import deployment, shipped_config

    chosen = shipped_config()
    deployment(chosen, "Limiter")["user_config"] = {
        "contract": {"rpm": 10**6, "tpm": 10**9, "concurrency": 1024},
        "pressure": {"target_s": 60.0, "prefill_target_s": 600.0, "deadline_s": 3600.0},
    }
    model = deployment(chosen, "Model")
    del model["autoscaling_config"]
    model |= {"num_replicas": 1, "max_ongoing_requests": 256}
    model["ray_actor_options"] = {"num_cpus": 1, **({"num_gpus": 1} if gpu else {})}
    if args.get("engine") == "vllm":
        model["ray_actor_options"]["runtime_env"] = {"py_executable": vllm_python()}
    [backend] = [one for one in chosen["applications"] if one["import_path"] == "deployments.apps:model"]
    backend["args"] = args
    return chosen


def make_server(args: dict[str, Any], options: Options) -> Any:
    """Returns the service. The caller starts it."""
    try:
        from bench.harness.servers import Launched
    except ImportError as error:
        raise Skip(f"the service cannot be imported: {error}") from None

    class OnGpu(Launched):
        name, title = "service", "serve-app"
        facts: dict[str, Any] = {}  # noqa: RUF012 -- of the base class

        def config(self) -> dict[str, Any]:
            return config(args, gpu=options.on_gpu)

    return OnGpu(Path(options.work))


async def measure_http(server: Any, streams: int, rounds: int, length: int) -> dict[str, Any]:
    """Measures `streams` clients. Each sends its next request when its previous reply has ended."""
    from bench.harness.client import Call, exchange
    from bench.harness.replies import RawReply, read

    def call(stream: int, number: int) -> Call:
        content = f"{stream}, {number}. {QUESTION}"
        body = {"model": "svc-chat", "messages": [{"role": "user", "content": content}], "stream": True}
        body |= {"max_tokens": length, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        head = ["POST /v1/chat/completions HTTP/1.1", f"host: 127.0.0.1:{server.port}", "connection: close"]
        head += ["content-type: application/json", f"authorization: Bearer {server.key}"]
        head += [f"content-length: {len(data)}", "", ""]
        return Call(server.port, "\r\n".join(head).encode() + data, length)

    raw: list[RawReply] = []

    async def run_stream(stream: int) -> None:
        for number in range(rounds):
            await exchange(call(stream, number), raw)

    began = time.perf_counter()
    await asyncio.gather(*map(run_stream, range(streams)))
    seconds = time.perf_counter() - began
    found = [read(one) for one in raw]
    tokens = sum(reply.completion_tokens or 0 for reply in found)
    times = [[at for at, _ in reply.texts] for reply in found]
    first = [(reply.first_at or reply.sent_at) - reply.sent_at for reply in found]
    wrong = [reply.problem or f"{reply.completion_tokens} tokens" for reply in found]
    problems = [text for text in wrong if text != f"{length} tokens"]
    return summary(tokens, seconds, first, times) | {"failed": len(problems), "problems": problems[:5]}


def summary(tokens: int, seconds: float, first: list[float], times: list[list[float]]) -> dict[str, Any]:
    """Throughput, seconds to the first token, and gaps between pieces."""
    gaps = [later - earlier for one in times for earlier, later in pairwise(one)]
    figures = {"tokens_s": tokens / seconds, "pieces_s": sum(map(len, times)) / seconds}
    for name, values in (("first_s", first), ("gap_s", gaps)):
        figures |= {f"{name}_p50": percentile(values, 0.5), f"{name}_p99": percentile(values, 0.99)}
    return figures


async def measure_bare(engine: Any, streams: int, rounds: int, length: int) -> dict[str, Any]:
    """Measures the same load on the bare engine."""
    from bench.gpu_check.models import GenerationRequest
    from serve_app.contracts.generation import Delta, Finished, SamplingParams

    params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
    first: list[float] = []
    times: list[list[float]] = []
    tokens = 0

    async def run_stream(stream: int) -> None:
        nonlocal tokens
        for number in range(rounds):
            prompt = engine.chat.render([{"role": "user", "content": f"{stream}, {number}. {QUESTION}"}])
            sent, arrived = time.perf_counter(), list[float]()
            async for event in engine.generate(GenerationRequest(f"{length}-{stream}-{number}", tuple(prompt), params)):
                if isinstance(event, Delta) and event.text:
                    arrived.append(time.perf_counter())
                elif isinstance(event, Finished):
                    tokens += event.completion_tokens
            times.append(arrived)
            first.append((arrived or [sent])[0] - sent)

    began = time.perf_counter()
    await asyncio.gather(*map(run_stream, range(streams)))
    return summary(tokens, time.perf_counter() - began, first, times)


def main(given: dict[str, Any]) -> None:
    """Measures the bare engine. Prints its figures as the last line."""
    from serve_app.engine.config import EngineSettings
    from serve_app.engine.engine import Engine

    engine = Engine.from_settings(EngineSettings(**given["args"]), progress=lambda text: print(text, file=sys.stderr))
    try:
        asyncio.run(measure_bare(engine, given["streams"], 1, 8))
        figures = asyncio.run(measure_bare(engine, given["streams"], given["rounds"], given["length"]))
    finally:
        engine.close()
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
