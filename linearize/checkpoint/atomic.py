"""Write a folder or a file so that it appears complete or not at all, even if the process is killed.

Everything goes to a temporary sibling, is synced there, and renamed into place last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from ..errors import LinearizeError, check_file, some, writing
from ..terminal.output import counted

ATTEMPTS = 100  # to lock a folder that others make and remove meanwhile; each fails only when another one was done
MANIFEST = "linearize.json"  # names the files that linearize wrote into a folder


@contextlib.contextmanager
def output_folder(output: Path, overwrite: bool | None, carried: Collection[str] = ()) -> Iterator[Path]:
    """A temporary folder that becomes `output` when the block ends well, and vanishes when it does not.

    With `overwrite` it replaces files that linearize wrote, and those `carried` over by the block; None is no, of a
    command without the option. One process at a time: a lock tells a folder in use from one that a killed process
    left, which is cleared here.
    Raises LinearizeError: 2 when `output` is in the way or in use, 4 for a full disk or what cannot be written.
    """
    output = Path(os.path.realpath(output))  # a link stays, what it points at is replaced
    work, old = _beside(output, "tmp"), _beside(output, "old")
    new_parents = [parent for parent in output.parents if not parent.exists()]
    try:
        with writing(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            with _claimed(work):
                _recover(output, old)
                check_output(output, overwrite, carried)
                with writing(output, inside=work):
                    yield work
                _sync(work)
                check_output(output, overwrite, carried)  # somebody may have put something there meanwhile
                _move_into_place(work, output, old)
    finally:
        with contextlib.suppress(OSError):  # they hold the output, or something else by now
            for parent in new_parents:
                parent.rmdir()


def _beside(output: Path, kind: str) -> Path:
    """The name of a temporary sibling: always the same, so that the next process finds what a killed one left."""
    name = output.name
    if len(os.fsencode(name)) > 200:  # of the 255 bytes that a name may have
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return output.parent / f".{name}.linearize.{kind}"


@contextlib.contextmanager
def scratch_beside(output: Path) -> Iterator[Path]:
    """Within: an empty folder on the disk of `output`, for the block alone. Those of killed processes go first."""
    remove_leftovers(output)
    work = _beside(output, f"{os.getpid()}.tmp")
    with _claimed(work):
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def remove_leftovers(output: Path) -> None:
    """Remove temporary siblings of `output` whose name has the number of a process that no longer lives.

    Left alone are those of other users, links, and what a process on another machine has locked, whose number means
    nothing here.
    """
    begin, end = _beside(output, "").name, ".tmp"
    with contextlib.suppress(OSError):
        for path in list(output.parent.iterdir()):
            number = path.name.removeprefix(begin).removesuffix(end)
            if path.name == f"{begin}{number}{end}" and re.fullmatch("[1-9][0-9]{0,8}", number) and not _lives(number):
                with contextlib.suppress(OSError):
                    _remove_unlocked(path)


def _lives(number: str) -> bool:
    """Whether a process of that number runs."""
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _remove_unlocked(path: Path) -> None:
    """Remove a file or folder of this user that nobody has locked. Raises OSError for a link and a locked one."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_uid == os.geteuid():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        os.close(handle)


@contextlib.contextmanager
def _claimed(work: Path) -> Iterator[None]:
    """`work` as a new and empty folder of this process alone; removed when the block fails."""
    handle = lock_folder(work)
    try:
        for path in work.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        yield
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    finally:
        os.close(handle)


def lock_folder(work: Path) -> int:
    """Create `work` if need be and lock it until the handle is closed.

    Raises LinearizeError (exit 2) when another process has it.
    """
    taken = LinearizeError(
        f"{work} is in use: another linearize writes this output. Wait for it, or choose another -o; "
        "if none is running, remove that folder"
    )
    for _ in range(ATTEMPTS):
        new = False
        with contextlib.suppress(FileExistsError):
            work.mkdir()
            new = True
        try:
            handle = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        free = _try_lock(handle, new)
        if free and work.exists() and os.path.samestat(os.fstat(handle), work.lstat()):
            return handle
        os.close(handle)  # its owner has it, or was done before it could be locked: then try again
        if not free:
            break
    raise taken


def _try_lock(handle: int, new: bool) -> bool:
    """Whether the folder is this process's now; `new` when it made it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: what is there may be in use
        return new
    return new or os.fstat(handle).st_uid == os.geteuid()  # never clear what another user put there


def _recover(output: Path, old: Path) -> None:
    """Of an output that is being replaced, leave one: the new one if it is there, else the old one."""
    if old.exists():
        if output.exists() and any(output.iterdir()):
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(output)


def check_target(folder: Path, output: Path, overwrite: bool) -> None:
    """Refuse an output that is the source's folder, inside it, or around it, and one that is not empty (exit 2). The
    source may be no folder here."""
    readable = folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)  # else whoever reads it says so
    if readable and not separate(folder, output):
        raise LinearizeError(f"-o {output} and the source {folder} must be separate folders")
    check_output(output, overwrite)


def separate(folder: Path, output: Path) -> bool:
    """Whether `output` is not in a model's folder, and neither the folder nor what its links lead to is in `output`."""
    target, place = Path(os.path.realpath(output)), Path(os.path.realpath(folder))
    files = [Path(os.path.realpath(f)) for f in folder.iterdir() if f.is_symlink()]
    return not (_holds(place, target) or any(_holds(target, path) for path in (place, *files)))


def _holds(folder: Path, path: Path) -> bool:
    """Whether real `path` is `folder` or inside, by name or, as under a bind mount, by what is there."""
    places = (path, *path.parents)
    return folder in places or (folder.exists() and any(p.exists() and p.samefile(folder) for p in places))


def check_output(output: Path, overwrite: bool | None, carried: Collection[str] = ()) -> None:
    """Refuse (exit 2) an output that is a file, or a folder with anything that linearize did not write and that is not
    `carried` over."""
    if output.exists() and not output.is_dir():
        raise LinearizeError(f"{output} is a file; choose another -o")
    files = _files(output)
    if not files:
        return
    if not overwrite:
        way = "" if overwrite is None else " --overwrite replaces only what linearize wrote."
        raise LinearizeError(f"{output} has {counted(len(files), 'file')} already.{way} Choose another -o")
    foreign = [name for name in foreign_files(output) if name not in carried]
    if foreign:
        raise LinearizeError(
            f"{output} holds files that linearize did not write ({some(foreign)}). Move them away or choose another -o"
        )


def foreign_files(folder: Path) -> list[str]:
    """Names of the files in a folder that its linearize.json does not list; all, where there is none."""
    ours = set()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        ours = set(json.loads((folder / MANIFEST).read_text("utf-8"))["files"])
    return sorted(_files(folder) - ours)


def _files(folder: Path) -> set[str]:
    return {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_symlink() or not f.is_dir()}


def _move_into_place(work: Path, output: Path, old: Path) -> None:
    """Rename; an old output steps aside first and is removed last."""
    try:
        if output.exists():
            output.rename(old)
        work.rename(output)
        _sync_folder(output.parent)
    finally:
        _recover(output, old)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        # A hard link shares its bytes with the source, which is on disk already.
        if path.is_dir():
            _sync_folder(path)
        elif path.stat().st_nlink == 1:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_result(path: Path, begins: str | bytes, command: str) -> None:
    """Before `command` computes what it will write: refuse (exit 2) a folder, a pipe, and a file that does not begin as
    its results do, which is somebody's; and (exit 4) a folder that lets nobody write."""
    if path.is_dir():
        raise LinearizeError(f"{path} is a folder. Name a file in it")
    nearest = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    begins = begins.encode() if isinstance(begins, str) else begins
    with writing(path):
        if path.exists():
            check_file(path)
            with path.open("rb") as file:
                found = file.read(len(begins))
            if found not in (b"", begins):
                raise LinearizeError(
                    f"{path} is there already, and linearize {command} did not write it. Choose another file, or move "
                    "that one away"
                )
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))


def write_result(path: Path, content: str | bytes) -> int:
    """Write a file, and its folder, whole or not at all, also beside others who write the same one; returns its bytes.
    Raises LinearizeError (exit 4) where that is refused."""
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        _replace(_beside(path, f"{os.getpid()}.tmp"), path, data)
    return len(data)


def write_atomically(path: Path, text: str) -> None:
    """Write beside and rename, so that the file is old or new, never half."""
    with writing(path):
        _replace(path.with_name(path.name + ".tmp"), path, text.encode())


def _replace(work: Path, path: Path, data: bytes) -> None:
    try:
        work.unlink(missing_ok=True)  # a killed process left it, or it is a link to elsewhere
        with work.open("xb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            work.rename(path)
    finally:
        work.unlink(missing_ok=True)
