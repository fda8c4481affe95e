"""Proof in environments of their own: converted checkpoints load, and compute what they should, without linearize.

    python tests/clean_env.py make FOLDER                 in the environment of linearize: models and expected logits
    python tests/clean_env.py check FOLDER PYTHON ...     each PYTHON is the interpreter of an environment that has
                                                          torch and transformers and nothing of this project

The check runs this file in each interpreter, isolated; that part imports torch and transformers alone.
"""

from __future__ import annotations

import _imp
import contextlib
import hashlib
import json
import marshal
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

EXPECTED = "expected.pt"
INPUTS = Path(__file__).resolve().parent.parent / "linearize" / "verify" / "child" / "inputs.py"
# What a clean environment lacks; triton may be there, as a requirement of torch.
FOREIGN = ("linearize", "linearize_kernels", "peft", "accelerate")
# Logits of two processes, perhaps of two versions of transformers, in float32.
LIMIT = 1e-4


def compute(model: Any, steps: bool = True) -> dict[str, Any]:
    """Logits of a left-padded batch in one pass, and of a prefill followed by steps.

    Of a model that writes no text, what comes out for its own kind of inputs, and for images of another shape.
    """
    import torch

    given = inputs()
    if not given.writes_text(model):
        taller = given.taller_images(model, given.make_inputs(model))
        return {"whole": given.outputs(model)} | ({"taller": given.outcome(model, taller)} if taller and steps else {})
    ids = (torch.arange(40).reshape(2, 20) * 31 + 7) % (model.config.get_text_config().vocab_size - 3) + 3
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        if not steps:
            return {"whole": whole}
        out = model(input_ids=ids[:1, :13], use_cache=True)
        if "past_key_values" not in out:  # it keeps no cache that one can hold
            return {"whole": whole}
        parts = [out.logits]
        for t in range(13, 20):
            out = model(input_ids=ids[:1, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits)
    return {"whole": whole, "steps": torch.cat(parts, 1)}


def inputs() -> Any:
    """`linearize.verify.child.inputs`, by its place: it imports torch alone; linearize may be absent."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("inputs", INPUTS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lay_out(place: Path, source: Path, converted: Path) -> None:
    """Copy a converted checkpoint to `place`, and beside it what the source class with the same mixers computes."""
    from models import source_with_mixers

    shutil.copytree(converted, place)
    expect(place, compute(source_with_mixers(source, converted)))


def expect(place: Path, logits: dict[str, Any]) -> None:
    """Note beside a checkpoint what it must compute: what `compute` gives, and perhaps `teacher`, softmax's `whole`."""
    import torch

    torch.save(logits, place.with_name(f"{place.name}.{EXPECTED}"))


def make(folder: Path) -> None:
    """A checkpoint per architecture in `folder`, half of them hybrids."""
    from models import ARCHITECTURES, HYBRID, Zoo

    with tempfile.TemporaryDirectory() as scratch:
        for number, name in enumerate(ARCHITECTURES):
            lay_out(folder / name, *Zoo(Path(scratch)).folders(name, HYBRID if number % 2 else "all"))


def load(folder: Path) -> None:
    """Inside the clean environment: load every checkpoint of `folder` and compare; one line each."""
    import transformers

    in_clean_environment()
    for expected in sorted(folder.glob("*." + EXPECTED)):
        name = check_one(expected)
        print(f"{name} loads with transformers {transformers.__version__}, logits equal")


def survey(folder: Path) -> None:
    """As `load`, but go on after a failure: one line of JSON each, its name and what went wrong or null."""
    in_clean_environment()
    remember_imports()
    for expected in sorted(folder.glob("*." + EXPECTED)):
        failure = None
        try:
            check_one(expected)
        except Exception as error:  # the reason is the result
            failure = f"{type(error).__name__}: {str(error).strip()}"
        print(json.dumps([expected.name.removesuffix("." + EXPECTED), failure]), flush=True)


def remember_imports() -> None:
    """Ask transformers once for what a text of code imports: it searches all files of a checkpoint three times at each
    load, which takes longer than it takes to make a tiny model."""
    from transformers import dynamic_module_utils

    search, known = dynamic_module_utils.get_relative_imports, dict[bytes, list[str]]()

    def get_relative_imports(module_file: str | os.PathLike[str]) -> list[str]:
        with open(module_file, "rb") as file:
            text = file.read()
        if text not in known:
            known[text] = search(module_file)
        return [*known[text]]

    dynamic_module_utils.get_relative_imports = get_relative_imports


def remember_code() -> None:
    """Compile each text of a checkpoint's code once, whatever temporary folder it is copied to; a folder beside these
    copies holds what was compiled, for processes that are forked, too. A load compiles some twenty files, which takes
    longer than to load a tiny model."""
    usual, kept = SourceFileLoader.get_code, Path(os.environ["HF_MODULES_CACHE"]) / ".compiled"
    temporary, here = tempfile.gettempdir(), str(Path(__file__).resolve().parent.parent)
    kept.mkdir(exist_ok=True)

    def get_code(self: SourceFileLoader, name: str) -> Any:
        if not self.path.startswith(temporary) or self.path.startswith(here):
            return usual(self, name)
        text = self.get_data(self.path)
        place = kept / hashlib.sha256(text).hexdigest()
        if place.exists():
            code = marshal.loads(place.read_bytes())
            _imp._fix_co_filename(code, self.path)  # as importlib does with what lay in __pycache__
            return code
        code = self.source_to_code(text, self.path)
        unfinished = place.with_name(f"{place.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # a process that may write no file of this size
            unfinished.write_bytes(marshal.dumps(code))
            unfinished.replace(place)
        return code

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def in_clean_environment() -> None:
    """Proof that nothing of this project is installed, and no noise."""
    import importlib.util

    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    present = [name for name in FOREIGN if importlib.util.find_spec(name)]
    assert not present, f"not a clean environment: it has {present}"


def check_one(expected: Path) -> str:
    """Load the checkpoint beside `expected`, compare, generate; returns what it is."""
    import torch
    import transformers

    place = expected.with_name(expected.name.removesuffix("." + EXPECTED))
    auto = inputs().auto_class(transformers.AutoConfig.from_pretrained(place, trust_remote_code=True))
    model, report = getattr(transformers, auto).from_pretrained(place, trust_remote_code=True, output_loading_info=True)
    assert not any(report.values()), f"{place}: {report}"
    refused_without_trust(place, auto)
    theirs, ours = torch.load(expected), compute(model.eval())
    if "teacher" in theirs:
        with model.teacher():
            ours["teacher"] = compute(model, steps=False)["whole"]
    assert ours.keys() == theirs.keys(), f"{place}: {sorted(ours)} beside {sorted(theirs)}"
    for key in theirs:
        difference = float((ours[key] - theirs[key]).abs().max() / theirs[key].abs().max())
        assert difference < LIMIT, f"{place}: {key} logits differ by {difference:.1e}"
    if not inputs().writes_text(model):
        return f"{place.name}: {type(model).__name__}"
    ids = torch.arange(3, 10)[None]
    assert model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0).shape == (1, 11)
    return f"{place.name}: {type(model).__name__}"


def refused_without_trust(place: Path, auto: str) -> None:
    """Loading without trust_remote_code fails, rather than giving a softmax model."""
    import transformers

    message = "it loads"
    try:
        getattr(transformers, auto).from_pretrained(place, trust_remote_code=False)
    except (ValueError, OSError) as error:
        message = str(error)
    assert "trust_remote_code" in message, f"{place} without trust_remote_code: {message}"


def check(folder: Path, interpreters: list[str], file: str = __file__) -> None:
    """Run `load` of a file in all interpreters at the same time; raises if one fails."""
    with contextlib.ExitStack() as held:
        commands = [[python, "-I", file, "load", str(folder)] for python in interpreters]
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL}
        started = [subprocess.Popen(one, env=held.enter_context(isolated()), **options) for one in commands]
        codes = [one.wait() for one in started]
    assert not any(codes), f"of {interpreters}: {codes}"


@contextlib.contextmanager
def isolated() -> Iterator[dict[str, str]]:
    """Environment variables of a process with a fresh code cache and no network."""
    with tempfile.TemporaryDirectory() as modules:
        yield {**os.environ, "HF_MODULES_CACHE": modules, "HF_HUB_OFFLINE": "1"}


HIDING = """
import runpy, sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {names} else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
sys.argv[0:1] = [{file}, "{verb}"]
runpy.run_path({file}, run_name="__main__")
"""


@contextlib.contextmanager
def without_packages(verb: str = "load") -> Iterator[list[str]]:
    """A command that runs `load` (or `survey`) on its argument in this interpreter, the foreign packages hidden."""
    with tempfile.TemporaryDirectory() as modules:
        code = HIDING.replace("{names}", repr((*FOREIGN, "triton"))).replace("{verb}", verb)
        code = code.replace("{file}", repr(str(Path(__file__).resolve())))
        yield ["env", f"HF_MODULES_CACHE={modules}", "HF_HUB_OFFLINE=1", sys.executable, "-I", "-c", code]


def in_clean_process(folder: Path, verb: str = "load") -> list[str]:
    """What such a process says of each checkpoint of `folder`, one line each; it must end well."""
    with without_packages(verb) as command:
        done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def main() -> None:
    verb, folder, *interpreters = sys.argv[1:]
    if verb == "check":
        check(Path(folder), interpreters)
    else:
        {"make": make, "load": load, "survey": survey}[verb](Path(folder))


if __name__ == "__main__":
    main()
