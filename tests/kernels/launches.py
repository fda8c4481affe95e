"""What mechanisms launch on a GPU, found without one, and the shared memory that each launch needs.

`PYTHONPATH=tests python tests/kernels/launches.py H200 gla` compiles what a mechanism launches on a GPU at the sizes of
sizes.py, as far as triton's compiler tells how much shared memory that takes, and prints the most that each kernel
needs. `all` stands for all mechanisms. A folder as third argument keeps the needs, and another run goes on there.

`PYTHONPATH=tests python tests/kernels/launches.py write H200` brings the GPU's part of needs.json up to date: for each
mechanism and kernel the number of launches, the most that one needs, and a digest of their code and constants. What has
the digest that it had is not compiled again. A folder may follow, as above.

A process of its own uses this: it replaces parts of gpu/launch.py before other kernels are imported, and triton knows
one driver a process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sizes import GPUS, HEADS, OPTIONS, Gpu, Heads, site_and_options
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from linearize_kernels.gpu import launch, operators, target
from linearize_kernels.gpu.operators import HOSTS

# ---------------------------------------------------------------- operators, and what they launch

NEEDS = Path(__file__).parent / "needs.json"
# Why mechanisms left a call to PyTorch, as a warning says on such a GPU.
REFUSED: list[str] = []
# The GPU that configurations are chosen for.
GPU = [GPUS["H200"]]


class Launch(NamedTuple):
    """A kernel, its arguments, and constants and options by name."""

    kernel: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kernel.fn.__module__.partition('.')[2]}.{self.kernel.fn.__name__}"

    def identity(self) -> str:
        """What decides the compiled kernel, but for ints that are 1 or even."""
        kinds = [str(x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in self.arguments]
        return json.dumps([self.name, kinds, self.keywords], default=str)


class Way(NamedTuple):
    """A call of a mixer: rows and tokens, `train` (with gradients), `prefill`, `decode` or `pool`, the latter two of a
    token more; `packed` documents, or `padded` rows."""

    B: int
    T: int
    mode: str = "train"
    masks: str = ""


# Those that a causal mixer is called in, from one token to the longest rows. Each has configurations of its own.
WAYS = (
    *(Way(B, T) for B, T in ((1, 1), (2, 200), (4, 2048), (8, 2048), (1, 16384), (1, 65536))),
    *(Way(8, 2048, "train", masks) for masks in ("packed", "padded")),
    *(Way(B, T, "prefill") for B, T in ((1, 200), (1, 16384), (16, 2048))),
    *(Way(B, 200, mode, masks) for B in (1, 64) for mode in ("decode", "pool") for masks in ("", "padded")),
)
BIDIRECTIONAL = tuple(way for way in WAYS if way.mode == "train" and way.masks != "packed")


def replace_entries() -> None:
    """Let host sides run on devices that are none; whatever the device, the GPU is GPU[0]."""

    def chosen(device: torch.device) -> target.Target:
        return target.Target(divmod(GPU[0].capability, 10), GPU[0].shared, GPU[0].processors)

    def refused(reason: str) -> str:
        REFUSED.append(reason)
        return reason

    class Properties:
        major, minor = property(lambda self: GPU[0].capability // 10), property(lambda self: GPU[0].capability % 10)
        multi_processor_count = property(lambda self: GPU[0].processors)
        shared_memory_per_block_optin = property(lambda self: GPU[0].shared)

    launch.entry = operators.entry = lambda run, *later: run
    launch.interpreted = lambda: True
    launch.warned_once = target.warned_once = refused
    target.target = chosen
    torch.autocast = lambda *args, **kwargs: contextlib.nullcontext()  # type: ignore[assignment, misc]
    torch.cuda.get_device_properties = lambda device=None: Properties()  # type: ignore[assignment, return-value]
    torch.cuda.get_device_capability = lambda device=None: divmod(GPU[0].capability, 10)
    torch.cuda.current_device = lambda: 0


class Indexed(TorchFunctionMode):
    """PyTorch without CUDA cannot index a fake tensor of a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and args[0].is_cuda:
            return _on_gpu(torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")[args[1]])
        return func(*args, **(kwargs or {}))


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


def calls(
    name: str, options: dict[str, Any], heads: Heads, ways: tuple[Way, ...], gpu: Gpu
) -> list[tuple[str, tuple[Any, ...]]]:
    """Operators that a mixer in bf16 calls on such a GPU in these ways, with meta tensors."""
    import linearize_kernels.window.window  # noqa: F401  (mixers with a window look it up)
    from linearize_kernels.layout import TokenLayout

    if GPU[0] != gpu:
        forget()
        GPU[0] = gpu
    kind, site, options = site_and_options(name, options, heads)
    with torch.device("meta"):
        mixer = kind(site, **options).to(torch.bfloat16)
        shapes = ((heads.H, heads.D), (heads.Hkv, heads.D), (heads.Hkv, heads.D), (64,))

        def inputs(way: Way, T: int) -> list[Tensor]:
            return [torch.empty(way.B, T, *s, dtype=torch.bfloat16, requires_grad=way.mode == "train") for s in shapes]

        def layout(way: Way, T: int) -> TokenLayout:
            packed = torch.zeros(way.B, T, dtype=torch.int64) if way.masks == "packed" else None
            padded = torch.ones(way.B, T, dtype=torch.bool) if way.masks == "padded" else None
            rows = torch.zeros(way.B, dtype=torch.int64) if way.mode == "pool" and T == 1 else None
            return TokenLayout(segments=packed, padding=padded, causal=site.causal, rows=rows)

        with Recorded() as record:
            for way in ways:
                with torch.set_grad_enabled(way.mode == "train"):
                    o, state = mixer(*inputs(way, way.T), layout(way, way.T))
                    if way.mode == "train":
                        torch.autograd.backward(o, torch.empty_like(o))
                    elif way.mode != "prefill":
                        mixer(*inputs(way, 1), layout(way, 1), state)
    return record.calls


def launches(made: list[tuple[str, tuple[Any, ...]]]) -> dict[str, Launch]:
    """What the host sides of operators launch, each once by its identity."""
    found: dict[str, Launch] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), Indexed(), collecting(found):
        for name, args in made:
            HOSTS[name](*(_on_gpu(x) for x in args))
    return found


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
def collecting(found: dict[str, Launch]) -> Iterator[None]:
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


class Needed(Exception):
    """Bytes of shared memory, known before code for the GPU is made, which takes most of the time."""


def need(one: Launch, whole: bool = False) -> int:
    """Bytes of shared memory of a launch, from the compiler, which makes the `whole` of the code or stops when it knows
    the bytes."""
    from triton.backends.nvidia import compiler
    from triton.runtime.jit import MockTensor

    backend: Any = compiler.CUDABackend
    passes, make_llir = compiler.nvidia.passes.ttgpuir, backend.make_llir
    allocate, source = passes.add_allocate_shared_memory_nv, []

    def made(self: Any, src: Any, *rest: Any) -> Any:
        source[:] = [src]
        return make_llir(self, src, *rest)

    def allocated(manager: Any, *rest: Any) -> None:
        allocate(manager, *rest)
        manager.run(source[0], "shared memory")
        raise Needed(source[0].get_int_attr("ttg.shared"))

    if not whole:
        backend.make_llir, passes.add_allocate_shared_memory_nv = made, allocated
    arguments = [MockTensor(x.dtype) if isinstance(x, Tensor) else x for x in one.arguments]
    try:
        return int(one.kernel.warmup(*arguments, grid=(1, 1, 1), **one.keywords).metadata.shared)
    except Needed as found:
        return int(found.args[0])
    finally:
        backend.make_llir, passes.add_allocate_shared_memory_nv = make_llir, allocate


class Size(NamedTuple):
    """A mechanism, its options and heads."""

    name: str
    options: dict[str, Any]
    heads: Heads

    @property
    def ways(self) -> tuple[Way, ...]:
        return WAYS if self.options.get("causal", True) else BIDIRECTIONAL


def all_launches(gpu: Gpu, name: str) -> dict[str, tuple[Launch, Size, Way]]:
    """What a mechanism launches on a GPU with each option and heads, each once, and where it was seen first."""
    found: dict[str, tuple[Launch, Size, Way]] = {}
    for size in (Size(name, options, heads) for options in OPTIONS[name] for heads in HEADS):
        for way in size.ways:
            for identity, one in launches(calls(*size, (way,), gpu)).items():
                found.setdefault(identity, (one, size, way))
    return found


def code_of(kernel: Any) -> dict[str, str]:
    """The text of a kernel, and of what it calls or names on the device."""
    from triton import JITFunction
    from triton.language import constexpr

    found: dict[str, str] = {}
    waiting = [kernel]
    while waiting:
        one = waiting.pop()
        where = f"{one.fn.__module__}.{one.fn.__qualname__}"
        if where in found:
            continue
        found[where] = one.src
        for name in one.fn.__code__.co_names:
            value = one.fn.__globals__.get(name)
            if isinstance(value, JITFunction):
                waiting.append(value)
            elif isinstance(value, constexpr):
                found[f"{where}.{name}"] = repr(value.value)
    return found


def by_kernel(gpu: Gpu, name: str) -> dict[str, tuple[dict[str, Launch], str]]:
    """What a mechanism launches on a GPU: kernel -> its launches by identity, and the digest of their code."""
    found: dict[str, dict[str, Launch]] = {}
    for identity, (one, *_) in all_launches(gpu, name).items():
        found.setdefault(one.name, {})[identity] = one
    digests = {}
    for kernel, ones in found.items():
        parts = [*sorted(ones), *map(str, sorted(code_of(next(iter(ones.values())).kernel).items()))]
        digests[kernel] = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return {kernel: (found[kernel], digests[kernel]) for kernel in sorted(found)}


def stale(table: dict[str, Any]) -> list[str]:
    """Which entries of a table of needs are missing, left over or of other code: `GPU mechanism kernel`."""
    wrong = []
    for gpu, known in table.items():
        for name in OPTIONS:
            digests = {kernel: digest for kernel, (_, digest) in by_kernel(GPUS[gpu], name).items()}
            before = {kernel: row[2] for kernel, row in known.get(name, {}).items()}
            names = sorted(digests.keys() | before.keys())
            wrong += [f"{gpu} {name} {kernel}" for kernel in names if digests.get(kernel) != before.get(kernel)]
    return wrong


def write(gpu: str, folder: str = "") -> None:
    """Bring the part of NEEDS that a GPU has up to date, a line for each kernel."""
    replace_entries()
    set_driver(GPUS[gpu].capability)
    table: dict[str, Any] = json.loads(NEEDS.read_text()) if NEEDS.exists() else {}
    needs, new = Kept(GPUS[gpu], folder), dict[str, Any]()
    for name in OPTIONS:
        rows = new.setdefault(name, {})
        for kernel, (ones, digest) in by_kernel(GPUS[gpu], name).items():
            row = table.get(gpu, {}).get(name, {}).get(kernel)
            if row is None or row[2] != digest:
                row = [len(ones), max(needs.of(identity, one) for identity, one in ones.items()), digest]
            rows[kernel] = row
        print(gpu, name, sum(row[0] for row in rows.values()), "launches", flush=True)
    text = json.dumps(table | {gpu: new}, indent=1)
    NEEDS.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\S+)\s+\]", r"[\1, \2, \3]", text) + "\n")


class Kept:
    """Needs of launches by their identity, in a folder if there is one. Of two capabilities that begin alike, code
    takes the same shared memory."""

    def __init__(self, gpu: Gpu, folder: str) -> None:
        self.file = Path(folder, f"{gpu.capability // 10}.jsonl") if folder else None
        there = self.file is not None and self.file.is_file()
        self.known: dict[str, int] = dict(map(json.loads, self.file.read_text().splitlines())) if there else {}

    def of(self, identity: str, one: Launch) -> int:
        if identity not in self.known:
            self.known[identity] = need(one)
            if self.file:
                with self.file.open("a") as file:
                    print(json.dumps([identity, self.known[identity]]), file=file)
        return self.known[identity]


def main(gpu: str, name: str, folder: str = "") -> int:
    """Print the most that each kernel of a mechanism needs on a GPU, and where; the number of launches that do not
    fit."""
    replace_entries()
    set_driver(GPUS[gpu].capability)
    begin, total, bad = time.perf_counter(), 0, 0
    needs = Kept(GPUS[gpu], folder)
    for one_name in [*OPTIONS] if name == "all" else name.split(","):
        found = all_launches(GPUS[gpu], one_name)
        print(f"{gpu} {one_name}: {len(found)} launches, {time.perf_counter() - begin:.0f} s", flush=True)
        most: dict[str, tuple[int, str]] = {}
        for identity, (one, size, way) in found.items():
            bytes_needed = needs.of(identity, one)
            row = bytes_needed, json.dumps([*size[:2], str(size.heads), *way])
            most[one.name] = max(most.get(one.name, row), row)
            if bytes_needed > GPUS[gpu].shared:
                bad += 1
                print("DOES NOT FIT", *row, identity, flush=True)
        total += len(found)
        for kernel, row in sorted(most.items(), key=lambda x: -x[1][0]):
            count = sum(one.name == kernel for one, *_ in found.values())
            print("MOST", gpu, one_name, kernel, count, *row, flush=True)
    for reason in dict.fromkeys(REFUSED):
        print("refused:", reason)
    print(f"{gpu}: {total} launches, {bad} do not fit, {time.perf_counter() - begin:.0f} s")
    return bad


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(*sys.argv[2:])
    else:
        sys.exit(main(*sys.argv[1:]) > 0)
