"""`serve-app models fetch`: downloads models from the hub in advance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.models import app
from serve_app.cli.output import CommandError, UsageError
from serve_app.contracts.units import GIB


@command(
    app,
    "fetch",
    examples=(
        "serve-app models fetch                      every model of config.yaml",
        "serve-app models fetch Qwen/Qwen2.5-7B-Instruct --dtype bfloat16",
        "HF_HOME=/shared/hub serve-app models fetch  for the replicas of all nodes",
    ),
)
def fetch_models(
    session: Session,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Name on the hub.", show_default=False)] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, tag or branch; default: the main branch.")] = None,
    dtype: Annotated[str, typer.Option(help="Type for the printed fingerprint.")] = "float32",
    config: Annotated[Path, typer.Option(help="Config file with the models to fetch, without MODEL.")] = Path(
        "config.yaml"
    ),
) -> None:
    """Download models from the hub to its cache on this machine (HF_HOME). Interrupted downloads resume.

    Prints the commit and the fingerprint, for `revision` and `fingerprint` in config.yaml.
    """
    from serve_app.engine.errors import ModelError
    from serve_app.model.fetch import fetch

    if model is None and revision is not None:
        raise UsageError("--revision needs a MODEL")
    wanted = [(model, revision, dtype)] if model is not None else _models_of(config)
    fetched = []
    for name, its_revision, its_dtype in wanted:
        try:
            fetched.append(fetch(name, its_revision, its_dtype, session.out.progress.log))
        except ModelError as error:
            raise CommandError(str(error), code="model") from None
    session.out.table(
        {
            "data": [
                {
                    "model": one.model,
                    "revision": one.revision,
                    "folder": str(one.folder),
                    "bytes": one.num_bytes,
                    "fingerprint": one.fingerprint,
                }
                for one in fetched
            ]
        },
        ("model", "revision", "GiB", "fingerprint", "folder"),
        [(one.model, one.revision, f"{one.num_bytes / GIB:.2f}", one.fingerprint, str(one.folder)) for one in fetched],
        ids=("revision", "fingerprint", "folder"),
        empty=f"{config} names no model of the hub.",
        footer="The fingerprint applies to the native engine.",
    )


def _models_of(config: Path) -> list[tuple[str, str | None, str]]:
    """Returns the hub name, revision and number type of each model in a config file."""
    from serve_app.settings import ModelArgs, SettingsError, parse, read_config

    try:
        applications = read_config(config).get("applications") or []
        given = [one.get("args") for one in applications if one.get("import_path") == "deployments.apps:model"]
        settings = [parse(ModelArgs, args, f"{config}: args") for args in given]
    except SettingsError as error:
        raise CommandError(str(error), code="settings") from None
    on_hub = [one for one in settings if one.model != "bundled" and not _is_path(one.model)]
    return list(dict.fromkeys((one.model, one.revision, one.dtype) for one in on_hub))


def _is_path(model: str) -> bool:
    return model.startswith((".", "~", "/")) or Path(model).exists() or model.endswith(".gguf")
