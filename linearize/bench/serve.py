"""`linearize bench serve`: a converted model beside its source in vLLM, each engine in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import Exit, LinearizeError


class Load(NamedTuple):
    """So many requests at a time, each with a prompt of so many tokens."""

    requests: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.requests} x {self.tokens}"


LOADS = (Load(1, 128), Load(64, 512), Load(32, 16384), Load(8, 65536))
# Of a sequence, for how many fit.
HELD = 32768


def parse_loads(text: str) -> tuple[Load, ...]:
    """Loads as `64x512,32x16384`.

    Raises LinearizeError (2) for anything else.
    """
    found = []
    for part in text.split(","):
        requests, x, tokens = part.strip().partition("x")
        if not (x and requests.isdigit() and tokens.isdigit() and int(requests) and int(tokens)):
            raise LinearizeError(f"--loads: {part!r} is not REQUESTSxTOKENS, for example 64x512", Exit.USAGE)
        found.append(Load(int(requests), int(tokens)))
    return tuple(found)


def bench_serve(
    models: Sequence[str],
    loads: Sequence[Load] = LOADS,
    *,
    steps: int = 256,
    timeout: float = 1800.0,
    options: dict[str, Any] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure each of `models`, the source first; `options` go to vLLM's engines, `timeout` is seconds for one engine.

    Raises LinearizeError: 4 where vLLM is not installed, 6 for an engine that failed, with the end of its log.
    """
    result: dict[str, Any] = {"loads": [load.name for load in loads], "steps": steps, "models": {}}
    for model in models:
        asked = {"model": model, "loads": [*loads], "steps": steps, "held": HELD, "options": options or {}}
        result["models"][model] = measured = run_engine(asked, timeout)
        result["machine"] = measured.pop("machine")
        tell(f"{model}: ready after {measured['start_s']} s")
    return result


def run_engine(asked: dict[str, Any], timeout: float) -> dict[str, Any]:
    """What one engine measured, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        log, out = Path(folder) / "log", Path(folder) / "result.json"
        command = [sys.executable, "-m", f"{__package__}.serve_engine", json.dumps(asked | {"result": str(out)})]
        # Sampling by FlashInfer compiles for minutes on a machine that has a compiler.
        environment = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_USE_FLASHINFER_SAMPLER": "0", **os.environ}
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the child asks its own engine how much fits
        try:
            with log.open("w") as stream:
                done = subprocess.run(command, stdout=stream, stderr=stream, env=environment, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            message = f"{asked['model']}: no result after {timeout:.0f} s. Its log ends:\n{log.read_text()[-3000:]}"
            raise LinearizeError(message, Exit.CHECK_FAILED) from None
        if out.exists():
            return dict(json.loads(out.read_text()))
        end = log.read_text()[-6000:]
        if done.returncode == Exit.RESOURCE:
            raise LinearizeError(end.strip(), Exit.RESOURCE)
        raise LinearizeError(f"{asked['model']}: its engine failed. Its log ends:\n{end}", Exit.CHECK_FAILED)
