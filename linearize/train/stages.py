"""The loss of each kind of stage for one micro batch, with its backward pass.

`attention_transfer`: softmax goes on through the network, each layer's mixer is compared with it on the same
input, and each layer's loss is backpropagated as it arises: memory is one layer's. `logit_kl`: a teacher pass,
then the student's, then backward, never a switch in between; `feature_cosine` does the same for last hidden states.
A head that predicts numbers of an image, and no distribution, has the relative squared error in place of KL.
`sft`: cross entropy alone.

Every loss is divided by counts of the whole optimizer step, so that micro batches and processes simply add up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from linearize_kernels.layout import TokenLayout

from ..data.batches import Batch, forward, is_dense, is_numbers, real_tokens, run
from ..errors import IncompatibleError
from ..recipe.recipe import SFT, AttentionTransfer, LogitKL, Stage
from .chunked_head import chunked_loss
from .losses import square_error, square_sum
from .predictions import Compared, predictions
from .student import Student
from .terms import total

Inputs = tuple[Tensor, ...]


class Listener:
    """What `model.transferring` calls for each layer; the default hears nothing.

    `own_call` asks for a second run of each attention module, as the student, because the student's q, k, v are
    not the teacher's.
    """

    own_call = False

    def __init__(self, student: Student) -> None:
        self.student_model = student

    def on_layer(self, mixer: Any, inputs: Inputs, o: Tensor, target: Tensor, layout: Any) -> None:
        """One layer: inputs (q, k, v, x) as for `Mixer.mix`, its output and softmax's, both [B,T,H,Dv]; `layout` is
        that of the call."""

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
        real: Tensor | None,
        tokens: Tensor,
        power: dict[int, Tensor],
        backward: Callable[[Tensor], None],
    ) -> None:
        super().__init__(student)
        self.own_call = student.lora is not None
        self.real, self.tokens, self.power, self.backward = real, tokens, power, backward
        self.losses: dict[int, Tensor] = {}

    def on_layer(self, mixer: Any, inputs: Inputs, o: Tensor, target: Tensor, layout: Any) -> None:
        layer = mixer.site.layer
        loss = square_error(o, target, self.real) / (self.power[layer] * self.tokens).clamp_min(1e-12)
        if not loss.requires_grad:  # softmax over a window has no parameters
            return
        # This is inside the forward pass, where autocast may be on; a backward pass must not be under it.
        with torch.autocast(loss.device.type, enabled=False):
            self.backward(loss)
        self.losses[layer] = loss.detach()


class Calibration(Listener):
    """Lets mixers set their norms, and their window's share, from the teacher's outputs of one batch; those in modules
    of the paths `untrained` alone, where given, for others would lose what they learned."""

    def __init__(self, student: Student, untrained: set[str] | None = None) -> None:
        super().__init__(student)
        self.untrained = untrained

    @torch.no_grad()
    def on_layer(self, mixer: Any, inputs: Inputs, o: Tensor, target: Tensor, layout: Any) -> None:
        if self.is_to_be_set(mixer):
            mixer.calibrate_all(*inputs, o, target, layout)

    def is_to_be_set(self, mixer: Any) -> bool:
        """Whether a mixer is one of those to be set."""
        return self.untrained is None or mixer.site.path in self.untrained


class Power(Listener):
    """Sums, by layer: square norms of softmax outputs, their number of elements, and what counts: tokens, or images."""

    def __init__(self, student: Student) -> None:
        super().__init__(student)
        self.sums: dict[int, Tensor] = {}
        self.real: Tensor | None = None
        self.count = torch.empty(0)

    @torch.no_grad()
    def on_layer(self, mixer: Any, inputs: Inputs, o: Tensor, target: Tensor, layout: Any) -> None:
        elements = square_sum(torch.ones_like(target), self.real)
        found = torch.stack([square_sum(target, self.real), elements, self.count])
        self.sums[mixer.site.layer] = self.sums.get(mixer.site.layer, 0) + found


def error_scale(stage: AttentionTransfer, student: Student, batches: Iterable[Batch]) -> dict[int, Tensor]:
    """What the squared error of a token (of an image's tokens) is divided by in each layer, as the stage's loss says:
    the softmax output's own mean square norm, or its number of elements."""
    listener = Power(student)
    for batch in batches:
        listener.real, listener.count = real_tokens(batch), batch["valid"].sum().float()
        listen(student, listener, batch)
    which = 0 if stage.loss.error == "relative" else 1
    return {layer: sums[which] / sums[2] / stage.loss.weight for layer, sums in listener.sums.items()}


def transfer_loss(
    student: Student, batch: Batch, tokens: Tensor, power: dict[int, Tensor], backward: Callable[[Tensor], None]
) -> Tensor:
    """Mean over layers of this batch's share of the relative error; gradients are accumulated when this returns."""
    listener = Transfer(student, real_tokens(batch), tokens, power, backward)
    listen(student, listener, batch)
    return torch.stack(list(listener.losses.values())).mean()


def listen(student: Student, listener: Listener, batch: Batch) -> None:
    """One pass of the teacher (source weights, adapters and dropout off) during which `listener` hears each layer."""
    with student.teacher_state(), student.model.transferring(listener):
        run(student.model, batch, head=False)


def check_prediction(stage: Stage, found: Tensor, batch: Batch, name: str) -> None:
    """Refuse (exit 3) a stage that needs labels of what a model, whose class is `name`, predicts of images, where there
    are none: finetune has classes of whole images. And a temperature where `found`, from `forward`, is numbers."""
    if not isinstance(stage, LogitKL | SFT) or "pixel_values" not in batch or not is_dense(found, batch):
        return
    what = "numbers" if is_numbers(found) else "classes of parts of an image"
    if stage.learns_labels:
        due = "loss.ce: 0" if isinstance(stage, LogitKL) else "logit_kl, which learns the teacher's"
        message = f"{stage.name}: {name} predicts {what}, and finetune has labels of whole images alone. Use {due}"
        raise IncompatibleError(message)
    if is_numbers(found) and stage.temperature != 1:
        message = f"{stage.name}: loss.temperature is of distributions, and {name} predicts numbers. Leave it out"
        raise IncompatibleError(message)


def end_to_end_loss(
    stage: Stage,
    student: Student,
    batch: Batch,
    tokens: Tensor,
    autocast: Callable[[], Any],
    saving: Callable[[], Any] = contextlib.nullcontext,
) -> tuple[Tensor, dict[str, Tensor]]:
    """logit_kl, feature_cosine or sft on one micro batch; `saving` is a context of the student's pass that says where
    autograd keeps what it needs.

    `tokens` are the counts [valid, targets, rows] of the whole optimizer step, over micro batches and processes. With
    the loss come its terms by name where it has several, as by `terms.total`.
    """
    if stage.chunk_size is not None:
        return chunked_loss(stage, student, batch, tokens, autocast, saving)
    theirs = predictions(student, batch, autocast) if stage.asks_teacher else None
    with autocast(), saving():
        ours = forward(student.model, batch)
    check_prediction(stage, ours, batch, type(student.model).__name__)
    return total(Compared(stage, student, batch, tokens, ours, theirs, slice(None)))


# ---------------------------------------------------------------- fitting

# Each mixer of a model just converted is fitted apart to its softmax, for a few dozen steps, on what both are given in
# the teacher. Nothing else of the model has a gradient. Fitting the layers in order, on what those before them put
# out, did not pay (docs/measurements/start.md).


# Passes over the tokens, in steps of about so many, and the learning rate, which falls to a tenth.
PASSES, STEP_TOKENS, RATE = 10, 1024, 1e-2


class Fit(Calibration):
    """Calibration, and behind it `fit_mixer` where that pays."""

    @torch.no_grad()
    def on_layer(self, mixer: Any, inputs: Inputs, o: Tensor, target: Tensor, layout: Any) -> None:
        super().on_layer(mixer, inputs, o, target, layout)
        if self.is_to_be_set(mixer) and starts_far(mixer):
            fit_mixer(mixer, tuple(y.detach() for y in inputs), layout, target)


def starts_far(mixer: Any) -> bool:
    """Whether a mixer is far from softmax when it is calibrated: one memory a head (recurrent.py's `start_from`), alone
    or under SLA's gates, and no exact window. GSA starts near, and so does what stands beside a window."""
    return mixer.near is None and any(hasattr(part, "start_from") for part in mixer.modules())


@torch.no_grad()
def fit_mixer(mixer: nn.Module, inputs: Inputs, layout: TokenLayout, target: Tensor) -> None:
    """Bring what a mixer makes of `inputs` (q, k, v, x) nearer to `target` [B,T,H,Dv], by Adam on its parameters.

    They are fitted in float32 and rounded at the end. Where the error did not become smaller they stay as they were.
    """
    weights = {name: p.detach().float().clone().requires_grad_() for name, p in mixer.named_parameters()}
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    rows = max(STEP_TOKENS // target.shape[1], 1)
    parts = [slice(start, start + rows) for start in range(0, len(target), rows)]
    power = square_sum(target, layout.padding).clamp_min(1e-12) / len(parts)

    def error(part: slice) -> Tensor:
        own = rows_of(layout, part, len(target))
        o, _ = functional_call(mixer, weights, (*(y[part] for y in inputs), own))
        return square_error(o, target[part], own.padding) / power

    def mean() -> float:
        return float(torch.stack([error(part) for part in parts]).mean())

    start, steps = mean(), PASSES * len(parts)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * (1.0 - 0.9 * step / steps)
        with torch.enable_grad():
            loss = error(parts[step % len(parts)])
        # Autocast may be on; a backward pass must not be under it.
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.clear_autocast_cache()  # it would go on with the weights as they were, rounded
    if mean() < start:
        for name, parameter in mixer.named_parameters():
            parameter.copy_(weights[name])


def rows_of(layout: TokenLayout, part: slice, rows: int) -> TokenLayout:
    """The layout of some rows of a call of `rows`."""
    padding, segments = (None if x is None else x[part] for x in (layout.padding, layout.segments))
    rotation = layout.rotation and type(layout.rotation)(*(x[part] if len(x) == rows else x for x in layout.rotation))
    return layout._replace(padding=padding, segments=segments, rotation=rotation)
