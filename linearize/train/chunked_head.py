"""The loss of a stage some tokens at a time, so that the logits of all tokens never lie in memory together.

The body of the model runs once over the whole text, as always. The head then runs on one stretch of t tokens after
another, and each stretch's gradient is computed before the next begins. So only [B,t,V] of the logits [B,T,V] and of
their gradient is in memory. What an architecture does around its head (scales, soft caps) is its own forward's, which
runs with its body replaced by one that gives back those hidden states.

Where FSDP2 divides the weights, those of the head are gathered once for all stretches, and their gradient is reduced
once. The head then runs past FSDP's hooks, which would gather for each stretch, and reduce in each backward pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from ..data.batches import INPUTS, Batch, forward, keeps_logits
from ..data.kinds import kind_of
from ..recipe.recipe import Stage
from .fsdp import is_divided, reshard, whole
from .predictions import Compared, predictions
from .student import Student
from .terms import total

# Logits [B,t,V] that an evaluation has at once of each model: 1 GiB in float32.
READ_AT_ONCE = 2**28

# Modules of a head with weights in one piece, by their paths in the model.
Gathered = dict[str, nn.Module]


def obstacle(model: Any) -> str:
    """Why the head of a model cannot run apart from its body; empty where it can."""
    if kind_of(model) != "text" or not keeps_logits(type(model).forward) or model.base_model is model:
        return f"{type(model).__name__} has no head that runs on some tokens alone"
    return ""


def chunked_loss(
    stage: Stage,
    student: Student,
    batch: Batch,
    tokens: Tensor,
    autocast: Callable[[], Any],
    saving: Callable[[], Any] = contextlib.nullcontext,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a stage on one micro batch, and its terms; arguments as for `stages.end_to_end_loss`."""
    model, size = student.model, stage.chunk_size
    assert size is not None
    theirs = predictions_of(student, batch, autocast) if stage.asks_teacher else None
    with autocast(), saving():
        ours, kind = hidden_states(model, batch)
    gathered = gathered_head(model, autocast)

    names: list[str] = []

    def loss_of(hidden: Tensor, part: slice) -> list[Tensor]:
        with autocast():
            logits = head(model, hidden, kind, gathered)
        loss, terms = total(Compared(stage, student, batch, tokens, logits, theirs and theirs(part), part))
        names[:] = terms
        return [loss, *terms.values()]

    with _in_place(model, gathered):
        trained = [p for p in model.get_output_embeddings().parameters() if p.requires_grad]
    loss, terms = _Chunks.apply(loss_of, size, model, ours, trained, *trained)
    return loss, dict(zip(names, terms, strict=True))


def predictions_of(
    student: Student, batch: Batch, autocast: Callable[[], Any], parts: list[slice] | None = None
) -> Callable[[slice], Tensor]:
    """`logits_of` the student's teacher, without gradient."""
    if parts is not None and len(parts) == 1:
        whole = predictions(student, batch, autocast)
        return lambda part: whole
    with student.teacher() as model:
        read = logits_of(model, batch, autocast)

    def piece(part: slice) -> Tensor:
        with student.teacher_head():
            return read(part)[..., : student.vocabulary]

    return piece


def logits_of(
    model: Any, batch: Batch, autocast: Callable[[], Any], parts: list[slice] | None = None
) -> Callable[[slice], Tensor]:
    """The logits of some tokens of each row: the body of `model` runs here, its head when it is asked. Where there is
    one part alone, both run here."""
    with autocast():
        if parts is not None and len(parts) == 1:
            whole = forward(model, batch)
            return lambda part: whole
        hidden, kind = hidden_states(model, batch)
    gathered = gathered_head(model, autocast)

    def piece(part: slice) -> Tensor:
        with autocast():
            return head(model, hidden[:, part], kind, gathered)

    return piece


def stretches(model: Any, batch: Batch) -> list[slice]:
    """The tokens of a batch's rows in parts whose logits an evaluation may hold at once. One part where the head cannot
    run apart, or where DeepSpeed divides its weights."""
    rows, length = batch["labels"].shape
    if obstacle(model) or any(hasattr(p, "ds_id") for p in model.parameters()):
        return [slice(0, length)]
    size = max(1, READ_AT_ONCE // (rows * model.config.get_text_config().vocab_size))
    return [slice(start, start + size) for start in range(0, length, size)]


class _Chunks(torch.autograd.Function):
    """The loss over all stretches, and the sums of its terms. The gradients of hidden states and of the head's weights
    are computed on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        loss_of: Callable[[Tensor, slice], list[Tensor]],
        size: int,
        model: Any,
        hidden: Tensor,
        trained: list[Tensor],
        *_: Tensor,
    ) -> tuple[Tensor, Tensor]:
        of_hidden, of_trained = torch.empty_like(hidden), [torch.zeros_like(p, dtype=torch.float32) for p in trained]
        sums = []
        for start in range(0, hidden.shape[1], size):
            part = slice(start, start + size)
            with torch.enable_grad():
                piece = hidden[:, part].detach().requires_grad_()
                loss, *terms = loss_of(piece, part)
                first, *rest = torch.autograd.grad(loss, [piece, *trained])
            of_hidden[:, part] = first
            for summed, found in zip(of_trained, rest, strict=True):
                summed += found
            sums.append(torch.stack([loss, *terms]).detach())
        sum_of = torch.stack(sums).sum(0)
        whole, apart = sum_of[0].clone(), sum_of[1:].clone()
        of_trained = [found.to(p.dtype) for found, p in zip(of_trained, trained, strict=True)]
        ctx.gradients, ctx.model = [of_hidden, *of_trained], model
        ctx.mark_non_differentiable(apart)
        return whole, apart

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        of_hidden, *of_trained = (found.mul_(grad) for found in ctx.gradients)
        # FSDP would at the model's output, which has no gradient here. The last norm's unit is the model or the head.
        for module in (ctx.model, *ctx.model.get_output_embeddings().modules()):
            if is_divided(module):
                module.unshard()
        return None, None, None, of_hidden, None, *of_trained


def hidden_states(model: Any, batch: Batch) -> tuple[Tensor, type]:
    """What the body of `model` hands to its head [B,T,hidden], and the class of its output."""
    kept: list[Any] = []
    handle = model.base_model.register_forward_hook(lambda body, inputs, output: kept.append(output))
    try:
        model(**{name: batch[name] for name in INPUTS if name in batch}, use_cache=False, logits_to_keep=1)
    finally:
        handle.remove()
    return kept[0].last_hidden_state, type(kept[0])


def head(model: Any, hidden: Tensor, kind: type, gathered: Gathered) -> Tensor:
    """The logits [B,t,V] that `model` makes of hidden states, which its body gives in an output of that class."""
    with _body_gives(model.base_model, kind(last_hidden_state=hidden)), _in_place(model, gathered):
        return model.forward(inputs_embeds=hidden, use_cache=False).logits


def gathered_head(model: Any, autocast: Callable[[], Any]) -> Gathered:
    """Modules of a model's head that FSDP2 divides, with weights in one piece, in the dtype that `autocast` multiplies
    in; empty for a model that is whole. Every process must ask. What trains hands its gradient to the shards."""
    if not is_divided(model):
        return {}
    reshard(model)
    of_head = {*model.get_output_embeddings().modules()}
    divided = {
        path: module
        for path, module in model.named_modules()
        if module in of_head and any(isinstance(p, DTensor) for p in module._parameters.values())
    }
    with autocast():
        kind = next(model.parameters()).device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return {path: _in_one_piece(module, dtype) for path, module in divided.items()}


def _in_one_piece(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A module of the same class, and of the same attributes, with whole weights and without FSDP's hooks."""
    kind: Any = next(one for one in type(module).__mro__ if not issubclass(one, FSDPModule))
    plain: nn.Module = kind.__new__(kind)
    nn.Module.__init__(plain)
    own = {*vars(plain)} - {"training", "_buffers", "_modules"}
    vars(plain).update({name: value for name, value in vars(module).items() if name not in own})
    for name, shard in module._parameters.items():
        if not isinstance(shard, DTensor):
            plain.register_parameter(name, shard)
            continue
        value = whole(shard.detach().to(dtype or shard.dtype), shard)
        # Of one process alone, the whole would be the shard's own memory.
        value = value.clone() if shard.device_mesh.size() == 1 else value
        plain.register_parameter(name, nn.Parameter(value, shard.requires_grad))
        if shard.requires_grad:
            plain.get_parameter(name).register_post_accumulate_grad_hook(functools.partial(_into_shard, shard))
    return plain


def _into_shard(shard: Any, parameter: Any) -> None:
    """A whole gradient becomes this process's rows of the mean over processes, as FSDP would reduce it in float32, is
    added to the shard's, and forgotten."""
    mesh = shard.device_mesh
    summed = DTensor.from_local(parameter.grad.float(), mesh, [Partial()] * mesh.ndim, run_check=False)
    grad = (summed.redistribute(placements=shard.placements) / mesh.size()).to(shard.dtype)
    parameter.grad = None
    shard.grad = grad if shard.grad is None else shard.grad + grad


@contextlib.contextmanager
def _in_place(model: nn.Module, gathered: Gathered) -> Iterator[None]:
    """Within: the model has these modules instead of its own."""
    own = {path: model.get_submodule(path) for path in gathered}
    for path, module in gathered.items():
        model.set_submodule(path, module)
    try:
        yield
    finally:
        for path, module in own.items():
            model.set_submodule(path, module)


@contextlib.contextmanager
def _body_gives(body: Any, output: Any) -> Iterator[None]:
    # Hooks of model and body stay out: layers that are computed again ask what these noted of the pass before.
    hooks = body._forward_pre_hooks, body._forward_hooks
    body.forward, body._forward_pre_hooks, body._forward_hooks = lambda *args, **named: output, {}, {}
    try:
        yield
    finally:
        del body.forward
        body._forward_pre_hooks, body._forward_hooks = hooks
