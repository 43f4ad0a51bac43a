"""Measures the whole service and its peers: `make bench-engine`, or `python -m bench.engine --help`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from bench.engine import plan, report
from bench.engine.servers import ContinuousBatching, EngineServer, LlamaCpp, OnVllm, Ours, Transformers, Vllm
from bench.engine.session import Session
from bench.harness.command import PEERS, ROOT, completed, say
from bench.harness.peers import installed
from bench.harness.servers import ServerError
from serve_app.model.bundled import ensure_bundled_model

WITHOUT_SPECULATION = {"speculation_rows": 0}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if there are results. Raises SystemExit: 1 after a failure, 130 after Ctrl-C."""
    options = _options(arguments)
    if options.render:
        results = json.loads(options.render.read_text())
    else:
        results = completed(lambda: measure(options), (ServerError,))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(report.markdown(results))
    if options.docs:
        report.write_docs(options.docs, results)
        say(f"updated {options.docs}")
    return 0 if results["records"] else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="1 and 4 clients, one round, short windows: a few minutes")
    size.add_argument("--full", action="store_true", help="long prompts at every number of clients, long windows")
    parser.add_argument("--only", nargs="+", choices=plan.SERVERS, help="servers; default: all that are installed")
    parser.add_argument("--workloads", nargs="+", choices=plan.WORKLOADS, default=list(plan.WORKLOADS))
    parser.add_argument("--clients", nargs="+", type=int, help="numbers of clients for the short and the long workload")
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--seed",
        default=f"{time.time_ns():x}",
        help="seed of the prompts: use one seed to compare two versions; default: a new one for each run",
    )
    parser.add_argument("--least", type=float, metavar="SECONDS", help="minimum duration of one measurement")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="after this time, no server's turn begins; default: 30"
    )
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder with the installed peers; default: .bench")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override an engine setting of serve-app"
    )
    parser.add_argument("--slots", type=int, default=16, help="slots of llama.cpp; default: 16")
    parser.add_argument("--vllm-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all results to OUT")
    parser.add_argument("--render", type=Path, metavar="IN", help="measure nothing: render results written by --json")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="update this document, such as docs/benchmarks.md")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the benchmark and returns the results that `--json` writes."""
    scope = plan.QUICK if options.quick else plan.FULL if options.full else plan.USUAL
    scope = replace(scope, workloads=tuple(options.workloads))
    if options.clients:
        scope = replace(scope, clients=tuple(options.clients), long_clients=tuple(options.clients))
    if options.least:
        scope = replace(scope, least_s=options.least, most_s=max(scope.most_s, options.least))
    if options.rounds:
        scope = replace(scope, rounds=options.rounds)
    if options.only:
        scope = replace(scope, servers=tuple(name for name in plan.SERVERS if name in options.only))
    folder: Path = options.peers.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    servers, missing = find_servers(folder, options, scope)
    if not servers:
        raise ServerError(f"none of the chosen servers is installed: {missing}")

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ensure_bundled_model(folder / "home", say) / "tokenizer.json"))
    facts = _machine()
    names = " ".join(server.name for server in servers)
    say(f"memory is read at {facts['read_bytes_per_s'] / 1e9:.1f} GB/s; servers: {names}")
    began = time.time()
    session = Session(
        servers,
        scope,
        lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
        60 * (options.minutes or (120 if options.full else 30)),
        options.seed,
    )
    session.run()
    # The faster of two measurements: another program may have used bandwidth during one of them.
    facts["read_bytes_per_s"] = max(facts["read_bytes_per_s"], _machine()["read_bytes_per_s"])
    return {
        "machine": facts,
        "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
        "seconds": time.time() - began,
        "seed": options.seed,
        "rounds": scope.rounds,
        "window_s": [scope.least_s, scope.most_s],
        "cut_short": session.cut_short,
        "servers": {
            server.name: {
                "title": server.title,
                "facts": server.facts,
                "batches": server.batches,
                "weight_bytes": server.weight_bytes(),
                "peak_memory_bytes": server.peak_memory,
                "idle_cpu": server.idle_cpu,
            }
            for server in servers
            if server.name not in session.missing
        },
        "missing": {**missing, **session.missing},
        "records": session.records,
    }


def find_servers(
    folder: Path, options: argparse.Namespace, scope: plan.Scope
) -> tuple[list[EngineServer], dict[str, str]]:
    """The chosen servers that are installed, and why the others are missing."""
    overrides = dict(_setting(text) for text in options.set)
    ours = Ours(folder, overrides)
    names = ("gguf", "transformers", "llama_cpp", "vllm")
    peers = {name: facts for name in names if (facts := installed(folder, name)) is not None}
    servers: list[EngineServer] = []
    missing: dict[str, str] = {}
    for name in scope.servers:
        needs = {"llama-cpp": ("llama_cpp", "gguf"), "vllm": ("vllm",), plan.ON_VLLM: ("vllm",)}.get(
            name, ("transformers",)
        )
        if name == plan.OURS:
            servers.append(ours)
        elif name == plan.PLAIN:
            servers.append(Ours(folder, overrides | WITHOUT_SPECULATION, plan.PLAIN, "serve-app without speculation"))
        elif not peers.keys() >= set(needs):
            missing[name] = "not installed: make bench-engine-peers"
        elif name == "llama-cpp":
            servers.append(LlamaCpp(folder, peers["llama_cpp"], Path(peers["gguf"]["gguf"]), options.slots))
        elif name in ("vllm", plan.ON_VLLM):
            bare = Vllm(folder, peers["vllm"], ours.model_folder, options.vllm_dtype)
            servers.append(bare if name == "vllm" else OnVllm(folder, bare))
        else:
            kind = Transformers if name == "transformers" else ContinuousBatching
            servers.append(kind(folder, peers["transformers"], ours.model_folder))
    return servers, missing


def _machine() -> dict[str, Any]:
    """Describes the machine in a separate process, so that torch and its threads end before the load."""
    command = [sys.executable, "-m", "bench.harness.machine"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def _setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, yaml.safe_load(value)


if __name__ == "__main__":
    sys.exit(main())
