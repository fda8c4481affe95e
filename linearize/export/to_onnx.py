"""A converted model as ONNX: torch writes the graph, and each linear layer becomes the operator LinearAttention.

Of its rules (opset 27) `gated` is GLA's recurrence, and with one decay for each head RetNet's; `gated_delta` is Gated
DeltaNet's. States go into the graph and come out of it, so that a prompt and each token after it are calls of one
graph.

Letters: B batch, T time, H query heads, E memories, F features, Dv value dim.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from ..checkpoint.atomic import output_folder
from ..checkpoint.provenance import check_code
from ..checkpoint.source import open_source
from ..errors import Exit, LinearizeError
from ..probe.meta_run import quiet
from ..serve.folder import is_converted
from ..train.save import load_converted

OPSET = 27
FILE = "model.onnx"
INSTALL = 'pip install "linearize[onnx]"'
# Mechanism -> rule of the operator.
RULES = {"gla": "gated", "retnet": "gated", "gdn": "gated_delta"}
# Why there is no rule for the others.
MISSING = {
    "gsa": "slots are read by softmax, and LinearAttention has no rule for that",
    "la": "its sums are divided by their weights, and LinearAttention has no normaliser",
    "mhla": "summaries of blocks are mixed, and LinearAttention has one state for each head",
    "saga": "it sees both sides, and LinearAttention is causal",
    "sla": "its gates on heads were not written for it",
}

_library = torch.library.Library("linearize_export", "DEF")
_library.define(
    "linear_attention(Tensor q, Tensor k, Tensor v, Tensor past, Tensor decay, Tensor? beta, float scale, int heads,"
    " int memories, str rule) -> (Tensor, Tensor)"
)


@torch.library.register_fake("linearize_export::linear_attention", lib=_library)
def _shapes(
    q: Tensor, k: Tensor, v: Tensor, past: Tensor, decay: Tensor, beta: Tensor | None, scale: float, heads: int,
    memories: int, rule: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [B,T,H*Dv] and the state [B,E,F,Dv]."""
    return v.new_empty(*v.shape[:2], v.shape[2] // memories * heads), torch.empty_like(past)


def obstacles(config: Any) -> list[str]:
    """Why a converted model cannot be exported, each with its first layer; empty where it can."""
    found: dict[str, list[str]] = {}
    for layer in config.linearize["layers"]:
        name, options, site = layer["mechanism"], layer["options"], layer["site"]
        reasons = {
            f"{name}: {MISSING.get(name, 'LinearAttention has no rule for it')}": name not in RULES,
            "the tokens of the exact window beside it were not written for ONNX": options.get("window", 0) > 0,
            "the tokens of the convolution before it were not written for ONNX": options.get("taps", 1) > 1,
            "it sees both sides, and LinearAttention is causal": name in RULES and not site["causal"],
        }
        for reason in [reason for reason, there in reasons.items() if there]:
            found.setdefault(reason, []).append(site["path"])
    kept = config.get_text_config().num_hidden_layers - len(config.linearize["layers"])
    said = [f"{paths[0]}{f' and {len(paths) - 1} more' if paths[1:] else ''}: {why}" for why, paths in found.items()]
    return said + [f"{kept} layers keep softmax, and its growing cache was not written for ONNX"] * (kept > 0)


def check(config: Any, name: str) -> None:
    """Raise LinearizeError: 3, naming all that is missing, unless a model can be exported; 4 without onnx."""
    if not is_converted(config):
        raise LinearizeError(f"{name} is not linearized. Export it without linearize", Exit.INCOMPATIBLE)
    if said := obstacles(config):
        message = f"{name} does not fit ONNX. {'. '.join(said)}. Layers can be gla, retnet or gdn, without a window"
        raise LinearizeError(message, Exit.INCOMPATIBLE)
    if any(importlib.util.find_spec(package) is None for package in ("onnx", "onnxscript")):
        raise LinearizeError(f"onnx and onnxscript are not installed: {INSTALL}", Exit.RESOURCE)


def export_onnx(model: str, output: Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """Write a converted model of a folder or the Hub as ONNX in fp32 into a new folder, beside its tokenizer.

    Raises LinearizeError: 2 where `output` is in the way, 3 for a model that does not fit, 4 without onnx, for disk and
    memory, 5 for the Hub.
    """
    source = open_source(model, revision)
    check_code(source.folder, trust_remote_code)
    with quiet():
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=True)
    check(config, model)
    loaded = load_converted(source.folder, torch.float32, trust_remote_code).eval()
    with output_folder(output, overwrite=False) as work:
        write(loaded, work / FILE)
        for path in source.folder.glob("*token*"):
            if path.is_file():
                (work / path.name).write_bytes(path.read_bytes())
    return output / FILE


def write(model: Any, path: Path) -> None:
    """Write a loaded model, whose mixers can only be exported from then on."""
    from onnxscript import values

    graph = OneGraph(model)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    batch, time = torch.export.Dim("batch"), torch.export.Dim("tokens")
    states = [torch.zeros(2, *shape) for shape in graph.shapes]
    names = [f"state_{number}" for number in range(len(states))]
    operator = values.Opset("", OPSET)["LinearAttention"]

    def translation(
        q: Any, k: Any, v: Any, past: Any, decay: Any, beta: Any = None, scale: float = 1.0, heads: int = 1,
        memories: int = 1, rule: str = "",
    ) -> Any:  # fmt: skip
        given = (q, k, v, past, decay) if beta is None else (q, k, v, past, decay, beta)
        return operator(*given, scale=scale, q_num_heads=heads, kv_num_heads=memories, update_rule=rule)

    program = torch.onnx.export(
        graph, (tokens, torch.arange(3).expand(2, -1), states), dynamo=True, verbose=False,
        input_names=["input_ids", "position_ids", *(f"past_{name}" for name in names)],
        output_names=["logits", *(f"present_{name}" for name in names)],
        dynamic_shapes=({0: batch, 1: time}, {0: batch, 1: time}, [{0: batch} for _ in states]),
        custom_translation_table={torch.ops.linearize_export.linear_attention.default: translation},
    )  # fmt: skip
    assert program is not None
    # What torch writes means the same in later opsets, of which it knows none with this operator.
    program.model.opset_imports[""] = OPSET
    program.save(path, external_data=True)


class OneGraph(nn.Module):
    """A converted model as a function of tokens [B,T], their places, and the states [B,E,F,Dv] of its layers, to logits
    and the states after them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.past: list[Tensor] = []
        self.after: list[Tensor] = []
        # Of the state of each layer, without B.
        self.shapes: list[tuple[int, ...]] = []
        for layer in model.config.linearize["layers"]:
            mixer = model.get_submodule(layer["site"]["path"]).mixer
            mixer.recur = self.recurrence(len(self.shapes), mixer, RULES[layer["mechanism"]])
            self.shapes.append((mixer.state_count, mixer.key_dim, mixer.site.value_dim))

    def recurrence(self, number: int, mixer: Any, rule: str) -> Any:
        """What does the work of a mixer's `recur`: the operator, and the norm of its output."""

        def recur(
            op: Any, layout: Any, state: Any, read: Any, write: Any, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor,
            scale: float, log_decay: Tensor | None = None,
        ) -> tuple[Tensor, Any]:  # fmt: skip
            H, E = q.shape[2], mixer.state_count
            k, v = (y.repeat_interleave(E // y.shape[2], 2) for y in (k, v))
            decay = gates[0].flatten(2) if log_decay is None else log_decay.expand(*q.shape[:2], -1)
            o, after = torch.ops.linearize_export.linear_attention(
                q.flatten(2), k.flatten(2), v.flatten(2), self.past[number], decay,
                gates[1] if len(gates) > 1 else None, scale, H, E, rule,
            )  # fmt: skip
            self.after.append(after)
            o = o.unflatten(2, (H, -1))
            return (o if mixer.norm is None else mixer.norm(o)), (after,)

        return recur

    def forward(self, input_ids: Tensor, position_ids: Tensor, states: list[Tensor]) -> tuple[Tensor, ...]:
        self.past, self.after = states, []
        logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return (logits, *self.after)
