"""Peak memory of a stage on one device, by its parts: the stage's step, run on fake tensors by the code that trains."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from linearize_kernels.hf.attention_hooks import mixers_of

from ..checkpoint.manifest import plan_in
from ..errors import LinearizeError, reason_of
from ..recipe.recipe import Recipe
from ..terminal.progress import Advance, silent
from ..train.offload import LEAST, Host
from ..train.save import meta_model
from ..train.small_adamw import fresh_state
from ..train.student import Student, inject_lora, is_source
from ..train.teacher import Named, find_teacher, give_teacher
from .repeated_layers import Layers, LayersDiffer, find_layers, rehearsed_once, whole
from .step import Step
from .tracker import Fakes, Tracker, Work, as_on_gpu, total

NONE = Work()
PARTS = ("weights", "masters", "gradients", "optimizer", "teacher", "activations", "logits")


@dataclass
class Memory:
    """Bytes of one stage on one device at the moment of its peak, by part, and what its step computes.

    `saved` are the activations and logits alive when a backward pass begins, the most of any; `work` is that of one
    micro batch, and `evaluated` that of passes of student and teacher over as many blocks. `trained` are parameters, in
    so many `tensors`, `checkpoint` the bytes of a checkpoint without the optimizer's. `whole` are the bytes that
    processes do not divide, `aside` those of trained source weights, which a teacher pass has twice, `gathered` what
    sharding holds of whole weights and gradients at a time, `early` what float32 masters of later stages take more,
    which shards have from the start, `host` what waits in the host's memory for the backward pass. `reason` says why
    activations could not be counted.
    """

    parts: dict[str, int]
    saved: int = 0
    work: Work = NONE
    evaluated: Work = NONE
    trained: int = 0
    tensors: int = 0
    checkpoint: int = 0
    teacher_copy: int = 0
    whole: dict[str, int] = field(default_factory=dict)
    aside: int = 0
    gathered: int = 0
    early: int = 0
    host: int = 0
    reason: str = ""

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


@dataclass
class Counted:
    """What a step held and computed: fields of `Memory`, of whose parts it is the peak."""

    peak: Counter[str]
    saved: int = 0
    work: Work = NONE
    evaluated: Work = NONE
    host: int = 0
    reason: str = ""


def moments(parameter: Tensor, small: bool) -> list[Tensor]:
    """What an optimizer keeps of a parameter, but for its step count."""
    if small:
        return [value for name, value in fresh_state(parameter).items() if name != "step"]
    return [torch.empty_like(parameter, dtype=torch.float32) for _ in range(2)]


def divided(memory: Memory, processes: int, sharded: bool) -> Memory:
    """The memory of one of several processes: FSDP2 and ZeRO-3 divide the source's part of what stays, DDP nothing.
    What is gathered is among the activations then, and else nothing is. It is computed here, and was not counted.
    """
    parts, gathered = dict(memory.parts), 0
    if processes > 1 and sharded:
        for part in PARTS[:5]:
            whole = memory.whole.get(part, 0)
            parts[part] = min(parts[part], whole) + max(parts[part] - whole, 0) // processes
        parts["teacher"] += memory.aside // processes
        parts["masters"] += memory.early // processes
        gathered = memory.gathered
        parts["activations"] += gathered
    return replace(memory, parts=parts, gathered=gathered)


class FakeHost(Host):
    """Counts the bytes that go away, of fake tensors."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def takes(self, tensor: Tensor) -> bool:
        return tensor.nbytes >= LEAST and self.tracker.part_of(tensor) in ("activations", "logits")

    def away(self, tensor: Tensor) -> Any:
        self.tracker.host(tensor.nbytes)
        return tensor.shape, tensor.dtype, tensor.device

    def back(self, kept: Any) -> Tensor:
        shape, dtype, device = kept
        return torch.empty(shape, dtype=dtype, device=device)


class Rehearsal:
    """A recipe's model on fake tensors, and its stages in order."""

    # What `advance` gets of a stage: a third each for a forward pass, a backward pass and an evaluation. Beside it what
    # planning and making the model take: 1.5 and 2.5 s for Llama 3.1 8B, whose stages take 7 to 18 s on two CPU cores.
    STAGE, PLANNED, MADE = 3.0, 0.5, 0.5

    def __init__(
        self,
        recipe: Recipe,
        planned: Any,
        folder: Path | None,
        precision: str,
        gpu: bool,
        named: Named | None = None,
        advance: Advance = silent,
        known: dict[str, Counted] | None = None,
    ) -> None:
        """Of a conversion that is `planned`, or a converted `folder`; `precision` is accelerate's name of it, and `gpu`
        the kind of device. `named` is the recipe's own teacher, if it was found already. `known` is what rehearsals of
        other recipes for the same base counted."""
        self.recipe, self.precision, self.gpu = recipe, precision, gpu
        self._advance, self._left = advance, 0.0
        self._known = {} if known is None else known
        self.planned, self.folder = planned, folder
        self.mode = Fakes()
        dtype = None if precision != "no" else torch.float32
        if precision != "no" and recipe.model.dtype is not None:
            dtype = getattr(torch, recipe.model.dtype)
        self.dtype = dtype
        if any(stage.lora is not None for stage in recipe.stages):
            # It imports bitsandbytes, which would make its tables of fake tensors.
            import peft.tuners.tuners_utils  # noqa: F401

        with self.mode, Tracker():  # which answers what initialisers ask of values
            self.model = meta_model(folder, planned, dtype, recipe.model.trust_remote_code, device="cpu")
            self.named = named or find_teacher(recipe)
            self.student = Student(self.model, own_teacher=self.named is None and not recipe.plain)
            if self.named is not None:
                give_teacher(self.named, self.student, "cpu")
        self.narrow = self.model.dtype != torch.float32
        self.stored_dtype = self._stored_dtype()
        sizes = {name: p.numel() * self.stored_dtype.itemsize for name, p in self.student.named_parameters()}
        # Bytes of the whole model on disk, and of what the conversion added.
        self.stored = sum(sizes.values())
        self.stored_new = sum(count for name, count in sizes.items() if ".mixer." in name)
        advance(self.MADE)

    def _stored_dtype(self) -> torch.dtype:
        """That of the weights on disk, before and after training: `model.dtype` changes what a conversion writes, and
        of a folder that was converted before only what training loads."""
        if self.planned is not None:
            name = self.planned[0].dtype
        elif self.recipe.plain or self.folder is None:
            name = self.recipe.model.dtype or "float32"
        else:
            name = plan_in(self.folder).dtype
        return cast(torch.dtype, getattr(torch, name))

    @classmethod
    def parts(cls, recipe: Recipe) -> float:
        """What `advance` gets in all, when each stage is asked for once."""
        return cls.MADE + cls.STAGE * len(recipe.stages)

    def changed(self, recipe: Recipe, advance: Advance) -> Rehearsal:
        """The rehearsal of another recipe for the same base."""
        return Rehearsal(recipe, self.planned, self.folder, self.precision, self.gpu, self.named, advance, self._known)

    def _tell(self, done: float) -> None:
        """`advance`, of one stage no more than STAGE in all."""
        done = min(done, self._left)
        self._left -= done
        self._advance(done)

    def stage(self, number: int) -> Memory:
        """The peak of stage `number`; the stages before it must have been asked for."""
        recipe, stage, self._left = self.recipe, self.recipe.stages[number], self.STAGE
        step = Step(recipe, stage, self.student, self.precision)
        if stage.lora is not None and self.student.lora is None:
            self._adapt(stage.lora)
        with self.mode:
            step.prepare()
            key = self._key(number)
            if key not in self._known:
                models = [model for model in (self.model, self.student.other) if model is not None]
                try:
                    self._known[key] = self._count(step, models, find_layers(models))
                except LayersDiffer:
                    self._known[key] = self._count(step, models, [])
            found = self._known[key]
        self._tell(self._left)
        state = self.student.state()
        return Memory(
            {part: int(found.peak[part]) for part in PARTS},
            saved=found.saved,
            work=found.work,
            evaluated=found.evaluated,
            trained=sum(p.numel() for p in step.parameters),
            tensors=len(step.parameters),
            checkpoint=sum(t.numel() * t.element_size() for t in state.values()),
            teacher_copy=self.student.teacher_bytes(),
            whole=self._whole(step),
            aside=sum(p.nbytes for name, p in self.student.named_parameters() if name in self.student.originals),
            gathered=self._gathered(step),
            early=self._early(step),
            host=found.host,
            reason=found.reason,
        )

    def _key(self, number: int) -> str:
        """All of the recipe that what a stage counts depends on: of the stages before it what they train, and of those
        behind it nothing."""
        values = self.recipe.resolved()
        stages = values.pop("stages")
        before = [(stage["train"], stage["optimizer"]["memory"], stage.get("lora")) for stage in stages[:number]]
        return repr((values, before, stages[number]))

    def _count(self, step: Step, models: list[Any], lists: list[Layers]) -> Counted:
        """What a step that is prepared holds and computes, with the layers of these lists that are alike run once.

        Raises LayersDiffer where they cannot be.
        """
        tracker = Tracker({getattr(model.config.get_text_config(), "vocab_size", 0) or 0 for model in models})
        step.host = FakeHost(tracker)
        try:
            with tracker:
                kept = self._keep(tracker, step)
                try:
                    return self._run(tracker, step, lists)
                except LayersDiffer:
                    raise
                except Exception as error:  # code of many architectures, which may ask for values
                    if isinstance(error, LinearizeError):
                        raise
                    alive = Counter({part: tracker.parts[part] for part in PARTS[:5]})
                    return Counted(alive, reason=f"{type(error).__name__}: {reason_of(error)}")
                finally:
                    del kept
        finally:
            for parameter in step.parameters:
                parameter.grad = None

    def _adapt(self, lora: Any) -> None:
        """Adapters, made with memory: peft converts their dtype, which modules of fake tensors refuse."""
        self.student.lora = inject_lora(self.model, lora)
        for module in self.model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and not isinstance(parameter, FakeTensor):
                    with self.mode:
                        module._parameters[key] = torch.nn.Parameter(
                            torch.empty(parameter.shape, dtype=parameter.dtype)
                        )

    def _whole(self, step: Step) -> dict[str, int]:
        """Bytes of the parts that each of several processes has whole whatever divides the rest: mixers, adapters,
        another teacher."""
        found: Counter[str] = Counter()
        trained, small = {id(p) for p in step.parameters}, step.stage.optimizer.memory == "small"
        for name, parameter in self.student.named_parameters():
            if is_source(name):
                continue
            master = step.wide and parameter.dtype == torch.float32 and self.narrow and id(parameter) in trained
            found["masters" if master else "weights"] += parameter.nbytes
            if id(parameter) in trained:
                found["gradients"] += parameter.nbytes
                with self.mode:
                    found["optimizer"] += sum(value.nbytes for value in moments(parameter, small))
        found["teacher"] = sum(tensor.nbytes for tensor in self._other())
        return dict(found)

    def _other(self) -> list[Tensor]:
        """Weights and buffers of another teacher than the model's own softmax."""
        other = self.student.other
        return [] if other is None else [*other.parameters(), *other.buffers()]

    def _gathered(self, step: Step) -> int:
        """What FSDP2 holds beside its shards: the outermost unit and two layers, gradients of one unit in fp32."""
        kinds = set(self.model._no_split_modules or ())
        units = [m for m in self.model.modules() if type(m).__name__ in kinds]
        layer = max((sum(p.numel() for n, p in m.named_parameters() if is_source(n)) for m in units), default=0)
        inside = {id(p) for m in units for p in m.parameters()}
        root = sum(p.numel() for n, p in self.student.named_parameters() if is_source(n) and id(p) not in inside)
        item = 2 if step.wide else 4
        trains = sum(p.numel() for n, p in self.student.named_parameters() if is_source(n) and p.requires_grad)
        gradients = 4 * max(layer, root) if trains else 0
        stage, heads = step.stage, 0
        if stage.chunk_size:  # the head in one piece, its teacher's as well
            own_teacher = stage.learns_logits and self.named is None
            heads = (1 + own_teacher) * sum(p.numel() for p in self.model.get_output_embeddings().parameters())
        return item * (root + 2 * layer + heads) + gradients

    def _early(self, step: Step) -> int:
        """What float32 masters of source weights take more than the weights, of those that a later stage trains. Shards
        have one dtype from the start."""
        stages = self.recipe.stages
        small = {name for stage in stages for name in self.student.narrow(stage)}
        due = {name for stage in stages for name in self.student.names_of(stage.train)} - small
        found = [p for name, p in self.student.named_parameters() if name in due and is_source(name) and step.wide]
        return sum(4 * p.numel() - p.nbytes for p in found)

    def _keep(self, tracker: Tracker, step: Step) -> list[Tensor]:
        """Count what stays for the whole stage; returns the tensors that stand for the optimizer's."""
        trained = {id(p) for p in step.parameters}
        wide = step.wide
        tracker.label(self.model.buffers(), "weights")
        for parameter in self.model.parameters():
            master = wide and parameter.dtype == torch.float32 and self.narrow
            tracker.label([parameter], "masters" if id(parameter) in trained and master else "weights")
        tracker.label([*self.student.originals.values(), *self._other()], "teacher")
        small = step.stage.optimizer.memory == "small"
        kept = [x for p in step.parameters for x in moments(p, small)]
        tracker.label(kept, "optimizer")
        if step.stage.batch.gradient_accumulation_steps > 1:  # from the second micro batch on they are there
            for parameter in step.parameters:
                parameter.grad = torch.empty_like(parameter)
                tracker.label([parameter.grad], "gradients")
        return kept

    def _run(self, tracker: Tracker, step: Step, lists: list[Layers]) -> Counted:
        """A micro batch, then an evaluation."""
        passes = len(mixers_of(self.model)) - sum(len(one.stands_for) for one in lists) if step.transfers else 1

        def note(parameter: Tensor) -> None:
            tracker.label([parameter.grad], "gradients")

        def look() -> None:
            tracker.look()
            self._tell(1 / max(passes, 1))

        def ended() -> None:
            if not step.transfers:  # whose backward passes are within those of layers
                tracker.begin(None)

        handles = [p.register_post_accumulate_grad_hook(note) for p in step.parameters]
        tracker.restart()
        start = Counter(tracker.parts)
        try:
            batch = step.batch()
            with (
                as_on_gpu(self.model) if self.gpu else contextlib.nullcontext() as tracker.workspace,
                rehearsed_once(lists, tracker),
            ):
                step.micro_batch(batch, look, ended)
                self._tell(1)
                trained = whole(tracker.cut(), lists)
                step.evaluate(batch)
                evaluated = whole(tracker.cut(), lists)
        finally:
            for handle in handles:
                handle.remove()
        of_step = total(trained, start)
        of_both = of_step if self.recipe.data_for(step.stage).eval is None else total(trained + evaluated, start)
        work = total(evaluated, of_step.end).work
        return Counted(of_both.peak, of_step.seen, of_step.work, work, of_step.hosted)
