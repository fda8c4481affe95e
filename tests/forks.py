"""Commands in forked children of one warm process, so that torch is imported once and not for each of them.

    python tests/forks.py     reads a JSON list of tasks a line, runs them at the same time, answers with a list

A child counts the moments at which it changes files below `root`; it can be killed or interrupted at each of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CHANGES = {"open", "os.rename", "os.link", "os.mkdir", "os.rmdir", "os.remove"}
NO_MOUNT = 98
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass
class Task:
    """One command. At moment number `at` (from 1; 0 is never) it gets `signal`."""

    arguments: list[str]
    root: str = "/"
    at: int = 0
    signal: int = signal.SIGKILL
    environment: dict[str, str] = field(default_factory=dict)
    file_bytes: int = 0  # the largest file that it may write; 0 is any
    as_user: bool = False  # whether file permissions bind, as they do not bind root
    mount: tuple[str, str] | None = None  # a folder, and the options of a small disk that is mounted there
    folder: str = "."
    script: str = ""  # what runs in place of the command, with `arguments`


@dataclass
class Done:
    """How it ended: the exit code (negative for a signal), all that it printed, and how many moments there were."""

    code: int
    output: str
    moments: int


class Moments:
    """Counts what a process does to files below `root`."""

    def __init__(self, task: Task) -> None:
        self.task, self.count = task, 0
        sys.addaudithook(self.hook)
        self.wrap_safetensors()

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or not isinstance(arguments[0], str | Path):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITES):
            return
        if str(arguments[0]).startswith(self.task.root):
            self.moment()

    def moment(self) -> None:
        self.count += 1
        if self.count == self.task.at:
            os.kill(os.getpid(), self.task.signal)

    def wrap_safetensors(self) -> None:
        """Its files are written beyond Python: a moment before each, and one with half of it written."""
        import safetensors.torch as package

        original = package.serialize_file

        def halfway(tensors: Any, path: Any, **arguments: Any) -> None:
            self.moment()
            original(tensors, path, **arguments)
            if self.count + 1 == self.task.at:
                os.truncate(path, Path(path).stat().st_size // 2)
            self.moment()

        package.serialize_file = halfway


def drop_root() -> None:
    """Give up what lets root read and write every file (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    data = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    assert libc.capget(header, data) == 0
    data[0] &= ~0b110
    data[1] &= ~0b110
    assert libc.capset(header, data) == 0


def mount_disk(folder: str, options: str) -> None:
    """Mount a tmpfs that no other process sees; NO_MOUNT where that is not allowed, even in a namespace of users."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_users, private, read_only = 0x20000, 0x10000000, (1 << 18) | (1 << 14), 1
    if libc.unshare(new_mounts) and libc.unshare(new_mounts | new_users):
        os._exit(NO_MOUNT)
    libc.mount(b"none", b"/", None, private, None)
    flags = read_only if options == "ro" else 0
    if libc.mount(b"none", os.fsencode(folder), b"tmpfs", flags, b"" if flags else options.encode()):
        os._exit(NO_MOUNT)


def run(tasks: list[Task]) -> list[Done]:
    """Fork, run the commands, wait."""
    children = []
    for task in tasks:
        output, counted = os.memfd_create("output"), os.memfd_create("counted")
        child = os.fork()
        if child == 0:
            code = 99
            try:
                code = in_child(task, output, counted)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append((child, output, counted))
    ended = []
    for child, output, counted in children:
        _, status = os.waitpid(child, 0)
        text = os.pread(output, 1 << 24, 0).decode("utf-8", "replace")
        ended.append(Done(os.waitstatus_to_exitcode(status), text, int(os.pread(counted, 99, 0) or 0)))
        os.close(output)
        os.close(counted)
    return ended


def in_child(task: Task, output: int, counted: int) -> int:
    from linearize.cli import main

    signal.alarm(300)  # nothing here takes as long
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind in (signal.SIGTERM, signal.SIGHUP):  # which nohup has ignored
        signal.signal(kind, signal.SIG_DFL)
    os.environ.update(task.environment)
    if task.mount:
        mount_disk(*task.mount)
    os.chdir(task.folder)
    if task.file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (task.file_bytes, task.file_bytes))
    if task.as_user:
        drop_root()
    moments = Moments(task)
    sys.argv = ["linearize", *task.arguments]
    code = 0
    try:
        if task.script:
            exec(task.script, {"__name__": "__main__"})
        else:
            main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    os.pwrite(counted, str(moments.count).encode(), 0)
    return code


def serve() -> None:
    """Warm up, then answer one line for each line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import quick

    import linearize.convert
    import linearize.finetune
    from linearize.cli import main
    from linearize.demo import model_folder

    # What a run imports on its way, which takes longer than a tiny run.
    for name in ("accelerate", "peft", "torch._dynamo", "PIL.ImageDraw", "PIL.ImageFont", "PIL.PngImagePlugin"):
        importlib.import_module(name)
    quick.be_quick()
    quick.without_full_collections()
    # What spawns processes is tested elsewhere.
    linearize.convert.verify = lambda *arguments: "not verified"  # type: ignore[assignment]
    sys.argv = ["linearize", "convert", str(model_folder()), "--to", "gsa", "--dry-run"]
    with contextlib.suppress(SystemExit):
        main()
    gc.freeze()
    for line in sys.stdin:
        ended = run([Task(**task) for task in json.loads(line)])
        print(json.dumps([asdict(done) for done in ended]), file=answers, flush=True)


class Forks:
    """The warm process, from outside: call it with the words of a command and the options of its Task."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.server = subprocess.Popen(
            [sys.executable, __file__], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def __call__(self, *arguments: Any, **options: Any) -> Done:
        return self.together([Task([str(a) for a in arguments], **options)])[0]

    def together(self, tasks: list[Task]) -> list[Done]:
        """Run commands at the same time."""
        assert self.server.stdin
        assert self.server.stdout
        print(json.dumps([asdict(task) for task in tasks]), file=self.server.stdin, flush=True)
        return [Done(**done) for done in json.loads(self.server.stdout.readline())]

    def close(self) -> None:
        self.server.communicate()


if __name__ == "__main__":
    serve()
