"""The server that forks clean processes for tests/warm.py. It runs with `python -I`, so this file imports only the
standard library."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from typing import Any


def serve(handle: int, path: list[str]) -> None:
    """Answer requests on a socket until the other side closes it; `path` is sys.path of a new process."""
    gc.freeze()
    server = socket.socket(fileno=handle)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, files, *_ = socket.recv_fds(server, 1 << 20, 3)
        if not message:
            return
        if os.fork() == 0:
            server.close()
            watch(json.loads(message), path, *files)
        for file in files:
            os.close(file)


def watch(request: dict[str, Any], path: list[str], out: int, err: int, told: int) -> None:
    """Fork once more; write the child's id and, at its end, its wait status to `told`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.close(told)
        code = 1
        try:
            code = run(request, path, out, err)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(out)  # the other side reads it until nobody has it open
    os.write(told, f"{child}\n".encode())
    os.write(told, f"{os.waitpid(child, 0)[1]}\n".encode())
    os._exit(0)


def run(request: dict[str, Any], path: list[str], out: int, err: int) -> int:
    """Do in this process what `python -I -c CODE ARGUMENTS` does; return the exit code."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    tempfile.tempdir = None
    sys.path[:] = path
    sys.argv = ["-c", *request["arguments"]]
    # transformers read this variable when it was imported.
    for module in [module for name, module in sys.modules.items() if name.startswith("transformers")]:
        if "HF_MODULES_CACHE" in vars(module):
            module.HF_MODULES_CACHE = os.environ["HF_MODULES_CACHE"]
    try:
        exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0
