"""The optimizer loop of one stage: steps, metrics, evaluation, checkpoints and interruption.

Data order, learning rate and random numbers are functions of the step, so a stage continues anywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset
from transformers.modeling_layers import GradientCheckpointingLayer

from ..bench.timing import device_ms
from ..data.augment import mixed
from ..data.batches import Samples, by_length, collate, moved, targets
from ..data.images import Images
from ..data.kinds import kind_of
from ..data.packing import BlockOrder
from ..errors import Exit, LinearizeError, resource_error
from ..recipe.data import unit_of
from ..recipe.recipe import SFT, AttentionTransfer, FeatureCosine, Stage
from ..terminal.output import counted, duration
from ..terminal.signals import END, caught, end_or_stop
from .compiled import CompiledLayers, compiles
from .drop_path import dropping, layers_of
from .fsdp import like, reshard, whole
from .graphs import LEAST_STEPS, PLAIN_STEPS, GraphedSteps, unrecordable
from .losses import IGNORED
from .offload import Host, offloaded
from .progress import StageProgress, forget_peak, memory_bytes
from .runs import OPTIMIZER, Position, reading
from .runtime import clip
from .speed import Products, Speed
from .stages import end_to_end_loss, transfer_loss

if TYPE_CHECKING:
    from ..measure.evaluate import Score
    from .session import Finetuner


# Optimizer steps, and seconds, after which losses are read from a GPU, which waits for Python then.
READ_EVERY, READ_SECONDS = 10, 1.0
DEFERRING = ("cuda",)  # devices that work while Python goes on
# The step of a process that torch's profiler watches, behind those in which graphs are recorded.
WATCHED = 9
BUCKET = 1 << 26  # gradients that processes sum at a time
# A step that is done, its loss, its gradients' norm, its learning rate, its terms: tensors, or numbers that were read.
Unread = tuple[int, Any, Any, float, dict[str, Any]]
Report = Callable[[int, float, float, float, dict[str, float]], None]


def seed_for(*parts: int) -> int:
    """A seed that no other tuple of numbers has."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7])


class Stream(Dataset[dict[str, Tensor]]):
    """A stage's samples by their places in its endless order; images are changed, each time otherwise."""

    def __init__(self, blocks: Samples, order: BlockOrder, seed: int) -> None:
        self.blocks, self.order, self.seed = blocks, order, seed

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        index = self.order.block(place)
        if isinstance(self.blocks, Images):
            return self.blocks.changed(index, seed_for(self.seed, place))
        return self.blocks[index]

    def __getitems__(self, places: Sequence[int]) -> list[dict[str, Tensor]] | LinearizeError:
        """What a worker reads for a batch; or what to tell the user: raised there, it would come as a bug's report."""
        try:
            return [self[place] for place in places]
        except LinearizeError as error:
            return error
        except Exception as error:
            refused = resource_error(error)
            if refused is None:
                raise
            return refused


def ignore_stop_signals(over: Any, worker: int) -> None:
    """A worker ends with the process that trains, which saves after Ctrl-C, SIGTERM or SIGHUP; both may be sent that.

    Once `over` has the value True, SIGTERM ends it: Python sends that at its exit and waits.
    """

    def leave(number: int, frame: object) -> None:
        if over.value:
            os._exit(0)

    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, leave)


def stacked(items: list[dict[str, Tensor]] | LinearizeError) -> dict[str, Tensor] | LinearizeError:
    """A batch on the CPU, or the error that came instead."""
    return items if isinstance(items, LinearizeError) else collate(items, torch.device("cpu"))


class StageLoop:
    """The optimizer loop of one stage; `power` is set before a transfer stage runs."""

    def __init__(
        self,
        owner: Finetuner,
        number: int,
        stage: Stage,
        blocks: Samples,
        order: BlockOrder,
        steps: int,
        parameters: list[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[int], float],
    ) -> None:
        self.owner, self.number, self.stage, self.blocks, self.order = owner, number, stage, blocks, order
        self.steps, self.parameters, self.schedule = steps, parameters, schedule
        self.power: dict[int, Tensor] = {}
        self.stopping = False
        self.since = 0  # the step from which this process went on
        # Of the evaluations so far, also of those before a resume; every process has the same.
        lines = owner.run.scores(number) if owner.accelerator.is_main_process else []
        self.scores = broadcast_object_list([[selection_metric(x) for x in lines]])[0]
        self.stream = Stream(blocks, order, seed_for(owner.recipe.seed, number))
        self.reader: Iterator[dict[str, Tensor] | LinearizeError] | None = None
        self.over: Any = multiprocessing.Value(ctypes.c_bool, False, lock=False)  # shared with the reader's processes
        self.tokens_per_step = blocks.seq_len * owner.blocks_per_step(stage)
        accelerator = owner.accelerator
        accelerator.free_memory()  # forget the optimizer of the stage before
        forget_peak()
        self.transfers = isinstance(stage, AttentionTransfer)
        self.optimizer = accelerator.prepare_optimizer(optimizer)
        self.compiled: Callable[[], Any] = contextlib.nullcontext
        set_checkpointing(owner.model, not self.transfers and owner.recipe.runtime.gradient_checkpointing)
        self.saving: Callable[[], Any] = contextlib.nullcontext
        if owner.recipe.runtime.offload_activations:
            self.saving = functools.partial(offloaded, Host(owner.model))
        self.graphed: GraphedSteps | None = None
        # Losses and norms of steps that nobody has read. Several processes stop together, a loss scale is changed by
        # the host, and small optimizers cannot leave a step out, so there each step is read before its update.
        self.unread: list[Unread] = []
        raw: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        self.defers = defers(accelerator, raw)
        self.speed = Speed()

    # ------------------------------------------------------------ the loop

    def run(self, start: int) -> None:
        """Steps `start`..`steps`, with metrics, evaluation and checkpoints on the way."""
        owner = self.owner
        self.read_ahead(start)
        self.graphed = self._graphs(start)
        tokens = (self.steps - start) * self.tokens_per_step // owner.accelerator.num_processes
        if compiles(owner.recipe, self.stage, owner.model, owner.device, owner.sharded, tokens):
            owner.say(f"{self.stage.name}: layers are compiled, which takes about a minute (runtime.compile)")
            self.compiled = CompiledLayers(owner.model).on
        try:
            with dropping(owner.model, self.stage.drop_path if isinstance(self.stage, SFT) else 0.0):
                self._steps(start)
        finally:
            self.over.value, self.reader = True, None  # which ends its processes
            if self.graphed is not None:
                self.graphed.close()
            self.graphed = None

    def _graphs(self, start: int) -> GraphedSteps | None:
        """What records micro batches as CUDA graphs; None where they stay plain."""
        owner, stage = self.owner, self.stage
        asked, kind = owner.recipe.runtime.graphs, kind_of(owner.model)
        if not asked or (asked == "auto" and self.steps - start < PLAIN_STEPS + LEAST_STEPS):
            return None
        if unrecordable(owner.recipe, stage, owner.device, owner.sharded, kind):
            return None
        micro = stage.batch.gradient_accumulation_steps
        return GraphedSteps(
            self._micro_batch, self.parameters, micro, lambda why: owner.say(f"note: {stage.name}: {why}")
        )

    def _steps(self, start: int) -> None:
        owner, began, self.since = self.owner, time.perf_counter(), start
        later = owner.later(self.number)
        quiet = not owner.accelerator.is_main_process
        unit = unit_of(owner.recipe.data_for(self.stage).train)

        def report(done: int, loss: float, norm: float, lr: float, terms: dict[str, float]) -> None:
            rate = (done - start) * self.tokens_per_step / (time.perf_counter() - began)
            self._log(done, loss=loss, **terms, grad_norm=norm, lr=lr, tokens_per_s=round(rate))
            seconds = ((self.steps - done) * self.tokens_per_step + later) / rate
            left = f"{duration(seconds)} left{' in all' * bool(later)}" if seconds else "evaluation and saving follow"
            bar.update(done, loss, rate, left)

        with (
            StageProgress(self.stage, self.steps, start, quiet, unit) as bar,
            caught((signal.SIGINT, *END), self._interrupt),
        ):
            self.speed.resume(start)
            for step in range(start, self.steps):
                done = step + 1
                if step == start + WATCHED and self.owner.device.type in DEFERRING:
                    self._watched(step, report)
                else:
                    self.unread.append((done, *self.step(step)))
                due = self._due(done)
                if due or not self.defers or len(self.unread) >= self.speed.steps_in(READ_SECONDS, READ_EVERY):
                    self._read(report)
                if due:
                    if self._after(done):
                        break
                    self.speed.resume(done)
        how = ["compiled"] if self.compiled is not contextlib.nullcontext else []
        how += ["as CUDA graphs"] if self.graphed is not None and self.graphed.checked else []
        line = self.speed.line(self.tokens_per_step, unit, how) if owner.device.type in DEFERRING else ""
        if line:
            owner.say(f"{self.stage.name}: {line}")

    def _watched(self, step: int, report: Report) -> None:
        """A step under torch's profiler, which does not count for the speed."""
        if self.unread:
            self._read(report)
        self.speed.works = device_ms(lambda: self.unread.append((step + 1, *self.step(step))))
        self.speed.resume(step + 1)

    def _due(self, done: int) -> bool:
        """Whether something other than the next step follows: an evaluation, a checkpoint, an end."""
        recipe, every = self.owner.recipe, self.owner.recipe.eval.every_steps
        self.stopping |= self.defers and self.owner.interrupted
        known = done == self.steps or done % recipe.checkpoint.every_steps == 0
        return known or self.stopping or bool(every and done % every == 0)

    def _read(self, report: Report) -> None:
        """Report the steps since the last time, which waits for the device. Raises LinearizeError (exit 6) for a step
        whose loss or gradient is not finite: its update was left out."""
        flat = [x for _, loss, norm, _, terms in self.unread for x in (loss, norm, *terms.values())]
        numbers = iter(torch.stack(flat).tolist() if self.defers else flat)
        steps = [
            (done, next(numbers), next(numbers), lr, {name: next(numbers) for name in terms})
            for done, _, _, lr, terms in self.unread
        ]
        self.unread = []
        self.speed.note(steps[-1][0])
        for done, loss, norm, lr, terms in steps:
            if self.defers:
                self._check_finite(loss, norm, lr, done - 1)
            report(done, loss, norm, lr, terms)

    def _after(self, done: int) -> bool:
        """What is due after a step: evaluation, a checkpoint, the end of an interrupted run. Returns whether the stage
        is over."""
        owner, recipe, last = self.owner, self.owner.recipe, done == self.steps
        if last or (recipe.eval.every_steps and done % recipe.eval.every_steps == 0):
            found = owner.evaluate(self.stage)
            if found is not None:
                if math.isnan(selection_metric(owner.of_evaluation(found)) if found.ppl is None else found.ppl):
                    raise owner.not_finite("held-out loss is nan", self.number, done + 1)
                owner.log_evaluation(self.stage.name, done, done * self.tokens_per_step, found)
                last = self._judge(done, found) or last
        if last or self.stopping or done % recipe.checkpoint.every_steps == 0:
            owner.save(Position(self.number, done, done * self.tokens_per_step, last), {} if last else self.state())
        if self.stopping:
            raise LinearizeError(
                f"interrupted after step {done} of {self.stage.name}; state saved in {owner.last_checkpoint}. "
                "The same command continues",
                Exit.INTERRUPTED,
            )
        return last

    def _judge(self, done: int, found: Score) -> bool:
        """Keep the weights of the best evaluation of the last stage, where the recipe asks for it; returns whether the
        recipe's patience is over."""
        owner, recipe = self.owner, self.owner.recipe
        self.scores.append(selection_metric(owner.of_evaluation(found)))
        best = self.scores.index(min(self.scores))
        if recipe.finish.keep == "best" and self.number == len(recipe.stages) - 1 and best == len(self.scores) - 1:
            owner.save_best(Position(self.number, done, done * self.tokens_per_step, True), found)
        waited = len(self.scores) - 1 - best
        if recipe.eval.patience is None or waited < recipe.eval.patience or done == self.steps:
            return False
        without = f"{counted(waited, 'evaluation')} without a lower KL"
        owner.say(f"note: {self.stage.name} ends after step {done} of {self.steps}: {without}")
        return True

    def step(self, step: int) -> tuple[Any, Any, float, dict[str, Any]]:
        """One optimizer step over all micro batches: mean loss, gradient norm before clipping, learning rate, and the
        terms of a loss of two. Where reading is put off these are tensors, but for the rate."""
        owner, accelerator = self.owner, self.owner.accelerator
        micro = by_length([self.batch(step, m) for m in range(self.stage.batch.gradient_accumulation_steps)])
        data = owner.recipe.data_for(self.stage)
        if data.mixup or data.cutmix:
            place = owner.recipe.seed, self.number, step, accelerator.process_index
            micro = [mixed(b, data.mixup, data.cutmix, seed_for(*place, m)) for m, b in enumerate(micro)]
        counts = torch.stack(
            [torch.stack([b["valid"].sum(), (targets(b) != IGNORED).sum(), b["valid"].any(1).sum()]) for b in micro]
        )
        tokens = accelerator.reduce(counts.sum(0), "sum")
        losses, terms = [], list[dict[str, Tensor]]()
        run: Callable[..., Any] = self.graphed or self._micro_batch
        if self.graphed is None or not self.graphed.checked:
            set_training(owner.model, dropout=not isinstance(self.stage, FeatureCosine))
        for number, batch in enumerate(micro):
            torch.manual_seed(seed_for(owner.recipe.seed, self.number, step, number, accelerator.process_index))
            with self._counted(step, number):
                share, parts = run(batch, tokens)
            losses.append(share)
            terms.append(parts)
        if accelerator.num_processes > 1:
            add_up(self.parameters, accelerator.device, mean=not self.transfers)
        own = not owner.sharded and accelerator.scaler is None  # gradients as they are, in one piece
        norm = (clip if own else accelerator.clip_grad_norm_)(self.parameters, self.stage.optimizer.max_grad_norm)
        shares = torch.stack(losses).sum()
        names = [*terms[0]]
        sums = [torch.stack([parts[name] for parts in terms]).sum() for name in names]
        lr = self.stage.optimizer.lr * self.schedule(step)
        if self.defers:
            # Without a look at the numbers: the optimizer's kernel leaves the step out where they are unusable, and
            # `_read` says so.
            raw: Any = getattr(self.optimizer, "optimizer", self.optimizer)
            raw.found_inf = (~(torch.isfinite(shares) & torch.isfinite(norm))).float()
            self._step_optimizer(lr)
            return shares, norm.to(shares.dtype), lr, dict(zip(names, sums, strict=True))
        norm = float(norm)
        loss, stop, *values = accelerator.reduce(
            torch.stack([shares, shares.new_tensor(owner.interrupted), *sums]), "sum"
        ).tolist()
        self.stopping = stop > 0  # all processes stop after the same step, whichever was told first
        self._update(loss, norm, lr, step)
        return loss, norm, lr, dict(zip(names, values, strict=True))

    @contextlib.contextmanager
    def _counted(self, step: int, number: int) -> Iterator[None]:
        """Within: on a GPU the products of a micro batch are counted, once, when its kernels are compiled. Layers that
        torch.compile made do not show theirs, so this one runs in Python."""
        if step != self.since + 1 or number or self.owner.device.type not in DEFERRING:
            yield
            return
        compiled, self.compiled = self.compiled, contextlib.nullcontext
        with Products() as counted:
            yield
        self.compiled = compiled
        self.speed.flops = counted.flops * self.stage.batch.gradient_accumulation_steps

    def _update(self, loss: float, norm: float, lr: float, step: int) -> None:
        """The optimizer's part of a step, unless loss or gradients are unusable."""
        self._check_finite(loss, norm, lr, step)
        self._step_optimizer(lr)

    def _check_finite(self, loss: float, norm: float, lr: float, step: int) -> None:
        """Raise LinearizeError (exit 6) for a loss or a gradient that is not finite. A loss scale that was too high
        makes infinite gradients now and then; the scaler leaves such a step out."""
        scaler = self.owner.accelerator.scaler
        if not math.isfinite(loss) or (scaler is None and not math.isfinite(norm)):
            self._log(step + 1, loss=loss, grad_norm=norm, lr=lr)
            what = f"loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
            raise self.owner.not_finite(what, self.number, step + 1)

    def _step_optimizer(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.graphed is None)  # a recording adds to gradients where they lie
        reshard(self.owner.model)  # DeepSpeed leaves weights gathered whose module's input has no gradient

    def _micro_batch(self, batch: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward and backward of one micro batch; returns its share of the step's loss and of the loss's terms,
        without gradient."""
        owner, accelerator = self.owner, self.owner.accelerator
        if self.transfers:
            with accelerator.autocast():
                return transfer_loss(owner.student, batch, tokens[0], self.power, accelerator.backward), {}
        given = self.stage, owner.student, batch, tokens
        with self.compiled():
            loss, terms = end_to_end_loss(*given, accelerator.autocast, self.saving)
            # FSDP takes the mean over processes of what has to be a sum, and so does `add_up`.
            accelerator.backward(loss * accelerator.num_processes)
        return loss.detach(), terms

    def batch(self, step: int, micro: int) -> dict[str, Tensor]:
        """The blocks of one micro batch of this process; the loop asks for them in order."""
        if self.reader is not None:
            read = next(self.reader)
            if isinstance(read, LinearizeError):
                raise read
            return {key: moved(value, self.owner.device) for key, value in read.items()}
        return collate([self.stream[k] for k in self.places(step, micro)], self.owner.device)

    def places(self, step: int, micro: int) -> range:
        """The samples of that micro batch, by their places in the stage's stream."""
        accelerator, batch = self.owner.accelerator, self.stage.batch
        return self.order.samples(
            step,
            micro,
            accelerator.process_index,
            accelerator.num_processes,
            batch.per_device,
            batch.gradient_accumulation_steps,
        )

    def read_ahead(self, start: int) -> None:
        """Let processes read the samples of all steps from `start` on, where the recipe asks for some."""
        workers, micro = self.owner.recipe.runtime.workers, range(self.stage.batch.gradient_accumulation_steps)
        if workers and start < self.steps:
            order: Any = (self.places(step, m) for step in range(start, self.steps) for m in micro)
            loader = DataLoader(
                self.stream,
                batch_sampler=order,
                num_workers=workers,
                collate_fn=stacked,
                worker_init_fn=functools.partial(ignore_stop_signals, self.over),
            )
            self.reader = iter(loader)

    # ------------------------------------------------------------ around the loop

    def _interrupt(self, number: int) -> None:
        """The first Ctrl-C, SIGTERM or SIGHUP finishes the step and saves; a second one stops at once."""
        end_or_stop(self.owner.interrupted, number, self.owner.say)
        self.owner.interrupted = True

    def _log(self, step: int, **values: float) -> None:
        if self.owner.accelerator.is_main_process:
            tokens = step * self.tokens_per_step
            here = {"memory": memory_bytes(), "since": self.since}
            self.owner.run.log(stage=self.stage.name, step=step, tokens=tokens, **values, **here)
            self.owner.track(self.stage.name, step, values)

    def names(self) -> list[str]:
        """Names of the trained parameters in the optimizer's order, which depends on what is in shards."""
        known = {id(parameter): name for name, parameter in self.owner.student.named_parameters()}
        return [known[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]

    def state(self) -> dict[str, Any]:
        """Optimizer and loss scale, for a checkpoint of the main process; the rest follows from the step."""
        scaler, kept = self.owner.accelerator.scaler, self.owner.accelerator.is_main_process
        names, moments = self.names(), {}
        own = dict(self.owner.student.named_parameters())
        for number, values in self.optimizer.state_dict()["state"].items():
            full = {key: whole(value, own[names[number]]) for key, value in values.items()}
            if kept:
                moments[names[number]] = {key: value.cpu() for key, value in full.items()}
        return {"optimizer": moments, "scaler": scaler.state_dict() if scaler is not None else None}

    def restore(self, checkpoint: Path) -> None:
        """The inverse of `state`; learning rate, betas and the like are the recipe's, which may have changed."""
        with reading(checkpoint / OPTIMIZER):
            state = torch.load(checkpoint / OPTIMIZER, map_location="cpu", weights_only=True, mmap=True)
        own = dict(self.owner.student.named_parameters())
        moments = {
            number: {key: like(value, own[name]) for key, value in state["optimizer"][name].items()}
            for number, name in enumerate(self.names())
            if name in state["optimizer"]  # not one that never had a gradient
        }
        with reading(checkpoint / OPTIMIZER):
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        if state["scaler"] is not None and self.owner.accelerator.scaler is not None:
            self.owner.accelerator.scaler.load_state_dict(state["scaler"])


def add_up(parameters: list[torch.nn.Parameter], device: torch.device, mean: bool) -> None:
    """Sum gradients over processes, or take their mean, but for those in shards, which are summed already. Some at a
    time, and where they lie, since recordings add to them there. One that a process has not is zero there: its expert
    got no token."""
    own = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    known = torch.tensor([parameter.grad is not None for parameter in own], dtype=torch.int32, device=device)
    dist.all_reduce(known, dist.ReduceOp.MAX)
    buckets: dict[torch.dtype, list[list[Tensor]]] = {}
    held: dict[torch.dtype, int] = {}  # numbers in the last bucket
    for parameter, somewhere in zip(own, known.tolist(), strict=True):
        if not somewhere:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad, dtype = parameter.grad, parameter.grad.dtype
        if dtype not in held or held[dtype] > BUCKET:
            buckets.setdefault(dtype, []).append([])
            held[dtype] = 0
        buckets[dtype][-1].append(grad)
        held[dtype] += grad.numel()
    for grads in itertools.chain(*buckets.values()):
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        if mean:
            flat /= dist.get_world_size()
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])


def defers(accelerator: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether losses of several steps are read at once: one process on a GPU, whose optimizer itself leaves out a step
    with unusable gradients."""
    alone = accelerator.num_processes == 1 and accelerator.scaler is None
    fused = isinstance(optimizer, torch.optim.AdamW) and bool(optimizer.defaults["fused"])
    return fused and alone and accelerator.device.type in DEFERRING


def selection_metric(entry: Mapping[str, Any]) -> float:
    """What an evaluation, as `Finetuner.of_evaluation` has it, is judged by, less being better: KL from the teacher, of
    numbers or hidden states the relative error; perplexity where there is neither."""
    return next(float(entry[key]) for key in ("eval_kl", "eval_error", "eval_ppl") if entry.get(key) is not None)


def set_training(model: torch.nn.Module, dropout: bool = True) -> None:
    """Training mode, but for batch norms: they keep the statistics that they came with. Statistics of batches would
    change the teacher as well, which is the same model, and no checkpoint has them.

    Without `dropout` the source's own is off, as for features: the teacher's have no noise, and a student cannot learn
    to undo its own. Adapters keep theirs, which the recipe sets; a layer is in training mode alone where it asks for
    that to compute its activations again.
    """
    model.train(dropout)
    for name, module in model.named_modules():
        again = getattr(module, "gradient_checkpointing", False) is True
        module.training |= not dropout and (again or "lora_dropout" in name)
    for _, module in batch_norms(model):
        module.eval()


def batch_norms(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The batch norms of a model by their names."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            yield name, module


def set_checkpointing(model: Any, layers: Any) -> None:
    """Recompute activations in backward: True of all layers, a number of so many, from the first on, False of none.
    transformers renamed the switch after 5.17."""
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    if layers:
        getattr(model, f"{name}_enable")({"use_reentrant": False})
    elif getattr(model, f"is_{name}"):
        getattr(model, f"{name}_disable")()
    if layers and layers is not True:
        again = layers_of(model)[:layers]
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.gradient_checkpointing = module in again
