"""What mechanisms launch on a GPU, found without one, and the shared memory that each launch needs.

`PYTHONPATH=tests python tests/kernels/launches.py H200 gla` compiles every kernel that a mechanism launches on a GPU at
the sizes of sizes.py, with triton's own assembler, and prints what they need, the largest first: minutes on one core.

A process of its own uses this: it replaces parts of gpu/launch.py before other kernels are imported, and triton knows
one driver a process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from sizes import GPUS, HEADS, OPTIONS, Gpu, Heads, site_and_options
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from linearize_kernels.gpu import launch, operators

# ---------------------------------------------------------------- operators, and what they launch

# Operator -> its host side.
HOSTS: dict[str, Callable[..., Any]] = {}


class Launch(NamedTuple):
    """A kernel, its arguments, and constants and options by name."""

    kernel: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kernel.fn.__module__.partition('.')[2]}.{self.kernel.fn.__name__}"

    def identity(self) -> tuple[Any, ...]:
        """What decides the compiled kernel, but for ints that are 1 or even."""
        kinds = tuple(str(x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in self.arguments)
        return self.name, kinds, tuple(self.keywords.items())


def replace_entries() -> None:
    """Make operators known with their host sides, on devices that are none."""
    operator, register = launch.operator, operators._register

    def named_operator(namespace: str, schema: str, run: Any, *rest: Any) -> Any:
        HOSTS[f"{namespace}::{schema.partition('(')[0]}"] = run
        return operator(namespace, schema, run, *rest)

    def named_register(library: torch.library.Library, signature: str, count: int, run: Any, fake: Any) -> Any:
        HOSTS[f"{library.ns}::{signature.partition('(')[0]}"] = run
        return register(library, signature, count, run, fake)

    launch.entry = operators.entry = lambda run, *later: run
    launch.operator, operators._register = named_operator, named_register
    launch.interpreted = lambda: True
    torch.autocast = lambda *args, **kwargs: contextlib.nullcontext()  # type: ignore[assignment, misc]
    # Imported after the entries are replaced. PyTorch without CUDA cannot index a fake tensor of a GPU; the gradients
    # of the slopes launch nothing.
    from linearize_kernels.linear import launch as linear

    linear.sums_so_far = lambda v, *rest: (v, v)


class Recorded(TorchDispatchMode):
    """Notes calls of operators that have a host side."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True
        if func.name() in HOSTS:
            assert not kwargs
            self.calls.append((func.name(), args))
        return func(*args, **(kwargs or {}))


def calls(name: str, options: dict[str, Any], heads: Heads, B: int, T: int) -> list[tuple[str, tuple[Any, ...]]]:
    """Operators that a mixer in bf16 calls for B rows of T tokens, their gradients and one token more, with meta
    tensors."""
    import linearize_kernels.window.window  # noqa: F401  (mixers with a window look it up)
    from linearize_kernels.layout import TokenLayout

    kind, site, options = site_and_options(name, options, heads)
    with torch.device("meta"):
        mixer = kind(site, **options).to(torch.bfloat16)
        shapes = ((heads.H, heads.D), (heads.Hkv, heads.D), (heads.Hkv, heads.D))

        def inputs(T: int) -> list[Tensor]:
            q, k, v = (torch.empty(B, T, *shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
            return [q, k, v, torch.empty(B, T, 64, dtype=torch.bfloat16, requires_grad=True)]

        with Recorded() as record:
            o, state = mixer(*inputs(T), TokenLayout(causal=site.causal))
            torch.autograd.backward(o, torch.empty_like(o))
            if site.causal:
                with torch.no_grad():
                    mixer(*inputs(1), TokenLayout(), state)
    return record.calls


def launches(made: list[tuple[str, tuple[Any, ...]]], gpu: Gpu) -> list[Launch]:
    """What the host sides of operators launch on such a GPU, each once. Raises ValueError where nothing fits."""

    class Properties:
        major, minor, multi_processor_count = gpu.capability // 10, gpu.capability % 10, gpu.processors
        shared_memory_per_block_optin = gpu.shared

    torch.cuda.get_device_properties = lambda device=None: Properties  # type: ignore[assignment, return-value]
    torch.cuda.get_device_capability = lambda device=None: divmod(gpu.capability, 10)
    torch.cuda.current_device = lambda: 0
    forget()
    found: dict[Any, Launch] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), collecting(found):
        for name, args in made:
            HOSTS[name](0, *(_on_gpu(x) for x in args))
    return list(found.values())


def _on_gpu(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device="cuda:0")


def forget() -> None:
    """Configurations of another GPU."""
    for module in [m for name, m in sys.modules.items() if name.startswith("linearize_kernels.")]:
        for thing in vars(module).values():
            if hasattr(thing, "cache_clear"):
                thing.cache_clear()


@contextlib.contextmanager
def collecting(found: dict[Any, Launch]) -> Iterator[None]:
    """Launches are noted in `found` and not made."""

    class Noted(dict[Any, Any]):
        def __setitem__(self, key: Any, compile_one: Any) -> None:
            kernel, _, arguments, keywords, _ = compile_one.args
            one = Launch(kernel, arguments, keywords)
            found.setdefault(one.identity(), one)

    token = launch._collected.set(Noted())
    try:
        yield
    finally:
        launch._collected.reset(token)


# ---------------------------------------------------------------- compiled


def set_driver(capability: int) -> None:
    """A driver that knows a GPU of such a capability and no more, so that triton compiles for one."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return capability

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

    triton.runtime.driver.set_active(Driver())


def need(one: Launch) -> int:
    """Bytes of shared memory of a launch, from the compiler."""
    from triton.runtime.jit import MockTensor

    arguments = [MockTensor(x.dtype) if isinstance(x, Tensor) else x for x in one.arguments]
    return int(one.kernel.warmup(*arguments, grid=(1, 1, 1), **one.keywords).metadata.shared)


def main(gpu: str, name: str) -> None:
    """Print what every launch of a mechanism needs on a GPU."""
    replace_entries()
    set_driver(GPUS[gpu].capability)
    found: dict[Any, Launch] = {}
    for options in OPTIONS[name]:
        for heads in HEADS:
            try:
                made = [call for B, T in ((1, 256), (1, 8192), (4, 2048)) for call in calls(name, options, heads, B, T)]
                found |= {one.identity(): one for one in launches(made, GPUS[gpu])}
            except ValueError as error:
                print(options, heads, error, flush=True)
    needs = {one.identity(): need(one) for one in found.values()}
    for identity in sorted(needs, key=needs.__getitem__, reverse=True):
        does = "fits" if needs[identity] <= GPUS[gpu].shared else "DOES NOT FIT"
        print(needs[identity], does, found[identity].name, found[identity].keywords)


if __name__ == "__main__":
    main(*sys.argv[1:])
