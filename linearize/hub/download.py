"""Download a model from the Hub into its cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import IncompatibleError, in_repository, near_path
from .errors import hub_errors, unreached


def download(
    model: str, revision: str | None, names: Iterable[str], weights: Callable[[Path], list[list[str]]] | None = None
) -> tuple[Path, str]:
    """The snapshot of a Hub repository in the cache, and its commit: files that match `names`, and weights.

    `weights` names the files of each format, best first, from what was downloaded before them; the first format that
    is complete is enough. Raises LinearizeError: 3 for a name that is no repository's, 5 for what the Hub refuses.
    """
    from huggingface_hub.errors import HFValidationError

    near = near_path(Path(model).expanduser(), "*/")
    offline = f"no such folder {model!r}, and offline no such model is cached.{near} Fetch it once: hf download {model}"
    try:
        with hub_errors(model, f" and there is no such folder.{near}", offline, revision):
            # A * also stands for a slash: code in folders would run when transformers loads a loop of generation.
            patterns = [*names, "README.md"]
            away = unanswered(model, revision)
            folder = snapshot(model, away, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*.py"])
            for files in weights(folder) if weights else ():
                # Of that commit, whatever the branch has become meanwhile.
                snapshot(model, away, revision=folder.name, allow_patterns=files)
                if all((folder / file).exists() for file in files):
                    break
    except HFValidationError as error:
        near = near or in_repository(model)
        message = f"no such folder {model!r}, and it is no Hub id (user/repo){near and '.'}{near}"
        raise IncompatibleError(message) from error
    return folder, folder.name


def unanswered(repo: str, revision: str | None = None, *, dataset: bool = False) -> Exception | None:
    """Why the Hub gives no answer in time about a model or a `dataset`, None where it does; `snapshot_download` would
    wait without an end, and `load_dataset` asks again for 23 seconds."""
    from huggingface_hub import HfApi

    try:
        facts(HfApi(), repo, revision, "dataset" if dataset else "model")
    except Exception as error:
        return error if unreached(error) else None  # a refusal meets snapshot_download too, which may have a copy
    return None


def facts(api: Any, repo: str, revision: str | None = None, kind: str = "model") -> Any:
    """`model_info`, or `dataset_info`, with a time limit; without one it can wait for ever."""
    from huggingface_hub import constants

    ask = api.dataset_info if kind == "dataset" else api.model_info
    return ask(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)


def snapshot(model: str, away: Exception | None, **wanted: Any) -> Path:
    """`snapshot_download`; of a Hub that is `away` what lies in the cache, and where nothing does, that error."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=away is not None, **wanted))
    except LocalEntryNotFoundError:
        if away is None:
            raise
        raise away from away.__cause__
