"""What launches of kernels share, without a GPU: kernels are compiled for one, and a driver of ours notes the launches.

A clean process runs this file and forks a child for each case.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


CASES = ("again", "ahead", "ints", "sizes", "kinds", "alignment", "stages", "blackwell", "failure")


@pytest.mark.slow
def test_launches(tmp_path: Path) -> None:
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "tests")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [*CASES]


def main(case: str) -> None:
    import torch
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget

    from linearize_kernels.gpu import launch
    from linearize_kernels.gpu.triton_helpers import jit

    shared, capability = 232448, 90
    launched: list[tuple[object, ...]] = []
    compiled: list[str] = []

    class Launcher:
        def __init__(self, src: object, metadata: object) -> None:
            self.source = src

        def __call__(self, x: int, y: int, z: int, stream: int, function: int, packed: object, *rest: object) -> None:
            launched.append((self.source, (x, y, z), *rest[3:]))

    class Utilities:
        def load_binary(self, name: str, *rest: object) -> tuple[int, ...]:
            compiled.append(name)
            return 1, 2, 32, 0, 1024

        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": shared}

        def unload_module(self, module: int) -> None: ...

    class Driver:
        launcher_cls, utils = Launcher, Utilities()

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    triton.runtime.driver.set_active(Driver())
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    torch.cuda.set_device = lambda device: None

    @jit
    def double(p_x, p_y, scale, n, BLOCK: tl.constexpr, TWICE: tl.constexpr):  # type: ignore[no-untyped-def]
        o = tl.arange(0, BLOCK)
        b_x = tl.load(p_x + o, mask=o < n) * scale
        if TWICE:
            b_x += b_x
        tl.store(p_y + o, b_x, mask=o < n)

    def once(x: torch.Tensor, twice: bool = False, n: int = 7) -> torch.Tensor:
        y = launch.scratch(x, *x.shape)
        launch.launch(double, (3, 2), x, y, 0.5, n, num_warps=1, TWICE=twice, BLOCK=16, UNUSED=None)
        return y

    def later(x: torch.Tensor) -> None:
        assert once(x, True).is_meta

    @jit
    def product(p_x, p_y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        o = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        b_y = tl.zeros([BLOCK, BLOCK], tl.float32)
        for i in range(n):
            b_x = tl.load(p_x + i * BLOCK * BLOCK + o)
            b_y += tl.dot(b_x, b_x)
        tl.store(p_y + o, b_y)

    def three(x: torch.Tensor) -> None:
        launch.launch(product, (1,), x, x, 9, num_warps=4, num_stages=3, BLOCK=64)

    x = torch.randn(16)
    if case == "again":  # the same launch, whichever way it was found
        operator = launch.entry(once)
        for _ in range(3):
            operator(x)
        assert [a[:2] + a[4:] for a in launched] == 3 * [(launched[0][0], (3, 2, 1), 0.5, 7, 16, False)]
        assert compiled == ["double"]
    elif case == "ahead":  # with a gradient wanted, what comes later is compiled with the rest, and not launched
        operator = launch.entry(once, later)
        operator(x)
        assert (len(compiled), len(launched)) == (1, 1)
        operator(x.requires_grad_())
        assert (len(compiled), len(launched)) == (2, 2)
        assert [a[-1] for a in launched] == [False, False]
    elif case == "ints":  # triton makes a constant of an int that is 1
        once(x, n=1)
        once(x, n=7)
        assert len({id(a[0]) for a in launched}) == 2
    elif case == "sizes":  # of those that a kernel marks as int it does not, and other lengths find the same kernel

        @jit
        def fill(p_x, N: int, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
            tl.store(p_x + tl.arange(0, BLOCK), n, mask=tl.arange(0, BLOCK) < N)

        found = []
        for size, n in ((1, 7), (16, 9), (33, 7), (5, 32), (5, 64)):
            launch.launch(fill, (1,), torch.randn(size), size, n, num_warps=1, BLOCK=64)
            found.append(len(launch._launches))
        assert found == [1, 1, 1, 2, 2]
        assert len({id(a[0]) for a in launched}) == len(compiled) == 2
    elif case == "kinds":  # another dtype or constant within one call is another kernel
        for y, twice in ((x, False), (x.half(), False), (x, True), (x.half(), True)):
            once(y, twice)
            once(y, twice)
        assert len({id(a[0]) for a in launched}) == len(compiled) == 4

        @jit
        def pair(p_x, FIRST: tl.constexpr, SECOND: tl.constexpr):  # type: ignore[no-untyped-def]
            tl.store(p_x + tl.arange(0, FIRST), SECOND)

        # Constants are told apart by their names, in whatever order they come.
        launch.launch(pair, (1,), x, num_warps=1, FIRST=16, SECOND=8)
        launch.launch(pair, (1,), x, num_warps=1, SECOND=16, FIRST=8)
        assert len(compiled) == 6
    elif case == "alignment":  # tensors that start off 16 bytes may not run what was compiled for aligned ones
        operator = launch.entry(once)
        operator(x)
        operator(torch.randn(17)[1:])
        assert len({id(a[0]) for a in launched}) == 2
    elif case == "stages":  # where buffers do not fit, fewer do, and one warning says so
        operator, shared = launch.entry(three), 20000
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for n in (4096, 4096, 8192):
                operator(torch.randn(n).half())
        assert sum("product needs more shared memory" in str(one.message) for one in told) == 1
        assert len(launched) == 3
    elif case == "blackwell":  # no tensor memory there, ahead of a launch and at one; whoever sets the variable has it
        capability = 100

        def codes() -> list[bool]:
            return ["tcgen05" in kernel.asm["ptx"] for kernel, _ in launch._launches.values()]

        launch.entry(three)(torch.randn(4096).half())
        three(torch.randn(4096).bfloat16())
        assert codes() == [False, False]
        assert launch.TENSOR_MEMORY_OFF not in os.environ
        os.environ[launch.TENSOR_MEMORY_OFF] = "0"
        three(torch.randn(4096))
        assert codes()[2]
    else:  # what a compiler says in a thread reaches the caller

        @jit
        def wrong(p_x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
            tl.store(p_x + tl.arange(0, BLOCK), nothing_of_that_name)  # type: ignore[name-defined]  # noqa: F821

        with pytest.raises(triton.compiler.CompilationError, match="nothing_of_that_name"):
            launch.entry(lambda x: launch.launch(wrong, (1,), x, num_warps=1, BLOCK=16))(x)
    print(case, flush=True)


if __name__ == "__main__":
    import triton  # noqa: F401
    from triton_tools import in_forks

    in_forks(main, CASES)
