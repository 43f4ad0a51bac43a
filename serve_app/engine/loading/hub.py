"""Fetches a model from the Hugging Face hub by name, into the hub's local cache."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serve_app.engine.errors import ModelError, first_line
from serve_app.engine.loading.checkpoint import Tensor
from serve_app.engine.loading.progress import Progress, Say

# Not downloaded: pickled weights, weights of other frameworks, subfolders, and `consolidated*.safetensors`, a second
# copy of the weights that many repositories have.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_IGNORED = ["*/*", "consolidated*.safetensors"]


def fetch(name: str, say: Say, revision: str | None = None) -> Path:
    """The local folder of the model `name`. Downloads missing files; cached files also work offline.

    `revision` is a commit, tag or branch; None is the main branch. `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and
    `HF_HUB_OFFLINE` have their usual meaning.

    Raises:
        ModelError: no such model, no access to it, or the hub cannot be reached and the model is not cached.
    """
    from huggingface_hub import snapshot_download

    say(f"Looking for {name} on the hub")
    with _one_line(name, revision):
        folder = snapshot_download(
            name, revision=revision, allow_patterns=_FILES, ignore_patterns=_IGNORED, tqdm_class=_bar(name, say)
        )
    return Path(folder)


def describe(name: str, say: Say) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors of the model `name`, from the headers of its files; no weights are downloaded.

    Raises:
        ModelError: see `fetch`; also if the model has no safetensors.
    """
    from huggingface_hub import HfApi, hf_hub_download

    say(f"Reading the size of {name} on the hub")
    with _one_line(name, None):
        config = json.loads(Path(hf_hub_download(name, "config.json")).read_text(encoding="utf-8"))
        files = HfApi().get_safetensors_metadata(name).files_metadata
    return config, {
        key: Tensor(tensor.dtype, tensor.parameter_count, tensor.data_offsets[1] - tensor.data_offsets[0])
        for file in files.values()
        for key, tensor in file.tensors.items()
    }


@contextlib.contextmanager
def _one_line(name: str, revision: str | None) -> Iterator[None]:
    """Converts the errors of the hub's client to a ModelError that says what to do."""
    import httpx
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        NotASafetensorsRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        SafetensorsParsingError,
    )

    try:
        yield
    except HFValidationError as error:
        raise ModelError(f"{name} is neither a model's folder nor a valid name on the hub: check 'model'.") from error
    except GatedRepoError as error:
        raise ModelError(
            f"The model {name} is gated: accept its terms on the hub, then set HF_TOKEN to a token of that account."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"The hub has no revision {revision} of {name}: check 'revision'.") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"There is no folder {name}, and the hub has no public model of that name: check 'model', "
            "or set HF_TOKEN if it is private."
        ) from error
    except LocalEntryNotFoundError as error:  # also raised for an incomplete cached snapshot
        raise ModelError(
            f"There is no folder {name}, no cached model of that name, and the hub is unreachable "
            f"({_reason(error)}): check the network, or use a folder."
        ) from error
    except (EntryNotFoundError, NotASafetensorsRepoError) as error:
        raise ModelError(
            f"{name} has no config.json, or no weights as safetensors: choose a model that has both."
        ) from error
    except (SafetensorsParsingError, json.JSONDecodeError) as error:
        raise ModelError(f"The files of {name} on the hub are damaged: {first_line(error)}.") from error
    except HfHubHTTPError as error:
        raise ModelError(f"The hub refuses to serve {name}: {first_line(error)}.") from error
    except (OSError, httpx.HTTPError) as error:
        raise ModelError(f"Can't fetch {name} from the hub: {first_line(error)}.") from error


def cached(name: str, revision: str | None = None) -> Path:
    """The folder of the model `name` in the local cache. Downloads nothing. Raises ModelError if it is not cached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_FILES, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        of = f"revision {revision} of {name}" if revision else name
        raise ModelError(f"{of} is not in the local cache: `serve-app models fetch` downloads it.") from error


def _reason(error: BaseException) -> str:
    """The innermost cause in a few words, because this is the cause that a user can fix."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return "HF_HUB_OFFLINE is set" if type(cause).__name__ == "OfflineModeIsEnabled" else first_line(cause)


def _bar(name: str, say: Say) -> type[Any]:
    """A class for the hub's client that reports progress as lines instead of a bar."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    progress = Progress(say, f"Fetching {name}", 1)

    class Lines(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO(), "leave": False, "disable": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self.unit == "B" and self.total:  # the other bars count files
                progress.at(self.n, self.total)

    return Lines
