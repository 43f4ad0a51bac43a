"""Loads a model into memory: finds its files, prepares them once, loads and places the weights."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from serve_app.contracts.units import GIB
from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError, first_line
from serve_app.engine.loading import checkpoint, gguf, hub, memory_plan, placement, prepared, weights_cache
from serve_app.engine.loading.prepared import Source, int8_slot
from serve_app.engine.loading.progress import Progress, Say, quiet_transformers
from serve_app.engine.models import llama_weights
from serve_app.engine.models.llama_weights import LlamaWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its tokenizer, and the tokens that end a reply.

    With `dtype: int8`, `weights` holds the decoder: matrices in int8, everything else in float32. `model` is then on
    the meta device, without weights. It has the configuration, the generation defaults and the rotary embedding, whose
    buffers are real and on the weights' device.
    """

    model: Any
    tokenizer: Any
    eos_token_ids: frozenset[int]
    settings: EngineSettings  # including the values chosen during loading
    weights: LlamaWeights | None = None
    fingerprint: str = ""  # see `checkpoint.fingerprint`


def load(settings: EngineSettings, progress: Say = logger.info) -> LoadedModel:
    """Load the model of the settings and place it by `device_map`; `progress` receives lines about the loading.

    Raises:
        ModelError: no such model, a damaged or unsuitable model, or too little memory.
    """
    source = locate(settings, progress)
    chosen = memory_plan.for_model(source.name, source.folder, settings)
    settings = memory_plan.applied(settings, chosen)
    for line in chosen.lines() if chosen is not None else ():
        progress(line)
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    tokenizer = load_tokenizer(source)
    fingerprint = checkpoint.fingerprint(source.folder, settings.dtype)
    check_fingerprint(source, settings, fingerprint)
    weights = None
    if settings.dtype == "int8":
        model, weights = _load_int8(source, settings, progress)
    else:
        model = _load_float(source, settings, progress)
    eos = eos_token_ids(model.generation_config, tokenizer)
    return LoadedModel(model, tokenizer, eos, settings, weights, fingerprint)


def prepare(settings: EngineSettings, progress: Say) -> None:
    """Run the one-time parts of `load` ahead of time and on the CPU: fetch, convert, quantize.

    Raises:
        ModelError: see `load`.
    """
    settings = settings.model_copy(update={"device_map": "cpu", "max_memory": None, "kv_cache_memory": 1})
    source = locate(settings, progress)
    if settings.dtype == "int8":
        _load_int8(source, settings, progress)


def locate(settings: EngineSettings, say: Say) -> Source:
    """The checked folder of the settings' model; fetches or converts it if necessary.

    Raises:
        ModelError: there is no such model, it is damaged, or the settings name a device that does not exist.
    """
    placement.check_devices(settings)
    name = settings.model
    path = Path(name).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        folder = gguf.converted(path, prepared.cache_dir(settings.cache_dir), say)
    elif path.exists():
        folder = path
    elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.suffix.lower() == ".gguf":
        raise ModelError(f"There is no model at {path}: check the setting 'model'.")
    else:
        folder = hub.fetch(name, say, settings.revision)
    if settings.revision is not None and path.exists():
        raise ModelError(f"'revision' is for models on the hub, but {path} is a file or folder: leave it out.")
    checkpoint.check(folder)
    return Source(str(path.absolute()) if path.exists() else name, folder)


def check_fingerprint(source: Source, settings: EngineSettings, fingerprint: str) -> None:
    """Raises ModelError if the settings name a fingerprint that differs from the fingerprint of the files."""
    if settings.fingerprint not in (None, fingerprint):
        raise ModelError(
            f"The files of {source.name} have the fingerprint {fingerprint}, but the settings name "
            f"{settings.fingerprint}: fetch the right files, or change 'fingerprint'."
        )


def load_tokenizer(source: Source) -> Any:
    """The tokenizer of a model. Raises ModelError if it cannot be loaded or has no chat template."""
    from transformers import AutoTokenizer

    with quiet_transformers(), _one_line(f"Can't load the tokenizer of {source.name}"):
        tokenizer = AutoTokenizer.from_pretrained(source.folder)
    if tokenizer.chat_template is None:
        raise ModelError(f"The model {source.name} has no chat template: choose a chat or instruct model.")
    return tokenizer


def _load_float(source: Source, settings: EngineSettings, say: Say, dtype: str | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    with contextlib.ExitStack() as stack:
        stack.enter_context(_one_line(f"Can't load the model {source.name}"))
        places = placement.arguments(settings)
        if placement.may_use_disk(settings):
            parent = settings.offload_folder or prepared.cache_dir(settings.cache_dir) / "offload"
            places["offload_folder"] = str(stack.enter_context(prepared.own_folder(Path(parent).expanduser())))
        with quiet_transformers(say, f"Loading {source.name}"):
            model, report = AutoModelForCausalLM.from_pretrained(
                source.folder,
                dtype=dtype or settings.dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_check_report` reports them
                **places,
            )
    _check_report(source, report, say)
    if away := placement.offloaded_bytes(model, settings):
        say(f"{away / GIB:.2f} GiB of the weights of {source.name} are offloaded: copying them in each step is slow")
    return model


def _check_report(source: Source, report: dict[str, Any], say: Say) -> None:
    """Reject a model with missing weights, which transformers replaces with random numbers.

    Raises:
        ModelError: the files do not hold what config.json describes.
    """
    wrong = sorted(report["missing_keys"]) + sorted(str(key) for key, *_ in report["mismatched_keys"])
    if wrong:
        raise ModelError(
            f"The weights in {source.folder} do not match its config.json: {wrong[0]} is missing or has the wrong "
            f"shape ({len(wrong)} such weights in total). Fetch the model again."
        )
    if extra := sorted(report["unexpected_keys"]):
        say(f"{len(extra)} weights of {source.name} are not used by models of its type, for example {extra[0]}")


def _load_int8(source: Source, settings: EngineSettings, say: Say) -> tuple[Any, LlamaWeights]:
    """A model without weights, and int8 weights from the cache; the float model is loaded only to fill the cache."""
    device = placement.single_device(settings)
    model = _empty_model(source)
    quantized = getattr(model.config, "quantization_config", None) is not None
    if (reason := "it is quantized already" if quantized else llama_weights.why_not(model)) is not None:
        raise ModelError(f"dtype int8 is not possible for {source.name} ({reason}): set dtype to float32 or bfloat16.")
    slot = int8_slot(source, prepared.cache_dir(settings.cache_dir))
    weights = weights_cache.load_or_build(
        slot, llama_weights.shape_of(model.config), device, lambda: _quantize(source, settings, say), say
    )
    model.model.rotary_emb.to(device)
    return model, weights


def _quantize(source: Source, settings: EngineSettings, say: Say) -> LlamaWeights:
    """Quantize the float model on the CPU.

    The model is loaded in its stored type, so its memory-mapped files need no extra memory.
    """
    say(f"Preparing int8 weights of {source.name}, once")
    stored = _load_float(source, settings.model_copy(update={"device_map": "cpu"}), say, dtype="auto")
    counter = Progress(say, f"Quantizing {source.name}", len(stored.model.layers))
    return llama_weights.extract_weights(stored, int8=True, on_layer=counter.at)


def _empty_model(source: Source) -> Any:
    """The model on the meta device, without weights."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with quiet_transformers(), _one_line(f"Can't load the model {source.name}"):
        config = AutoConfig.from_pretrained(source.folder)
        with init_empty_weights():  # buffers such as the rotary frequencies are real
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.tie_weights()
        if (source.folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(source.folder)
    return model.eval()


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Convert any error of a library to a ModelError that begins with `what`."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{what}: {first_line(error)}.") from error


def eos_token_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a reply, according to the tokenizer and `generation_config`, which may be None."""
    ids = getattr(generation_config, "eos_token_id", None)
    own = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in (*own, tokenizer.eos_token_id) if i is not None)


# Tokenizers run in the caller's thread here; the library's thread pool would compete with torch's for the cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
