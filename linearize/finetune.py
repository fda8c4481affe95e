"""Finetune: convert if asked, then one loop over the recipe's stages, then save, reload and verify."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, get_scheduler

from . import __version__
from .convert import convert, plan_conversion
from .data import Blocks, Source, build_blocks
from .demo import model_folder
from .errors import Exit, LinearizeError
from .evaluate import batches, layer_fidelity, perplexity
from .export import load_converted, meta_model, save_final
from .loop import StageLoop
from .recipe import AttentionTransfer, Recipe, Stage
from .runs import Position, Run, read_position
from .stages import Calibration, listen
from .trainable import Student

Say = Callable[[str], None]
# Enough for two digits of a mean over tokens, and cheap beside a stage.
FIDELITY_TOKENS = 16384


class Finetuner:
    """State of one `linearize finetune` process."""

    def __init__(self, recipe: Recipe, run: Run, *, max_steps: int | None = None, say: Say = print) -> None:
        self.recipe, self.run, self.max_steps, self.say = recipe, run, max_steps, say
        self.accelerator = make_accelerator(recipe, run)
        self.device = self.accelerator.device
        self.interrupted = False
        self.last_checkpoint: Path | None = run.resume_from
        self.wide = self.accelerator.mixed_precision != "no"

    def load(self, folder: Path) -> None:
        """Model and tokenizer from the converted checkpoint; every process does the same."""
        set_seed(self.recipe.seed)
        dtype = "auto" if self.wide else torch.float32
        if self.wide and self.recipe.model.dtype is not None:
            dtype = getattr(torch, self.recipe.model.dtype)
        model = load_converted(folder, dtype, self.recipe.model.trust_remote_code)
        self.model = model.to(self.device)
        self.student = Student(self.model)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)

    # ------------------------------------------------------------ data

    def blocks(self, stage: Stage, split: str) -> Blocks | None:
        """The packed blocks of a stage's train or eval data; the main process tokenises first."""
        data = self.recipe.data_for(stage)
        source = getattr(data, split)
        if source is None:
            return None
        limit = None
        if split == "eval":
            limit = self.recipe.eval.max_tokens
        elif getattr(source, "streaming", False):
            limit = self._token_budget(stage, data.pack.seq_len)
        with self.accelerator.main_process_first():
            return build_blocks(
                to_source(source, data.pack.text_key, self.recipe.folder),
                self.tokenizer,
                data.pack.seq_len,
                self.run.folder / "cache",
                sft=stage.kind == "sft",
                max_tokens=limit,
            )

    def _token_budget(self, stage: Stage, seq_len: int) -> int:
        per_step = self._blocks_per_step(stage) * seq_len
        return stage.tokens or (stage.steps or 0) * per_step

    def _blocks_per_step(self, stage: Stage) -> int:
        return stage.batch.per_device * stage.batch.accumulate * self.accelerator.num_processes

    def steps(self, stage: Stage, blocks: Blocks) -> int:
        """Optimizer steps of a stage, from its budget of tokens, steps or epochs, capped by --max-steps."""
        per_step = self._blocks_per_step(stage)
        if stage.steps is not None:
            steps = stage.steps
        elif stage.tokens is not None:
            steps = math.ceil(stage.tokens / (per_step * blocks.seq_len))
        else:
            steps = math.ceil((stage.epochs or 0) * len(blocks) / per_step)
        return min(steps, self.max_steps or steps)

    # ------------------------------------------------------------ stages

    def train(self, only: str | None = None) -> None:
        """All stages from the resume point on, or `only` the one of that name, once those before it are done."""
        resume = self.run.resume_from
        position = read_position(resume) if resume else Position(-1, 0, 0, True)
        if resume:
            self.run.rewind_metrics(position)
            self.restore_weights(position.stage, resume)
        else:
            self.baseline()
        for number, stage in enumerate(self.recipe.stages):
            if number < position.stage or number == position.stage and position.done:
                continue
            within = number == position.stage
            if only is not None and stage.name != only:
                raise LinearizeError(f"--stage {only} needs {stage.name}, which is not finished in {self.run.folder}")
            self.train_stage(number, stage, position.step if within else 0, resume if within else None)
            if stage.name == only:
                return

    def train_stage(self, number: int, stage: Stage, start: int, checkpoint: Path | None) -> None:
        """One stage: parameters, optimizer, schedule, then the loop, from step `start` of `checkpoint`."""
        blocks = self.blocks(stage, "train")
        assert blocks is not None
        steps = self.steps(stage, blocks)
        parameters = self.student.prepare(stage, wide=self.wide)
        optimizer = torch.optim.AdamW(
            parameters,
            lr=stage.optimizer.lr,
            betas=stage.optimizer.betas,
            weight_decay=stage.optimizer.weight_decay,
            fused=self.device.type == "cuda",
        )
        loop = StageLoop(self, number, stage, blocks, steps, parameters, optimizer, make_schedule(stage, optimizer, steps))
        if checkpoint is not None:
            loop.restore(checkpoint)
        if number == 0 and start == 0:
            self.calibrate(loop)
        loop.run(start)

    def restore_weights(self, number: int, checkpoint: Path) -> None:
        """Trained tensors of the resume point; LoRA layers and teacher copies of the stages so far come first."""
        for stage in self.recipe.stages[: number + 1]:
            self.student.prepare(stage, wide=self.wide)
        self.student.load_state(load_file(checkpoint / "trained.safetensors", device=str(self.device)))

    def calibrate(self, loop: StageLoop) -> None:
        """Before the first step of all: mixers with norms take the teacher's scale from one batch."""
        with self.accelerator.autocast():
            listen(self.student, Calibration(self.student), loop.batch(0, 0))

    def baseline(self) -> None:
        """Held-out perplexity of the teacher and of the model just converted, when there is eval data."""
        stage = self.recipe.stages[0]
        with self.student.as_teacher():
            teacher = self.evaluate(stage)
        converted = self.evaluate(stage)
        if teacher is not None and converted is not None:
            self.log_evaluation("teacher", 0, 0, teacher)
            self.log_evaluation("converted", 0, 0, converted)

    def evaluate(self, stage: Stage) -> float | None:
        """Held-out perplexity of the model as it is, None without eval data."""
        blocks = self.blocks(stage, "eval")
        if blocks is None:
            return None
        data = batches(blocks, stage.batch.per_device, self.recipe.eval.max_tokens, self.device)
        return perplexity(self.model, data, self.accelerator.autocast)

    def log_evaluation(self, name: str, step: int, tokens: int, ppl: float) -> None:
        """One evaluation into metrics.jsonl and to the person who waits."""
        if self.accelerator.is_main_process:
            self.run.log(stage=name, step=step, tokens=tokens, eval_ppl=ppl)
            self.say(f"{name}{f' step {step}' if step else ''}: held-out perplexity {ppl:.4g}")

    def fidelity(self) -> list[dict[str, float]]:
        """Per-layer distance to the teacher on held-out text; empty without eval data."""
        stage = self.recipe.stages[-1]
        blocks = self.blocks(stage, "eval")
        if blocks is None:
            return []
        data = batches(blocks, stage.batch.per_device, FIDELITY_TOKENS, self.device)
        return layer_fidelity(self.student, data, self.accelerator.autocast)

    def save(self, position: Position, loop: StageLoop) -> None:
        """A checkpoint: trained tensors by name, and what accelerate keeps (optimizer, schedule, RNG, scaler)."""

        def write(folder: Path) -> None:
            save_file({k: v.contiguous().cpu() for k, v in self.student.state().items()}, folder / "trained.safetensors")
            torch.save(loop.state(), folder / "optimizer.pt")

        if self.accelerator.is_main_process:
            self.last_checkpoint = self.run.save(position, write)
        self.accelerator.wait_for_everyone()


# ---------------------------------------------------------------- the command


def finetune(
    recipe: Recipe, *, resume: str = "auto", only: str | None = None, max_steps: int | None = None, say: Say = print
) -> dict[str, Any]:
    """Run a recipe; returns the report: `output`, `teacher_ppl`, `stages`, `layers` (also in report.json).

    Raises LinearizeError: 2 for the recipe, 3 for what does not fit, 4 for resources, 6 for NaN or a failed
    verification, 130 when interrupted (state saved).
    """
    check_stages(recipe, only)
    run = Run(recipe, resume)
    if run.final.exists() and run.resume_from is not None and only is None:
        say(f"{run.final} is finished already; --resume never starts over")
        return run.read_report()
    tuner = Finetuner(recipe, run, max_steps=max_steps, say=say)
    if tuner.accelerator.is_main_process:
        run.start(versions())
        prepare_base(recipe, run, say)
    tuner.accelerator.wait_for_everyone()
    tuner.accelerator.init_trackers(recipe.name)
    with interruptible(tuner), memory_errors(tuner):
        tuner.load(base_folder(recipe, run))
        tuner.train(only)
    layers = tuner.fidelity()
    tuner.accelerator.end_training()
    report = run.report(layers)
    if tuner.accelerator.is_main_process:
        run.write_report(report)
        save_final(tuner.student, base_folder(recipe, run), run.final, recipe, say)
    tuner.accelerator.wait_for_everyone()
    return report


def check_stages(recipe: Recipe, only: str | None) -> None:
    """Rules that need more than one field. Raises LinearizeError (exit 2)."""
    names = [stage.name for stage in recipe.stages]
    if only is not None and only not in names:
        raise LinearizeError(f"--stage {only}: the recipe has {', '.join(names)}")
    drifted, lora = None, None
    for number, stage in enumerate(recipe.stages):
        if isinstance(stage, AttentionTransfer) and drifted:
            raise LinearizeError(
                f"stages[{number}] ({stage.name}) transfers attention after {drifted} trained source weights: the "
                "residual stream is no longer the teacher's. Put attention_transfer first"
            )
        if {"mixer", "all"} & set(stage.train):
            drifted = stage.name
        if stage.lora is not None:
            if lora is not None and stage.lora != lora:
                raise LinearizeError(f"stages[{number}].lora differs from an earlier stage's; a run has one set of adapters")
            lora = stage.lora


def base_path(recipe: Recipe) -> str:
    """`demo` stands for the model that the package ships."""
    return str(model_folder()) if recipe.model.base == "demo" else recipe.model.base


def base_folder(recipe: Recipe, run: Run) -> Path:
    """The converted checkpoint that training starts from."""
    return run.converted if recipe.convert is not None else Path(base_path(recipe))


def plan_base(recipe: Recipe, *, weights: bool = True) -> Any:
    """The conversion that the recipe asks for, as `plan_conversion` returns it; None when there is none."""
    if recipe.convert is None:
        return None
    return plan_conversion(
        base_path(recipe),
        recipe.convert.mechanism,
        layers=recipe.convert.layers,
        keep_softmax=recipe.convert.keep_softmax,
        options=recipe.convert.options,
        dtype=recipe.model.dtype or "keep",
        revision=recipe.model.revision,
        trust_remote_code=recipe.model.trust_remote_code,
        weights=weights,
    )


def prepare_base(recipe: Recipe, run: Run, say: Say) -> None:
    """Convert the base into the run's folder, unless an earlier start of this run did."""
    if recipe.convert is None or run.converted.exists():
        return
    plan, source, natives = plan_base(recipe)
    convert(plan, source, natives, run.converted, level="keys", trust_remote_code=recipe.model.trust_remote_code,
            seed=recipe.seed, say=say)  # fmt: skip


def dry_run(recipe: Recipe, say: Say) -> list[dict[str, Any]]:
    """What each stage would do, from the config alone: parameters, steps, tokens, bytes of teacher copies."""
    check_stages(recipe, None)
    planned = plan_base(recipe, weights=False)
    student = Student(meta_model(base_path(recipe), planned))
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    rows = []
    for stage in recipe.stages:
        parameters = student.prepare(stage, wide=False)
        per_step = stage.batch.per_device * stage.batch.accumulate * processes * recipe.data_for(stage).pack.seq_len
        steps = stage.steps or math.ceil(stage.tokens / per_step) if stage.epochs is None else None
        rows.append(
            {
                "name": stage.name,
                "kind": stage.kind,
                "train": list(stage.train),
                "parameters": sum(p.numel() for p in parameters),
                "steps": steps,
                "tokens": None if steps is None else steps * per_step,
                "epochs": stage.epochs,
                "lr": stage.optimizer.lr,
                "teacher_copy_bytes": student.teacher_bytes() if stage.kind == "logit_kl" else 0,
            }
        )
    if planned is not None:
        say(f"{planned[0].source}: {len(planned[0].steps)} layers become {recipe.convert.mechanism}")
    return rows


def make_accelerator(recipe: Recipe, run: Run) -> Accelerator:
    """Devices and precision: bf16 on a GPU that has it, fp32 on a CPU, unless the recipe says otherwise."""
    runtime = recipe.runtime
    if runtime.device == "cuda" and not torch.cuda.is_available():
        raise LinearizeError("runtime.device is cuda, but torch sees no CUDA device", Exit.RESOURCE)
    cpu = runtime.device == "cpu" or not torch.cuda.is_available()
    precision = {"fp32": "no", "auto": "no" if cpu else "bf16"}.get(runtime.precision, runtime.precision)
    if precision == "fp16" and cpu:
        raise LinearizeError("runtime.precision fp16 needs a GPU; use fp32 or bf16 on a CPU")
    track = None if recipe.track.to == "none" else recipe.track.to
    try:
        return Accelerator(mixed_precision=precision, cpu=cpu, log_with=track, project_dir=str(run.folder))
    except (ImportError, ValueError) as error:
        raise LinearizeError(f"track.to {track}: {error}", Exit.RESOURCE) from error


def to_source(source: Any, text_key: str, folder: Path) -> Source:
    """A recipe's data source, with relative files starting at the recipe's folder."""
    values = source.model_dump()
    if "files" in values:
        values["files"] = tuple(folder / name for name in values["files"])
    return Source(**values, text_key=text_key)


def make_schedule(stage: Stage, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """The learning-rate schedule of transformers by its name."""
    schedule = stage.schedule
    name = "constant_with_warmup" if schedule.name == "constant" else schedule.name
    extra = {"min_lr_rate": schedule.min_lr_ratio} if schedule.min_lr_ratio is not None else None
    warmup = round(schedule.warmup_ratio * steps)
    return get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=extra)


@contextlib.contextmanager
def interruptible(tuner: Finetuner) -> Iterator[None]:
    """Within: the first Ctrl-C finishes the step and saves, the second stops at once."""

    def on_signal(number: int, frame: Any) -> None:
        if tuner.interrupted:
            raise KeyboardInterrupt
        tuner.interrupted = True
        tuner.say("interrupted: finishing this step, then saving (again to stop at once)")

    try:
        before = signal.signal(signal.SIGINT, on_signal)
    except ValueError:  # not the main thread: nobody can press Ctrl-C here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def memory_errors(tuner: Finetuner) -> Iterator[None]:
    """Within: running out of device memory becomes advice."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        peak, total = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.mem_get_info()[1] / 2**30
        raise LinearizeError(
            f"CUDA out of memory (peak {peak:.1f} of {total:.1f} GiB). Try, cheapest first: "
            "runtime.gradient_checkpointing=true; batch.per_device=1 with a larger batch.accumulate; a smaller "
            f"data.pack.seq_len; train: [new, lora]. Last checkpoint: {tuner.last_checkpoint or 'none'}",
            Exit.RESOURCE,
        ) from error


def versions() -> dict[str, str]:
    """Versions of what a run depends on."""
    packages = ("torch", "transformers", "accelerate", "peft")
    return {"linearize": __version__, **{name: importlib.metadata.version(name) for name in packages}}
