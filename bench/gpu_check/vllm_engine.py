"""Measures vLLM through our adapter, with the first of the model shapes. Tests the engines' contract."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from bench.gpu_check import service
from bench.gpu_check.correctness import LENGTHS, REPLY, judge, pytest_figures
from bench.gpu_check.part import Options, Report, Skip
from bench.gpu_check.parts import ROOT

CONTRACT = ("test_counts.py", "test_sharing.py", "test_text.py")
_BUNDLED = "models/smollm2-135m-instruct/model.safetensors"


def run(options: Options, report: Report) -> None:
    """Measures the first shape, then runs some of the tests for the engines' contract."""
    began = time.monotonic()
    report.doing("loading vLLM")
    import torch
    import vllm
    from vllm.platforms import current_platform

    from bench.gpu_check import models
    from bench.gpu_check.engine import Load
    from serve_app.engine.vllm_adapter.start import start
    from serve_app.engine.vllm_adapter.vllm_settings import VllmSettings

    on_cpu = current_platform.is_cpu()
    if options.on_gpu and on_cpu:
        raise Skip(f"vLLM {vllm.__version__} is the CPU build: make engine-vllm ARGS='--device cuda'")
    if not options.on_gpu and not on_cpu:
        raise Skip(f"vLLM {vllm.__version__} is the CUDA build, and the device is cpu")
    shape, load = options.shapes[0], Load() if options.on_gpu else Load(4, 8)
    report.add(version=vllm.__version__, shape=shape, dtype=options.dtype, sequences=load.sequences)
    report.doing(f"{shape}: writing the model")
    folder = models.model_folder(shape, options)
    report.doing(f"{shape}: starting vLLM")
    given = {"model": str(folder), "dtype": options.dtype, "kv_cache_memory": models.kv_cache_memory(options)}
    settings = models.EngineSettings(**given, max_running=64, max_waiting=64, max_context=2048, prefix_reuse=False)
    engine = start(settings, VllmSettings(), 1 if options.on_gpu else 0, progress=lambda text: report.doing(text))
    report.add(start_s=round(time.monotonic() - began, 1))
    try:
        config = models.LlamaConfig.from_pretrained(folder)
        asked = models.prompts(config.vocab_size, [models.PROMPT] * load.sequences)
        report.doing(f"{shape}: warming up")
        models.generate(engine, asked, 8)
        report.doing(f"{shape}: one sequence")
        whole, first = models.generate(engine, asked[:1], load.length), models.generate(engine, asked[:1], 1)
        report.add(step_ms=(whole - first) / (load.length - 1) * 1e3)
        report.doing(f"{shape}: {load.sequences} sequences")
        report.add(tokens_s=load.sequences * load.length / models.generate(engine, asked, load.length))
        report.doing(f"{shape}: the load of the whole service")
        asyncio.run(service.measure_bare(engine, service.load(options)[0], 1, 8))
        report.add(service_load=asyncio.run(service.measure_bare(engine, *service.load(options))))
        report.doing(f"{shape}: log-probabilities")
        short = models.prompts(config.vocab_size, LENGTHS)
        said = models.replies(engine, short, REPLY)
        reference = models.make_model(shape, torch.device(options.device), getattr(torch, options.dtype))
        judge(report, options.dtype, shape, reference, short, said)
    finally:
        engine.close()
    contract(options, report, options.limit_s - (time.monotonic() - began) - 10)


def contract(options: Options, report: Report, limit_s: float) -> None:
    """Runs tests of the engines' contract if pytest, its plugins and the bundled model are installed."""
    report.doing("the engines' contract")
    homes = [os.environ.get("SERVE_APP_TEST_HOME"), ROOT / ".serve-app" / "test", ROOT / ".serve-app"]
    home = next((Path(home) for home in homes if home and (Path(home) / _BUNDLED).is_file()), None)
    absent = [name for name in ("pytest", "pytest_asyncio", "hypothesis") if find_spec(name) is None]
    if home is None or absent or limit_s < 30:
        why = f"{', '.join(absent)}: not installed" if absent else "no time left"
        report.add(contract=f"skipped: {why if home else 'the bundled model is not here (make setup)'}")
        return
    os.environ["SERVE_APP_TEST_HOME"] = str(home)
    tests = [f"tests/engine_contract/{name}" for name in CONTRACT]
    found = pytest_figures(sys.executable, tests, options.work, limit_s)
    report.add(contract=found)
    if found["failed"]:
        report.problem(f"the engines' contract: {found['summary']}")
