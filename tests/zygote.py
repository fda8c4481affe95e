"""The clean processes of linearize/verify/reload.py, forked from one that has imported torch and transformers.

Of the seconds that such a process takes, nearly all are imports. The warm process runs the same PRELUDE: what a clean
process refuses, it cannot have imported. Some tests ask for real processes, by the fixture `real_processes`; commands
that tests run in processes of their own, clean loads and the demo in CI start nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import clean_env

# What a clean process imports to load a model, write text and compare it.
WARM = """
import transformers.modeling_utils, transformers.generation, transformers.models.auto.modeling_auto
import transformers.dynamic_module_utils, safetensors.torch, transformers.conversion_mapping
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
"""

# In place of this machine's own.
WARM_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def hub_settings(environment: dict[str, str]) -> dict[str, str]:
    """What huggingface_hub has read of an environment when it is imported; the cache of code is set in each child."""
    return {name: value for name, value in environment.items() if name.startswith("HF_") and name != "HF_MODULES_CACHE"}


def serve(listener: socket.socket, alive: int) -> None:
    """Fork a child for each connection, until this process is killed, or `alive` ends with the one that started it.

    PR_SET_PDEATHSIG would kill this process when the thread ends that started it, which may be one of a command.
    """
    clean_env.remember_imports()
    clean_env.remember_code()
    while True:
        ready, _, _ = select.select([listener, alive], [], [])
        if alive in ready:
            return
        connection, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            listener.close()
            os.close(alive)
            watch(connection)
            os._exit(0)
        connection.close()


def watch(connection: socket.socket) -> None:
    """Fork the child that a connection asks for, send its id, and how it ended."""
    request, files, _, _ = socket.recv_fds(connection, 1 << 24, 2)
    while not request.endswith(b"\n"):
        request += connection.recv(1 << 24)
    child = os.fork()
    if child == 0:
        connection.close()
        code = 1
        try:
            code = run(json.loads(request), files)
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    for file in files:
        os.close(file)
    connection.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def run(request: dict[str, Any], files: list[int]) -> int:
    """What `python -I -c SCRIPT ARGUMENTS` does in that environment; returns the exit code."""
    for stream, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files]):
        os.dup2(file, stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers") and isinstance(vars(module).get("HF_MODULES_CACHE"), str):
            module.HF_MODULES_CACHE = os.environ["HF_MODULES_CACHE"]  # type: ignore[attr-defined]
    sys.argv = ["-c", *request["arguments"]]
    try:
        exec(request["script"], {"__name__": "__main__"})
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


class Child:
    """A forked child, with what `reload.started` uses of subprocess.Popen."""

    def __init__(self, place: str, command: list[str], environment: dict[str, str]) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(place)
        (out, theirs), (err, their_errors) = os.pipe(), os.pipe()
        script, arguments = command[3], command[4:]
        request = {"script": script, "arguments": arguments, "environment": environment, "folder": os.getcwd()}
        sent = json.dumps(request).encode() + b"\n"
        done = socket.send_fds(self.connection, [sent], [theirs, their_errors])
        self.connection.sendall(sent[done:])
        os.close(theirs)
        os.close(their_errors)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        self.answers = self.connection.makefile()
        self.pid, self.returncode = int(self.answers.readline()), None

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self.answers.readline())
        return self.returncode

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: Any) -> None:
        self.wait()
        for file in (self.stdout, self.stderr, self.answers, self.connection):
            file.close()


class Zygotes:
    """The warm processes, from outside: one for each of the sets of packages that clean processes refuse."""

    def __init__(self) -> None:
        self.servers: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        self.alive, self.held = os.pipe()  # the second end is held open for as long as this process lives
        self.environment = {**os.environ, **WARM_ENVIRONMENT}  # before any test changes it
        self.environment.pop("PYTHONPATH", None)

    def popen(self, command: list[str], **options: Any) -> Any:
        """As subprocess.Popen; a clean process is forked if huggingface_hub would read the settings of the warm one."""
        from linearize.verify.reload import PRELUDE, REFUSED

        if hub_settings(options["env"]) != hub_settings(self.environment):
            return subprocess.Popen(command, **options)
        for refused in (set(REFUSED), {""}):
            prelude = PRELUDE.replace("{refused}", repr(refused))
            if command[1:3] == ["-I", "-c"] and prelude in command[3]:
                return Child(self.server(prelude), command, options["env"])
        return subprocess.Popen(command, **options)

    def server(self, prelude: str) -> str:
        from linearize.verify.reload import is_code_cache

        if prelude not in self.servers:
            place = f"\0{secrets.token_hex()}"  # a name without a file
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(place)
                listener.listen()
                paths = [path for path in sys.path if path and not is_code_cache(path)]
                text = f"import sys\nsys.path[:0] = {paths!r}\n{prelude}{WARM}"
                text += f"import socket\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport zygote\n"
                text += f"del sys.path[0]\nzygote.serve(socket.socket(fileno={listener.fileno()}), {self.alive})\n"
                command = [sys.executable, "-I", "-c", text]
                process = subprocess.Popen(command, env=self.environment, pass_fds=[listener.fileno(), self.alive])
            self.servers[prelude] = place, process
        return self.servers[prelude][0]

    def patched(self) -> Any:
        """What stands for `subprocess` in reload.py."""
        return SimpleNamespace(Popen=self.popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)

    def close(self) -> None:
        for _, process in self.servers.values():
            process.kill()
            process.wait()
