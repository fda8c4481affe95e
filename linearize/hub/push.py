"""Push a converted folder to the Hub.

A push is decided by `plan_push`, which asks nothing of the network, and carried out by `push` as one commit: the
repository is the old one or the new one, never half of each. An interrupted push goes on where it stopped, for the
client of the Hub sends only what the Hub lacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import SECRET, CheckFailedError, Exit, IncompatibleError, LinearizeError, quoted
from ..plan.plan import Plan
from ..terminal.output import counted, size
from ..terminal.progress import progress
from .download import facts
from .errors import answering, hub_errors

Say = Callable[[str], None]

# What a Hub repository may hold before the first push: it comes with the first, and its web page writes the others.
EXPECTED = (".gitattributes", "README.md", "LICENSE")
# For each answer while files are sent: the Hub puts a large file together before it says a word.
UPLOAD_SECONDS = 120
# What the metadata of a card should have: why it may lack it, and the line to add.
WANTED = {
    "license": ("the source's card names none", "license: other  # or its name on the Hub: apache-2.0, mit, llama3.2"),
    "base_model": ("the source was a local folder", "base_model: USER/NAME  # the source, where it is on the Hub"),
}
TRUST = "Load it with `trust_remote_code=True`, which runs the Python files of this repository."
# What every folder holds that linearize writes.
ALWAYS = ("config.json", "model.safetensors.index.json")
# What reading the files takes beside loading the model in a clean process: 0.8 and 8 s for the demo, on two CPU cores.
LISTED = 0.1


@dataclasses.dataclass(frozen=True)
class Upload:
    """A push, decided: what goes where. `files` are bytes by name; `notes` are what a person should know before."""

    folder: Path
    repo: str
    private: bool
    pr: bool
    message: str
    files: dict[str, int]
    card: str
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything above as plain JSON values."""
        return {**dataclasses.asdict(self), "folder": str(self.folder)}

    def with_card(self, card: str) -> Upload:
        """The same upload with another card, whose bytes are those that are listed."""
        return dataclasses.replace(self, card=card, files=self.files | {"README.md": len(card.encode())})


def plan_push(folder: Path, repo: str, *, trust_remote_code: bool = False, **how: Any) -> Upload:
    """Check a folder and decide what of it is uploaded, as `how` asks `listed_upload`; asks nothing of the Hub.

    Raises LinearizeError: 2 for the name, 3 for a folder that linearize did not write and for a link to a file
    elsewhere, 6 for one that does not verify, whose card cannot be shown, or that holds an access token.
    """
    from ..checkpoint.manifest import check_complete, read_plan
    from ..checkpoint.provenance import check_code
    from ..verify.reload import check_keys

    check_name(repo)
    with progress("push: checking the folder", LISTED + 1) as advance:
        plan = read_plan(folder)
        check_complete(folder, code=Exit.CHECK_FAILED)
        check_code(folder, trust_remote_code)
        upload = listed_upload(folder, plan, repo, **how)
        advance(LISTED)
        check_keys(folder, advance)
    return upload


def listed_upload(
    folder: Path, plan: Plan, repo: str, *, private: bool = False, pr: bool = False, message: str | None = None
) -> Upload:
    """The upload of the files that a folder's linearize.json lists.

    Raises LinearizeError: 3 when it lists none, for a link to a file elsewhere and for weights that are none, 6 for a
    file that is missing or holds an access token, and for a card that cannot be shown.
    """
    from ..checkpoint.atomic import MANIFEST
    from ..checkpoint.card import PLACE
    from ..checkpoint.carried import check_file
    from ..checkpoint.manifest import WEIGHTS, check_complete
    from ..checkpoint.source import read_header

    listed = json.loads((folder / MANIFEST).read_text("utf-8")).get("files", ())
    if MANIFEST not in listed:
        raise IncompatibleError(f"{folder / MANIFEST} does not say which files are the model's. Convert or train again")
    present = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    check_complete(folder, code=Exit.CHECK_FAILED)
    files = {name: present[name].stat().st_size for name in sorted(listed)}
    for name in files:
        if name.endswith(WEIGHTS):  # they may be links to another disk, and whatever they lead to is weights
            read_header(present[name])
        else:
            check_file(present[name], folder)
            check_secrets(present[name])
    notes = check_card(folder / "README.md")
    others = sorted(name for name in present.keys() - set(listed) if not name.startswith("."))
    if others:
        notes.append(f"not uploaded, for linearize did not write them: {', '.join(others)}. hf upload sends them")
    mechanisms = "+".join(sorted({step.mechanism for step in plan.linear}))
    card = (folder / "README.md").read_text("utf-8").replace(PLACE, f'name = "{repo}"')
    message = message or f"Upload {plan.source} with {mechanisms} attention"
    return Upload(folder, repo, private, pr, message, files, "", tuple(notes)).with_card(card)


def results_of(folder: Path, path: Path | None) -> tuple[dict[str, Any] | None, str]:
    """What `linearize eval --tasks -o` wrote of the weights in `folder`, for the card, or None; and why it is left out.

    `path` is the file; without one it is tasks.json of the run whose model `folder` is. Raises LinearizeError (exit 2)
    for a file that was named and cannot be used.
    """
    from ..checkpoint.manifest import identity, is_linearized
    from ..measure.tasks import RESULTS, read_tasks

    if not is_linearized(folder):  # `plan_push` says what it is
        return None, ""
    run = folder.resolve().parent
    named = path or run / RESULTS
    if path is None and not ((run / "run.json").is_file() and named.is_file()):
        return None, ""
    result, wrong = read_tasks(named), ""
    if result["limit"] is not None:
        wrong = f"it has {result['limit']} rows of each task, and a card is about all. Leave out --limit"
    elif result.get("without"):
        wrong = f"the student was measured without its {result['without']}, and a card is about all of it"
    elif result["model"] != identity(folder):
        again = f"linearize eval {quoted(folder)} --tasks NAMES -o {quoted(named)}"
        wrong = f"other weights than those in {folder} were measured. Measure again: {again}"
    if wrong and path is not None:
        raise LinearizeError(f"{named}: {wrong}")
    return (None, f"{named} is not in the card: {wrong}") if wrong else (result, "")


def check_name(repo: str) -> None:
    """Refuse (exit 2) what is no user/repo."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise LinearizeError(f"{repo!r} is no name for a Hub repository: {error}") from error
    if "/" not in repo:
        raise LinearizeError(f"{repo!r} is no name for a Hub repository. Write user/repo, or organisation/repo")


def check_secrets(path: Path) -> None:
    """Refuse (exit 6) a file that holds an access token or a password, without repeating it."""
    from huggingface_hub import get_token

    token = get_token()
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
        if SECRET.search(line) or (token and token in line):
            raise CheckFailedError(f"{path}:{number} holds an access token or a password. Take it out, and revoke it")


def check_card(path: Path) -> list[str]:
    """What the card of a public model should say and this one does not, with the lines to add. Raises LinearizeError
    (exit 6) when it cannot be read, or names a base that is no Hub repository.
    """
    import yaml
    from huggingface_hub import metadata_load
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        data = metadata_load(path) or {}
        bases = data.get("base_model", [])
        for base in [bases] if isinstance(bases, str) else bases:
            validate_repo_id(base)
    except (ValueError, TypeError, yaml.YAMLError, HFValidationError) as error:
        raise CheckFailedError(f"{path}: its metadata cannot be used: {error}") from error
    notes, lacking = [], {key: told for key, told in WANTED.items() if not data.get(key)}
    if lacking:
        names = " and ".join(f"no {key} ({why})" for key, (why, _) in lacking.items())
        lines = [line for _, line in lacking.values()]
        where, lines = ("below the first ---", lines) if data else ("at its top", ["---", *lines, "---"])
        notes.append("\n".join([f"the card names {names}. Add to README.md, {where}:", *lines]))
    if "trust_remote_code" not in path.read_text("utf-8"):
        notes.append(f"the card does not say that loading runs code. Add to README.md:\n{TRUST}")
    return notes


def check_access(repo: str) -> None:
    """Before hours of work: the name is possible, the Hub answers, the token is one, and no other model is there.

    Raises LinearizeError: 2 for the name and for another model, 5 for what the Hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    check_name(repo)
    with _pushing(repo):
        HfApi().whoami()
        with contextlib.suppress(RepositoryNotFoundError):  # the push makes it
            check_foreign(repo, facts(HfApi(), repo), ALWAYS)


def _pushing(repo: str) -> contextlib.AbstractContextManager[None]:
    offline = f"offline: nothing can be pushed to {repo}. Leave out --offline, and unset HF_HUB_OFFLINE"
    return hub_errors(repo, ".", offline)


def push(upload: Upload, say: Say = print) -> dict[str, Any]:
    """Carry a push out; returns `repo`, `commit`, its `url`, and that of the pull request (`pr`, or None).

    Raises LinearizeError: 2 when something else is in the repository, 5 for what the Hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, repo = HfApi(), upload.repo
    with _pushing(repo):
        api.whoami()
        api.create_repo(repo, private=upload.private or None, exist_ok=True)
        stale, seen = check_remote(api, upload)
        operations: list[Any] = [CommitOperationDelete(name) for name in sorted(stale)]
        for name in upload.files:
            content = upload.card.encode() if name == "README.md" else upload.folder / name
            operations.append(CommitOperationAdd(name, content))
        say(f"pushing {counted(len(upload.files), 'file')}, {size(sum(upload.files.values()))}, to {repo}")
        with answering(UPLOAD_SECONDS):
            # Onto what was checked: what someone else pushed meanwhile is not overwritten.
            done = api.create_commit(
                repo, operations, commit_message=upload.message, create_pr=upload.pr, parent_commit=seen
            )
    say(f"pushed {done.pr_url or done.commit_url}")
    return {"repo": repo, "commit": done.oid, "url": done.commit_url, "pr": done.pr_url}


def check_foreign(repo: str, info: Any, names: Iterable[str]) -> None:
    """Refuse (exit 2) a repository with files of these `names` that linearize did not write."""
    from ..checkpoint.atomic import MANIFEST

    present = {file.rfilename for file in info.siblings}
    theirs = sorted((present & set(names)) - set(EXPECTED))
    if theirs and MANIFEST not in present:
        raise LinearizeError(
            f"{repo} holds a model that linearize did not write ({', '.join(theirs[:3])}). "
            "Choose another name, or propose it with --pr"
        )


def check_remote(api: Any, upload: Upload) -> tuple[set[str], str]:
    """Files of an earlier push that this one does not have, and the commit at which this was found.

    Raises LinearizeError: 2 when the repository holds another model, 5 when it is public and was to be private.
    """
    from ..checkpoint.atomic import MANIFEST

    repo, info = upload.repo, facts(api, upload.repo)
    if upload.private and not info.private:
        raise LinearizeError(f"{repo} exists and is public; --private does not change that. Its settings do", Exit.HUB)
    present = {file.rfilename for file in info.siblings}
    if not upload.pr:
        check_foreign(repo, info, upload.files)
    if MANIFEST not in present:
        return set(), info.sha
    earlier = Path(api.hf_hub_download(repo, MANIFEST, revision=info.sha))
    with contextlib.suppress(ValueError, KeyError, TypeError):  # whatever someone made of it
        return present & set(json.loads(earlier.read_text("utf-8"))["files"]) - upload.files.keys(), info.sha
    return set(), info.sha


def push_saved(
    folder: Path, repo: str, trust_remote_code: bool, say: Say, planned: Callable[..., Upload] = plan_push
) -> dict[str, Any]:
    """Push a folder just written, as `planned` decides; when that fails, the message says how to go on."""
    try:
        upload = planned(folder, repo, trust_remote_code=trust_remote_code)
        for note in upload.notes:
            say(f"note: {note}")
        return push(upload, say)
    except LinearizeError as error:
        again = f"{error.message}. The model is in {folder}; push it later: linearize push {quoted(folder)} {repo}"
        raise LinearizeError(again, error.code) from error
