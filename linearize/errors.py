"""The error class for users' mistakes, the exit codes of the command line, and the removal of secrets from messages."""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What the machine refuses, whatever was asked of it; any other OSError may be a bug.
REFUSED: tuple[int, ...] = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
REFUSED += (errno.EBUSY, errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ENOMEM)
# As torch says it: of the CPU, of a CUDA device, of a library that runs there.
FULL_MEMORY = re.compile(
    "allocate memory|not enough memory|out of memory|_STATUS_ALLOC_FAILED|(calculation|multiplication) overflow"
)
# torch.save and numpy's tofile forget why a write was cut short.
FULL_DISK = re.compile(r"PytorchStreamWriter failed|unexpected pos|\d+ requested and \d+ written")
# Access tokens of the Hub (34 characters; fewer may be a name), and the user part of an address, often a token alone.
SECRET = re.compile(r"\bhf_[A-Za-z0-9]{30,}|(?<=://)(?!git@)[^\s/@'\"]+(?=@)")
SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")


# What parsing may raise of a file that was damaged, or that somebody edited.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class Exit(IntEnum):
    """Documented exit codes; stable once shipped."""

    OK = 0
    BUG = 1
    USAGE = 2
    INCOMPATIBLE = 3
    RESOURCE = 4
    HUB = 5
    CHECK_FAILED = 6
    INTERRUPTED = 130
    CLOSED = 141  # as of a program that SIGPIPE ends


class LinearizeError(Exception):
    """A mistake or an obstacle that the user can act on: printed as one message, never as a traceback.

    `message` names what was asked, what was found and what to do next; `code` is the exit code, that of its class
    unless given.
    """

    usual = Exit.USAGE

    def __init__(self, message: str, code: Exit | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = self.usual if code is None else code


class IncompatibleError(LinearizeError):
    """Model, mechanism, data or file do not fit together (exit 3)."""

    usual = Exit.INCOMPATIBLE


class ResourceError(LinearizeError):
    """Disk, memory, a device, a file or a package is missing (exit 4)."""

    usual = Exit.RESOURCE


class CheckFailedError(LinearizeError):
    """A check failed, or a number is not finite (exit 6)."""

    usual = Exit.CHECK_FAILED


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest of `known`, or an empty string when nothing is near."""
    near = nearest(name, known)
    return f" Did you mean {near!r}?" if near else ""


def check_choice(option: str, value: str, choices: Sequence[str]) -> str:
    """`value`, of an option that has these choices alone. Raises LinearizeError (exit 2) for another one."""
    if value not in choices:
        raise LinearizeError(f"{option} {value}: choose {', '.join(choices)}.{did_you_mean(value, choices)}")
    return value


def some(names: list[str]) -> str:
    """The first three of `names`, and whether there are more."""
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def near_path(path: Path, pattern: str = "*") -> str:
    """` Did you mean 'folder/x'?` for the nearest name beside `path` of those that match, or an empty string.

    The folder is that of `path`: its last name alone would be looked for somewhere else.
    """
    names = {other.name for other in path.parent.glob(pattern)} - {path.name}  # itself: a link to nothing
    near = nearest(path.name, sorted(names))
    return f" Did you mean {str(path.with_name(near))!r}?" if near else ""


def quoted(word: object) -> str:
    """A path or a name within a command that a message names: as a shell takes it."""
    return shlex.quote(str(word))


def in_repository(name: str) -> str:
    """What to do about `user/repo/folder`, a model below the top of a repository, else an empty string: transformers
    looks for the code of a model at the top, with `subfolder`, too."""
    user, _, rest = name.partition("/")
    repo, _, inner = rest.partition("/")
    if not inner or user in ("", "~") or os.path.exists(user):  # a path here that was mistyped
        return ""
    fetched = f"hf download {user}/{repo} --include '{inner}/*' --local-dir DIR"
    return f" On the Hub a model stands at the top of its repository: {fetched}, then give DIR/{inner}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name of `known` that is most like `name`, or None when nothing is near."""
    written = {one.lower(): one for one in known}
    begun = [one for one in written if name and one.startswith(name.lower())]
    if begun:  # a100 is no mistyped h100, but the beginning of a100-80g
        return written[min(begun, key=len)]
    near = difflib.get_close_matches(name.lower(), written, n=1, cutoff=0.6)
    return written[near[0]] if near else None


def absent(path: Path, what: str = "no such file", then: str = "") -> LinearizeError:
    """The error (exit 2) for a file or folder that is not there; it names the nearest one beside it."""
    rest = f"{near_path(path)} {then}".rstrip()
    if path.is_symlink():
        rest = f" It is a link to {os.path.realpath(path)}, which is not there.{rest}"
    return LinearizeError(f"{what} {str(path)!r}" + (f".{rest}" if rest else ""))


def holds_model(folder: Path) -> bool:
    """Whether a folder has the config of a model or pipeline; one that may not be read may have."""
    found = (os.path.exists(folder / name) for name in ("config.json", "model_index.json"))
    return not os.access(folder, os.X_OK) or any(found)


def no_model(folder: Path) -> LinearizeError:
    """The error (exit 3) for a folder that is absent or has no config.json; it says where the model may be."""
    if folder.exists():
        inside, files = folder / "final", sorted(folder.glob("*.gguf"))
        there = f". The model of this run is {inside}" if (inside / "config.json").exists() else ""
        there = f". A GGUF file is given by its name: {files[0]}" if files else there
        message = f"{folder} has no config.json: not a Transformers model folder{there}"
    else:
        message = absent(folder, "no such folder").message
    return IncompatibleError(message)


def no_such_run(place: Path) -> LinearizeError:
    """The error (exit 2) for the folder of a run, or a file with figures, that is not there."""
    return absent(place) if place.suffix == ".json" else absent(place, "no such run", "linearize runs lists runs")


def check_runs(folder: Path) -> None:
    """Raise LinearizeError (exit 2) unless this is a folder, which may hold runs."""
    if not folder.is_dir():
        raise LinearizeError(f"{folder} is no folder. Give the one with your runs; linearize finetune makes runs/")


def check_file(path: Path, code: Exit = Exit.USAGE) -> None:
    """Raise LinearizeError with that exit code for a pipe, a socket or a device: reading one may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise no_file(path, code)


def existing_folder(path: Path) -> Path:
    """`path` in full, or the nearest folder above it that is there: on whose disk it will be."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.is_dir())


def no_file(path: Path, code: Exit) -> LinearizeError:
    """The error for a pipe, a device, or a link to one or to nothing, where a file should be."""
    what = f"a link to {os.path.realpath(path)}" if path.is_symlink() else "a pipe or a device"
    return LinearizeError(f"{path} is {what}: not a file. Remove it or replace it", code)


def reason_of(error: BaseException) -> str:
    """The first line of an error, the second too where the first announces it; else its name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]).rstrip(",") if lines[0].endswith(":") else lines[0]


def redact(text: str) -> str:
    """`text` with access tokens and passwords replaced by `***`: messages and cards go through here.

    Files that are read back do not: a short key may be part of a name in them.
    """
    for value in _own_secrets():
        text = text.replace(value, "***")
    return SECRET.sub("***", text)


def is_secret(text: str) -> bool:
    """Whether `text` holds what looks like an access token or a password, or is one of the environment's."""
    return bool(SECRET.search(text)) or text in _own_secrets()


def _own_secrets() -> list[str]:
    """Those of the environment; nothing shorter than 8 characters, which would be found everywhere."""
    return [value for value in (os.environ.get(variable, "") for variable in SECRET_VARIABLES) if len(value) >= 8]


def os_error(error: BaseException) -> OSError | None:
    """The operating system's refusal behind `error`, which safetensors and torch wrap; None when there is none."""
    if isinstance(error, LinearizeError) or (isinstance(error, OSError) and error.errno is not None):
        return error if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and FULL_MEMORY.search(str(error))):
        return OSError(errno.ENOMEM, "CUDA out of memory" if "CUDA" in str(error) else "out of memory")
    found = re.search(r"\(os error (\d+)\)", str(error))
    if found:
        return OSError(int(found[1]), os.strerror(int(found[1])))
    if isinstance(error, RuntimeError | OSError) and FULL_DISK.search(str(error)):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return error if isinstance(error, OSError) else None


def lacking(traceback: str) -> str | None:
    """`disk` or `memory`, when that is what a child process ran out of, by the traceback that it printed; else None."""
    last = re.split(r"^(?=[\w.]*Error\b)", traceback, flags=re.MULTILINE)[-1]
    numbers = {int(number) for number in re.findall(r"(?:\[Errno |\(os error )(\d+)", last)}
    if numbers & set(FULL) or FULL_DISK.search(last):
        return "disk"
    if errno.ENOMEM in numbers or FULL_MEMORY.search(last) or re.search("^MemoryError", last, re.MULTILINE):
        return "memory"
    return None


@contextlib.contextmanager
def writing(what: Path, then: str = "", inside: Path | None = None) -> Iterator[None]:
    """Within: whatever the system refuses becomes `cannot write WHAT: ...` (exit 4).

    With `inside`, the folder where all is written, a file elsewhere is one that could not be read.
    """
    try:
        yield
    except Exception as error:
        refused = os_error(error)
        if refused is None:
            raise
        full = refused.errno in FULL
        if inside and not full and isinstance(refused.filename, str | os.PathLike) and refused.filename2 is None:
            read = Path(refused.filename)
            if read != inside and inside not in read.parents:
                raise ResourceError(f"cannot read {read}: {refused.strerror or refused}") from error
        room = ". Make room, and run the same command again" if full else ""
        raise ResourceError(f"cannot write {what}: {_reason(refused)}{room}{then}") from error


@contextlib.contextmanager
def undamaged(path: Path, then: str) -> Iterator[None]:
    """Within: a file that this program wrote is read; raises LinearizeError (exit 2) when it is no longer like that."""
    try:
        yield
    except (*MALFORMED, FileNotFoundError) as error:
        raise LinearizeError(f"{path} is damaged ({type(error).__name__}: {error}). {then}") from error


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file that this program wrote. Raises what `undamaged` tells, also for another value."""
    return dict(**json.loads(path.read_text("utf-8")))


def leaves(value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """What JSON holds that is no mapping and no list, or an empty one, each with its keys, in order."""
    left: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while left:  # no recursion: what others wrote may be nested as deep as they like
        keys, value = left.pop()
        if isinstance(value, dict | list) and value:
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            left += [((*keys, key), item) for key, item in inner][::-1]
        else:
            yield keys, value


def resource_error(error: BaseException) -> LinearizeError | None:
    """What to say (exit 4) of an error that nobody caught: None unless the machine refused and it can be no bug."""
    refused = os_error(error)
    if refused is None or refused.errno not in FULL + REFUSED:
        return None
    return ResourceError(_reason(refused))


def _reason(refused: OSError) -> str:
    message = "no space left on the disk" if refused.errno in FULL else refused.strerror or str(refused)
    if refused.errno == errno.EFBIG:
        message = "the file is larger than the disk's file system, or the limit of ulimit -f, allows"
    return f"{message} ({refused.filename})" if refused.filename else message
