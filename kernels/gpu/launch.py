"""What the host side of every mechanism's kernels shares: launches, scratch, chunks.

An operator on the GPU reads like this, where the inputs alone decide all that is launched:

    def run_forward(*inputs):
        x = scratch(inputs[0], 4, 64)
        launch(kernel, grid, *arguments, num_warps=4, **constants)

    forward = entry(run_forward)

A launch finds its kernel by what triton compiles for, without what triton otherwise does to find it: most of a launch's
time on the CPU. Lengths of any number find the same kernels. At first use all kernels of the operator compile at once,
in threads.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout import of_starts
from .triton_helpers import load_rows, triton

# Compiled kernels and the values of their constants, by what triton compiles for.
_launches: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
# Of a kernel, which of its arguments are ints for which triton compiles once, whatever they are.
_free: dict[int, tuple[bool, ...]] = {}
_kinds: set[Hashable] = set()
# Warnings about kernels that do not fit a GPU, each of which is given once.
_warned: set[str] = set()
# Launches that `_compile_ahead` collects instead of making them.
_collected: ContextVar[dict[Hashable, Callable[[], None]] | None] = ContextVar("collected", default=None)
# What triton's compiler reads, and who may set it.
TENSOR_MEMORY_OFF = "DISABLE_MMA_V5"
_setting = threading.Lock()
# Earlier versions have no products of several bf16 parts, which some kernels name.
OLD = triton is not None and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6)


def interpreted() -> bool:
    """Whether triton runs its kernels on the CPU (TRITON_INTERPRET=1, for tests)."""
    return type(load_rows).__name__ == "InterpretedFunction"


def unavailable(device: torch.device, dtype: torch.dtype) -> str:
    """Why no kernel can take tensors of a device and dtype; empty when kernels can."""
    if triton is None:
        return "triton is not installed"
    if OLD:
        return f"triton {triton.__version__} is older than 3.6"
    if device.type != "cuda" and not interpreted():
        return f"the tensors are on {device}"
    return "" if dtype in (torch.bfloat16, torch.float16, torch.float32) else f"dtype {dtype}"


# ---------------------------------------------------------------- launches


def entry(run: Callable[..., Any], *later: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation of an operator on its inputs' device: run(*inputs).

    At the first inputs of their dtypes, heads and dims the kernels of `run` are compiled in threads, and those of
    `later`, called like it, where an input wants a gradient.
    """

    def enter(*inputs: Any) -> Any:
        with torch.cuda.device_of(inputs[0]):
            if _first_of_kind(run, inputs):
                wanted = (run, *later) if any(isinstance(x, Tensor) and x.requires_grad for x in inputs) else (run,)
                _compile_ahead(*(partial(one, *inputs) for one in wanted))
            return run(*inputs)

    return enter


def _first_of_kind(run: Any, inputs: Sequence[Any]) -> bool:
    kind = run, *[(x.shape[2:], x.dtype, x.requires_grad) if isinstance(x, Tensor) else x is None for x in inputs]
    new = kind not in _kinds and not interpreted()
    _kinds.add(kind)
    return new


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    num_warps: int,
    num_stages: int = 1,
    maxnreg: int | None = None,
    **constants: Any,
) -> None:
    """kernel[grid](*arguments, **constants), fast where triton has compiled it for such arguments.

    `arguments` are those of the kernel that are not constexpr, in order, the first a tensor. Its constexpr ones come last
    in its signature; `constants` may hold more than those.
    """
    collected = _collected.get()
    key = (
        id(kernel), num_warps, num_stages, maxnreg, arguments[0].device, *constants, *constants.values(),
        *_compiled_for(kernel, arguments, collected is not None),
    )  # fmt: skip
    if known := _launches.get(key):
        if collected is None:
            compiled, values = known
            compiled[(*grid, 1, 1)[:3]](*arguments, *values)
        return
    values = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
    keywords = dict(zip(kernel.arg_names[len(arguments) :], values, strict=True)) | options
    if collected is not None:
        collected[key] = partial(_compile, kernel, grid, arguments, keywords, torch.cuda.current_device())
        return
    with _without_tensor_memory():
        compiled = _fitting(lambda keywords: kernel[grid](*arguments, **keywords), keywords, kernel.__name__)
    if compiled is not None:  # the interpreter compiles nothing
        _launches[key] = compiled, values


def _compiled_for(kernel: Any, arguments: tuple[Any, ...], collected: bool) -> list[Any]:
    """What triton compiles for: dtypes, whether memory begins at a multiple of 16 bytes (not of memory that is not there,
    where launches are collected), and whether an int is 1 or a multiple of 16."""
    free = _free.get(id(kernel))
    if free is None:
        free = _free[id(kernel)] = tuple(one.do_not_specialize for one in getattr(kernel, "params", ()))
    found: list[Any] = []
    for x, every in zip(arguments, free or (False,) * len(arguments), strict=False):
        kind = type(x)
        if kind is int:
            wide = not -(1 << 31) <= x < 1 << 31
            found.append(wide if every else 1 if x == 1 else (x % 16 == 0, wide))
        elif x is None or kind is float:
            found.append(kind)
        else:
            found.append((x.dtype, collected or x.data_ptr() % 16 == 0))
    return found


@contextlib.contextmanager
def _without_tensor_memory() -> Iterator[None]:
    """Within: kernels for B200 and its like multiply as those for other GPUs do, unless the user's environment says
    otherwise. Triton takes tensor memory for products there, of which it has 512 columns: with some versions kernels
    need more, or do not compile (docs/measurements/kernel-notes.md)."""
    gpu = None if interpreted() else triton.runtime.driver.active.get_current_target()
    if gpu is None or gpu.backend != "cuda" or gpu.arch // 10 not in (10, 11):
        yield
        return
    with _setting:
        if TENSOR_MEMORY_OFF in os.environ:
            yield
            return
        os.environ[TENSOR_MEMORY_OFF] = "1"
        try:
            yield
        finally:
            del os.environ[TENSOR_MEMORY_OFF]


def _fitting(run: Callable[[dict[str, Any]], Any], keywords: dict[str, Any], name: str) -> Any:
    """run(keywords) of the kernel `name`, with fewer stages where shared memory does not hold the buffers of all.

    Configurations are computed to fit; this is for versions of triton and GPUs that need more than was foreseen.
    """
    asked = {option: keywords[option] for option in ("num_stages", "STAGES") if option in keywords}
    stages = max(asked.values())
    while True:
        try:
            return run(keywords | {option: min(n, stages) for option, n in asked.items()})
        except triton.runtime.errors.OutOfResources as error:
            if stages == 1 or error.name != "shared memory":
                raise
            _warn_once(f"{name} needs more shared memory than this GPU has and runs with fewer stages, more slowly")
            stages -= 1


def warned_once(reason: str) -> str:
    """`reason`, why no configuration fits a GPU; the first time with a warning."""
    _warn_once(f"{reason}: PyTorch takes over, more slowly")
    return reason


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=2)


def scratch(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised memory on the device of `like`; no memory where launches are only collected."""
    return torch.empty(shape, device="meta" if _collected.get() is not None else like.device, dtype=dtype)


def _compile_ahead(*runs: Callable[[], Any]) -> None:
    """Compile and load in threads what `runs` would launch: seconds for each. Nothing is launched or allocated."""
    collected: dict[Hashable, Callable[[], None]] = {}
    token = _collected.set(collected)
    try:
        for run in runs:
            run()
    finally:
        _collected.reset(token)
    with _without_tensor_memory(), ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda compile_one: compile_one(), collected.values()))


def _compile(kernel: Any, grid: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], device: int) -> None:
    torch.cuda.set_device(device)
    # `run` loads it, and compiles triton's launcher.
    _fitting(lambda keywords: kernel.warmup(*arguments, grid=grid, **keywords).run, keywords, kernel.__name__)


class Problem:
    """One call of an operator, and what every launch derives from it."""

    def __init__(self, call: Any) -> None:
        """`call` begins with q [B,T,H,D], k and v [B,T,E,Dv]."""
        self.call = call
        self.q, self.k, self.v = (dense(x) for x in call[:3])
        (self.B, self.T, self.H, self.D), self.DV = call.q.shape, call.v.shape[-1]

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return scratch(self.q, *shape, dtype=dtype)


# ---------------------------------------------------------------- chunks


class ChunkLayout(NamedTuple):
    """How rows or sequences fall into chunks; a row of N chunks owns N + 1 slots."""

    chunks: int  # grid size: chunks per row, or a bound on all chunks of all sequences
    rows: int
    slots: int
    per_chunk: Tensor | None  # cu_seqlens: [chunks,3] first token, tokens, slot
    per_row: Tensor | None  # cu_seqlens: [rows,2] first slot, chunks


def most_chunks(T: int, cu: Tensor | None, C: int) -> int:
    """Chunks of a row of T tokens, or with cu_seqlens a bound on those of all sequences, for which nothing waits."""
    return -(-T // C) if cu is None else T // C + len(cu) - 1


def lay_out(q: Tensor, cu: Tensor | None, C: int) -> ChunkLayout:
    """The chunks of q [B,T,H,D]. With cu_seqlens their number is only bounded, so that nothing waits for the GPU."""
    B, T = q.shape[:2]
    if cu is None:
        N = most_chunks(T, cu, C)
        return ChunkLayout(N, B, B * (N + 1), None, None)
    return of_starts(cu, ("chunks", T, C), lambda starts: _chunks(starts, T, C))


def _chunks(cu: Tensor, T: int, C: int) -> ChunkLayout:
    """`lay_out` of sequences."""
    S, N = cu.shape[0] - 1, most_chunks(T, cu, C)
    cu = cu.long()
    counts = (cu[1:] - cu[:-1] + C - 1) // C
    ends = counts.cumsum(0)
    index = torch.arange(N, device=cu.device)
    row = torch.searchsorted(ends, index, right=True).clamp(max=S - 1)
    token = cu[row] + (index - (ends - counts)[row]) * C
    size = torch.where(index < ends[-1], (cu[row + 1] - token).clamp(max=C), 0)
    per_chunk = torch.stack([token, size, index + row], -1).int()
    per_row = torch.stack([ends - counts + torch.arange(S, device=cu.device), counts], -1).int()
    return ChunkLayout(N, S, N + S, per_chunk, per_row)


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Batch, time and head strides of [B,T,heads,D] tensors, whose last dimension is dense."""
    return tuple(step for tensor in tensors for step in tensor.stride()[:3])


def width(size: int) -> int:
    """Columns of a tile that holds `size` of them: a power of two, and at least the 16 that a product takes."""
    return max(16, 1 << (size - 1).bit_length())


def dense(x: Tensor) -> Tensor:
    """x, copied where its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def in_rows(state: Tensor, rows: Tensor | None) -> Tensor:
    """A state as a step reads it: each of its rows dense. A pool, of which `rows` are named, is changed where it lies.

    Raises ValueError for a pool whose rows are not dense.
    """
    if rows is None:
        return state.contiguous()
    if state.numel() and not state[:1].is_contiguous():
        raise ValueError(f"each row of a pool of states must be dense, found strides {state.stride()}")
    return state
