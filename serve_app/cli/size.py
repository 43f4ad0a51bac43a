"""`serve-app size`: estimates GPUs, replicas and cost for a model and its users. It calls no service."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.output import CommandError, UsageError

app = typer.Typer()


@command(
    app,
    "size",
    examples=(
        "serve-app size llama-3.1-8b --gpu l40s --users 100 --tokens-per-second 2000 --price 1.90",
        "serve-app size ./models/Qwen2.5-32B --gpu h100 --context 16384 --users 200",
        "serve-app size qwen2.5-7b --gpu l40s --engine native",
        "serve-app size llama-3.3-70b --gpu h100 --gpus 4 --users 50 --replica-tokens 900",
        "serve-app size mixtral-8x7b --memory 96GiB --bandwidth 1800 --users 50",
    ),
)
def size(
    session: Session,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, config.json, or a model name as in the examples.")
    ],
    gpu: Annotated[str, typer.Option(metavar="CARD", help="l4, l40s, a100-80, h100, …")] = "h100",
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a card that --gpu does not know, such as 96GiB.")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(min=1, metavar="GB/S", help="Memory bandwidth of that card.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="GPUs per replica. Default: the number that needs the fewest in total."),
    ] = None,
    engine: Annotated[str, typer.Option(help="vllm or native.")] = "vllm",
    dtype: Annotated[
        str, typer.Option(help="bfloat16 or float32, for the native engine; vLLM takes the type of the files.")
    ] = "bfloat16",
    length: Annotated[int, typer.Option("--context", min=2, help="Tokens per sequence: prompt plus reply.")] = 8192,
    users: Annotated[int, typer.Option(min=1, help="Concurrent sequences.")] = 32,
    tokens_per_second: Annotated[
        float, typer.Option(min=0, help="Output tokens per second, for all users together.")
    ] = 0.0,
    max_running: Annotated[int, typer.Option(min=1, help="Maximum number of running sequences per replica.")] = 128,
    replica_tokens: Annotated[
        float | None, typer.Option(min=0.1, help="Measured tokens per second of one replica.")
    ] = None,
    price: Annotated[float, typer.Option(min=0, metavar="PRICE", help="Price of one GPU per hour.")] = 0.0,
) -> None:
    """Estimate a service: GPUs per replica, sequences that fit, replicas, cost. Lists the assumptions."""
    from serve_app.engine.config import parse_bytes
    from serve_app.engine.errors import ModelError
    from serve_app.engine.loading import sizing  # imported here, because it loads torch

    if engine not in sizing.SHARE_OF_BANDWIDTH:
        raise UsageError(f"--engine {engine}: must be one of {', '.join(sizing.SHARE_OF_BANDWIDTH)}")
    if dtype not in ("bfloat16", "float32"):
        raise UsageError(f"--dtype {dtype}: must be bfloat16 or float32")
    if engine == "vllm" and dtype != "bfloat16":
        raise UsageError("--dtype is for --engine native: vLLM takes the type of the model's files")
    card = sizing.CARDS.get(gpu.lower())
    if memory is not None:
        try:
            card = sizing.Card(parse_bytes(memory), (bandwidth or 0) * 1e9)
        except ValueError as error:
            raise UsageError(f"--memory: {error}") from None
        if bandwidth is None and replica_tokens is None:
            raise UsageError("--memory does not give the card's speed: add --bandwidth or --replica-tokens")
    if card is None:
        raise UsageError(f"--gpu {gpu}: must be one of {', '.join(sizing.CARDS)}, or use --memory")
    wanted = sizing.Wanted(length, users, tokens_per_second, max_running)
    try:
        found = sizing.size(model, wanted, card, engine=engine, dtype=dtype, gpus=gpus, replica_tokens_s=replica_tokens)
    except ModelError as error:
        raise CommandError(str(error), code="does_not_fit") from None
    plan, total = found.plan, found.replicas * found.gpus
    notes = sizing.assumptions(found, card, engine=engine, measured=replica_tokens is not None)
    document: dict[str, Any] = {
        "model": plan.demand.name,
        "gpus_per_replica": found.gpus,
        "weights_bytes": plan.demand.weights,
        "kv_bytes": plan.kv,
        "kv_tokens": plan.kv // plan.demand.kv_token,
        "sequences_per_replica": found.sequences,
        "tokens_per_second_per_replica": round(found.replica_tokens_s),
        "replicas": found.replicas,
        "replicas_for_users": found.for_users,
        "replicas_for_tokens": found.for_tokens,
        "gpus": total,
        "cost_per_hour": round(total * price, 2),
        "assumptions": notes,
    }
    session.out.record(
        document,
        [
            ("GPUs per replica", found.gpus),
            ("sequences per replica", f"{found.sequences:,} of {length:,} tokens"),
            ("tokens/s per replica", round(found.replica_tokens_s)),
            ("replicas", f"{found.replicas:,} (the users need {found.for_users}, the tokens {found.for_tokens})"),
            ("total GPUs", total),
            ("cost per hour", f"{total * price:,.2f}" if price else "add --price"),
        ],
        note="\n".join(["", *plan.lines(), "", "Assumed:", *(f"- {note}" for note in notes)]),
    )
