"""`linearize bench kernels`: each mechanism's op beside its peers, in one process, with the ceilings measured first.

Peers on the same inputs: our PyTorch path, softmax through SDPA, and flash-linear-attention's function for the same
where it is installed. Times are medians of queued runs after a warm-up; spread is the middle half. fla tunes itself for
minutes on a first call: that stays outside the measurement. Without a GPU it measures the PyTorch path on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from .bench_case import Case, Run, Shape, case_names, load_case, softmax, softmax_flops
from .bench_measure import allocated, captured_us, here, machine, measure_ceilings, peak_mib, timed, wait

OURS, PYTORCH = "linearize", "linearize, PyTorch path"


def bench_kernels(mechanism: str = "all", tokens: int | None = None) -> dict[str, Any]:
    """Measure one mechanism or all, every shape cut to at most `tokens` tokens; return everything as plain data:
    `machine`, `ceilings`, and in `mechanisms` by name `cold_start`, `errors`, `runs`, `steps`.

    What cannot run has `failed`, the reason, in place of its numbers. Raises LinearizeError (exit 2) for a mechanism
    without a case.
    """
    cases = {name: load_case(name) for name in (case_names() if mechanism == "all" else [mechanism])}
    ceilings = measure_ceilings()
    measured = {}
    for name, case in cases.items():
        measured[name] = {
            "cold_start": attempt(partial(cold_start, name)) if here() == "cuda" else None,
            "errors": [e for shape in cut(case, case.errors, tokens) for e in measure_errors(case, shape)],
            "runs": [run for shape in cut(case, case.shapes, tokens) for run in measure_shape(case, shape, ceilings)],
            "steps": [measure_step(case, shape) for shape in cut(case, case.steps, tokens)],
        }
    return {"machine": machine(), "ceilings": ceilings, "mechanisms": measured}


def failures(result: dict[str, Any]) -> list[str]:
    """What of ours failed, one line each; a peer may."""
    found = []
    for name, measured in result["mechanisms"].items():
        records = [{"name": OURS, "shape": "first call", **(measured["cold_start"] or {})}, *measured["errors"]]
        records += [*measured["runs"], *measured["steps"]]
        ours = [one for one in records if one["name"] in (OURS, PYTORCH) and "failed" in one]
        found += [f"{name} {one['shape']}, {one['name']}: {one['failed']}" for one in ours]
    return found


def cut(case: Case, shapes: tuple[Shape, ...], tokens: int | None) -> list[Shape]:
    """The shapes, each with at most `tokens` tokens and none twice."""
    return list(dict.fromkeys(case.shorten(shape, tokens) if tokens else shape for shape in shapes))


def backends(case: Case) -> dict[str, str]:
    """Name of a contender -> backend of our op."""
    names = {"triton": OURS, "torch": PYTORCH}
    return {names[backend]: backend for backend in case.backends if backend == "torch" or here() == "cuda"}


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What work returns, or why it failed: an hour's table must not be lost to one row of it."""
    try:
        return work()
    except Exception as error:  # of peers, of compilers, of a full GPU
        if here() == "cuda":
            torch.cuda.empty_cache()
        return {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}


# ---------------------------------------------------------------- speed


def contenders(case: Case, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
    """Name -> forward pass, [B,T,H,D]."""
    out: dict[str, Run] = {}
    for name, backend in backends(case).items():
        few = case.torch_tokens >= shape.B * shape.T
        if few or backend != "torch":
            out |= {name: partial(case.op, inputs, shape, backend), **case.peers(inputs, shape, backend)}
    if not shape.causal and here() == "cuda" and PYTORCH in out:
        torch.compiler.reset()  # earlier shapes count: past a limit torch runs what it has not compiled
        out[f"{PYTORCH}, compiled"] = torch.compile(out[PYTORCH])
    out |= softmax(inputs, shape)
    if here() == "cuda" and importlib.util.find_spec("fla"):
        out |= case.fla(inputs, shape)
    return out


def measure_shape(case: Case, shape: Shape, ceilings: dict[str, float]) -> list[dict[str, Any]]:
    """One record per contender: forward, forward + backward, peak memory, rates as shares of the ceilings."""
    before = allocated()
    inputs = [x.requires_grad_() for x in case.inputs(shape, here())]
    records = []
    for name, forward in contenders(case, inputs, shape).items():
        record: dict[str, Any] = {"name": name, "shape": str(shape)}
        # Part by part: some peers compute forward and refuse backward.
        record |= attempt(partial(_forward, forward, before))
        if "failed" not in record:
            record |= attempt(partial(_both, name, forward, inputs, shape, before, ceilings))
        records.append(record)
    return records


@torch.no_grad()
def _forward(forward: Run, before: int) -> dict[str, Any]:
    forward()
    return {"forward": timed(forward), "forward_mib": peak_mib(forward, before)}


def _both(
    name: str, forward: Run, inputs: list[Tensor], shape: Shape, before: int, ceilings: dict[str, float]
) -> dict[str, Any]:
    do = torch.randn_like(inputs[0])

    def both() -> None:
        torch.autograd.grad(forward(), inputs, do, allow_unused=True)

    both()
    record: dict[str, Any] = {"both": timed(both), "both_mib": peak_mib(both, before)}
    if name.startswith("softmax"):  # torch's counter does not know grouped heads
        flops = softmax_flops(shape)
    else:
        with FlopCounterMode(display=False) as counter:
            both()
        flops = counter.get_total_flops()
    # Each input read once, each output written once; backward reads them again with do and writes gradients.
    moved = 3 * (sum(x.nbytes for x in inputs) + do.nbytes)
    record["tflop_s"], record["tb_s"] = (x / record["both"]["ms"] / 1e9 for x in (flops, moved))
    record["tflop_share"] = record["tflop_s"] / ceilings["bf16_tflop_s"]
    record["tb_share"] = record["tb_s"] / ceilings["copy_tb_s"]
    return record


# ---------------------------------------------------------------- the first call


def cold_start(name: str) -> dict[str, Any]:
    """Seconds of the first forward and backward in a new process with an empty Triton cache."""
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_CACHE_DIR": cache}
        code = f"from {__name__} import first_call; print(first_call({name!r}))"
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return {"seconds": float(done.stdout.split()[-1])}


def first_call(name: str) -> float:
    """Seconds of one forward and backward of the first shape, short, on a GPU that is already awake."""
    case = load_case(name)
    shape = case.shorten(case.shapes[0], 256)
    inputs = [x.requires_grad_() for x in case.inputs(shape, here())]
    wait()
    start = time.perf_counter()
    case.op(inputs, shape, case.backends[0] if here() == "cuda" else "torch").sum().backward()
    wait()
    return time.perf_counter() - start


# ---------------------------------------------------------------- errors


def measure_errors(case: Case, shape: Shape) -> list[dict[str, Any]]:
    """Relative error |x - ref| / |ref| of the output and each gradient against the PyTorch path in float64."""
    return [
        {"shape": str(shape), "name": name} | attempt(partial(_errors, case, shape, backend))
        for name, backend in backends(case).items()
    ]


def _errors(case: Case, shape: Shape, backend: str) -> dict[str, Any]:
    inputs = case.inputs(shape, here())
    do = torch.randn_like(inputs[0])
    exact = _outputs(case, [x.double() for x in inputs], do.double(), shape, "torch")
    found = _outputs(case, inputs, do, shape, backend)
    return {"errors": {name: float((found[name].double() - x).norm() / x.norm()) for name, x in exact.items()}}


def _outputs(case: Case, inputs: list[Tensor], do: Tensor, shape: Shape, backend: str) -> dict[str, Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o = case.op(leaves, shape, backend)
    names = ("o", *(f"d{name}" for name in case.names))
    return dict(zip(names, (o.detach(), *torch.autograd.grad(o, leaves, do)), strict=True))


# ---------------------------------------------------------------- decode


def measure_step(case: Case, shape: Shape) -> dict[str, Any]:
    """One decode step of one layer against a copy of the bytes of its state, in CUDA graphs that rotate through
    several states, so that none is found in the cache."""
    name, backend = next(iter(backends(case).items()))
    return {"shape": str(shape), "name": name} | attempt(partial(_step, case, shape, backend))


@torch.no_grad()
def _step(case: Case, shape: Shape, backend: str) -> dict[str, Any]:
    sets = 12 if here() == "cuda" else 2
    inputs, states = case.inputs(shape, here()), [case.state(shape, here()) for _ in range(sets)]
    moved = 2 * sum(part.nbytes for part in states[0] if part.is_floating_point())
    sources = [torch.randn(moved // 8, device=here()) for _ in range(sets)]
    targets = [torch.empty_like(x) for x in sources]
    step = captured_us([partial(case.step, inputs, state, backend) for state in states])
    copy = captured_us([partial(b.copy_, a) for a, b in zip(sources, targets, strict=True)])
    return {"us": step, "copy_us": copy, "tb_s": moved / step / 1e6, "share_of_copy": copy / step}
