"""Micro batches of a stage as one CUDA graph: teacher's pass, student's pass, loss and backward pass in one launch.

A small model takes a GPU less time than Python needs to ask for it: some 15,000 operations of a micro batch wait for
45 us of Python each. Rows of packed text all have one shape, so one recording serves the whole stage. What it reads
lies in buffers that each batch is copied into; gradients are added to tensors that stay where they are.

The first steps are plain: kernels compile in them, and parameters get their gradients. The last of these is watched:
code that waits for the GPU cannot be recorded. Then the same code is recorded, and the next step runs both ways. Its
loss and the norm of each gradient have to be the same up to rounding, and the recording has to be faster; otherwise
steps stay plain, and a note says why.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from linearize_kernels.hf.cuda_graphs import capture, waiting

from ..data.batches import Batch
from ..data.kinds import Kind
from ..recipe.recipe import SFT, AttentionTransfer, Recipe, Stage

# One micro batch: its batch and the counts of the step -> its share of the loss and of the loss's terms.
Micro = Callable[[Batch, Tensor], tuple[Tensor, dict[str, Tensor]]]

# Optimizer steps before the recording, and those that a stage must have left for it to pay.
PLAIN_STEPS, LEAST_STEPS = 2, 10
# How far a recorded micro batch may be from the plain one: of the loss, and of the norms of gradients. Sums of bf16
# products are added in another order each time.
LOSS_OFF, NORMS_OFF = 0.02, 0.05
# Of the memory that is left, what a recording and an evaluation beside it may take.
ROOM = 0.9


def unrecordable(recipe: Recipe, stage: Stage, device: torch.device, sharded: bool, kind: Kind) -> str:
    """Why micro batches of a stage cannot be recorded, as far as that is known before it runs; empty where they can.
    `kind` is that of its samples."""
    runtime = recipe.runtime
    if device.type != "cuda":
        return "there is no GPU"
    if sharded:
        return "its weights are in shards, which are gathered anew"
    if runtime.gradient_checkpointing and not isinstance(stage, AttentionTransfer):
        return "gradient_checkpointing draws random numbers again"
    if runtime.precision == "fp16":
        return "precision fp16 changes the scale of its loss"
    if stage.optimizer.memory == "small":
        return "optimizer.memory is small, where a recording would hold more"
    if kind != "text":
        return f"only packed text is recorded, no {'text with masks' if kind == 'masked' else kind}"
    if isinstance(stage, SFT) and stage.drop_path:
        return "drop_path chooses layers anew"
    return ""


class GraphedSteps:
    """Called in place of `plain` for every micro batch of a stage, `micro` of them a step. `say` gets a note where
    steps stay plain. `record(run, tensor)` gives what does again what `run` would, for the device of that tensor, and
    `watch()` a context with the places that wait for it; both are of the GPU, but in tests."""

    def __init__(
        self,
        plain: Micro,
        parameters: list[torch.nn.Parameter],
        micro: int,
        say: Callable[[str], None],
        record: Callable[[Callable[[], None], Tensor], Callable[[], None]] = capture,
        watch: Callable[[], AbstractContextManager[list[str]]] = waiting,
    ) -> None:
        self.plain, self.parameters, self.micro, self.say = plain, parameters, micro, say
        self.record, self.watch = record, watch
        self.calls = 0
        self.inputs: Batch = {}
        self.tokens = torch.empty(0)
        self.found: tuple[Tensor, dict[str, Tensor]] = self.tokens, {}
        self.replay: Callable[[], None] | None = None
        self.checked = False  # micro batches are replayed from now on
        self.over = False  # they stay plain

    def __call__(self, batch: Batch, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Adds the gradients of a micro batch; returns what `plain` does. `tokens` are the counts of the whole step."""
        begins = self.calls % self.micro == 0
        self.calls += 1
        waits = self.calls <= PLAIN_STEPS * self.micro or not (begins or self.checked)
        shapes, recorded = ({n: x.shape for n, x in one.items()} for one in (batch, self.inputs or batch))
        if self.over or waits or shapes != recorded:
            return self.plain(batch, tokens)
        if self.replay is None:
            return self._begin(batch, tokens)
        if not self.checked:
            return self._check(batch, tokens)
        return self._replayed(batch, tokens)

    def close(self) -> None:
        """Give the recording's memory back."""
        self.replay, self.inputs, self.found, self.over = None, {}, (self.tokens, {}), True

    def _begin(self, batch: Batch, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A plain micro batch, and the recording of one."""
        with self.watch() as waited:
            found = self.plain(batch, tokens)
        if waited:
            self._end(f"{', '.join(dict.fromkeys(waited))} waits for the GPU")
        elif reason := no_room(tokens.device):
            self._end(reason)
        else:
            self.inputs, self.tokens = {name: value.clone() for name, value in batch.items()}, tokens.clone()
            before = [parameter.grad for parameter in self.parameters]
            gc.collect()  # a recording cannot free what it did not take
            if tokens.is_cuda:
                torch.cuda.empty_cache()
            try:
                self.replay = self.record(self._run, tokens)
            except Exception as error:  # code of many architectures, which may do what cannot be recorded
                for parameter, grad in zip(self.parameters, before, strict=True):
                    parameter.grad = grad
                self._end(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return found

    def _run(self) -> None:
        """What is recorded: a micro batch from the buffers."""
        # Tensors of this pass alone, so that what layers share of documents is made within it.
        batch = {name: own.view_as(own) for name, own in self.inputs.items()}
        for own in batch.values():
            own.memo = {}  # type: ignore[attr-defined]  # layout.py's `once`
        self.found = self.plain(batch, self.tokens)

    def _replayed(self, batch: Batch, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.replay is not None
        for name, own in self.inputs.items():
            own.copy_(batch[name])
        self.tokens.copy_(tokens)
        self.replay()
        loss, terms = self.found
        return loss.clone(), {name: value.clone() for name, value in terms.items()}

    def _check(self, batch: Batch, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The first micro batch of a step, plain and replayed, with the same random numbers."""
        seed = torch.initial_seed()
        found, seconds = timed(lambda: self.plain(batch, tokens))
        norms = self._norms()
        for _ in range(2):  # the first replay of a graph also sends it to the device
            self._zero()
            torch.manual_seed(seed)
            again, seconds_again = timed(lambda: self._replayed(batch, tokens))
        off, norms_off = relative(again[0], found[0]), relative(self._norms(), norms)
        if off <= LOSS_OFF and norms_off <= NORMS_OFF and seconds_again <= seconds:
            self.checked = True
            return again
        if off <= LOSS_OFF and norms_off <= NORMS_OFF:
            self._end("a CUDA graph of them is no faster")
        else:
            self._end(f"a CUDA graph of them differs, by {off:.1e} in the loss and {norms_off:.1e} in the gradients")
        self._zero()
        torch.manual_seed(seed)
        return self.plain(batch, tokens)

    def _norms(self) -> Tensor:
        norms = torch._foreach_norm([p.grad for p in self.parameters if p.grad is not None])
        return torch.stack([norm.float() for norm in norms])

    def _zero(self) -> None:
        torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])

    def _end(self, reason: str) -> None:
        self.close()
        self.say(f"steps run without CUDA graphs: {reason}")


def no_room(device: torch.device) -> str:
    """Why a device has no room for a recording, which keeps what a step holds at its peak; empty where it has."""
    if device.type != "cuda":
        return ""
    held, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    left = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - held
    need = 2 * (peak - held)  # evaluations take theirs beside it
    return "" if need <= ROOM * left else f"they would take {need / 2**30:.1f} of {left / 2**30:.1f} GiB that are left"


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` returns, and how many seconds a GPU takes for it; 0 without one."""
    if not torch.cuda.is_available():
        return work(), 0.0
    torch.cuda.synchronize()
    began = time.perf_counter()
    found = work()
    torch.cuda.synchronize()
    return found, time.perf_counter() - began


def relative(found: Tensor, due: Tensor) -> float:
    """|found - due| / |due|."""
    return float((found - due).norm() / due.norm().clamp_min(1e-30))
