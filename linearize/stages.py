"""The loss of each kind of stage, for one micro batch: backpropagated here, its value returned.

`attention_transfer`: softmax goes on through the network, each layer's mixer is compared with it on the same
input, and each layer's loss is backpropagated as it arises: memory is one layer's. `logit_kl`: a teacher pass,
then the student's, then backward, never a switch in between. `sft`: cross entropy alone.

Every loss is divided by counts of the whole optimizer step, so that micro batches and processes simply add up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from linearize_kernels.seam import mixers_of

from .losses import logit_kl, next_token_ce, relative_mse
from .recipe import AttentionTransfer, LogitKL, Stage
from .trainable import Student

Batch = dict[str, Tensor]


def forward(model: Any, batch: Batch) -> Tensor:
    """Logits [B,T,V] of packed blocks. No mask and no cache: transformers then keeps documents apart."""
    return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits


class Listener:
    """What `model.transferring` calls for each layer; the default hears nothing.

    `own_call` asks for a second run of each attention module, as the student, because the student's q, k, v are
    not the teacher's.
    """

    own_call = False

    def __init__(self, student: Student) -> None:
        self.student_model = student

    def hear(self, mixer: Any, inputs: tuple[Tensor, ...], o: Tensor, target: Tensor) -> None:
        """One layer: inputs (q, k, v, x) as for `Mixer.mix`, its output and softmax's, both [B,T,H,Dv]."""

    def compare(self, mixer: Any, y: Tensor, target: Tensor) -> None:
        """Outputs [B,T,hidden] of one attention module after a second run: the student's, the teacher's."""

    def student(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """The context of that second run."""
        return self.student_model.as_student(module)


class Transfer(Listener):
    """Trains each mixer, on the spot, towards the softmax output of its layer.

    `power` divides a token's squared error in each layer, constant for the stage: the error relative to the micro
    batch's own would not add up to the error of the step. `tokens` counts the whole step.
    """

    def __init__(
        self,
        student: Student,
        valid: Tensor,
        tokens: Tensor,
        power: dict[int, Tensor],
        backward: Callable[[Tensor], None],
    ) -> None:
        super().__init__(student)
        self.own_call = student.lora is not None
        self.valid, self.tokens, self.power, self.backward = valid, tokens, power, backward
        self.losses: dict[int, Tensor] = {}

    def hear(self, mixer: Any, inputs: tuple[Tensor, ...], o: Tensor, target: Tensor) -> None:
        layer = mixer.site.layer
        share = square_sum(target, self.valid) / (self.power[layer] * self.tokens).clamp_min(1e-12)
        loss = relative_mse(o, target, self.valid) * share
        # This is inside the forward pass, where autocast may be on; a backward pass must not be under it.
        with torch.autocast(loss.device.type, enabled=False):
            self.backward(loss)
        self.losses[layer] = loss.detach()


class Calibration(Listener):
    """Lets each mixer set its norms from the teacher's outputs of one batch."""

    @torch.no_grad()
    def hear(self, mixer: Any, inputs: tuple[Tensor, ...], o: Tensor, target: Tensor) -> None:
        mixer.calibrate(*inputs, o, target)


class Power(Listener):
    """Sums the square norms of softmax outputs, and the tokens."""

    def __init__(self, student: Student) -> None:
        super().__init__(student)
        self.sums: dict[int, Tensor] = {}
        self.valid = torch.empty(0)

    @torch.no_grad()
    def hear(self, mixer: Any, inputs: tuple[Tensor, ...], o: Tensor, target: Tensor) -> None:
        found = torch.stack([square_sum(target, self.valid), self.valid.sum().float()])
        self.sums[mixer.site.layer] = self.sums.get(mixer.site.layer, 0) + found


def square_sum(o: Tensor, valid: Tensor) -> Tensor:
    """sum ||o||^2 over valid tokens, in float32; o [B,T,H,Dv]."""
    return torch.where(valid[..., None, None], o, 0.0).float().square().sum()


def teacher_power(student: Student, batches: Iterable[Batch]) -> dict[int, Tensor]:
    """Mean square norm of a token's softmax output, by layer."""
    listener = Power(student)
    for batch in batches:
        listener.valid = batch["valid"]
        listen(student, listener, batch)
    return {layer: total / tokens for layer, (total, tokens) in listener.sums.items()}


def error_scale(stage: AttentionTransfer, student: Student, batches: Iterable[Batch]) -> dict[int, Tensor]:
    """What the squared error of a token is divided by in each layer, as the stage's loss says."""
    if stage.loss.error == "relative":
        scale = teacher_power(student, batches)
    else:
        sites = [mixer.site for mixer in mixers_of(student.model).values()]
        scale = {site.layer: torch.tensor(float(site.heads * site.value_dim)) for site in sites}
    return {layer: value / stage.loss.weight for layer, value in scale.items()}


def transfer_loss(
    student: Student, batch: Batch, tokens: Tensor, power: dict[int, Tensor], backward: Callable[[Tensor], None]
) -> Tensor:
    """Mean over layers of this batch's share of the relative error; gradients are accumulated when this returns."""
    listener = Transfer(student, batch["valid"], tokens, power, backward)
    listen(student, listener, batch)
    return torch.stack(list(listener.losses.values())).mean()


def listen(student: Student, listener: Listener, batch: Batch) -> None:
    """One pass of the teacher (source weights, adapters and dropout off) during which `listener` hears each layer."""
    with student.teacher_state(), student.model.transferring(listener):
        forward(student.model, batch)


def end_to_end_loss(
    stage: Stage, student: Student, wrapped: Any, batch: Batch, tokens: Tensor, autocast: Callable[[], Any]
) -> Tensor:
    """logit_kl or sft on one micro batch; `wrapped` is the model as accelerate prepared it.

    `tokens` are the counts [valid, targets] of the whole optimizer step, over micro batches and processes.
    """
    if not isinstance(stage, LogitKL):
        with autocast():
            return next_token_ce(forward(wrapped, batch), batch["labels"], num_tokens=tokens[1])
    teacher = None
    if stage.loss.kl:
        # A context of its own: autocast caches weights, and what it casts without gradients must not be reused.
        with student.as_teacher(), autocast():
            teacher = forward(student.model, batch)
    with autocast():
        logits = forward(wrapped, batch)
    loss = logits.new_zeros((), dtype=torch.float32)
    if teacher is not None:
        kl = logit_kl(logits, teacher, batch["valid"], temperature=stage.loss.temperature, num_tokens=tokens[0])
        loss = loss + stage.loss.kl * kl
    if stage.loss.ce:
        loss = loss + stage.loss.ce * next_token_ce(logits, batch["labels"], num_tokens=tokens[1])
    return loss
