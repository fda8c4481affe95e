"""`linearize export`: whether a converted model fits ONNX, and the proof that its graph computes the same."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from torch import Tensor

from ..checkpoint.atomic import check_output, output_folder, separate
from ..checkpoint.carried import carried_files, check_carried, is_read
from ..checkpoint.manifest import is_linearized, plan_of_resaved
from ..checkpoint.provenance import behind, check_code, check_merged, open_config
from ..checkpoint.source import open_source
from ..errors import Exit, LinearizeError, os_error, quoted, reason_of
from ..plan.plan import Plan
from ..probe.trace import quiet
from ..train.save import load_converted
from ..verify.child.inputs import LONGEST, proof_length
from ..verify.tolerances import ONNX
from .graph import EXPORTED, OneGraph, write

FILE = "model.onnx"
INSTALL = 'pip install "linearize[onnx]"'
# The first versions that know opset 27 and write what torch.onnx asks for.
OLDEST = {"onnx": "1.23", "onnxscript": "0.7"}
# Tokens of the rows that prove a graph: how many of each a prompt has, and how many follow it one by one. The long one
# has more than a window holds (`proof_length`).
SHORT, LONG, STEPS = 5, 33, 2
# Why LinearAttention cannot compute the others.
MISSING = {
    "gsa": "slots are read by softmax, and LinearAttention has no such rule",
    "la": "sums are divided by their weights, and LinearAttention has no normaliser",
    "mamba2": "its gate stands in front of the norm, and export does not write that (linearize export --as auto)",
    "mhla": "summaries of blocks are mixed, and LinearAttention has one state for each head",
    "sla": "gates between heads stand around its base, and export does not write them",
}


def export_onnx(model: str, output: Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """Write a converted model of a folder or the Hub as ONNX in float32 into a new folder, with its tokenizer, once
    onnx's reference evaluator computed the same logits from it.

    Raises LinearizeError: 2 where `output` is in the way, 3 for a model that does not fit, 4 without onnx, for disk and
    memory, 5 for the Hub, 6 where the graph computes something else.
    """
    folder, _, config, carried = open_converted(model, output, revision, trust_remote_code)
    check(config, model)
    loaded = load_converted(folder, torch.float32, trust_remote_code).eval()
    with output_folder(output, overwrite=None) as work, silent(), torch.no_grad():
        rows = proof_rows(config.get_text_config())
        expected = [loaded(input_ids=row[None], use_cache=False).logits[0] for row in rows]
        try:
            graph = OneGraph(loaded)
            write(graph, work / FILE)
        except Exception as error:  # torch.export raises as it likes, and wraps what it was refused
            cause = error.__cause__ or error
            if isinstance(cause, LinearizeError) or os_error(cause):
                raise cause from None
            what = f"{type(error).__name__}: {reason_of(cause)}"
            message = f"{model} does not fit ONNX: torch.onnx could not write its graph ({what})"
            if any("experts" in key and value for key, value in config.to_dict().items()):
                message += ". Which experts a token goes to depends on the text, and torch.onnx does not follow that"
            raise LinearizeError(message, Exit.INCOMPATIBLE) from error
        prove(graph, work / FILE, rows, expected)
        for path in carried:
            shutil.copyfile(path, work / path.name)
    return output / FILE


def open_converted(
    model: str, output: Path, revision: str | None, trust_remote_code: bool
) -> tuple[Path, Plan, Any, list[Path]]:
    """The folder of a converted model that is to be exported to `output`, its plan and config, and the files of its
    tokenizer. Raises LinearizeError: 2 where `output` is in the way, 3 for what linearize did not write, 5 for the Hub.
    """
    folder = open_source(model, revision).folder
    if not is_linearized(folder):
        raise LinearizeError(f"{model} is not linearized, and can be used without an export", Exit.INCOMPATIBLE)
    if not separate(folder, output):
        raise LinearizeError(f"{output} and the model {folder} must be separate folders. Choose another -o")
    check_output(output, overwrite=None)
    plan = check_code(folder, trust_remote_code)
    check_carried(folder)
    check_merged(folder, model)
    version = behind(folder, plan)
    if version is not None:
        way = f"Bring it to this version first: linearize upgrade {quoted(model)}"
        if plan_of_resaved(folder):
            way = "transformers saved it without linearize.json: linearize finetune and push write it in this version"
        raise LinearizeError(f"{model} has the code of linearize {version}. {way}", Exit.INCOMPATIBLE)
    # Before anything is computed, for links that lead elsewhere are refused.
    carried = [path for path in carried_files(folder) if path.parent == folder and is_read(path)]
    return folder, plan, open_config(folder), carried


def check(config: Any, name: str) -> None:
    """Raise LinearizeError: 3, naming all that is missing, for a model that cannot be exported; 4 without onnx, and
    for a version that is too old."""
    if found := obstacles(config):
        message = f"{name} does not fit ONNX. {'. '.join(found)}. Linear layers can be {', '.join(EXPORTED)}"
        raise LinearizeError(message, Exit.INCOMPATIBLE)
    for package, oldest in OLDEST.items():
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError as error:
            raise LinearizeError(f"{package} is not installed: {INSTALL}", Exit.RESOURCE) from error
        if Version(installed) < Version(oldest):
            message = f"export needs {package} {oldest} or later: {INSTALL}. Installed is {installed}"
            raise LinearizeError(message, Exit.RESOURCE)


def obstacles(config: Any) -> list[str]:
    """Why a converted model cannot be exported, each reason with its first layer; empty where it can."""
    if "AutoModelForCausalLM" not in config.auto_map or config.get_text_config() is not config:
        return ["It is no language model of text alone, and export writes those"]
    found: dict[str, list[str]] = {}
    for layer in config.linearize["layers"]:
        name, options, site = layer["mechanism"], layer["options"], layer["site"]
        reasons = {
            f"{name}: {MISSING.get(name, 'LinearAttention has no rule for it')}": name not in EXPORTED,
            "native: export does not write it as a graph (linearize export --as auto)": bool(options.get("native")),
            "taps: export does not write the convolution of q, k and v": options.get("taps", 1) > 1,
            "memories: export writes one for each head": options.get("memories", 1) > 1,
            "its softmax is in the architecture's own code": not site.get("routed", True),
        }
        for reason in [reason for reason, there in reasons.items() if there]:
            found.setdefault(reason, []).append(site["path"])
    return [f"{paths[0]}{f' and {len(paths) - 1} more' * bool(paths[1:])}, {why}" for why, paths in found.items()]


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Silence what torch's exporter logs and prints of itself, such as the whole graph that it could not write."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with quiet(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def proof_rows(config: Any, longest: int = LONGEST) -> list[Tensor]:
    """Random tokens [T] of a short row, and of a longer one that goes beyond the first tokens and the window of each
    linear layer, as far as `longest` and the positions of the model."""
    generator = torch.Generator().manual_seed(0)
    lengths = (SHORT, proof_length(config, LONG, STEPS, longest))
    return [torch.randint(config.vocab_size, (tokens + STEPS,), generator=generator) for tokens in lengths]


def prove(graph: OneGraph, path: Path, rows: list[Tensor], expected: list[Tensor]) -> None:
    """Run a file by onnx's reference evaluator: the short row alone, then both in a batch, each time a prompt and then
    its last tokens one by one.

    Raises LinearizeError (exit 6) where it computes something else than `expected`, the logits [T,V] of each row, or
    cannot be run.
    """
    try:
        compare(graph, path, rows, expected)
    except Exception as error:
        if isinstance(error, LinearizeError) or os_error(error):
            raise
        message = f"onnx cannot run the graph ({type(error).__name__}: {reason_of(error)}). Nothing was written"
        raise LinearizeError(message, Exit.CHECK_FAILED) from error


def compare(graph: OneGraph, path: Path, rows: list[Tensor], expected: list[Tensor]) -> None:
    """Compare as `prove` says. Raises LinearizeError (exit 6) for other logits, and what onnx raises of its own."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    onnx.checker.check_model(str(path))
    evaluator = ReferenceEvaluator(onnx.load(str(path)))
    for chosen in ([0], [0, 1]):
        longest = max(len(rows[i]) for i in chosen)
        ids = torch.stack([torch.nn.functional.pad(rows[i], (longest - len(rows[i]), 0)) for i in chosen])
        real = torch.stack([torch.arange(longest) >= longest - len(rows[i]) for i in chosen]).long()
        past: list[Any] = [part.numpy() for part in graph.empty(len(chosen))]
        outputs, begin = [], 0
        for end in range(longest - STEPS, longest + 1):
            feed = {"input_ids": ids[:, begin:end].numpy(), "attention_mask": real[:, :end].numpy()}
            feed |= {f"past_{part.name}": tensor for part, tensor in zip(graph.parts, past, strict=True)}
            logits, *past = evaluator.run(None, feed)
            outputs.append(logits)
            begin = end
        computed = np.concatenate(outputs, 1)
        for number, i in enumerate(chosen):
            want = expected[i].numpy()
            difference = np.abs(computed[number, longest - len(rows[i]) :] - want).max()
            limit = ONNX * max(1.0, np.abs(want).max())
            if not difference <= limit:
                raise LinearizeError(
                    f"the graph computes other logits than the model: {difference:.1e} apart, at most {limit:.1e} was "
                    "expected. Nothing was written. The architecture does in softmax what export does not know",
                    Exit.CHECK_FAILED,
                )
