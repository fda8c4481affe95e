"""Whether every kernel compiles to its end for a GPU that is not here, with the triton that is imported.

`PYTHONPATH=tests python tests/kernels/compile_all.py B200` compiles one launch of each kernel, of heads of 64 and in
training, prefill and decode, down to the GPU's own code. It prints those that fail, or need more shared or tensor
memory than there is. With `all` as second argument every such launch is compiled. For another version of triton:
`pip install --no-deps --target DIR triton==3.7.0`, and DIR first in PYTHONPATH.

Each launch has a process of its own, since some compilers abort. `B200` compiles as the kernels do (gpu/launch.py);
`DISABLE_MMA_V5=0` before the command compiles with tensor memory.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import launches
import triton
from launches import Launch, Size, Way, calls
from sizes import GPUS, OPTIONS, Gpu, Heads
from torch import Tensor

TARGETS = {**GPUS, "B200": Gpu(100, 232448, 148), "5090": Gpu(120, 101376, 170)}
TENSOR_COLUMNS = 512
WAYS = (Way(4, 2048), Way(8, 2048, "train", "packed"), Way(2, 200, "prefill"), *(
    Way(64, 200, mode, masks) for mode, masks in (("decode", ""), ("pool", "padded"))
))  # fmt: skip


def compile_whole(one: Launch, gpu: Gpu) -> None:
    """Raises RuntimeError where the GPU lacks the memory, and whatever the compiler raises."""
    from triton.runtime.jit import MockTensor

    from linearize_kernels.gpu.launch import _without_tensor_memory

    arguments = [MockTensor(x.dtype) if isinstance(x, Tensor) else x for x in one.arguments]
    launches.launch.interpreted = lambda: False  # type: ignore[assignment]
    with _without_tensor_memory():
        made: Any = one.kernel.warmup(*arguments, grid=(1, 1, 1), **one.keywords).metadata
    columns = getattr(made, "tmem_size", None) or 0
    if made.shared > gpu.shared or columns > TENSOR_COLUMNS:
        raise RuntimeError(f"{made.shared} bytes of shared memory and {columns} columns of tensor memory")


def main(name: str, every: str = "") -> int:
    """The number of launches that fail."""
    gpu = launches.GPU[0] = TARGETS[name]
    launches.launch.OLD = False  # a triton that is too old for some kernels is asked which ones
    launches.replace_entries()
    launches.set_driver(gpu.capability)
    found: dict[str, tuple[Launch, Size, Way]] = {}
    for size in (Size(kind, options, Heads(32, 8, 64)) for kind in OPTIONS for options in OPTIONS[kind]):
        for way in WAYS if size.options.get("causal", True) else WAYS[:1]:
            for identity, one in launches.launches(calls(*size, (way,), gpu)).items():
                found.setdefault(identity if every else one.name, (one, size, way))
    begin, bad = time.perf_counter(), 0
    for one, size, way in found.values():
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                compile_whole(one, gpu)
                os._exit(0)
            except BaseException as error:
                print(type(error).__name__, str(error)[-300:], flush=True)
            os._exit(1)
        if os.waitpid(child, 0)[1]:
            bad += 1
            print("FAILS", one.name, *size[:2], *way, one.keywords)
    seconds = time.perf_counter() - begin
    print(f"{name}, triton {triton.__version__}: {len(found)} launches, {bad} fail, {seconds:.0f} s")
    return bad


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
