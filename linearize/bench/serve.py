"""`linearize bench serve`: a converted model compared with its source in vLLM, each engine in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..checkpoint.manifest import is_linearized
from ..checkpoint.provenance import check_code
from ..checkpoint.source import open_source
from ..errors import Exit, LinearizeError
from ..serve.start import is_installed
from ..terminal.output import markdown_table


class Load(NamedTuple):
    """So many requests at a time, each with a prompt of so many tokens."""

    requests: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.requests} x {self.tokens}"


LOADS = (Load(1, 128), Load(64, 512), Load(32, 16384), Load(8, 65536))
LOAD = re.compile(r"([1-9][0-9]{,8})x([1-9][0-9]{,8})")
# Of a sequence, for how many fit.
HELD = 32768
# Options of vLLM by which it takes the same commit of the Hub that was looked at here.
PINNED = ("revision", "code_revision", "tokenizer_revision")
# An exception with its message, in a log; engines go on behind those in warnings.
CAUSE = re.compile(r"^(?!.*WARNING).*?\b(\w+(?:Error|Exception): .{,300})", re.MULTILINE)
# What the reason follows in the log of an engine that exits with 2 or 3.
REFUSED = "bench serve: "


def parse_loads(text: str) -> tuple[Load, ...]:
    """Loads as `64x512,32x16384`.

    Raises LinearizeError (2) for anything else.
    """
    found = []
    for part in text.split(","):
        asked = LOAD.fullmatch(part.strip())
        if asked is None:
            raise LinearizeError(f"--loads: {part!r} is not REQUESTSxTOKENS, for example 64x512", Exit.USAGE)
        found.append(Load(int(asked[1]), int(asked[2])))
    return tuple(found)


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """Options of vLLM's engine: key=value, values as YAML reads them.

    Raises LinearizeError (2) for one without a value, for one that is no YAML or no JSON, and for the model and its
    revision.
    """
    found = {}
    for one in given:
        key, equals, value = one.partition("=")
        try:
            found[key] = yaml.safe_load(value)
            json.dumps(found[key])  # the engine's process gets it so
        except (yaml.YAMLError, ValueError, TypeError):
            equals = ""
        if not (equals and key.isidentifier() and key != "model"):
            raise LinearizeError(f"--engine: {one!r} is not key=value, for example dtype=bfloat16", Exit.USAGE)
        if key in PINNED:  # code of another revision than the one that was looked at would run
            raise LinearizeError(f"--engine {one}: give --revision, or leave it out", Exit.USAGE)
    return found


def bench_serve(
    models: Sequence[str],
    loads: Sequence[Load] = LOADS,
    *,
    steps: int = 256,
    timeout: float = 1800.0,
    revision: str | None = None,
    options: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure each of `models`, the source first; the last one in this `revision`. `options` go to vLLM's engines,
    `timeout` is seconds for one engine.

    Raises LinearizeError: 2 for an option that vLLM has not, 3 for what is no model, has code that is not trusted or
    vLLM refuses, 4 where vLLM is not installed, 5 for the Hub, 6 for an engine that failed, with the end of its log.
    """
    if not is_installed("vllm"):
        raise LinearizeError("bench serve needs vLLM: pip install vllm", Exit.RESOURCE)
    found: dict[str, dict[str, Any]] = {}
    for model in models:  # before the first of them is measured
        source = open_source(model, revision if model == models[-1] else None, weights=False)
        found[model] = {"trust_remote_code": trust_remote_code}
        if is_linearized(source.folder):
            check_code(source.folder, trust_remote_code)
            found[model]["trust_remote_code"] = True
        if source.revision is not None:
            found[model] |= dict.fromkeys(PINNED, source.revision)
    result: dict[str, Any] = {"loads": [load.name for load in loads], "steps": steps, "models": {}}
    for model in models:
        asked: dict[str, Any] = {"model": model, "loads": [*loads], "steps": steps, "held": HELD}
        asked["options"] = {**found[model], **(options or {})}
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
        with log.open("w") as stream:
            written: dict[str, Any] = {"stdout": stream, "stderr": stream, "env": environment}
            engine = subprocess.Popen(command, **written, start_new_session=True)
        try:
            code = engine.wait(timeout)
        except subprocess.TimeoutExpired:
            end = log.read_text("utf-8", "replace")[-3000:]
            message = f"{asked['model']}: no result after {timeout:.0f} s. Its log ends:\n{end}"
            raise LinearizeError(message, Exit.CHECK_FAILED) from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # vLLM starts more processes, which hold the card's memory
                os.killpg(engine.pid, signal.SIGKILL)
            engine.wait()
        if out.exists():
            return dict(json.loads(out.read_text("utf-8")))
        text = log.read_text("utf-8", "replace")
        end = text[-6000:]
        if code in (Exit.USAGE, Exit.INCOMPATIBLE):
            raise LinearizeError(f"{asked['model']}: {end.rpartition(REFUSED)[2].strip()}", Exit(code))
        # A process that failed is followed by long tracebacks of those that waited for it.
        first = CAUSE.search(text)
        cause = "" if first is None else f" with {first[1]}"
        raise LinearizeError(f"{asked['model']}: its engine failed{cause}. Its log ends:\n{end}", Exit.CHECK_FAILED)


# Of a load: the figure, its title, whether it is a number of tokens.
FIGURES = (
    ("step_ms", "ms a step", False),
    ("written_tokens_s", "decode tokens/s", True),
    ("read_tokens_s", "prefill tokens/s", True),
)


def markdown(result: dict[str, Any]) -> str:
    """The table: a row for each load and model, compared with the first model."""
    models, machine = result["models"], result["machine"]
    first = next(iter(models.values()))
    lines = [
        f"{machine['device']}, vLLM {machine['vllm']}, torch {machine['torch']}; {result['steps']} decode steps "
        "after the last prompt.",
        "",
    ]
    rows = [
        (load, Path(name).name, *(_beside(one["loads"][load], first["loads"][load], *figure) for figure in FIGURES))
        for load in result["loads"]
        for name, one in models.items()
    ]
    lines += markdown_table(("requests x tokens", "model", *(title for _, title, _ in FIGURES)), rows)
    ready = []
    for name, measured in models.items():
        fits, base = (one["fits"][str(HELD)] for one in (measured, first))
        share = "" if measured is first else f" ({fits / base:.2f}x)"
        first_ms, tenth_ms = (f"{measured[f'{which}_request_s'] * 1e3:.0f} ms" for which in ("first", "tenth"))
        ready.append((Path(name).name, f"{measured['start_s']:.0f} s", first_ms, tenth_ms, f"{fits:.0f}{share}"))
    titles = ("model", "ready after", "first request", "tenth", "sequences of 32,768 that fit")
    return "\n".join([*lines, "", *markdown_table(titles, ready)])


def _beside(ours: dict[str, float], first: dict[str, float], name: str, title: str, tokens: bool) -> str:
    """A figure, and how many times the first model's it is."""
    value = f"{ours[name]:,.0f}" if tokens else f"{ours[name]:.2f}"
    if ours is first:
        return value
    return f"{value} ({ours[name] / first[name]:.2f}x)"
