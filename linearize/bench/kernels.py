"""`linearize bench kernels`: time each mechanism beside its peers, in one process, with the device's limits.

Peers on the same inputs: our PyTorch path, softmax through SDPA, and flash-linear-attention's function for the same
where it is installed. Times are medians of queued runs after a warm-up, the device never waiting for the CPU, whose
part is told beside them; spread is the middle half. fla tunes itself for minutes on a first call: that stays outside
the measurement. Without a GPU it measures the PyTorch path on the CPU.

The roofline is the least that a shape can take: its bytes at the speed of a copy, or its products at that of a large
product in the same precision, whichever is longer.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ..terminal.progress import Advance, progress
from .case import COMPILED, OURS, PYTORCH, Case, Run, Shape, softmax, softmax_flops
from .cases import case_names, load_case
from .layer import FIRST, Layer
from .report import first_line, line
from .timing import allocated, captured_us, here, machine, measure_ceilings, peak_mib, queued, wait


def bench_kernels(
    mechanisms: str = "",
    tokens: int | None = None,
    tell: Callable[[str, dict[str, Any]], None] = lambda *_: None,
    *,
    presets: str = "",
) -> dict[str, Any]:
    """Measure the layers of recipe presets by name (`gsa-window,gla`), then mechanisms by name (`la,gla`) or `all`, in
    that order, every shape cut to at most `tokens` tokens. Without any name: the preset FIRST, then all mechanisms.

    Returns everything as plain data: `machine`, `ceilings`, and in `mechanisms` by name `cold_start`, `errors`, `runs`,
    `steps`, of a preset also its `options`. `tell` gets each row as a line of text when it is measured, and the result
    so far. What cannot run has `failed`, the reason, in place of its numbers. Raises LinearizeError (exit 2) for an
    unknown preset, and for a mechanism without a case.
    """
    if not mechanisms and not presets:
        presets, mechanisms = FIRST, "all"
    names = case_names() if mechanisms == "all" else _split(mechanisms)
    layers = {f"preset {name}": Layer(name) for name in _split(presets)}
    cases = {name: load_case(name) for name in names}
    result: dict[str, Any] = {"machine": machine(), "ceilings": None, "mechanisms": {}}
    tell("; ".join(f"{key} {value}" for key, value in result["machine"].items()), result)
    cut_to = {name: shapes_of(case, tokens) for name, case in (layers | cases).items()}
    rows = sum(len(shapes) for tables in cut_to.values() for shapes in tables)
    with progress("bench kernels", 1 + rows) as advance:
        result["ceilings"] = measure_ceilings()
        advance(1)
        for name, case in (layers | cases).items():
            measured: dict[str, Any] = {"cold_start": None, "runs": [], "steps": [], "errors": []}
            result["mechanisms"][name] = measured
            if name in layers:
                measured["options"] = layers[name].about
            _measure_case(name, case, cut_to[name], result, tell, advance)
            if here() == "cuda" and name in cases:
                measured["cold_start"] = attempt(partial(cold_start, name))
                tell(f"{name} {first_line(measured['cold_start'])}", result)
    return result


def _measure_case(
    name: str,
    case: Case,
    shapes: tuple[list[Shape], list[Shape], list[Shape]],
    result: dict[str, Any],
    tell: Callable[[str, dict[str, Any]], None],
    advance: Advance,
) -> None:
    """The rows of one case, each into the result and to `tell`; `advance` counts shapes."""

    def keep(table: str, records: Iterable[dict[str, Any]]) -> None:
        rows = result["mechanisms"][name][table]
        for record in records:
            rows.append(record)
            tell(f"{name} {line(record, rows)}", result)
        advance(1)

    runs, steps, errors = shapes
    for shape in runs:
        keep("runs", measure_shape(case, shape, result["ceilings"]))
    for shape in steps:
        keep("steps", [measure_step(case, shape)])
    for shape in errors:
        keep("errors", measure_errors(case, shape))


def shapes_of(case: Case, tokens: int | None) -> tuple[list[Shape], list[Shape], list[Shape]]:
    """What is measured of a case: shapes of layers, of decode steps, and of errors, of at most `tokens` tokens."""
    return cut(case, case.shapes, tokens), cut(case, case.steps, tokens), cut(case, case.errors, tokens)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def failures(result: dict[str, Any]) -> list[str]:
    """What of ours failed, one line each; a peer may, and torch.compile."""
    found = []
    for name, measured in result["mechanisms"].items():
        records = [{"name": OURS, "shape": "first call", **(measured["cold_start"] or {})}, *measured["errors"]]
        records += [*measured["runs"], *measured["steps"]]
        ours = [one for one in records if one["name"].startswith(OURS) and not one["name"].endswith(COMPILED)]
        found += [f"{name} {one['shape']}, {one['name']}: {one['failed']}" for one in ours if "failed" in one]
    return found


def cut(case: Case, shapes: tuple[Shape, ...], tokens: int | None) -> list[Shape]:
    """The shapes, each with at most `tokens` tokens and none twice."""
    return list(dict.fromkeys(case.shorten(shape, tokens) if tokens else shape for shape in shapes))


def backends(case: Case, shape: Shape) -> dict[str, str]:
    """Name of a contender -> backend of our op. Kernels that multiply fp32 in less are named by what they do."""
    products = f", {case.precision}" * bool(case.precision and shape.dtype == "float32")
    names = {"triton": OURS + products, "torch": PYTORCH}
    return {names[backend]: backend for backend in case.backends if backend == "torch" or here() == "cuda"}


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What work returns, or why it failed: an hour's table must not be lost to one row of it."""
    try:
        return work()
    except Exception as error:  # of peers, of compilers, of a full GPU
        reason = (str(error).splitlines() or [""])[0]
        if isinstance(error, torch.OutOfMemoryError):  # what follows is about other processes and settings
            reason = ". ".join(reason.split(". ")[:2])
        failed = f"{type(error).__name__}: {reason[:200]}"
    # Only now is the error gone, whose frames hold all that was computed, often in cycles.
    gc.collect()
    if here() == "cuda":
        torch.cuda.empty_cache()
    return {"failed": failed}


# ---------------------------------------------------------------- speed


def contenders(case: Case, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
    """Name -> forward pass, [B,T,H,D]."""
    out: dict[str, Run] = {}
    for name, backend in backends(case, shape).items():
        few = case.torch_tokens >= shape.B * shape.T
        if few or backend != "torch":
            out |= {name: partial(case.op, inputs, shape, backend), **case.peers(inputs, shape, backend)}
    if not shape.causal and here() == "cuda" and PYTORCH in out:
        torch.compiler.reset()  # earlier shapes count: past a limit torch runs what it has not compiled
        out[PYTORCH + COMPILED] = torch.compile(out[PYTORCH])
    out |= softmax(inputs, shape)
    if here() == "cuda" and importlib.util.find_spec("fla"):
        try:
            out |= case.fla(inputs, shape)
        except ImportError as error:  # another version, or something that it needs
            out["fla"] = partial(_raise, error)
    return out


def _raise(error: Exception) -> Tensor:
    raise error


def measure_shape(case: Case, shape: Shape, ceilings: dict[str, float]) -> Iterator[dict[str, Any]]:
    """One record per contender, ours first, each when it is measured: forward, forward + backward, peak memory, rates
    as shares of the ceilings."""
    before = allocated()
    inputs = [x.requires_grad_() for x in case.inputs(shape, here())]
    for name, forward in contenders(case, inputs, shape).items():
        record: dict[str, Any] = {"name": name, "shape": str(shape)}
        # Part by part: some peers compute forward and refuse backward.
        record |= attempt(partial(_forward, forward, before))
        if "failed" not in record:
            record |= attempt(partial(_both, name, forward, inputs, shape, before, ceilings))
        yield record


@torch.no_grad()
def _forward(forward: Run, before: int) -> dict[str, Any]:
    forward()
    return {"forward": queued(forward), "forward_mib": peak_mib(forward, before)}


def _both(
    name: str, forward: Run, inputs: list[Tensor], shape: Shape, before: int, ceilings: dict[str, float]
) -> dict[str, Any]:
    do = torch.randn_like(inputs[0])

    def both() -> None:
        torch.autograd.grad(forward(), inputs, do, allow_unused=True)

    def counted() -> None:
        # The counter follows the tensors that modules take, and then leaves cannot be given to autograd.grad.
        forward().backward(do)
        for x in inputs:
            x.grad = None

    both()
    record: dict[str, Any] = {"both": queued(both), "both_mib": peak_mib(both, before)}
    # Each input read once, each output written once; backward reads them again with do and writes gradients.
    given = sum(x.nbytes for x in inputs)
    moved = {"forward": given + do.nbytes, "both": 3 * given + 2 * do.nbytes}
    if name.startswith("softmax"):  # torch's counter does not know grouped heads
        flops = softmax_flops(shape)
    elif name.startswith("fla") or name.endswith(COMPILED):  # nor others' kernels, nor all of what inductor makes
        flops = {"forward": 0, "both": 0}
    else:
        flops = {"forward": _flops(torch.no_grad()(forward)), "both": _flops(counted)}
    products = "bf16" if shape.dtype != "float32" else "tf32" if name.endswith("tf32") else "fp32"
    fastest = ceilings[f"{products}_tflop_s"]
    record["tflop_s"], record["tb_s"] = (x["both"] / record["both"]["ms"] / 1e9 for x in (flops, moved))
    record["tflop_share"], record["tb_share"] = record["tflop_s"] / fastest, record["tb_s"] / ceilings["copy_tb_s"]
    if flops["both"]:
        record["roofline_ms"] = {
            part: max(moved[part] / ceilings["copy_tb_s"], flops[part] / fastest) / 1e9 for part in moved
        }
    return record


def _flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


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


def measure_errors(case: Case, shape: Shape) -> Iterator[dict[str, Any]]:
    """Relative error |x - ref| / |ref| of the output and each gradient against the PyTorch path in float64: of our op,
    and of its variants among the peers."""
    ops: dict[str, Callable[[list[Tensor]], Tensor]] = {}
    for name, backend in backends(case, shape).items():
        ops[name] = partial(case.op, shape=shape, backend=backend)
        variants = [n for n in case.peers(case.inputs(shape, here()), shape, backend) if n.startswith(OURS)]
        ops |= {variant: partial(_variant, case, shape, backend, variant) for variant in variants}
    for name, op in ops.items():
        yield {"shape": str(shape), "name": name} | attempt(partial(_errors, case, shape, op))


def _variant(case: Case, shape: Shape, backend: str, name: str, inputs: list[Tensor]) -> Tensor:
    return case.peers(inputs, shape, backend)[name]()


def _errors(case: Case, shape: Shape, op: Callable[[list[Tensor]], Tensor]) -> dict[str, Any]:
    inputs = case.inputs(shape, here())
    do = torch.randn_like(inputs[0])
    reference = partial(case.op, shape=shape, backend="torch")
    exact = _outputs(case, shape, reference, [x.double() for x in inputs], do.double())
    found = _outputs(case, shape, op, inputs, do)
    return {"errors": {name: float((found[name].double() - x).norm() / x.norm()) for name, x in exact.items()}}


def _outputs(
    case: Case, shape: Shape, op: Callable[[list[Tensor]], Tensor], inputs: list[Tensor], do: Tensor
) -> dict[str, Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o = op(leaves)
    names = ("o", *(f"d{name}" for name in case.named(shape)))
    return dict(zip(names, (o.detach(), *torch.autograd.grad(o, leaves, do)), strict=True))


# ---------------------------------------------------------------- decode


def measure_step(case: Case, shape: Shape) -> dict[str, Any]:
    """One decode step of one layer against a copy of the bytes of its state, in CUDA graphs that rotate through
    several states, so that none is found in the cache."""
    name, backend = next(iter(backends(case, shape).items()))
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
