"""The Python API: the stories of the command line as five functions.

    from linearize import api

    api.plan("MODEL", "gsa", keep_softmax="7,15")              # decide, write nothing
    folder = api.convert("MODEL", "gsa", "MODEL-gsa")          # write a model folder
    report = api.finetune("gsa", {"model.base": "MODEL"})      # convert, distil, save, as a recipe says
    result = api.evaluate("runs/gsa/final", teacher="MODEL")   # compare student and teacher
    model, tokenizer = api.load("runs/gsa/final")              # an ordinary transformers model

The promise: the names and arguments of these five functions, their order, and the keys of what they return stay as they
are within a minor version (0.2.x). A change of them comes with a new minor version, is in the changelog, and the old
form works for one minor version more with a DeprecationWarning. New arguments have defaults; results may get new keys.
All else in the package may change at any time.

Importing this module is cheap: torch and transformers are imported by the functions. Every function raises
`LinearizeError`, whose `message` says what to do and whose `code` is the exit code of the command line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import LinearizeError, check_choice
from .terminal.arguments import LEVELS
from .terminal.output import say as _stderr

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .plan.plan import Plan

__all__ = ["LinearizeError", "convert", "evaluate", "finetune", "load", "plan"]

Say = Callable[[str], None]


def plan(
    model: str | Path,
    mechanism: str | None,
    *,
    layers: str = "all",
    keep_softmax: str = "",
    options: Mapping[str, Any] | None = None,
    allow_drop: Sequence[str] = (),
    dtype: str = "keep",
    revision: str | None = None,
    trust_remote_code: bool = False,
    restore: str = "",
    keep_heads: str = "",
    kept_window: int | str | None = None,
) -> Plan:
    """What `convert` would do; writes nothing, and reads weights only where `keep_softmax`, `keep_heads` or
    `kept_window` is `auto`.

    Args:
        model: A local folder or a Hub id.
        mechanism: What replaces softmax, such as `gsa`; `linearize mechanisms` lists them. None, for a model that is
            converted already: its own, with its options.
        layers: Layers to convert: `all`, `0-3,7` or `every:2`; of a model that is converted already, further ones.
        keep_softmax: Layers that stay as they are: `7,15`, `every:4`, or `auto:2` to let linearize choose, by the
            sources of Python packages as text.
        options: The mechanism's own options by name.
        allow_drop: Attention features that the result may lack, as a refusal names them.
        dtype: Of the result: `keep`, `float32`, `bfloat16`, `float16` or `float64`.
        revision: Branch, tag or commit of a model on the Hub.
        trust_remote_code: Allow Python code that the model ships to run.
        restore: Layers of a model that is converted already that get softmax back.
        keep_heads: Heads of linear layers that keep softmax, by layer and KV head: `3:0,1;7:2`, or `auto:2%` to let
            linearize choose.
        kept_window: How many last tokens, with the first four, softmax sees in kept layers; None: all. `4096@1,3`:
            in these layers alone. `auto:4096`: where it is measured that this changes predictions little.

    Returns:
        The plan: `steps` (layers that change, with `new_parameters` and `state_bytes`), `kept`, `notes`, and
        `cache_bytes(tokens)`.

    Raises:
        LinearizeError: 2 for a wrong argument, 3 where model and mechanism do not fit, 5 for the Hub.
    """
    from .convert import plan_conversion

    asked: dict[str, Any] = {"layers": layers, "keep_softmax": keep_softmax, "options": dict(options or {})}
    asked |= {"allow_drop": tuple(allow_drop), "dtype": dtype, "revision": revision, "restore": restore}
    asked |= {"keep_heads": keep_heads, "kept_window": kept_window}
    choice = _choice(_stderr, keep_softmax, keep_heads, kept_window)
    trust = trust_remote_code
    return plan_conversion(str(model), mechanism, trust_remote_code=trust, weights=bool(choice), **asked, **choice)[0]


def convert(
    model: str | Path,
    mechanism: str | None,
    output: str | Path,
    *,
    layers: str = "all",
    keep_softmax: str = "",
    options: Mapping[str, Any] | None = None,
    allow_drop: Sequence[str] = (),
    dtype: str = "keep",
    revision: str | None = None,
    trust_remote_code: bool = False,
    copy: bool = False,
    overwrite: bool = False,
    verify: Literal["auto", "full", "keys", "none"] = "auto",
    seed: int = 0,
    say: Say | None = None,
    restore: str = "",
    keep_heads: str = "",
    kept_window: int | str | None = None,
) -> Path:
    """Replace softmax attention, and write a model folder that transformers loads.

    Args:
        model: As for `plan`, with all arguments up to `trust_remote_code`.
        mechanism: What replaces softmax.
        output: The folder to write. It appears when it is complete.
        layers: Layers to convert.
        keep_softmax: Layers that stay as they are.
        options: The mechanism's own options by name.
        allow_drop: Attention features that the result may lack.
        dtype: Of the result.
        revision: Branch, tag or commit of a model on the Hub.
        trust_remote_code: Allow Python code that the model ships to run.
        copy: Copy the source's weight files, which are hard links otherwise where the disk allows it.
        overwrite: Replace a folder that linearize wrote.
        verify: Check of the result in a clean process: `full` compares logits, `keys` names of tensors; `auto` is full
            where memory allows.
        seed: Of the new parameters.
        say: Gets messages for a person; None: they go to stderr.
        restore: As for `plan`.
        keep_heads: As for `plan`.
        kept_window: As for `plan`.

    Returns:
        `output`.

    Raises:
        LinearizeError: As `plan`, 4 for disk and memory, 6 when the check fails, which leaves no folder.
    """
    from .checkpoint.atomic import check_target
    from .convert import convert as carry_out
    from .convert import plan_conversion

    check_target(Path(model), Path(output), overwrite)  # planning may measure layers for minutes
    check_choice("verify", verify, LEVELS)
    asked: dict[str, Any] = {"layers": layers, "keep_softmax": keep_softmax, "options": dict(options or {})}
    asked |= {"allow_drop": tuple(allow_drop), "dtype": dtype, "revision": revision, "copy": copy, "restore": restore}
    asked |= {"keep_heads": keep_heads, "kept_window": kept_window}
    asked |= _choice(say or _stderr, keep_softmax, keep_heads, kept_window)
    planned = plan_conversion(str(model), mechanism, trust_remote_code=trust_remote_code, **asked)
    how: dict[str, Any] = {"overwrite": overwrite, "level": verify, "trust_remote_code": trust_remote_code}
    carry_out(*planned, Path(output), **how, seed=seed, say=say or _stderr)
    return Path(output)


def finetune(
    recipe: str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    resume: str = "auto",
    stage: str | None = None,
    max_steps: int | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Distil a model by the stages of a recipe; go on where an earlier call of the same recipe stopped.

    Args:
        recipe: A recipe file, or the name of a preset such as `gsa`.
        overrides: Values of the recipe: `{"model.base": "DIR", "stages[0].tokens": 5_000_000}`, or strings as on the
            command line, `["model.base=DIR"]`.
        resume: `auto`, `never` (start over) or the folder of a checkpoint.
        stage: Run only the stage of this name.
        max_steps: Stop each stage after so many optimizer steps.
        say: Gets messages for a person; None: they go to stderr.

    Returns:
        `output` (folder of the finished model, None where stages are left), `teacher_ppl` (held-out perplexity),
        `stages` (each with `name`, `tokens` trained on, and `ppl`, `teacher_ppl` on the same rows, `ppl_ratio` and `kl`
        after it), `layers` (each with `layer`, and `relative_mse` and `cosine` of its output against softmax) and more.
        Figures without held-out text are None, and the lists empty.

    Raises:
        LinearizeError: 2 for the recipe, 3 for what does not fit, 4 for resources, 5 for the Hub, 6 for NaN or a failed
            check, 130 when interrupted, with the state saved. While a stage trains in the main thread, Ctrl-C, SIGTERM
            and SIGHUP interrupt it so after the step, a second Ctrl-C or SIGTERM at once (KeyboardInterrupt). Your
            handlers are back afterwards.
    """
    from .finetune import finetune as story
    from .recipe.recipe import load_recipe

    loaded = load_recipe(recipe, _overrides(overrides))
    return story(loaded, resume=resume, only=stage, max_steps=max_steps, say=say or _stderr)


def evaluate(
    student: str | Path,
    teacher: str | Path,
    *,
    recipe: str | Path = "demo",
    overrides: Mapping[str, Any] | Sequence[str] = (),
    lengths: Sequence[int] = (256, 512, 1024),
    trials: int = 32,
    seed: int = 0,
    batch_tokens: int = 8192,
    device: str = "auto",
    dtype: str = "keep",
    trust_remote_code: bool = False,
    generate: int = 0,
) -> dict[str, Any]:
    """Compare a converted model with the one that it was made of, on the same text.

    Args:
        student: Converted model: a local folder or a Hub id.
        teacher: The model that was converted.
        recipe: Recipe or preset that names the text: `data.eval`, `data.pack` and `eval.max_tokens`. `demo` has the
            held-out part of Python's standard library.
        overrides: Values of the recipe, as for `finetune`.
        lengths: Lengths of recall and needle texts, in tokens.
        trials: Texts for each task and length.
        seed: Of the random texts.
        batch_tokens: Tokens in one forward pass.
        device: `auto`, `cpu` or `cuda`.
        dtype: `keep`, `float32`, `bfloat16` or `float16`.
        trust_remote_code: Allow Python code that the models ship to run.
        generate: Texts that each model writes by itself: recall without help, repetition; of
            conversations also whether answers end, and where the teacher's do.

    Returns:
        `read` (tokens), `tokens` (of these predicted), `student_ppl`, `teacher_ppl`, `ppl_ratio`, `kl` (nats a token),
        `top1_agreement` (share of tokens), and a row for each `length` in `recall` and `needle` (`student` and
        `teacher`, each with `accuracy` and `loss`) and in `state` (bytes of the caches of `student` and `teacher`, both
        in `state_dtype`); `generated`, None where that is 0.

    Raises:
        LinearizeError: 2 for text or lengths, 3 for models that do not belong together, 4 for resources.
    """
    from .measure.compare import EvalRequest, check_eval, compare, text_recipe
    from .measure.generate import load as load_for_text

    # Its default, which stays, is what the command reads without a recipe.
    text = text_recipe("" if recipe == "demo" else recipe, teacher, _overrides(overrides))
    check_eval(text)
    request = EvalRequest(tuple(lengths), trials, seed, batch_tokens, generate)
    how: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    ours, theirs = (load_for_text(str(name), None, teacher=False, **how) for name in (student, teacher))
    return compare(ours, theirs, text, request)


def load(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str = "keep",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model that writes text, converted or not, and its tokenizer.

    The code of a converted folder runs where it is what linearize writes; else it needs `trust_remote_code`. Without
    linearize the same folder loads with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`.

    Args:
        model: A local folder or a Hub id.
        device: `auto`, `cpu` or `cuda`.
        dtype: `keep`, `float32`, `bfloat16` or `float16`.
        revision: Branch, tag or commit of a model on the Hub.
        trust_remote_code: Allow Python code that the model ships to run.

    Returns:
        The model, in evaluation mode, and the tokenizer.

    Raises:
        LinearizeError: 2 for an option, 3 for what cannot be loaded or needs trust, 4 for a device, 5 for the Hub.
    """
    from .measure.generate import load as load_for_text

    how: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    found = load_for_text(str(model), revision, teacher=False, **how)
    return found.model, found.tokenizer


def _choice(say: Say, *kept: int | str | None) -> dict[str, Any]:
    """What `plan_conversion` needs where linearize is to choose the layers, or heads, that keep softmax, or those with
    a window."""
    from .choose.choose import Scoring, choosers
    from .plan.keep import is_auto

    return choosers(Scoring(say=say)) if any(map(is_auto, kept)) else {}


def _overrides(values: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Overrides of a recipe as the command line has them."""
    if isinstance(values, str):
        raise LinearizeError(f"overrides={values!r} is one text: give a list of key.sub=value, or a dict")
    if isinstance(values, Mapping):
        return [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()]
    return list(values)
