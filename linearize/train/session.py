"""One process of a training run: devices, model, data, and the stages in order."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from safetensors.torch import load_file, save_file

from linearize_kernels.hf.attention_hooks import evaluating

from ..checkpoint.manifest import base_hashes, read_plan
from ..checkpoint.provenance import trained_before, untrained_mixers
from ..data.augment import augmentation
from ..data.batches import (
    FEW_IMAGES,
    Samples,
    check_source,
    check_vocabulary,
    collate,
    forward,
    open_processor,
    open_samples,
    source_hash,
    token_limit,
)
from ..data.documents import TextSource
from ..data.kinds import has_head, kind_of
from ..data.packing import BlockOrder, Blocks
from ..errors import CheckFailedError, IncompatibleError, LinearizeError, quoted, resource_error
from ..measure.embeddings import known_pooling
from ..measure.evaluate import (
    Score,
    batches,
    check_finite,
    layer_fidelity,
    note_of_little,
    random_teacher_warning,
    sample_count,
    score,
)
from ..measure.positions import longest_text, positions, reader, trained_length
from ..recipe.data import Data, TeacherSource, parts_of
from ..recipe.models import Scratch
from ..recipe.recipe import SFT, AttentionTransfer, FeatureCosine, Recipe, Stage
from ..terminal.output import counted, nats, percent
from ..terminal.tables import row_name
from ..verify.child.inputs import make_inputs, most_tokens
from .chunked_head import obstacle
from .deepspeed_zero3 import partition, read_config
from .drop_path import layers_of
from .fsdp import reshard, shard, whole
from .graphs import unrecordable
from .loop import StageLoop, batch_norms, seed_for
from .own_text import check_width, shards_of, write_own_text
from .progress import pace
from .runs import BEST, OPTIMIZER, WEIGHTS, Position, Run, check_checkpoint, read_position, reading
from .runtime import Say, in_turns, make_optimizer, make_schedule, prompts_of, stage_steps, to_source
from .samples import write_samples
from .save import load_converted, load_whole
from .stages import Calibration, Fit, check_prediction, error_scale, listen
from .student import Student, check_targets
from .teacher import Named, load_teacher, teacher_line, vocabulary_of

# Enough for two digits of a mean over tokens, and cheap beside a stage.
FIDELITY_TOKENS = 16384
# Of texts longer than the trained length: a ratio of two perplexities on the same tokens needs few.
POSITION_TOKENS = 16384
# The scale of each layer's loss needs one digit.
POWER_BLOCKS = 8
# At most: norms and windows have a few numbers per head, but fitted on 512 tokens they fit those alone.
CALIBRATION_TOKENS = 4096
# What evaluations compute in, by accelerate's name of the precision.
COMPUTES = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Finetuner:
    """State of one `linearize finetune` process."""

    def __init__(self, recipe: Recipe, run: Run, accelerator: Accelerator, say: Say = print) -> None:
        self.recipe, self.run, self.accelerator = recipe, run, accelerator
        self.say = say if accelerator.is_main_process else lambda text: None
        self.device = accelerator.device
        self.last_checkpoint: Path | None = run.resume_from
        self.kept: Path | None = None  # the best weights, once they are taken
        self.only: str | None = None  # the one stage that this process was asked for
        self.interrupted = False  # by a signal, in this process
        self.named: Named | None = None  # the recipe's own teacher
        self._blocks: dict[tuple[str, str], Samples | None] = {}
        self.say_once = functools.cache(self.say)  # stages often share their data
        self.eval_tokens = 0  # of the last evaluation
        self.steps_before: dict[str, int] = {}  # of each stage that a tracker got metrics of
        self.wide = accelerator.mixed_precision != "no"
        self.computes = COMPUTES[accelerator.mixed_precision]
        self.zero = read_config(recipe, accelerator.mixed_precision)
        self.sharded = self.zero is not None or accelerator.state.fsdp_plugin is not None

    def load(self, folder: Path, named: Named | None = None) -> None:
        """Model, tokenizer and data, with every check that must not wait until a stage begins; `named` is the recipe's
        own teacher."""
        self.base, self.named = folder, named
        self.model = self.open_model()
        if note := trained_before(folder, named.name if named else None):
            self.say(note)
        self.student = Student(self.model, own_teacher=named is None and not self.recipe.plain)
        if self.sharded:
            self.shard()
        else:
            self.model.to(self.device)
        for stage in self.recipe.stages:
            if self.sharded and own_texts(self.recipe.data_for(stage)):
                message = f"{stage.name}: a teacher in shards writes no text. Use DDP for a run of a few steps"
                raise IncompatibleError(f"{message}, then give data.train the files in its cache")
        for note in stage_notes(
            self.model, self.recipe, [(one, self.blocks_per_step(one)) for one in self.recipe.stages], folder
        ):
            self.say(note)
        self.processor = open_processor(folder, kind_of(self.model))
        if named is not None:
            self.load_teacher(named)
        for stage in self.recipe.stages:
            self.write_own_texts(self.recipe.data_for(stage))
        found = [self.blocks(stage, split) for stage in self.recipe.stages for split in ("train", "eval")]
        if kind_of(self.model) != "images":
            texts = [blocks for blocks in found if blocks is not None]
            for model in filter(None, (self.model, self.student.other)):
                check_vocabulary(self.processor, model, texts)

    def load_teacher(self, named: Named) -> None:
        """The model of the recipe's own teacher, whole on this device."""
        with in_turns(self.accelerator):
            self.student.other = load_teacher(named, self.device)
        self.student.vocabulary = min(map(vocabulary_of, (self.model, self.student.other)))
        self.say(teacher_line(named, self.student.other))

    def open_model(self) -> Any:
        """The base, converted unless it keeps its softmax, on the CPU."""
        dtype = "auto" if self.wide else torch.float32
        if self.wide and self.recipe.model.dtype is not None:
            dtype = getattr(torch, self.recipe.model.dtype)
        load = load_whole if self.recipe.plain else load_converted
        return load(self.base, dtype, self.recipe.model.trust_remote_code)

    def shard(self) -> None:
        """Divide the source's weights among the processes; those that some stage trains become float32 masters, unless
        the optimizer is a small one."""
        names = {name for stage in self.recipe.stages for name in self.student.names_of(stage.train)}
        small = {name for stage in self.recipe.stages for name in self.student.narrow(stage)}
        if self.wide:
            self.student.keep_stream()
            self.student.widen(names, small)
        if self.zero is None:
            shard(self.model, self.accelerator, names)
        else:
            partition(self.model, self.accelerator, self.zero, names)

    def whole_student(self) -> Student:
        """The trained model in one piece, in the main process: from shards, the base and the last checkpoint's."""
        if self.sharded:
            weights = self.kept or self.last_checkpoint
            assert weights is not None
            self.model = self.open_model()
            self.student = Student(self.model, self.student.own_teacher)
            self.restore_weights(len(self.recipe.stages) - 1, weights)
        return self.student

    # ------------------------------------------------------------ data

    def own_text(self, source: TeacherSource) -> Path:
        """Where a text is that the teacher writes: the same for the same teacher, request and seed."""
        who = base_hashes(self.base) if self.named is None else self.named.facts()
        facts = [who, source_hash(source, self.recipe.folder), self.recipe.seed]
        return self.run.folder / "cache" / f"own-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"

    def write_own_texts(self, data: Data) -> None:
        """The texts of its own that a stage asks the teacher for, unless they are there."""
        for source in own_texts(data):
            prompts = prompts_of(source, data.pack.text_key, self.recipe.folder)
            folder = self.own_text(source)
            with self.accelerator.main_process_first(), self.student.teacher() as model, evaluating(model):
                write_own_text(
                    model,
                    self.processor,
                    source.teacher,
                    prompts,
                    folder,
                    self.recipe.seed,
                    self.say,
                    self.accelerator.autocast,
                )

    def blocks(self, stage: Stage, split: str) -> Samples | None:
        """The packed blocks, or images, of a stage's train or eval data, opened once: opening reads all the text."""
        if (stage.name, split) not in self._blocks:
            self._blocks[stage.name, split] = self._open_blocks(stage, split)
        return self._blocks[stage.name, split]

    def _open_blocks(self, stage: Stage, split: str) -> Samples | None:
        """Samples from the cache or tokenised now, by the main process first."""
        data = self.recipe.data_for(stage)
        source = getattr(data, split)
        if source is None:
            return None
        limit = token_limit(self.recipe, stage, split, self.accelerator.num_processes, self.run.max_steps)
        with self.accelerator.main_process_first():
            return open_samples(
                source,
                data.pack,
                self.model,
                self.processor,
                self.run.folder / "cache",
                start=self.recipe.folder,
                sft=stage.answers_alone,
                seed=self.recipe.seed,
                max_tokens=limit,
                say=self.say_once,
                augment=augmentation(data.augment) if split == "train" else None,
                erased=data.erase if split == "train" else 0.0,
                own=lambda source: TextSource(files=tuple(shards_of(self.own_text(source)))),
            )

    def blocks_per_step(self, stage: Stage) -> int:
        """Blocks of one optimizer step, over all micro batches and processes."""
        return stage.batch.blocks * self.accelerator.num_processes

    def blocks_and_steps(self, stage: Stage) -> tuple[Samples, int]:
        """What a stage trains on, and its optimizer steps."""
        blocks = self.blocks(stage, "train")
        assert blocks is not None
        steps = stage_steps(stage, self.blocks_per_step(stage), blocks.seq_len, self.run.max_steps, len(blocks))
        assert steps is not None
        return blocks, steps

    # ------------------------------------------------------------ stages

    def train(self, only: str | None = None) -> bool:
        """All stages from the resume point on, or `only` the one of that name, for which `check_order` has found those
        before it done; True when the last one is done."""
        self.only = only
        resume = self.run.resume_from
        position = read_position(resume) if resume else Position(-1, 0, 0, True)
        if resume:
            self.restore_weights(position.stage, resume)
        else:
            self.baseline(calibrated=self.calibrate())
        for number, stage in enumerate(self.recipe.stages):
            within = number == position.stage and not position.done
            if number > position.stage or within:
                self.train_stage(number, stage, position.step if within else 0, resume if within else None)
            if stage.name == only:
                return number == len(self.recipe.stages) - 1
        return True

    def train_stage(self, number: int, stage: Stage, start: int, checkpoint: Path | None) -> None:
        """One stage: parameters, optimizer, schedule, then the loop, from step `start` of `checkpoint`."""
        blocks, steps = self.blocks_and_steps(stage)
        parameters = self.prepare(number, stage)
        optimizer = make_optimizer(self.student.groups(stage, parameters), stage, self.device, self.recipe.seed)
        order = BlockOrder(len(blocks), self.recipe.seed, self.recipe.data_for(stage).repeats)
        schedule = make_schedule(stage, steps)
        loop = StageLoop(self, number, stage, blocks, order, steps, parameters, optimizer, schedule)
        if isinstance(stage, AttentionTransfer):
            chosen = [blocks[order.block(k)] for k in range(min(POWER_BLOCKS, len(blocks)))]
            with self.accelerator.autocast():
                loop.power = error_scale(stage, self.student, (collate([block], self.device) for block in chosen))
        if checkpoint is not None:
            loop.restore(checkpoint)
        loop.run(start)

    def later(self, number: int) -> float:
        """How long the stages after `number` will take, in tokens of that one; 0 where this process ends with it."""
        total = 0.0
        for stage in self.recipe.stages[number + 1 :] if self.only is None else ():
            blocks, steps = self.blocks_and_steps(stage)
            total += steps * self.blocks_per_step(stage) * blocks.seq_len * pace(stage)
        return total / pace(self.recipe.stages[number])

    def prepare(self, number: int, stage: Stage) -> list[torch.nn.Parameter]:
        """What a stage trains; a stage prepared again gets the same adapters."""
        return self.student.prepare(stage, wide=self.wide, seed=seed_for(self.recipe.seed, number))

    def restore_weights(self, number: int, checkpoint: Path) -> None:
        """Trained tensors of the resume point; LoRA layers and teacher copies of the stages so far come first."""
        for earlier, stage in enumerate(self.recipe.stages[: number + 1]):
            self.prepare(earlier, stage)
        with reading(checkpoint / WEIGHTS):
            tensors = load_file(checkpoint / WEIGHTS)
        self.student.load_state(tensors)

    def calibrate(self) -> bool:
        """Before anything is measured or trained: from a few blocks, gates and norms start where each layer's output is
        nearest to the teacher's, and windows with their share; where a stage learns from the teacher, mixers that are
        far from softmax are fitted. The same in every process. Mixers that an earlier run trained stay as they are:
        False where there are no others."""
        untrained = set[str]() if self.recipe.plain else untrained_mixers(self.base, read_plan(self.base))
        if not untrained:
            return False
        blocks, _ = self.blocks_and_steps(self.recipe.stages[0])
        order = BlockOrder(len(blocks), self.recipe.seed)
        count = max(min(CALIBRATION_TOKENS // blocks.seq_len, POWER_BLOCKS, len(blocks)), 1)
        batch = collate([blocks[order.block(k)] for k in range(count)], self.device)
        if blocks.seq_len > CALIBRATION_TOKENS:
            batch = {name: value[:, :CALIBRATION_TOKENS] for name, value in batch.items()}
        with self.accelerator.autocast():
            learns = any(isinstance(stage, AttentionTransfer) or stage.asks_teacher for stage in self.recipe.stages)
            listener = Fit if learns else Calibration
            listen(self.student, listener(self.student, untrained), batch)
        for name, parameter in self.student.named_parameters():
            if ".mixer." in name:
                parameter.data.copy_(broadcast(parameter.data))
        told = "new parameters now start where each layer is nearest to its softmax"
        self.say(f"calibrated on {batch['input_ids'].numel():,} tokens: {told}" if "input_ids" in batch else told)
        return True

    # ------------------------------------------------------------ evaluation and checkpoints

    def baseline(self, calibrated: bool) -> None:
        """Of the teacher and of the model just converted, when there is eval data: held-out perplexity, and how far
        each layer is from its softmax. Nothing of random weights without a teacher. `calibrated` is noted, as
        `linearize eval` of the converted folder finds other figures then."""
        if not self.student.has_teacher:
            return
        stage = self.recipe.stages[0]
        with self.student.teacher() as model:
            teacher = self.evaluate(stage, teacher=model)
        if teacher is not None:
            check_finite("the teacher", teacher.ppl)
        converted = self.evaluate(stage)
        if teacher is not None and teacher.ppl is not None:  # of maps a teacher has no figures of its own
            self.log_evaluation("teacher", 0, 0, teacher)
            if kind_of(self.model) == "text" and (
                warning := random_teacher_warning(teacher.ppl, vocabulary_of(self.model))
            ):
                self.say(warning)
        if converted is not None:
            self.log_evaluation("converted", 0, 0, converted, calibrated)
            if teacher is not None and (note := note_of_little(converted, teacher)):
                self.say(note)
        layers = self.fidelity()
        if layers and self.accelerator.is_main_process:
            self.run.log(stage="converted", step=0, tokens=0, layers=layers)

    def evaluate(self, stage: Stage, *, teacher: Any = None) -> Score | None:
        """Held-out perplexity and accuracy of the model as it is, and its KL from the teacher; or what the `teacher`
        alone has. None without eval data, and of maps or hidden states for a teacher alone."""
        blocks = self.blocks(stage, "eval")
        if blocks is None or (teacher is not None and not has_head(self.model)):
            return None
        self.eval_tokens = sample_count(blocks, self.recipe.eval.max_tokens) * blocks.seq_len
        data = batches(blocks, stage.batch.per_device, self.recipe.eval.max_tokens, self.accelerator)
        if teacher is None:
            found = score(self.model, data, self.accelerator, self.student)
        else:
            found = score(teacher, data, self.accelerator)
        reshard(self.model)
        return found

    def log_evaluation(self, name: str, step: int, tokens: int, found: Score, calibrated: bool = False) -> None:
        """One evaluation into metrics.jsonl and to the person who waits."""
        if self.accelerator.is_main_process:
            values = self.of_evaluation(found)
            noted = {"calibrated": True} if calibrated else {}
            self.run.log(stage=name, step=step, tokens=tokens, **noted, eval_dtype=self.computes, **values)
            self.track(name, step, values)
        told = {"accuracy": percent(found.accuracy) if kind_of(self.model) != "text" else ""}
        beside = "" if found.teacher_ppl is None else f" (teacher {found.teacher_ppl:.4g})"
        told |= {"perplexity": "" if found.ppl is None else f"{found.ppl:.4g}{beside}"}
        told |= {"same class": percent(found.agreement)}
        told |= {
            "KL": f"{nats(found.kl)} nats" if found.kl is not None else "",
            "relative squared error": nats(found.error),
        }
        figures = ", ".join(f"{what} {value}" for what, value in told.items() if value)
        self.say(f"{row_name(name, calibrated)}{f' step {step}' if step else ''}: held-out {figures}")

    def track(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Metrics of a stage to the recipe's tracker. Its steps go on from one stage to the next: wandb and trackio
        leave out what comes at a step that is past."""
        if name not in self.steps_before:
            self.steps_before[name] = self.run.steps_before(name)
        named = {f"{name}/{key}": value for key, value in values.items()}
        self.accelerator.log(named, step=self.steps_before[name] + step)

    def of_evaluation(self, found: Score) -> dict[str, float]:
        """An evaluation as metrics.jsonl has it."""
        values = {f"eval_{what}": value for what, value in found._asdict().items() if value is not None}
        return values | {"eval_tokens": self.eval_tokens}

    def fidelity(self) -> list[dict[str, float]]:
        """Per-layer distance to the source's softmax on held-out text; empty without eval data, and where source
        weights trained beside another teacher, since no copies of them are kept then."""
        stage = self.recipe.stages[-1]
        blocks = self.blocks(stage, "eval")
        if blocks is None or self.recipe.plain or (self.student.drifted and not self.student.own_teacher):
            return []
        data = batches(blocks, stage.batch.per_device, FIDELITY_TOKENS, self.accelerator)
        return layer_fidelity(self.student, data, self.accelerator)

    def positions(self) -> dict[str, Any] | None:
        """Perplexity and KL by position in held-out texts longer than the rows of training; None for models of no
        text, without eval data, without a teacher that reads other texts, and for shards, whose processes read other
        ones."""
        data = self.recipe.data_for(self.recipe.stages[-1])
        if not self.student.has_teacher or data.eval is None:
            return None
        if kind_of(self.model) != "text" or not has_head(self.model) or self.sharded:
            return None
        source = to_source(data.eval, data.pack.text_key, self.recipe.folder)
        trained = trained_length(self.recipe)

        @contextlib.contextmanager
        def as_teacher() -> Iterator[None]:
            with self.student.teacher(), self.accelerator.autocast():
                yield

        models = [self.model] if self.student.other is None else [self.model, self.student.other]

        with evaluating(self.model):
            return positions(
                reader(self.model, self.accelerator.autocast),
                reader(models[-1], as_teacher),
                source,
                self.processor,
                self.device,
                trained=trained,
                longest=longest_text(*models),
                tokens=min(POSITION_TOKENS, self.recipe.eval.max_tokens),
                batch_tokens=trained * self.recipe.stages[-1].batch.per_device,
            )

    def samples(self) -> list[dict[str, str]]:
        """Held-out texts as teacher and student continue them; empty for models that write none, and for shards.

        Pictures of a run are no reason to lose it: what generation raises becomes a message.
        """
        blocks = self.blocks(self.recipe.stages[-1], "eval")
        if not isinstance(blocks, Blocks) or self.sharded or not has_head(self.model):
            return []
        try:
            with self.accelerator.autocast():
                return write_samples(self.student, self.processor, blocks, self.device)
        except Exception as error:  # generation of many architectures raises as it likes
            if resource_error(error) is not None:
                raise
            self.say(f"note: no sample texts ({type(error).__name__}: {error})")
            return []

    def save(self, position: Position, state: dict[str, Any]) -> None:
        """A checkpoint: trained tensors by name, whole, and the optimizer unless the stage is over."""
        tensors = self.gathered()

        def write(folder: Path) -> None:
            self.write_weights(tensors, folder, position)
            if not position.done:
                torch.save(state, folder / OPTIMIZER)

        if self.accelerator.is_main_process:
            self.last_checkpoint = self.run.save(position, write)
        self.accelerator.wait_for_everyone()

    def gathered(self) -> dict[str, torch.Tensor]:
        """Trained tensors by name, whole and on the CPU, in the main process; every process must ask."""
        tensors, own = {}, dict(self.student.named_parameters())
        for name, tensor in self.student.state().items():  # of shards, one at a time is whole on the device
            tensor = whole(tensor, own[name])
            if self.accelerator.is_main_process:
                tensors[name] = tensor.contiguous().cpu()
        return tensors

    def write_weights(self, tensors: dict[str, torch.Tensor], folder: Path, position: Position) -> None:
        """The weights of a checkpoint. Raises LinearizeError (exit 6) for one that is not finite."""
        broken = next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)
        if broken is not None:
            raise self.not_finite(f"{broken} is not finite", position.stage, position.step + 1)
        save_file(tensors, folder / WEIGHTS)

    def save_best(self, position: Position, found: Score) -> None:
        """Keep the weights as they are, which had the lowest KL of the stage so far."""
        tensors = self.gathered()
        if self.accelerator.is_main_process:
            score = self.of_evaluation(found)
            self.run.save_best(position, score, lambda folder: self.write_weights(tensors, folder, position))
        self.accelerator.wait_for_everyone()

    def take_best(self) -> None:
        """Where the recipe keeps the best: give the model the weights of `save_best`, and the report their figures."""
        best = self.run.read_best() if self.recipe.finish.keep == "best" else None
        if best is None:
            return
        position, score = best
        stage = self.recipe.stages[position.stage]
        self.say(f"note: keeps the weights of step {position.step} of {stage.name}, the lowest KL that was measured")
        self.kept = self.run.best
        check_checkpoint(self.kept, BEST)
        with reading(self.kept / WEIGHTS):
            self.student.load_state(load_file(self.kept / WEIGHTS))
        if self.accelerator.is_main_process:
            self.run.log(stage=stage.name, step=position.step, tokens=position.tokens, **score)

    def not_finite(self, what: str, number: int, step: int) -> LinearizeError:
        """The error for a loss, a gradient or a weight that is NaN or infinite; `step` of that stage went wrong."""
        kept = self.run.last_good(number, step)
        stage = self.recipe.stages[number]
        then = f"continue with --resume {quoted(kept)}" if kept else "start again with --resume never"
        return CheckFailedError(
            f"{what} at step {step} of {stage.name}; last good checkpoint: {kept or 'none was written'}. Lower "
            f"stages[{number}].optimizer.lr (now {stage.optimizer.lr:g}) or set runtime.precision: fp32, and {then}"
        )


def own_texts(data: Data) -> list[TeacherSource]:
    """Those parts of a stage's data that the teacher writes."""
    return [part for part, _ in parts_of(data.train) if isinstance(part, TeacherSource)]


def stage_notes(model: Any, recipe: Recipe, stages: Iterable[tuple[Stage, int]], folder: Path) -> list[str]:
    """Notes on stages whose rows, or texts that the teacher writes, are longer than what a model was made for, or whose
    steps, of so many samples, see so few images that their gradients are mostly chance, or that compare other vectors
    than a sentence encoder's `folder` makes: one for all stages of which it says the same.

    A step of text has thousands of tokens to predict, one of images a class or a vector each.
    """
    images = kind_of(model) == "images"
    known, own = None if images else longest_text(model), known_pooling(folder)
    found: dict[str, list[str]] = {}
    for stage, samples in stages:
        if own not in (None, stage.pooling) and (stage.of_loss("embedding", 0.0) or stage.of_loss("similarity", 0.0)):
            message = f"its loss compares vectors by pooling={stage.pooling}, and the model makes them by {own}"
            found.setdefault(f"{message}. Set stages.{stage.name}.loss.pooling={own}", []).append(stage.name)
        data = recipe.data_for(stage)
        length = data.pack.seq_len
        written = max((part.teacher.length for part in own_texts(data)), default=0) if recipe.teacher is None else 0
        if images and samples < FEW_IMAGES:
            message = f"a step sees {counted(samples, 'image')}, and gradients of so few may not converge. Give it "
            message += "batch.per_device: 64, or what memory holds and the rest by batch.gradient_accumulation_steps"
        elif known is not None and length > known:
            message = f"rows have {length:,} tokens, and {type(model).__name__} was made for {known:,} "
            message += f"(max_position_embeddings). Set data.pack.seq_len={known}, unless it is to learn longer rows"
        elif known is not None and written > known:
            message = f"the teacher writes {written:,} tokens of a text, and {type(model).__name__} was made for "
            message += f"{known:,} (max_position_embeddings). Set data.train.teacher.length={known}"
        else:
            continue
        found.setdefault(message, []).append(stage.name)
    return [f"note: {', '.join(names)}: {message}" for message, names in found.items()]


def check_graphs(recipe: Recipe, device: torch.device, sharded: bool, model: Any) -> None:
    """Refuse (exit 3) `runtime.graphs: true` for stages whose steps cannot be recorded."""
    for stage in recipe.stages if recipe.runtime.graphs is True else ():
        if reason := unrecordable(recipe, stage, device, sharded, kind_of(model)):
            message = f"{stage.name}: runtime.graphs is true, and {reason}"
            raise IncompatibleError(f"{message}. Set it to auto, which leaves such steps plain")


def check_drop_path(model: Any, stage: SFT) -> None:
    """Refuse (exit 3) stochastic depth of a model that has its own, or no layers that it is for."""
    own = getattr(model.config, "drop_path_rate", None)
    if own is not None:
        raise IncompatibleError(
            f"{stage.name}: {type(model).__name__} has stochastic depth of its own; the drop_path_rate in its config "
            f"is {own}. Set drop_path to 0"
        )
    if not layers_of(model):
        message = f"{stage.name}: {type(model).__name__} has no layers that drop_path could leave out. Set it to 0"
        raise IncompatibleError(message)


def check_model(model: Any, recipe: Recipe) -> None:
    """Refuse (exit 3) what the model cannot do, and data that it cannot learn from; `model` may be without weights."""
    if isinstance(recipe.model.base, Scratch) and (norm := next(batch_norms(model), None)) is not None:
        raise IncompatibleError(
            f"{norm[0]} of {type(model).__name__} is a batch norm. Training keeps the statistics that it comes with, "
            "and those of random weights say nothing. Give a trained model as model.base, or the config of an "
            "architecture without batch norms"
        )
    most, seen = most_tokens(model), tried(model)
    for number, stage in enumerate(recipe.stages):
        if stage.lora is not None:
            check_targets(model, stage.lora.target_modules)
        elif not Student(model).names_of(stage.train):
            message = f"{stage.name}: train {', '.join(stage.train)} names no parameter, for the mixers have none"
            raise IncompatibleError(f"{message}. Leave the stage out, or train all")
        if isinstance(stage, FeatureCosine) == has_head(model) and not isinstance(stage, AttentionTransfer):
            what, other = ("has a head", "logit_kl or sft") if has_head(model) else ("has no head", "feature_cosine")
            raise IncompatibleError(f"{stage.name}: {type(model).__name__} {what}; use {other}")
        if isinstance(stage, SFT) and stage.drop_path:
            check_drop_path(model, stage)
        if seen is not None and (not isinstance(stage, AttentionTransfer) or recipe.data_for(stage).eval is not None):
            if isinstance(seen, LinearizeError):
                raise seen
            check_prediction(stage, *seen, type(model).__name__)
        for name, source in recipe.sources_of(stage).items():
            check_source(source, model, recipe.folder, name)
        for source in own_texts(recipe.data_for(stage)):
            check_width(model, 1, source.teacher.length)
        length = recipe.data_for(stage).pack.seq_len
        if most is not None and length > most:
            own = f"stages[{number}]." * (stage.data.pack.seq_len is not None)
            message = f"{own}data.pack.seq_len is {length}, and {type(model).__name__} takes at most {most} tokens"
            raise IncompatibleError(f"{message}. Set it to {most}, or less")
    apart = next((s.name for s in recipe.stages if s.chunk_size), None)
    if apart is not None and (reason := obstacle(model)):
        raise IncompatibleError(f"{apart}: {reason}; set loss.chunk_size: null")
    small = next((stage.name for stage in recipe.stages if stage.optimizer.memory == "small"), None)
    if small is not None and model.dtype == torch.float16:
        raise IncompatibleError(
            f"{small}: optimizer.memory small trains weights in their own dtype, and float16 loses small updates. Set "
            "model.dtype: bfloat16, or optimizer.memory: full"
        )
    if recipe.runtime.gradient_checkpointing is True and not model.supports_gradient_checkpointing:
        raise IncompatibleError(
            f"{type(model).__name__} has no gradient checkpointing; set runtime.gradient_checkpointing: false"
        )


def tried(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | LinearizeError | None:
    """What a model without memory behind its weights predicts of an image, and the image as a batch; or why finetune
    cannot compare that. None for a model with weights, which shows it in its first step, and for one that does not run.
    """
    if kind_of(model) != "images" or not has_head(model) or not next(model.parameters()).is_meta:
        return None
    try:
        batch = {name: value.to("meta") for name, value in make_inputs(model, 1).items()}
        batch["labels"] = torch.zeros(1, 1, dtype=torch.long)
        as_teacher = model.teacher() if hasattr(model, "teacher") else contextlib.nullcontext()
        with evaluating(model), torch.no_grad(), as_teacher:
            return forward(model, batch), batch
    except LinearizeError as error:
        return error
    except Exception:  # code of many architectures, which may ask for values
        return None
