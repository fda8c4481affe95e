"""Reload a checkpoint in clean processes, and compare its logits with those of the source class.

Each child refuses to import linearize, linearize_kernels, triton and peft, has a fresh cache for remote code, and
no network. `keys`: built on the meta device, every tensor accounted for, the mixers decoded. `full`: also the
logits, against the source class with the package's own mixers, each side in its own process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers.utils import HF_MODULES_CACHE, TRANSFORMERS_DYNAMIC_MODULE_NAME

from ..checkpoint.fp8 import cut_blocks
from ..checkpoint.shards import index_fault, read_tensor
from ..checkpoint.source import DTYPES, Entry, Source, read_header, tensor_places, weight_map
from ..checkpoint.write import INDEX, MIXER_SHARD
from ..errors import SECRET_VARIABLES, CheckFailedError, LinearizeError, ResourceError, lacking, reason_of, some
from ..plan.plan import Plan
from ..terminal.progress import Advance, progress, silent
from .tolerances import RELOADED

Level = Literal["auto", "full", "keys", "none"]

PRELUDE = """
import json, sys

class Without:
    # Refused packages look as if they were not installed, so that optional imports of others still work.
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused}:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import torch, transformers
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
"""

# The first share of its work is done where torch is imported, which is PRELUDE's.
LOAD = 'print("done 0.3", flush=True)\nfrom linearize_child.load import main; main()'
SOURCE_SIDE = "from linearize_child.source_side import main; main()"

# Where a container finds its limit of memory: version 2 of control groups, and 1.
CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
CHILD = Path(__file__).parent / "child"
# Children of this process that `started` started.
RUNNING: set[subprocess.Popen[str]] = set()
# How a line of a child begins that says what share of its work was done since the last such line.
DONE = "done "
# What else is said where keys alone were checked.
NOT_COMPARED = "; logits and decoding not compared: "
KEYS_ALONE = "; names and shapes alone: logits and decoding are compared by verify, and where finetune ends"
FIRST = "; compared on the first {} layers, which hold one of each kind, since all of them exceed free memory"
CUT = "; logits not compared with the source's: transformers does not dequantize blocks that an edge cuts"
# The number of a layer in the name of a tensor, and what else has layers.
LAYER, TOWER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\."), re.compile("vision|audio|visual|encoder")
TOO_LARGE = NOT_COMPARED + "twice the weights exceed free memory"
REPORT = "This is a bug in linearize: please open an issue with this line, the command and what linearize doctor prints"
# Of a traceback: the line that names the exception, a line of the folder's code, and where that code was copied to.
RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
FRAME = re.compile(r'File "[^"]*transformers_modules/[^"]*?([\w.-]+\.py)", line (\d+)')
CACHED = re.compile(r"transformers_modules\.[\w.]*\.(?=\w+\b)| \([^()]*transformers_modules/[^()]*\)")
RESTORE = ". If files of the folder were changed, restore them, or convert or download the model again"
REFUSED = ("linearize", "linearize_kernels", "triton", "peft")


def verify(folder: Path, level: Level, source: Source, plan: Plan, trust: bool) -> str:
    """Check a freshly written checkpoint; returns a sentence that says what was checked.

    Raises LinearizeError (exit 6) when anything is missing, unexpected, of another shape or dtype, or unequal.
    """
    if level == "none":
        return "not verified (--verify none)"
    message = "reloaded in a clean process without linearize: {} tensors, none missing, none unexpected"
    fits = ALL_TWICE if level == "full" else what_fits(folder, plan) if level == "auto" else None
    if fits is None:
        said = TOO_LARGE + " (--verify full forces it)" if level == "auto" else KEYS_ALONE
        return message.format(check_keys(folder)) + said
    first = FIRST.format(fits.layers) if fits.layers else ""
    if cut_blocks(source):
        count, _, loaded = reload_logits(folder, fits.layers)
        return message.format(count) + check_steps(loaded) + first + CUT
    count, difference, steps = check_logits(folder, source, plan, trust, fits)
    message = message.format(count) + "; logits equal the source class with mixers (largest difference "
    return message + f"{difference:.1e}){steps}{first}"


class Fits(NamedTuple):
    """What of a model fits in free memory in float32: its first `layers` layers (0: all), `twice` or once."""

    layers: int
    twice: bool


ALL_TWICE = Fits(0, True)


def what_fits(folder: Path, plan: Plan) -> Fits | None:
    """What of a converted model can be compared with its source: all of it, both sides at once or one after the other;
    else its first layers, as many as hold one of each kind; None where these do not fit, or the model has no such
    layers, as with images and encoders."""
    free, held = free_memory(), numbers([folder])
    if 4 * held < free:
        return Fits(0, 2 * 4 * held < free)
    layers = one_of_each(folder, plan)
    held = numbers([folder], layers)
    return Fits(layers, 2 * 4 * held < free) if layers and 4 * held < free else None


def one_of_each(folder: Path, plan: Plan) -> int:
    """How many of a decoder's first layers hold one of each kind: linear ones by mechanism and options, those with
    softmax, and what the config calls their types. 0 where all are needed, or layers are not a decoder's in one list.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    types = (config.get("text_config") or config).get("layer_types") or []
    sites = [*(step.site for step in plan.steps), *plan.kept]
    if config.get("is_encoder_decoder") or not all(site.causal and site.grid == "line" for site in sites):
        return 0
    kinds = {step.site.layer: (step.mechanism, json.dumps(step.options, sort_keys=True)) for step in plan.steps}
    total = max(len(types), *(site.layer + 1 for site in sites))
    met = [(kinds.get(i), types[i] if i < len(types) else None) for i in range(total)]
    needed = 1 + max(met.index(kind) for kind in set(met))
    return needed if needed < total else 0


def fits_twice(folders: Iterable[Path]) -> bool:
    """Whether two float32 copies of the models in these folders, one a side, fit in free memory."""
    return 2 * 4 * numbers(folders) < free_memory()


def numbers(folders: Iterable[Path], layers: int = 0) -> int:
    """How many numbers the weights in these folders hold, with `layers` those without what follows so many layers."""
    shards = [shard for folder in folders for shard in folder.glob("*.safetensors")]
    entries = [item for shard in shards for item in read_header(shard).items()]
    if layers:
        entries = [(name, entry) for name, entry in entries if _layer_of(name) < layers]
    return sum(math.prod(entry.shape) for _, entry in entries)


def _layer_of(tensor: str) -> int:
    """The number of the decoder's layer that a tensor is in; -1 of those outside, as in a tower for images or sound."""
    found = LAYER.search(tensor)
    return -1 if found is None or TOWER.search(tensor) else int(found[1])


def free_memory() -> float:
    """Bytes that a new process can take without swapping, or being killed where a container has a limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                machine = int(line.split()[1]) * 1024
    return min(machine, *(_left(*group) for group in CGROUPS))


def _left(folder: Path, limit: str, used: str, cached: str) -> float:
    """What a control group's limit leaves, pages of files not counted as `used`; infinite without a limit."""
    with contextlib.suppress(OSError, ValueError, KeyError):  # "max" is none
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        most, taken = (int((folder / name).read_text()) for name in (limit, used))
        return most - taken + int(counts[cached])
    return math.inf


def check_keys(folder: Path, advance: Advance = silent) -> int:
    """Every tensor of the index exists in its shard and in the model, and the other way round; returns how many.
    `advance` gets shares, 1 in all."""
    count = check_tensors(folder)
    with clean_command(LOAD, [str(folder), "meta", "0", "0", ""]) as command, started(*command) as loading:
        _check_loaded(folder, result_of(loading, advance))
    return count


def check_logits(
    folder: Path, source: Source, plan: Plan, trust: bool, fits: Fits = ALL_TWICE
) -> tuple[int, float, str]:
    """`check_keys`; the largest difference between the checkpoint's logits and those of the source class with the same
    mixers, relative to the largest; and `check_steps`. The two sides load at the same time where both fit (`fits`), and
    no more layers than it has.
    """
    dtype = plan.dtype if plan.cast else "float32"
    options = {"spec": plan.spec(), "class": plan.architecture, "dtype": dtype, "trust": trust, "mixers": MIXER_SHARD}
    options |= {"block": source.block, "layers": fits.layers}
    with scratch_folder() as scratch:
        ours, theirs = scratch / "ours.pt", scratch / "theirs.pt"
        arguments = [str(folder), str(theirs), str(source.folder.resolve()), json.dumps(options)]
        with (
            clean_command(LOAD, [str(folder), str(ours), str(RELOADED), str(fits.layers), "padded"]) as a,
            clean_command(SOURCE_SIDE, arguments, refused=()) as b,
            contextlib.ExitStack() as children,
            progress("reloading", 2 if fits.layers else 1) as advance,
        ):
            count = check_keys(folder, advance) if fits.layers else check_tensors(folder)
            loading = children.enter_context(started(*a))
            comparing = children.enter_context(started(*b)) if fits.twice else None
            loaded = result_of(loading, advance)
            result_of(comparing or children.enter_context(started(*b)))
        _check_loaded(folder, loaded, fits.layers)
        reloaded = _finite(torch.load(ours))
        difference = compare(reloaded, torch.load(theirs), "logits differ from the source class with mixers by")
        return count, difference, check_steps(loaded)


def check_steps(loaded: dict[str, Any]) -> str:
    """What to say of single steps through a cache after LOAD: nothing where the model writes no text.

    Raises LinearizeError (exit 6) when they do not compute what one pass computes.
    """
    row = loaded["steps"]
    if row is None:
        return ""
    if row["status"] == "failed":
        off = f"differ from one pass by {row['difference']:.1e} (limit {row['limit']:.0e})" if "limit" in row else ""
        _fail(f"single steps through a cache {off} {row['detail']}".rstrip() + f". {REPORT}")
    if row["status"] == "skipped" or row["detail"]:
        return f"; single steps through a cache not compared with one pass: {row['detail']}"
    proof = f"rows of {row['tokens']} tokens, largest difference {row['difference']:.1e}"
    held = f"; the window of {row['window']} held all of a row" if row["window"] else ""
    return f"; single steps through a cache equal one pass ({proof}{held})"


def compare(ours: torch.Tensor, theirs: torch.Tensor, what: str, limit: float = RELOADED) -> float:
    """The largest difference relative to the largest value. Raises LinearizeError (exit 6) over the limit."""
    difference = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6))
    if not difference <= limit:  # so that nan is over it
        _fail(f"{what} {difference:.1e} (limit {limit:.0e}). {REPORT}")
    return difference


def reload_logits(folder: Path, layers: int = 0, padded: bool = True) -> tuple[int, torch.Tensor, dict[str, Any]]:
    """`check_keys`; the logits, or what else comes out, of a saved model in float32; and what the child found, for
    `check_steps`. In one clean process; with `layers` of the model's first layers alone. A row has padding if `padded`.

    Raises LinearizeError (exit 6) for logits that are not finite."""
    count = check_keys(folder) if layers else check_tensors(folder)
    with scratch_folder() as scratch:
        out = scratch / "logits.pt"
        arguments = [str(folder), str(out), str(RELOADED), str(layers), "padded" if padded else ""]
        with clean_command(LOAD, arguments) as command, started(*command) as child:
            loaded = result_of(child)
        _check_loaded(folder, loaded, layers)
        return count, _finite(torch.load(out)), loaded


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """The same logits. Raises LinearizeError (exit 6) for others than finite ones."""
    if not bool(torch.isfinite(logits).all()):
        _fail("the reloaded model's logits are not finite")
    return logits


def check_tensors(folder: Path) -> int:
    """Index and shards list the same tensors, and the new ones are finite; returns how many there are."""
    index = weight_map(folder / INDEX)
    if fault := index_fault(index, [folder / name for name in set(index.values())]):
        _fail(fault)
    for tensor, (shard, entry) in _mixers(folder).items():
        if not all(bool(block.isfinite().all()) for block in read_tensor(shard, entry)):
            _fail(f"{tensor} has values that are not finite")
    return len(index)


def _mixers(folder: Path) -> dict[str, tuple[Path, Entry]]:
    """The tensors of mixers, and where they lie: in a shard of their own, or, in a folder that transformers saved once
    (checkpoint/adopt.py), among the others."""
    own = folder / MIXER_SHARD
    if own.exists():
        return tensor_places([own])
    layers = json.loads((folder / "config.json").read_text("utf-8"))["linearize"]["layers"]
    places = tuple(f"{layer['site']['path']}.mixer." for layer in layers)
    found = tensor_places(folder.glob("*.safetensors"))
    return {name: value for name, value in found.items() if name.startswith(places)}


def _check_loaded(folder: Path, result: dict[str, Any], layers: int = 0) -> None:
    """Nothing is missing or left over; of a model's first `layers` layers, what is in others is left over."""
    for kind, names in result["report"].items():
        if names and not (layers and kind == "unexpected_keys"):
            _fail(f"{kind.replace('_', ' ')}: {some(names)}")
    if not layers:
        _check_mixers(folder, result["mixers"])


def _check_mixers(folder: Path, expected: dict[str, list[int]]) -> None:
    """The new tensors have the model's names and shapes, and the dtype of the config or float32."""
    dtype = json.loads((folder / "config.json").read_text("utf-8"))["dtype"]
    stored = {name: entry for name, (_, entry) in _mixers(folder).items()}
    for name in sorted(set(stored) ^ set(expected)):
        _fail(f"{name} is {'not in the model' if name in stored else 'not in ' + MIXER_SHARD}")
    for name, entry in stored.items():
        # Decays and biases of gates are in float32 (Mixer.fp32_names) in folders from 2026-11-28 on.
        if list(entry.shape) != expected[name] or DTYPES.get(entry.dtype) not in (dtype, "float32"):
            _fail(f"{name} is {entry.dtype} {list(entry.shape)}, expected {dtype} {expected[name]}")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for what a check writes. Raises LinearizeError (exit 4) where none can be made."""
    try:
        scratch = tempfile.TemporaryDirectory()
    except OSError as error:
        raise _no_room(error.strerror or str(error)) from error
    with scratch as folder:
        yield Path(folder)


def _no_room(why: str) -> LinearizeError:
    """The error for temporary files of a check that cannot be written. The model that was checked may be right."""
    place = tempfile.tempdir or "any folder for temporary files"
    return ResourceError(
        f"the result could not be checked: cannot write temporary files to {place} ({why}). Make room there or set "
        "TMPDIR to another folder, and run the same command again. To save without this check: --verify none (in a "
        "recipe finish.verify: false)"
    )


@contextlib.contextmanager
def clean_command(
    script: str, arguments: list[str], refused: tuple[str, ...] = REFUSED
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Command and environment that run `script` after PRELUDE in a clean process.

    The folder `child` is copied and found there as the package `linearize_child`; the copy and the process's cache of
    remote code are removed at the end.
    """
    with scratch_folder() as scratch:
        copied, cache = f"{scratch}/package", f"{scratch}/modules"
        try:
            shutil.copytree(CHILD, f"{copied}/linearize_child", ignore=shutil.ignore_patterns("__pycache__"))
        except OSError as error:
            why = "no space left on the disk" if lacking(str(error)) == "disk" else reason_of(error)
            raise _no_room(why) from error
        environment = {**os.environ, "HF_MODULES_CACHE": cache, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        for variable in ("PYTHONPATH", *SECRET_VARIABLES):
            environment.pop(variable, None)
        # -I hides user packages and this process's additions to the path; torch may be installed there, and what is
        # found first here must be there. Code caches of this process are among them and must not be found: transformers
        # and diffusers may have one each.
        paths = [copied, *(path for path in sys.path if path and not is_code_cache(path))]
        setup = f"import sys\nsys.path[:0] = {paths!r}\n"
        setup += PRELUDE.replace("{refused}", repr(set(refused) or {""}))
        yield [sys.executable, "-I", "-c", setup + script, *arguments], environment


def is_code_cache(path: str) -> bool:
    """Whether a folder of sys.path is one into which transformers copies the code of checkpoints."""
    return path == HF_MODULES_CACHE or os.path.isdir(os.path.join(path, TRANSFORMERS_DYNAMIC_MODULE_NAME))


@contextlib.contextmanager
def started(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A running child, killed when the block is left before it has ended, or by `stop_children`."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    ) as child:
        RUNNING.add(child)
        try:
            yield child
        finally:
            child.kill()
            RUNNING.discard(child)


def stop_children() -> None:
    """Kill the children of all threads, which then end: a command that is interrupted would wait for them."""
    for child in [*RUNNING]:
        child.kill()


def result_of(child: subprocess.Popen[str], advance: Advance = silent) -> Any:
    """Wait for a child, which says "loaded" once it is, and "done SHARE" after part of its work, which `advance` gets;
    the JSON of its last line, None when there is none."""
    assert child.stdout is not None
    assert child.stderr is not None
    lines: list[str] = []
    printed: list[str] = []
    # Read at the same time, because a full pipe stops the child; a daemon, so that an interrupt here waits for nothing.
    reader = threading.Thread(target=lambda pipe: printed.append(pipe.read()), args=(child.stderr,), daemon=True)
    reader.start()
    for line in child.stdout:
        if line.startswith(DONE):
            advance(float(line.removeprefix(DONE)))
        elif line.strip():
            lines.append(line.strip())
    reader.join()
    child.wait()
    errors = "".join(printed)
    if child.returncode:
        killed = child.returncode == -signal.SIGKILL and not errors.strip()  # as the kernel does for want of memory
        lacks = "memory" if killed else lacking(errors)
        if lacks == "disk":
            raise _no_room("no space left on the disk")
        if lacks == "memory":
            message = (
                "the result could not be checked: the process that loads it ran out of memory. Close other programs"
            )
            message += ", or save without this check: --verify none (in a recipe finish.verify: false)"
            raise ResourceError(message)
        what = "loads it and then fails" if "loaded" in lines else "cannot load it"
        ended = f" (ended by signal {-child.returncode})" if child.returncode < 0 else RESTORE
        _fail(f"a clean process {what}: {cause(errors)}{ended}")
    return json.loads(lines[-1]) if lines and lines[-1] != "loaded" else None


def cause(errors: str) -> str:
    """What a child's traceback ends with, in one line, and the line of the folder's code that raised it."""
    lines, places = errors.splitlines(), FRAME.findall(errors)
    last = max((place for place, line in enumerate(lines) if RAISED.match(line)), default=None)
    message = errors.strip()[-300:] if last is None else reason_of(Exception("\n".join(lines[last:])))
    message = CACHED.sub("", message)[:300] or "it says nothing"
    return message + (f" ({places[-1][0]}, line {places[-1][1]})" if places else "")


def _fail(reason: str) -> None:
    raise CheckFailedError(f"verification failed: {reason}")
