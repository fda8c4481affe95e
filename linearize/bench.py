"""`linearize bench kernels`: the GPU kernels beside their peers, in one process, with the ceilings measured first.

Peers on the same inputs: our PyTorch path, flash-linear-attention's `chunk_gsa` when installed, and causal softmax
through SDPA's flash kernel, which does other arithmetic for the same purpose. Times are medians of runs between CUDA
events after a warm-up; spread is the middle half. fla tunes itself for minutes on a first call: that
stays outside the measurement.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from linearize_kernels.gsa import GSAState, gsa
from linearize_kernels.gsa_launch import runs_on

from .errors import Exit, LinearizeError, did_you_mean


class Shape(NamedTuple):
    """B sequences of T tokens, H query heads over Hkv key heads of D channels, M slots; bf16, gates fp32."""

    B: int
    T: int
    H: int = 16
    Hkv: int = 4
    D: int = 128
    M: int = 64

    def __str__(self) -> str:
        return f"B{self.B} T{self.T} H{self.H}/{self.Hkv} D{self.D} m{self.M}"


SHAPES = (Shape(8, 2048), Shape(1, 8192), Shape(1, 16384), Shape(1, 65536))
STEPS = (Shape(64, 1, 32, 8), Shape(16, 1, 32, 8), Shape(1, 1, 32, 8))
# The PyTorch path keeps its intermediates in fp32: longer shapes would measure the allocator.
PYTORCH_TOKENS = 16384
COLD_START = """
import time, torch
from linearize_kernels.gsa import gsa
q, k = torch.randn(1, 256, 16, 128).cuda().bfloat16(), torch.randn(1, 256, 4, 128).cuda().bfloat16()
g = -torch.rand(1, 256, 4, 64).cuda()
inputs = [x.requires_grad_() for x in (q, k, k.clone(), g)]
torch.cuda.synchronize(); start = time.perf_counter()
gsa(*inputs)[0].sum().backward()
torch.cuda.synchronize(); print(time.perf_counter() - start)
"""


def bench_kernels(mechanism: str = "gsa", shapes: tuple[Shape, ...] = SHAPES, peers: bool = True) -> dict[str, Any]:
    """Measure and return everything as plain data: `machine`, `ceilings`, `cold_start_s`, `errors`, `runs`, `steps`.

    Raises LinearizeError for a mechanism without GPU kernels, and where there is no GPU or no triton.
    """
    if mechanism != "gsa":
        raise LinearizeError(f"{mechanism!r} has no GPU kernels to measure.{did_you_mean(mechanism, ['gsa'])} Use gsa.")
    if not torch.cuda.is_available():
        raise LinearizeError("bench kernels measures GPU kernels, and torch sees no CUDA GPU here.", Exit.RESOURCE)
    inputs = make_inputs(Shape(1, 64))
    if obstacle := runs_on(inputs[0], inputs[2], inputs[3]):
        raise LinearizeError(f"the kernels cannot run here: {obstacle}.", Exit.RESOURCE)
    ceilings = measure_ceilings()
    return {
        "machine": machine(),
        "ceilings": ceilings,
        "cold_start_s": cold_start(),
        "errors": measure_errors(Shape(2, 1024)),
        "runs": [run for shape in shapes for run in measure_shape(shape, ceilings, peers)],
        "steps": [measure_step(shape) for shape in STEPS],
    }


def machine() -> dict[str, str]:
    """Hardware, versions, date."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "fla": _version("fla-core"),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def make_inputs(shape: Shape, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Tensor]:
    """q, k, v, g; half-lives of the slots spread from a few tokens to thousands, as at conversion."""
    B, T, H, Hkv, D, M = shape
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, T, heads, D, device="cuda").to(dtype) for heads in (H, Hkv, Hkv))
    bias = torch.linspace(-2.0, 8.0, M, device="cuda")
    return [q, k, v, logsigmoid(torch.randn(B, T, Hkv, M, device="cuda") + bias) / 8.0]


# ---------------------------------------------------------------- measuring


def timed(run: Callable[[], Any], seconds: float = 0.4) -> dict[str, float]:
    """Median and middle half of the run's time in ms; runs are queued without waiting, as a training loop does."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    torch.cuda.synchronize()
    count = max(9, min(200, round(seconds / (time.perf_counter() - begun))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    return {"ms": times[count // 2], "low": times[count // 4], "high": times[3 * count // 4]}


def peak_mib(run: Callable[[], Any], before: int) -> float:
    """Peak of allocated memory while it runs, inputs included, less the bytes that were allocated `before`."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure_ceilings() -> dict[str, float]:
    """What this GPU does at best: bytes per second of a copy, flop per second of a bf16 product."""
    x = torch.randn(2**29, device="cuda")
    y = torch.empty_like(x)
    copied = 2 * x.nbytes / timed(lambda: y.copy_(x))["ms"] / 1e9
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return {"copy_tb_s": copied, "bf16_tflop_s": 2 * 8192**3 / timed(lambda: a @ b)["ms"] / 1e9}


def cold_start() -> float:
    """Seconds of the first forward and backward in a new process with an empty Triton cache."""
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_CACHE_DIR": cache}
        done = subprocess.run([sys.executable, "-c", COLD_START], env=env, capture_output=True, text=True)
    if done.returncode:
        raise LinearizeError(f"the cold start failed: {done.stderr[-500:]}", Exit.CHECK_FAILED)
    return float(done.stdout)


def contenders(inputs: list[Tensor], peers: bool) -> dict[str, Callable[[], Tensor]]:
    """name -> forward pass on q, k, v, g."""
    q, k, v, g = inputs
    out: dict[str, Callable[[], Tensor]] = {"linearize": lambda: gsa(q, k, v, g)[0]}
    if not peers:
        return out
    if q.shape[0] * q.shape[1] <= PYTORCH_TOKENS:
        out["linearize, PyTorch path"] = lambda: gsa(q, k, v, g, backend="torch")[0]
    out["softmax, SDPA flash"] = lambda: softmax(q, k, v)
    if importlib.util.find_spec("fla"):
        from fla.ops.gsa import chunk_gsa

        out["fla chunk_gsa"] = lambda: chunk_gsa(
            q, k, v, -torch.expm1(g).to(q.dtype), g.to(q.dtype), q.shape[-1] ** -0.5
        )[0]
    return out


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention by SDPA's flash kernel; [B,T,H,D] in and out."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.transpose(1, 2)


def measure_shape(shape: Shape, ceilings: dict[str, float], peers: bool) -> list[dict[str, Any]]:
    """One record per contender: forward, forward + backward, peak memory, rates as shares of the ceilings."""
    before = torch.cuda.memory_allocated()
    inputs = [x.requires_grad_() for x in make_inputs(shape)]
    do = torch.randn_like(inputs[0])
    in_and_out = sum(x.nbytes for x in inputs) + do.nbytes
    records = []
    for name, forward in contenders(inputs, peers).items():
        used = inputs[:3] if name.startswith("softmax") else inputs

        def both(forward: Callable[[], Tensor] = forward, used: list[Tensor] = used) -> None:
            torch.autograd.grad(forward(), used, do)

        with torch.no_grad():
            forward()
            record: dict[str, Any] = {"name": name, "shape": str(shape)}
            record |= {"forward": timed(forward), "forward_mib": peak_mib(forward, before)}
        both()
        record |= {"both": timed(both), "both_mib": peak_mib(both, before)}
        flops = count_flops(name, both, shape)
        # Each input read once, each output written once; backward reads them again with do and writes gradients.
        moved = 3 * in_and_out
        record["tflop_s"], record["tb_s"] = (x / record["both"]["ms"] / 1e9 for x in (flops, moved))
        record["tflop_share"] = record["tflop_s"] / ceilings["bf16_tflop_s"]
        record["tb_share"] = record["tb_s"] / ceilings["copy_tb_s"]
        records.append(record)
    return records


def count_flops(name: str, both: Callable[[], Any], shape: Shape) -> int:
    """Of a forward and backward. torch's counter does not know grouped heads in SDPA: two causal products forward,
    five backward."""
    if name.startswith("softmax"):
        return 7 * shape.B * shape.H * shape.T**2 * shape.D
    with FlopCounterMode(display=False) as counter:
        both()
    return counter.get_total_flops()


def measure_errors(shape: Shape) -> list[dict[str, Any]]:
    """Relative error |x - ref| / |ref| of the output and each gradient against the PyTorch path in float64."""
    records = []
    for dtype, gate_dtype in (
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
    ):
        q, k, v, g = make_inputs(shape, dtype)
        inputs, do = [q, k, v, g.to(gate_dtype)], torch.randn_like(q)
        exact = _all_outputs([x.double() for x in inputs], do.double(), "torch")
        for backend in ("triton", "torch"):
            found = _all_outputs(inputs, do, backend)
            errors = {name: _relative(found[name], exact[name]) for name in exact}
            records.append({"dtype": _short(dtype), "gates": _short(gate_dtype), "backend": backend, "errors": errors})
    return records


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _all_outputs(inputs: list[Tensor], do: Tensor, backend: Any) -> dict[str, Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o = gsa(*leaves, backend=backend)[0]
    return dict(zip(("o", "dq", "dk", "dv", "dg"), (o, *torch.autograd.grad(o, leaves, do)), strict=True))


def _relative(x: Tensor, reference: Tensor) -> float:
    return float((x.detach().double() - reference.detach()).norm() / reference.detach().norm())


def measure_step(shape: Shape, sets: int = 12) -> dict[str, Any]:
    """One decode step of one layer against a copy of the same bytes, inside CUDA graphs that rotate through `sets`
    states, so that none is found in the cache."""
    q, k, v, g = make_inputs(shape)
    B, _, _, Hkv, D, M = shape
    states = [
        GSAState(
            torch.randn(B, Hkv, M, D, device="cuda"),
            torch.randn(B, Hkv, M, D, device="cuda"),
            torch.zeros(B, device="cuda").long(),
        )
        for _ in range(sets)
    ]
    moved = 2 * (states[0].keys.nbytes + states[0].values.nbytes)
    sources = [torch.randn(moved // 8, device="cuda") for _ in range(sets)]
    targets = [torch.empty_like(x) for x in sources]
    with torch.no_grad():
        step = _graph_us([partial(gsa, q, k, v, g, state=s, backend="triton") for s in states])
        copy = _graph_us([partial(b.copy_, a) for a, b in zip(sources, targets, strict=True)])
    return {"shape": str(shape), "us": step, "copy_us": copy, "tb_s": moved / step / 1e6, "share_of_copy": copy / step}


def _graph_us(runs: list[Callable[[], Any]]) -> float:
    """Median device time of one run in µs, over replays of a graph of all of them."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept: list[Any] = []
    with torch.cuda.graph(graph):
        kept.extend(run() for run in runs)
    return 1e3 * timed(graph.replay, 0.1)["ms"] / len(runs)
