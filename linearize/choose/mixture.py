"""A source model in which each layer computes softmax, its mixer, or a mixture of both.

The mixers are attached to the source in memory; nothing is written. A pass runs under the hooks' transfer mode, in
which an attention module has softmax at hand and a mixer with the same q, k and v. For a mixer with q and k of its own,
or a key for each query where its source has fewer, the module runs once more inside, as in attention transfer. A gate
in each module, or one for each of its KV heads and their query heads, says how much of softmax goes on: 1 softmax
alone, 0 the mixer alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from linearize_kernels.hf.attention_hooks import (
    Linearized,
    attach,
    bind,
    evaluating,
    hidden_name,
    layout_of_call,
    mixers_of,
    renamed,
    without_rotation,
)
from linearize_kernels.hf.cache import CACHE_NAMES
from linearize_kernels.hf.capture import capture
from linearize_kernels.hf.interface import TRANSFER, split_name
from linearize_kernels.layout import is_causal, reduce_keys, this_thread
from linearize_kernels.mixer import Mixer

from ..checkpoint.code import captured
from ..data.batches import Batch, forward, real_tokens, run
from ..plan.keep import Group
from ..plan.mechanisms import build_mixer, load_mechanism
from ..plan.plan import Plan, Step
from ..terminal.progress import Advance, silent
from ..train.losses import relative_mse
from ..train.stages import Calibration, Inputs, Listener
from ..train.student import Student

Gate = float | Tensor  # a tensor has a number for each KV head: [Hkv], or [B,Hkv] where rows differ
Units = Sequence[int] | Sequence[Group]  # layers, or heads by layer and KV head


class BriefTransfer(Listener):
    """Trains each mixer towards the softmax of its layer, on the teacher's hidden states; `real` [B,T]: no padding, and
    None of images."""

    def __init__(self, student: Student, real: Tensor | None) -> None:
        super().__init__(student)
        self.real = real

    def on_layer(self, mixer: Any, inputs: Inputs, o: Tensor, target: Tensor, layout: Any) -> None:
        with torch.autocast(o.device.type, enabled=False):
            loss = relative_mse(o, target, self.real)
            if loss.requires_grad:  # softmax over a window has no parameters
                loss.backward()


class Mixture:
    """`model` is a source on its device; layers are named by their numbers in `plan`, all of whose steps get a mixer.

    The source's weights stay frozen. Mixers are float32; on a GPU passes run under autocast in bfloat16. Layers
    in `local` use softmax with the window of that step; one that is not in `plan` has no other mixer.
    """

    def __init__(self, model: Any, plan: Plan, local: Sequence[Step] = ()) -> None:
        self.model, self.student = model.requires_grad_(False), Student(model)
        steps = {step.site.layer: step for step in (*local, *plan.steps)}
        plan = dataclasses.replace(plan, steps=tuple(steps.values()))
        mechanisms = {step.mechanism: load_mechanism(step.mechanism) for step in plan.steps}
        spec = plan.spec() | {"all_linear": False}  # softmax needs its mask
        attach(model, spec, mechanisms, capture if captured(plan) else None)
        mixers = mixers_of(model).values()
        for mixer in mixers:
            mixer.to(model.device, torch.float32)
        self.mixers: dict[int, Mixer] = {mixer.site.layer: mixer for mixer in mixers}
        self.gates: Mapping[int, Gate] = dict.fromkeys(self.mixers, 1.0)
        # During a pass: what a module was called with whose mixer needs q and k of its own, and what that computed.
        self.bound: dict[Mixer, dict[str, Any]] = {}
        self.own: dict[Mixer, Tensor] = {}
        self.layers = sorted(step.site.layer for step in plan.linear)
        self.local: dict[int, Mixer] = {
            step.site.layer: build_mixer(step.mechanism, step.site, step.options)
            for step in local
            if step.site.layer in self.layers
        }

    def autocast(self) -> Any:
        """The context of a pass."""
        device = self.model.device.type
        return torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext()

    @torch.no_grad()
    def teacher(self, batch: Batch, last: int | None = None) -> Tensor:
        """What `forward` gives of the source, such as logits [B,T,V]; of the `last` tokens of each row where given."""
        with Linearized.teacher(self.model), self.autocast():
            return self._logits(batch, last)

    def logits(self, batch: Batch, gates: Mapping[int, Gate], last: int | None = None) -> Tensor:
        """The same as `teacher` where `gates` has a number for each layer, or one for each of its KV heads."""
        self.gates = gates
        with self._mixing(), self.autocast():
            return self._logits(batch, last)

    def _logits(self, batch: Batch, last: int | None) -> Tensor:
        return forward(self.model, batch) if last is None else run(self.model, batch, head=last).logits[:, -last:]

    def hybrid(self, kept: Collection[int] | Collection[Group]) -> dict[int, Gate]:
        """The gates with which the layers, or heads, `kept` compute softmax and the others their mixers."""
        gates: dict[int, Gate] = {}
        for layer, mixer in self.mixers.items():
            heads = [float((layer, head) in kept) for head in range(mixer.site.kv_heads)]
            gates[layer] = torch.tensor(heads, device=self.model.device) if any(heads) else float(layer in kept)
        return gates

    def hybrids(self, sets: Sequence[Collection[int] | Collection[Group]], rows: int) -> dict[int, Gate]:
        """The gates with which each of the `sets` is kept in so many rows of one batch."""
        each = [self.hybrid(kept) for kept in sets]
        gates: dict[int, Gate] = {}
        for layer, mixer in self.mixers.items():
            own = [one[layer] for one in each]
            if all(isinstance(gate, float) and gate == own[0] for gate in own):
                gates[layer] = own[0]
                continue
            wide = [torch.as_tensor(gate, device=self.model.device).expand(mixer.site.kv_heads) for gate in own]
            gates[layer] = torch.stack(wide).repeat_interleave(rows, 0)
        return gates

    @contextlib.contextmanager
    def _mixing(self) -> Iterator[None]:
        functions = {mixer: mixer.attention_function for mixer in self.mixers.values()}
        for mixer in functions:
            mixer.attention_function = functools.partial(mix, self)
        hooks = [
            self.model.get_submodule(name).register_forward_pre_hook(self._keep, with_kwargs=True)
            for name, mixer in mixers_of(self.model).items()
            if needs_own_call(mixer)
        ]
        try:
            with evaluating(self.model), renamed(self.model, lambda name: TRANSFER + split_name(name)[1]):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self.bound.clear()
            for mixer, function in functions.items():
                mixer.attention_function = function
                mixer.calls.clear()

    def _keep(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.bound[module.mixer] = bind(module, args, kwargs)

    def of_own_call(self, mixer: Mixer, module: Any) -> Tensor:
        """What a mixer computes that `needs_own_call`, for which its attention module runs once more."""
        call, bound = mixer.calls[this_thread()], self.bound.pop(mixer)
        bound |= {hidden_name(mixer): call.x} | {name: None for name in CACHE_NAMES if name in bound}
        if mixer.drop_rope:
            call.skip_qk_norm, call.rotation = mixer.skip_qk_norm, without_rotation(bound, mixer.site.routed)
        reduce_keys(module, mixer.reductions, False)  # before the next call they are reduced again
        module.forward(**bound)  # `mix` sees that it is inside
        call.skip_qk_norm, call.rotation = False, None
        return self.own.pop(mixer)

    # ------------------------------------------------------------ mixers

    @torch.no_grad()
    def calibrate(self, batch: Batch) -> None:
        """Norms take the teacher's scale and windows their share, from one batch."""
        self._listen(Calibration(self.student), batch)

    def train_mixers(self, batches: list[Batch], lr: float, advance: Advance = silent) -> None:
        """A step of attention transfer on each batch, of whose tokens `advance` gets the number, with a learning rate
        that falls to a tenth."""
        parameters = [p for mixer in self.mixers.values() for p in mixer.parameters()]
        if not parameters:
            return
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        for step, batch in enumerate(batches):
            optimizer.param_groups[0]["lr"] = lr * (1 - 0.9 * step / len(batches))
            self._listen(BriefTransfer(self.student, real_tokens(batch)), batch)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            advance(batch["valid"].numel())
        for parameter in parameters:
            parameter.requires_grad_(False)

    def _listen(self, listener: Listener, batch: Batch) -> None:
        """A pass of the teacher in which `listener` hears each layer."""
        with torch.no_grad(), Linearized.transferring(self.model, listener), self.autocast():
            run(self.model, batch, head=False)


def needs_own_call(mixer: Mixer) -> bool:
    """Whether it takes other q or k than softmax."""
    return mixer.drop_rope or bool(mixer.reductions)


def mix(
    mixture: Mixture,
    mixer: Mixer,
    prefix: str,
    softmax: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In place of a mixer's attention function: gate times softmax plus the rest of its output, [B,T,H,Dv]."""
    call, gate = mixer.calls[this_thread()], mixture.gates[mixer.site.layer]
    if isinstance(gate, Tensor):
        gate = gate.repeat_interleave(query.shape[1] // gate.shape[-1], -1)[..., None]  # [H,1] or [B,H,1]
        if gate.ndim == 3:  # windows of an image are rows of their own, one image after the other
            gate = gate.repeat_interleave(query.shape[0] // len(gate), 0)[:, None]
    call.used = True
    local = mixture.local.get(mixer.site.layer)

    def mixed(by: Mixer) -> Tensor:
        shape = query.shape[0], query.shape[2]
        causal = is_causal(module, kwargs, mixer.site.causal)
        call.check(mixer, attention_mask, shape[1], None, causal)
        layout = layout_of_call(by, call, causal, attention_mask, shape, None, kwargs)
        return by(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), call.x, layout)[0]

    if needs_own_call(mixer) and mixer not in mixture.bound:  # inside `of_own_call`
        mixture.own[mixer] = o = mixed(mixer)
        return o.to(query.dtype), None
    parts: list[Tensor] = []
    if not isinstance(gate, float) or gate > 0:
        exact = mixed(local) if local else softmax(module, query, key, value, attention_mask, **kwargs)[0]
        parts.append(gate * exact)
    if not isinstance(gate, float) or gate < 1:
        parts.append((1 - gate) * (mixture.of_own_call(mixer, module) if needs_own_call(mixer) else mixed(mixer)))
    return torch.stack(parts).sum(0).to(query.dtype) if len(parts) > 1 else parts[0].to(query.dtype), None
