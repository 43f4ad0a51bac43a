"""Measures the whole service on vLLM over HTTP, and vLLM's own server with the same model and load.

After the load on the service, its replica is killed while it generates. The part `vllm` measures the engine alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from bench.gpu_check import service
from bench.gpu_check.part import Options, Report, Skip
from bench.gpu_check.parts import vllm_python

PATIENCE_S = 150.0  # maximum time until another replica replies


def run(options: Options, report: Report) -> None:
    """Measures the first shape."""
    from bench.gpu_check import models

    shape, streams, rounds, length = options.shapes[0], *service.load(options)
    report.doing(f"{shape}: writing the model")
    args = service.engine_args(str(models.model_folder(shape, options)), options)
    own = ("model", "dtype", "kv_cache_memory", "max_running", "max_waiting", "max_context", "prefix_reuse")
    report.add(shape=shape, streams=streams, requests=streams * rounds, reply_tokens=length)
    backend = {"engine": "vllm", **{name: args[name] for name in own}}
    service.serve(options, report, backend, then=lambda server: kill(server, report))
    report.doing(f"{shape}: starting vLLM's own server")
    server = own_server(backend, options)
    began = time.monotonic()
    try:
        server.start()
        report.add(own_start_s=round(time.monotonic() - began, 1))
        report.doing(f"{shape}: vLLM's own server, {streams} streams")
        asyncio.run(service.measure_http(server, streams, 1, 8))
        report.add(own=asyncio.run(service.measure_http(server, streams, rounds, length)))
    finally:
        server.stop()


def kill(server: Any, report: Report) -> None:
    """Kills the replica during a reply. Measures when the engine's processes end and when a new replica replies."""
    import psutil

    children = psutil.Process(server.tree.root.pid).children(recursive=True)
    [replica] = [one for one in children if one.name().startswith("ray::ServeReplica") and "Model" in one.name()]
    engine = replica.children(recursive=True)
    report.doing("kill -9 of the replica")
    threading.Thread(target=ask, args=(server, 2000), daemon=True).start()
    time.sleep(1)
    replica.send_signal(signal.SIGKILL)
    at = time.monotonic()
    _, alive = psutil.wait_procs([replica, *engine], timeout=30)
    found = {"processes": len(engine), "left": len(alive), "ended_s": time.monotonic() - at}
    report.add(kill=found)
    while not ask(server, 2) and time.monotonic() - at < PATIENCE_S:
        time.sleep(0.2)
    report.add(kill={"replaced_s": time.monotonic() - at})
    if alive or report.figures["kill"]["replaced_s"] >= PATIENCE_S:
        report.problem(f"{len(alive)} processes of the killed replica are alive, or none replied in {PATIENCE_S:.0f} s")


def ask(server: Any, tokens: int) -> bool:
    """Sends a request. Returns whether a reply came."""
    body = {"model": "svc-chat", "messages": [{"role": "user", "content": service.QUESTION}], "max_tokens": tokens}
    head = {"authorization": f"Bearer {server.key}", "content-type": "application/json"}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{server.base_url}/v1/chat/completions", data, head)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return bool(json.load(reply)["choices"])
    except (OSError, urllib.error.URLError):
        return False


def own_server(backend: dict[str, Any], options: Options) -> Any:
    """Returns vLLM's own HTTP server with the settings of our backend. The caller starts it."""
    python = vllm_python()
    if python is None:
        raise Skip("vLLM is not installed")
    from bench.harness.servers import Server, ServerError
    from serve_app.engine.config import parse_bytes

    class Own(Server):
        name, title = "vllm-own", "vLLM's own server"
        facts: dict[str, Any] = {}  # noqa: RUF012 -- the base class declares this name

        def command(self) -> list[str]:
            line = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", backend["model"]]
            line += ["--served-model-name", "svc-chat", "--host", "127.0.0.1", "--port", str(self.port)]
            line += ["--dtype", backend["dtype"], "--max-model-len", str(backend["max_context"])]
            line += ["--max-num-seqs", str(backend["max_running"]), "--no-enable-prefix-caching"]
            line += ["--kv-cache-memory-bytes", str(parse_bytes(backend["kv_cache_memory"]))]
            return [*line, "--no-enable-log-requests", "--disable-uvicorn-access-log"]

        def environment(self) -> dict[str, str]:
            # the interpreter's folder has ninja, which compiles kernels
            path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])
            return {**super().environment(), "PATH": path, "VLLM_NO_USAGE_STATS": "1"}

        def wait_until_ready(self, tree: Any) -> None:
            while tree.root.poll() is None:  # no timeout here: the part has a time limit
                try:
                    urllib.request.urlopen(f"{self.base_url}/health", timeout=2).close()
                except OSError:
                    time.sleep(0.2)
                else:
                    return
            raise ServerError(f"vLLM's own server did not start: {tree.last_lines()}")

    return Own(Path(options.work))
