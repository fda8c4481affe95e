"""Fork the clean processes of `linearize.verify.reload` from servers that have imported torch and transformers.

A check of a folder starts a Python, which imports for five seconds and checks for half a second. In the tests a fork
runs the same code instead, with the same arguments, environment, path and refused packages. tests/forked.py is the
server. A test that takes the fixture `cold` starts a new Python, as a user does.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# What `clean_command` writes before a script.
SETUP = re.compile(r"import sys\nsys\.path\[:0\] = \['(.*?)', (.*?)\]\n(.*?)set_verbosity_error\(\)\n", re.DOTALL)
# What most of the scripts import beside; the code of checkpoints is imported after the fork.
IMPORTS = (
    "import safetensors.torch, transformers.modeling_utils\nfrom transformers import AutoConfig, LlamaForCausalLM\n"
)
SERVE = """
def serve(path):
    import importlib.util, sys
    spec = importlib.util.spec_from_file_location("forked", {file!r})
    forked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(forked)
    forked.serve({handle}, path)
serve(path)
"""
# Variables that packages read when they are imported: other values need a server of their own.
READ_EARLY = ("HF_", "HUGGING", "TRANSFORMERS_", "DIFFUSERS_", "TORCH", "OMP_", "CUDA_", "TRITON_")


class Child:
    """A forked process, with the methods of subprocess.Popen that `linearize.verify.reload` calls."""

    def __init__(self, server: socket.socket, request: dict[str, Any]) -> None:
        self.err = os.memfd_create("err")
        (said, out), (ended, told) = os.pipe(), os.pipe()
        self.stdout, self.ended = os.fdopen(said), os.fdopen(ended)
        socket.send_fds(server, [json.dumps(request).encode()], [out, self.err, told])
        os.close(out)
        os.close(told)
        self.pid = int(self.ended.readline())
        self.returncode: int | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.communicate()
        self.stdout.close()
        self.ended.close()
        os.close(self.err)

    def communicate(self) -> tuple[str, str]:
        """Wait for the end; return the rest of stdout, and all of stderr."""
        out = self.stdout.read()
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(int(self.ended.readline()))
        return out, os.pread(self.err, os.fstat(self.err).st_size, 0).decode()

    def kill(self) -> None:
        """Kill the process where it still runs."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


Variables = tuple[tuple[str, str], ...]

MOST = 4  # servers at a time; each takes about 400 MB
_servers: dict[tuple[str, Variables], tuple[socket.socket, subprocess.Popen[bytes]]] = {}


def _server(paths: str, imports: str, variables: Variables) -> socket.socket:
    """The socket of a server that has run `imports`, in an environment with these variables of READ_EARLY."""
    known = _servers.pop((imports, variables), None)
    if known:
        _servers[imports, variables] = known  # the last to go
        return known[0]
    while len(_servers) >= MOST:
        _close(_servers.pop(next(iter(_servers))))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rest = {name: value for name, value in os.environ.items() if not name.startswith((*READ_EARLY, "PYTHON"))}
    code = f"import sys\npath = sys.path[:]\nsys.path[:0] = [{paths}]\n{imports}"
    code += SERVE.format(file=str(Path(__file__).with_name("forked.py")), handle=theirs.fileno())
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        env={**rest, **dict(variables)},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    _servers[imports, variables] = ours, process
    return ours


def _close(server: tuple[socket.socket, subprocess.Popen[bytes]]) -> None:
    """End a server."""
    server[0].close()
    server[1].wait()


@atexit.register
def _close_all() -> None:
    for server in _servers.values():
        _close(server)


def start(command: list[str], *, env: dict[str, str], **pipes: Any) -> Any:
    """Stand for Popen: fork where `clean_command` made the command, else start a new process."""
    setup = SETUP.match(command[3]) if command[1:3] == ["-I", "-c"] else None
    if setup is None:
        return subprocess.Popen(command, env=env, **pipes)
    imports = f"{setup[3]}set_verbosity_error()\n{IMPORTS}"
    imports += "import diffusers\n" if "import diffusers" in command[3] else ""
    imports += "import linearize_kernels.window.window\n" if "import linearize_kernels" in command[3] else ""
    early = {name: value for name, value in env.items() if name.startswith(READ_EARLY) and name != "HF_MODULES_CACHE"}
    request = {"code": command[3], "arguments": command[4:], "environment": env, "folder": os.getcwd()}
    return Child(_server(setup[2], imports, tuple(sorted(early.items()))), request)


# What `linearize.verify.reload` uses as its module `subprocess` in the tests.
SUBPROCESS = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
