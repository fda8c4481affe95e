"""Every mechanism on a GPU at every size of sizes.py: mixers in bf16, whose kernels `auto` chooses, against the same in
float64, which the PyTorch path takes, and no worse than the PyTorch path in bf16 where that is not near.

Skipped without a GPU, but for a run of the checks themselves. `PYTHONPATH=tests python tests/gpu/test_sweep_gpu.py gla`
needs no pytest; `gla 1 3` runs the second third. `gla,sla side-by-side` runs these mechanisms in as many processes at a
time as there are cores, two for each option, so that they compile side by side, on all GPUs of the machine; `all
side-by-side` runs all mechanisms. `rows` as the last word leaves packed and long rows alone. Long rows may take 25 GB
and more, and processes take turns at a GPU's memory. `gla cpu` checks the script itself: every option of the mechanism,
with few heads, by PyTorch on the CPU.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import torch
from sizes import HEADS, OPTIONS, Heads, site_and_options
from torch import Tensor

from linearize_kernels.gpu import launch
from linearize_kernels.layout import TokenLayout

# Of the norm of what the float64 path gives: any tensor, and one that the PyTorch path in bf16 misses by so much less.
ALLOWED, FACTOR = 1e-2, 1.5
# Name -> error of ours, and if that is large, that of the PyTorch path in bf16 (else 0).
Found = dict[str, tuple[float, float]]
# Nearly all of a slope's gradient cancels, and the rounding of the weights' gradients to bf16 in dq stays: 1.2e-2 and
# 1.8e-2 bidirectional, 32/8 heads of 128, on one H100 (docs/measurements/kernel-notes.md).
# Those of decays are a number a head, added up over all tokens: 1.1e-2 in packed rows, 8/4 heads of 256, on one H100.
ALLOWED_OF = {"slope_logit": 2.5e-2, "A_log": 1.5e-2, "decay.bias": 1.5e-2}
FEW = HEADS[1], HEADS[6]
SMALL = Heads(4, 2, 16)
HIDDEN = 256


def mixers(name: str, options: dict[str, Any], heads: Heads, device: str = "cuda") -> tuple[Any, Any]:
    """A mixer in bf16 with random weights, and its copy in float64."""
    kind, site, options = site_and_options(name, options, heads, HIDDEN)
    torch.manual_seed(0)
    ours = kind(site, **options)
    ours.reset_parameters()
    ours = ours.to(device, torch.bfloat16)
    exact = kind(site, **options).to(device, torch.float64)
    exact.load_state_dict(ours.state_dict())
    ours.dtype, exact.dtype = torch.bfloat16, torch.float64  # a window alone has no parameter that tells it
    return ours, exact


def inputs(heads: Heads, B: int, T: int, device: str = "cuda") -> list[Tensor]:
    """q, k, v and hidden states in bf16."""
    torch.manual_seed(B + T)
    shapes = (heads.H, heads.D), (heads.Hkv, heads.D), (heads.Hkv, heads.D), (HIDDEN,)
    return [torch.randn(B, T, *shape, device=device).bfloat16() for shape in shapes]


def trained(
    mixer: Any, given: list[Tensor], layout: TokenLayout, backward: bool = True, only_output: bool = False
) -> dict[str, Tensor]:
    """The output and, made in any case with `backward`, gradients of inputs and weights."""
    leaves = [x.detach().to(mixer.dtype).requires_grad_(backward) for x in given]
    with torch.set_grad_enabled(backward):
        o, _ = mixer(*leaves, layout)
    found = {"o": o.detach()}
    if backward:
        torch.manual_seed(1)
        arrives = torch.randn(o.shape, device=o.device).bfloat16().to(o.dtype)
        wanted = {"d" + n: x for n, x in zip("qkvx", leaves, strict=True)}
        wanted |= {n: x for n, x in mixer.named_parameters() if x.requires_grad}
        gradients = torch.autograd.grad(o, list(wanted.values()), arrives, allow_unused=True)
        found |= {n: g for n, g in zip(wanted, gradients, strict=True) if g is not None}
    return {"o": found["o"]} if only_output else found


def decoded(mixer: Any, given: list[Tensor], prefill: int) -> dict[str, Tensor]:
    """Outputs of the tokens after `prefill`, one at a time, and the prefill's."""
    given = [x.to(mixer.dtype) for x in given]
    with torch.no_grad():
        o, state = mixer(*(x[:, :prefill] for x in given), TokenLayout())
        steps = []
        for t in range(prefill, given[0].shape[1]):
            one, state = mixer(*(x[:, t : t + 1] for x in given), TokenLayout(), state)
            steps.append(one)
    return {"prefill": o, "decode": torch.cat(steps, 1)}


def errors(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Norm of the difference over that of what is exact; inf where ours is not finite.

    A bias's gradient is a sum over tokens that may cancel. Its norm counts as no less than the root of its summands'
    squares, which its weight's gradient tells, because hidden states are random. The gradient of weights of blocks is 0
    but for rounding where every document has one block: elsewhere its norm is 0.6 to 2 of the output's.
    """
    found = {}
    for name, x in exact.items():
        norm = x.norm().clamp_min(1e-3 * x.numel() ** 0.5)
        if name.endswith(".bias") and name.replace(".bias", ".weight") in exact:
            norm = norm.maximum(exact[name.replace(".bias", ".weight")].norm() / HIDDEN**0.5)
        if name == "block_logits":
            norm = norm.maximum(0.1 * exact["o"].norm())
        difference = float((ours[name].double() - x).norm() / norm)
        found[name] = difference if bool(ours[name].isfinite().all()) else float("inf")
    return found


def compared(run: Callable[[Any], dict[str, Tensor]], ours: Any, exact: Any) -> Found:
    """Of what a run gives, the error of ours, and if that is large, that of the PyTorch path in bf16 (else 0)."""
    wanted = run(exact)
    found = errors(run(ours), wanted)
    if all(error <= ALLOWED for error in found.values()):
        return {name: (error, 0.0) for name, error in found.items()}
    with without_kernels():
        torchs = errors(run(ours), wanted)
    return {name: (error, torchs[name]) for name, error in found.items()}


def cells(
    name: str, options: dict[str, Any], heads: Heads, device: str = "cuda", only_rows: bool = False
) -> Iterator[tuple[str, Found]]:
    """Name and errors of each check of one size, or of its packed and long rows alone."""
    ours, exact = mixers(name, options, heads, device)
    causal = ours.site.causal

    def layout(B: int, T: int, packed: bool) -> TokenLayout:
        length = 60 if T <= 2048 else 3000
        documents = torch.arange(T, device=device) // length + torch.arange(B, device=device)[:, None]
        return TokenLayout(segments=documents if packed else None, causal=causal)

    for B, T, packed in ((2, 200, False), (1, 1, False), (2, 200, True)):
        if (packed and not causal) or (only_rows and not packed):
            continue
        given, how = inputs(heads, B, T, device), layout(B, T, packed)
        # At one token the norm of a head leaves q and k no gradient but rounding's.
        run = partial(trained, given=given, layout=how, only_output=T == 1)
        yield f"train {B}x{T}" + " packed" * packed, compared(run, ours, exact)
    for B in (1, 16, 64) if causal and not only_rows else ():
        given = inputs(heads, B, 103 if B == 1 else 20, device)
        yield f"decode {B}", compared(partial(decoded, given=given, prefill=given[0].shape[1] - 3), ours, exact)
    if device == "cpu":
        return

    def large() -> Found:
        given = inputs(heads, 8, 2048, device)
        check = finite(trained(ours, given, layout(8, 2048, False)))
        row = partial(trained, given=[x[:1] for x in given], layout=layout(1, 2048, False), backward=heads in FEW)
        return check | compared(row, ours, exact)

    def long(T: int, packed: bool) -> Found:
        given = inputs(heads, 1, T, device)
        found = trained(ours, given, layout(1, T, packed))
        check = finite(found)
        if causal:  # what comes first sees nothing of the rest
            first = [x[:, :4096] for x in given]
            wanted = trained(exact, first, layout(1, 4096, packed), backward=False)
            check["o"] = errors({"o": found["o"][:, :4096]}, wanted)["o"], 0.0
        return check

    if not only_rows:
        yield "train 8x2048", in_turn(8, 2048, heads, large)
    for T, packed in ((16384, False), (16384, True), (65536, False)):
        if causal or not packed:
            yield f"train 1x{T}" + " packed" * packed, in_turn(1, T, heads, partial(long, T, packed))


def in_turn(B: int, T: int, heads: Heads, run: Callable[[], Found]) -> Found:
    """What `run` gives on long rows, for whose memory this waits until the other processes of the GPU leave it; again,
    with more of it, where it was not enough."""
    total = torch.cuda.get_device_properties(0).total_memory
    needed = 25e9 * B * T / 65536 * heads.H * heads.D / 4096
    while True:
        needed = min(max(needed, 3e9), 0.4 * total)  # contexts of the processes take the most of the rest
        with open(os.path.join(tempfile.gettempdir(), f"linearize-sweep-{gpu()}"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            while torch.cuda.mem_get_info()[0] < needed + 1e9:
                time.sleep(0.05)
            torch.empty(int(needed), dtype=torch.uint8, device="cuda")  # freed at once, but it stays this process's
        try:
            return run()
        except torch.OutOfMemoryError:
            if needed >= 0.4 * total:
                raise
            needed *= 1.5
        finally:
            torch.cuda.empty_cache()


def gpu() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0")


def finite(found: dict[str, Tensor]) -> Found:
    return {f"finite {name}": (0.0 if bool(x.isfinite().all()) else float("inf"), 0.0) for name, x in found.items()}


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """The PyTorch path of operators and features; gates stay, which are exact."""
    refusals: dict[str, Any] = dict.fromkeys(("use_kernels", "use_triton", "fits"), lambda *args: False)
    refusals["runs_on"] = lambda *args: "left to PyTorch"
    modules = [module for name, module in sys.modules.items() if name.startswith("linearize_kernels.")]
    found = [(module, name) for module in modules for name in refusals if hasattr(module, name)]
    kept = [getattr(module, name) for module, name in found]
    for module, name in found:
        setattr(module, name, refusals[name])
    try:
        yield
    finally:
        for (module, name), value in zip(found, kept, strict=True):
            setattr(module, name, value)


def needs() -> dict[str, int]:
    """Kernel -> the most shared memory that a launch of this process needed."""
    found: dict[str, int] = {}
    for compiled, _ in launch._launches.values():
        found[compiled.metadata.name] = max(found.get(compiled.metadata.name, 0), compiled.metadata.shared)
    return found


def rows(name: str, options: dict[str, Any], heads: Heads, device: str, only_rows: bool) -> Iterator[tuple[bool, str]]:
    """Whether each check of one size is good, and a line about it; the last one if it raises."""
    begin, title = time.perf_counter(), f"{name} {options or ''} {heads}"
    try:
        for cell, found in cells(name, options, heads, device, only_rows):
            worst = [
                n for n, (ours, torchs) in found.items() if not ours <= max(ALLOWED_OF.get(n, ALLOWED), FACTOR * torchs)
            ]
            shown = [n for n, (ours, _) in found.items() if ours > ALLOWED or n in ("o", "dq", "prefill", "decode")]
            numbers = " ".join("{} {:.1e}/{:.1e}".format(n, *found[n]) for n in shown)
            spent, begin = time.perf_counter() - begin, time.perf_counter()
            yield not worst, f"{'BAD' if worst else 'ok'} {title} {cell} {spent:.1f}s {' '.join(worst)} | {numbers}"
    except Exception as error:
        yield False, f"BAD {title} {type(error).__name__} {str(error)[:400]!r}"


def main(name: str, *part: str) -> int:
    """Print a row for each check; the number of those that are bad. `part` is empty, its number and how many there are,
    `side-by-side` or `cpu`, and then `rows` where packed and long rows alone are asked for."""
    only_rows = part[-1:] == ("rows",)
    part = part[:-1] if only_rows else part
    if part == ("side-by-side",):
        return side_by_side([*OPTIONS] if name == "all" else name.split(","), only_rows)
    device = "cpu" if part == ("cpu",) else "cuda"
    if device == "cpu":
        sizes = [(options, SMALL) for options in OPTIONS[name]]
    else:
        number, parts = map(int, part or ("0", "1"))
        sizes = [(options, heads) for options in OPTIONS[name] for heads in HEADS]
        sizes = sizes[number * len(sizes) // parts : (number + 1) * len(sizes) // parts]
    bad = 0
    for options, heads in sizes:
        for good, line in rows(name, options, heads, device, only_rows):
            print(line, flush=True)
            bad += not good
        if device == "cuda":
            torch.cuda.empty_cache()
    print("shared memory", needs(), flush=True)
    return bad


def side_by_side(names: list[str], only_rows: bool) -> int:
    """`main` of every mechanism named, in as many processes at a time as cores and memory allow: what they print as it
    comes, the bad checks once more, and the most shared memory of each kernel. The number of what is bad.

    The first options of every mechanism come first: what a limit of time cuts is then the last."""
    begin, count, bad, most = time.perf_counter(), 0, [], dict[str, int]()
    parts = [(name, str(i), str(2 * len(OPTIONS[name]))) for name in names for i in range(2 * len(OPTIONS[name]))]
    parts.sort(key=lambda part: int(part[1]))
    gpus, cores = max(1, torch.cuda.device_count()), os.cpu_count() or 1
    if torch.cuda.is_available():  # a process with its kernels' local memory holds up to 3 GB beside what it computes
        cores = min(cores, gpus * int(torch.cuda.get_device_properties(0).total_memory // 7e9))
    with ThreadPoolExecutor(cores) as pool:
        commands = {
            pool.submit(_output, i % gpus, sys.executable, __file__, *part, *["rows"] * only_rows): part
            for i, part in enumerate(parts)
        }
        for done in as_completed(commands):
            *lines, last = done.result() or [""]
            if last.startswith("shared memory "):
                found = ast.literal_eval(last.removeprefix("shared memory "))
                most = {kernel: max(most.get(kernel, 0), found.get(kernel, 0)) for kernel in {*most, *found}}
            else:
                lines += [last, f"BAD {' '.join(commands[done])} did not end"]
            count += sum(line.startswith(("ok ", "BAD ")) for line in lines)
            bad += [line for line in lines if line.startswith("BAD ")]
    print("----", *bad, f"shared memory {most}", sep="\n")
    print(f"{count} checks, {count - len(bad)} good, {time.perf_counter() - begin:.0f} s")
    return len(bad)


def _output(number: int, *command: str) -> list[str]:
    """The lines that a command prints, which are printed as they come; it sees one GPU."""
    env, lines = {**os.environ, "CUDA_VISIBLE_DEVICES": str(number)}, []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as running:
        for line in running.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    return lines


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)

import pytest  # noqa: E402  (the script needs none of these)
import yaml  # noqa: E402
from sizes import BIDIRECTIONAL, PRESETS  # noqa: E402

from linearize.recipe.presets import presets  # noqa: E402
from linearize_kernels.mixer import option_types  # noqa: E402


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", OPTIONS)
def test_every_size_runs_and_is_near_float64(name: str) -> None:
    assert main(name) == 0


@pytest.mark.parametrize("name", OPTIONS)
def test_the_checks_themselves_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With every option of the sweep, a window among them where the mechanism can have one."""
    assert main(name, "cpu") == 0, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    bidirectional = sum(options.get("causal") is False for options in OPTIONS[name])
    assert len(lines) == 2 * bidirectional + 6 * (len(OPTIONS[name]) - bidirectional) + 1
    assert main(name, "cpu", "rows") == 0
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert len(lines) == len(OPTIONS[name]) - bidirectional
    assert all(" packed " in line for line in lines)
    kind, _, _ = site_and_options(name, {}, SMALL)
    assert any(options.get("window") for options in OPTIONS[name]) == ("window" in option_types(kind))


@pytest.mark.slow
def test_the_script_imports_what_a_window_needs() -> None:
    """In a process of its own: other tests import that, too."""
    tests = os.path.dirname(os.path.dirname(__file__))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, __file__, "retnet", "cpu"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'window': 64" in done.stdout


def test_side_by_side_runs_every_size_once_and_tells_what_is_bad(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of eight parts one has a bad check, and one is killed."""
    seen = []

    def output(_: int, __: str, ___: str, name: str, number: str, parts: str, *only: str) -> list[str]:
        main(name, number, parts, *only)
        lines = {"1": "ok a\nBAD b\nshared memory {'k': 9}", "2": "ok a\n"}
        return lines.get(number, "ok a\nshared memory {'j': 1, 'k': 5}").splitlines()

    module = sys.modules[__name__]
    monkeypatch.setattr(module, "rows", lambda name, *size: (seen.append(size[:2]), iter(()))[1])
    monkeypatch.setattr(module, "_output", output)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert main("saga", "side-by-side") == 2
    assert sorted(map(str, seen)) == sorted(str((options, heads)) for options in OPTIONS["saga"] for heads in HEADS)
    *_, bad, killed, most, summary = capsys.readouterr().out.splitlines()
    assert {bad, killed} == {"BAD b", "BAD saga 2 8 did not end"}
    assert ast.literal_eval(most.removeprefix("shared memory ")) == {"j": 1, "k": 9}
    assert summary.startswith("10 checks, 8 good")


def test_presets_are_swept() -> None:
    """Every preset's mechanism with its options, and no other options are called those of a preset."""
    found: dict[str, list[Any]] = {"window": [*PRESETS["window"]]}
    for preset in presets():
        converted = yaml.safe_load(preset.path.read_text())["convert"]
        options = converted.get("options", {}) | (BIDIRECTIONAL if preset.name.startswith(("vit-", "sentence")) else {})
        known = found.setdefault(converted["mechanism"], [])
        known += [options] if options not in known else []
    by_text = {name: sorted(map(_sorted, options)) for name, options in found.items()}
    assert by_text == {name: sorted(map(_sorted, options)) for name, options in PRESETS.items()}


def _sorted(options: dict[str, Any]) -> str:
    return str(sorted(options.items()))
