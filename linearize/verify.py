"""Proof that a checkpoint stands on its own, found by loading it in clean processes.

Each child refuses to import linearize, linearize_kernels, triton and peft, has a fresh cache for remote code, and
no network. `keys`: built on the meta device, every tensor accounted for, the mixers decoded. `full`: also the
logits, against the source class with the package's own mixers, each side in its own process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from .checkpoint import INDEX, MIXER_SHARD
from .errors import Exit, LinearizeError
from .source import DTYPES, Source, read_header

Level = Literal["auto", "full", "keys", "none"]
# Logits of two processes running the same float32 maths on the same CPU: equal up to the order of additions.
TOLERANCE = 1e-4

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
folder = sys.argv[1]
import torch, transformers
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
"""

KEYS = """
from transformers import AutoModelForCausalLM
model, report = AutoModelForCausalLM.from_pretrained(
    folder, trust_remote_code=True, device_map={"": "meta"}, output_loading_info=True
)
print(json.dumps({
    "report": {key: sorted(map(str, value)) for key, value in report.items()},
    "mixers": {name: list(p.shape) for name, p in model.state_dict().items() if ".mixer." in name},
    "class": type(model).__name__,
}))
"""

# The tokens are fixed and need no tokenizer; one row is left-padded.
LOGITS = """
def logits(model):
    vocab = model.config.get_text_config().vocab_size
    ids = (torch.arange(2 * 24).reshape(2, 24) * 7919 + 11) % min(vocab, 4096)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    return out[mask.bool()]
"""

FULL = """
from transformers import AutoModelForCausalLM
model, report = AutoModelForCausalLM.from_pretrained(
    folder, trust_remote_code=True, dtype=torch.float32, output_loading_info=True
)
torch.save(logits(model.eval()), sys.argv[2])
print(json.dumps({"report": {key: sorted(map(str, value)) for key, value in report.items()}}))
"""

# The other side: the native class on the source's own weights, mixers from the installed package.
SOURCE_SIDE = """
import importlib
from safetensors.torch import load_file
from linearize_kernels.mixer import own_mixer
from linearize_kernels.seam import attach
source, options = sys.argv[3], json.loads(sys.argv[4])
model_class = getattr(transformers, options["class"], None) or transformers.AutoModelForCausalLM
model = model_class.from_pretrained(source, dtype=torch.float32, trust_remote_code=options["trust"])
spec = options["spec"]
names = {layer["mechanism"] for layer in spec["layers"]}
attach(model, spec, {n: own_mixer(importlib.import_module("linearize_kernels." + n)) for n in names})
mixers = load_file(folder + "/" + options["mixers"])
loaded = model.load_state_dict({k: v.float() for k, v in mixers.items()}, strict=False)
assert not loaded.unexpected_keys, loaded.unexpected_keys
torch.save(logits(model.eval()), sys.argv[2])
"""


def verify(folder: Path, level: Level, source: Source, spec: dict[str, Any], head: str, trust: bool) -> str:
    """Check a freshly written checkpoint; returns a sentence that says what was checked.

    Raises LinearizeError (exit 6) when anything is missing, unexpected, of another shape or dtype, or unequal.
    """
    if level == "none":
        return "not verified (--verify none)"
    chosen = choose_level(folder) if level == "auto" else level
    count = check_keys(folder)
    said = f"reloaded in a clean process without linearize: {count} tensors, none missing, none unexpected"
    if chosen == "full":
        difference = check_logits(folder, source, spec, head, trust)
        said += f"; logits equal the source class with mixers (largest difference {difference:.1e})"
    elif level == "auto":
        said += "; logits not compared, twice the weights exceed free memory (--verify full forces it)"
    return said


def choose_level(folder: Path) -> Level:
    """`full` when two float32 copies of the model, one a side, fit in free memory."""
    elements = sum(_elements(t.shape) for shard in folder.glob("*.safetensors") for t in read_header(shard).values())
    return "full" if 2 * 4 * elements < free_memory() else "keys"


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def free_memory() -> int:
    """Bytes that a new process can take without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


def check_keys(folder: Path) -> int:
    """Every tensor of the index exists in its shard and in the model, and the other way round; returns how many."""
    index = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
    headers = {name: read_header(folder / name) for name in set(index.values())}
    stored = {tensor: name for name, tensors in headers.items() for tensor in tensors}
    if stored != index:
        wrong = sorted(set(stored.items()) ^ set(index.items()))[0]
        _fail(f"index and shards disagree, first at {wrong[0]!r} in {wrong[1]}")
    result = _run_child(PRELUDE + KEYS, [str(folder)])
    _check_report(result["report"])
    _check_mixers(folder, result["mixers"])
    return len(index)


def _check_report(report: dict[str, list[str]]) -> None:
    for kind, names in report.items():
        if names:
            _fail(f"{kind.replace('_', ' ')}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")


def _check_mixers(folder: Path, expected: dict[str, list[int]]) -> None:
    """Decode the new shard: names and shapes as the model's, one dtype, all values finite."""
    import torch
    from safetensors.torch import load_file

    dtype = json.loads((folder / "config.json").read_text("utf-8"))["dtype"]
    tensors = load_file(folder / MIXER_SHARD)
    for name in sorted(set(tensors) ^ set(expected)):
        _fail(f"{name} is {'not in the model' if name in tensors else 'not in ' + MIXER_SHARD}")
    for name, entry in read_header(folder / MIXER_SHARD).items():
        if list(entry.shape) != expected[name] or DTYPES.get(entry.dtype) != dtype:
            _fail(f"{name} is {entry.dtype} {list(entry.shape)}, expected {dtype} {expected[name]}")
        if not bool(torch.isfinite(tensors[name]).all()):
            _fail(f"{name} has values that are not finite")


def check_logits(folder: Path, source: Source, spec: dict[str, Any], head: str, trust: bool) -> float:
    """Largest relative difference between the checkpoint's logits and the source class with the same mixers."""
    import torch

    options = json.dumps({"spec": spec, "class": head, "trust": trust, "mixers": MIXER_SHARD})
    with tempfile.TemporaryDirectory() as scratch:
        ours, theirs = Path(scratch) / "ours.pt", Path(scratch) / "theirs.pt"
        _check_report(_run_child(PRELUDE + LOGITS + FULL, [str(folder), str(ours)])["report"])
        arguments = [str(folder), str(theirs), str(source.folder), options]
        _run_child(PRELUDE + LOGITS + SOURCE_SIDE, arguments, refused=())
        a, b = torch.load(ours), torch.load(theirs)
    if not bool(torch.isfinite(a).all()):
        _fail("the reloaded model's logits are not finite")
    difference = float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))
    if not difference <= TOLERANCE:
        _fail(f"logits differ from the source class with mixers by {difference:.1e} of the largest (limit {TOLERANCE:.0e})")
    return difference


def _run_child(
    script: str, arguments: list[str], refused: tuple[str, ...] = ("linearize", "linearize_kernels", "triton", "peft")
) -> Any:
    """Run `script` in a fresh interpreter; returns the JSON of its last line, None when it prints nothing."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "HF_MODULES_CACHE": cache, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment.pop("PYTHONPATH", None)
        # The child of the source side needs the package, also when it is not installed but on this process's path.
        paths = [] if refused else [p for p in sys.path if p]
        setup = f"import sys\nsys.path += {paths!r}\n"
        done = subprocess.run(
            [sys.executable, "-I", "-c", setup + script.replace("{refused}", repr(set(refused) or {""})), *arguments],
            env=environment,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        _fail("a clean process cannot load it:\n" + done.stderr.strip()[-2000:])
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else None


def _fail(reason: str) -> None:
    raise LinearizeError(f"verification failed: {reason}", Exit.CHECK_FAILED)
