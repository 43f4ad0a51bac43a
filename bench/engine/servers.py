"""The servers that are compared: how each is started and configured, and how its weights are stored."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.engine import plan
from bench.engine.workloads import Ask
from bench.harness.client import Call
from bench.harness.processes import Tree
from bench.harness.servers import Launched, Server, ServerError, deployment, shipped_config

START_S = 420.0  # vLLM compiles on its first start
CONTEXT = 8192  # tokens; the model's maximum
SEQUENCES = 64  # maximum that vLLM decodes together
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


class EngineServer(Server):
    """A server that takes chat requests and streams its replies."""

    model = "bench"
    batches = True  # runs several requests at once
    pausable = True  # can be stopped with a signal and continued later
    patience_s = 8.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.peak_memory = 0  # bytes
        self.idle_cpu: float | None = None  # processor seconds per second without requests

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of weights that each step reads, as this server stores them."""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def body(self, ask: Ask) -> dict[str, Any]:
        """A streamed request whose reply has exactly `max_tokens` tokens."""
        return {
            "model": self.model,
            "messages": ask.messages,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }

    def call(self, ask: Ask) -> Call:
        """A request as bytes. It asks the server to close the connection after the reply."""
        body = json.dumps(self.body(ask)).encode()
        head = [
            "POST /v1/chat/completions HTTP/1.1",
            f"host: 127.0.0.1:{self.port}",
            "content-type: application/json",
            "accept: text/event-stream",
            "connection: close",
            f"content-length: {len(body)}",
        ]
        if self.key:
            head.append(f"authorization: Bearer {self.key}")
        return Call(self.port, "\r\n".join([*head, "", ""]).encode() + body, ask.max_tokens)

    def wait_until_ready(self, tree: Tree) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if tree.root.poll() is not None:
                raise ServerError(f"{self.name} ended: {tree.last_lines()}")
            try:
                with urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.2)
        raise ServerError(f"{self.name} was not ready within {START_S:.0f} s: {tree.last_lines()}")


class Ours(Launched, EngineServer):
    """The whole service: launcher, HAProxy, gateway with an API key, limiter, ledger, engine."""

    pausable = False  # its processes check one another with timeouts, so a pause looks like a failure
    patience_s = 25.0
    model = "svc-chat"

    def __init__(
        self, folder: Path, overrides: Mapping[str, Any], name: str = plan.OURS, title: str = "serve-app"
    ) -> None:
        self.name, self.title = name, title
        super().__init__(folder)
        self.home = folder / "home"  # shared by all runs: the model is converted once
        self._config = shipped_config()
        # One account sends the whole load: its limits are lifted, and its requests may wait as long as with the peers.
        deployment(self._config, "Limiter")["user_config"] = {
            "contract": {"rpm": 10**6, "tpm": 10**9, "concurrency": 1024},
            "pressure": {"target_s": 60.0, "prefill_target_s": 600.0, "deadline_s": 3600.0},
        }
        model = deployment(self._config, "Model")
        model["autoscaling_config"] |= {"min_replicas": 1, "max_replicas": 1}  # two replicas would compete for cores
        model["max_ongoing_requests"] = 256
        [backend] = [one for one in self._config["applications"] if one["import_path"] == "deployments.apps:model"]
        backend["args"] |= {"max_running": 64, **overrides}
        self.args: dict[str, Any] = backend["args"]

    def config(self) -> dict[str, Any]:
        return self._config

    def wait_until_ready(self, tree: Tree) -> None:
        super().wait_until_ready(tree)
        _, self.key = self.new_account("bench", "1000")

    def weight_bytes(self) -> int:
        return parameters(self.model_folder) * BYTES[self.args["dtype"]]

    @property
    def model_folder(self) -> Path:
        """The converted model. All peers except llama.cpp use it too."""
        from serve_app.model.bundled import NAME

        return self.home / "models" / NAME

    @property
    def facts(self) -> dict[str, Any]:
        return {"settings": self.args}


class Transformers(EngineServer):
    """`transformers serve`, one request at a time."""

    name = "transformers"
    title = "transformers serve"
    batches = False

    def __init__(self, folder: Path, peer: dict[str, Any], model_folder: Path) -> None:
        super().__init__(folder)
        self.peer, self.model = peer, str(model_folder)

    def command(self) -> list[str]:
        program = Path(self.peer["python"]).with_name("transformers")
        command = [str(program), "serve", self.model, "--host", "127.0.0.1", "--port", str(self.port)]
        return [*command, "--device", "cpu", "--log-level", "error"]

    def body(self, ask: Ask) -> dict[str, Any]:
        # The server rejects `stream_options` but reports usage. `generation_config` disables the end-of-sequence token.
        generation = {"eos_token_id": -1, "pad_token_id": 2, "max_new_tokens": ask.max_tokens}
        generation["do_sample"] = ask.temperature > 0
        return {
            "model": self.model,
            "messages": ask.messages,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "stream": True,
            "generation_config": json.dumps(generation),
        }

    def weight_bytes(self) -> int:
        return parameters(Path(self.model)) * BYTES["float32"]

    @property
    def facts(self) -> dict[str, Any]:
        return {"version": self.peer["version"], "torch": self.peer["torch"], "dtype": "float32"}


class ContinuousBatching(Transformers):
    """`transformers serve --continuous-batching`."""

    name = "transformers-cb"
    title = "transformers serve --continuous-batching"
    batches = True

    def command(self) -> list[str]:
        # The default takes nine tenths of the machine's memory for the KV cache.
        return [*super().command(), "--continuous-batching", "--cb-max-memory-percent", "0.15"]


class LlamaCpp(EngineServer):
    """llama.cpp's C++ server on the bundled Q4_1 file."""

    name = "llama-cpp"
    title = "llama.cpp server"

    def __init__(self, folder: Path, peer: dict[str, Any], gguf: Path, slots: int) -> None:
        super().__init__(folder)
        self.peer, self.gguf, self.slots = peer, gguf, slots

    def command(self) -> list[str]:
        command = [self.peer["server"], "--model", str(self.gguf), "--host", "127.0.0.1", "--port", str(self.port)]
        threads = str(len(os.sched_getaffinity(0)))
        # Each slot has a full context, 3 GB of cache for 16 slots. A shared context would need less but be slower.
        context = str(CONTEXT * self.slots)
        command += ["--threads", threads, "--parallel", str(self.slots), "--ctx-size", context, "--no-kv-unified"]
        return [*command, "--no-webui"]

    def weight_bytes(self) -> int:
        return self.gguf.stat().st_size

    @property
    def facts(self) -> dict[str, Any]:
        return {"version": self.peer["version"], "build": self.peer["flags"], "dtype": "Q4_1", "slots": self.slots}


class Vllm(EngineServer):
    """vLLM's CPU build."""

    name = "vllm"
    title = "vLLM (CPU build)"
    patience_s = 15.0

    def __init__(self, folder: Path, peer: dict[str, Any], model_folder: Path, dtype: str) -> None:
        super().__init__(folder)
        self.peer, self.model, self.dtype = peer, str(model_folder), dtype

    def command(self) -> list[str]:
        command = [self.peer["python"], "-m", "vllm.entrypoints.cli.main", "serve", self.model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", self.dtype]
        return [
            *command,
            "--max-model-len",
            str(CONTEXT),
            "--max-num-seqs",
            str(SEQUENCES),
            "--disable-uvicorn-access-log",
        ]

    def environment(self) -> dict[str, str]:
        cores = sorted(os.sched_getaffinity(0))
        # vLLM's documentation recommends Intel's OpenMP, which is installed with vLLM but not loaded by default.
        openmp = Path(self.peer["python"]).parents[1] / "lib" / "libiomp5.so"
        preload = {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
        return {
            **super().environment(),
            **preload,
            "VLLM_CPU_KVCACHE_SPACE": "3",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # by default, vLLM leaves one core to its front end
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(self.folder / "vllm-cache"),
        }

    def weight_bytes(self) -> int:
        return parameters(Path(self.model)) * BYTES[self.dtype]

    @property
    def facts(self) -> dict[str, Any]:
        return {"version": self.peer["version"], "torch": self.peer["torch"], "dtype": self.dtype}


class OnVllm(Ours):
    """The whole service on vLLM, with the same threads, cache memory and number of sequences as `vllm serve`."""

    title = "serve-app on vLLM"
    patience_s = 40.0

    def __init__(self, folder: Path, vllm: Vllm) -> None:
        super().__init__(folder, {}, plan.ON_VLLM, self.title)
        self.args.clear()
        self.args |= {"model": "bundled", "engine": "vllm", "dtype": vllm.dtype, "kv_cache_memory": "3GiB"}
        self.args |= {"max_running": SEQUENCES, "max_waiting": SEQUENCES, "interpreter": vllm.peer["python"]}
        # The environment of `vllm serve`, to share its cache of compiled kernels.
        own = {name: value for name, value in vllm.environment().items() if os.environ.get(name) != value}
        runtime = {"py_executable": vllm.peer["python"], "env_vars": own}
        deployment(self._config, "Model")["ray_actor_options"] = {"num_cpus": 1, "runtime_env": runtime}


def parameters(model_folder: Path) -> int:
    """Counts the parameters of the model in a folder of safetensors. Tied parameters are stored once and count once."""
    total = 0
    for path in model_folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                size = 1
                for length in tensor["shape"]:
                    size *= length
                total += size
    return total
