"""`linearize generate`: continue a text with a converted model, with its softmax teacher, or with any causal model.

`load` opens a model for all commands that run one, and `switch_off` leaves out a part of it."""

from __future__ import annotations

import contextlib
import errno
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, CompileConfig, LogitsProcessor, LogitsProcessorList, TextStreamer

from linearize_kernels.hf.attention_hooks import mixers_of

from ..checkpoint.manifest import is_linearized
from ..checkpoint.provenance import check_code_cache, lora_apart
from ..checkpoint.source import open_source, read_header
from ..checkpoint.write import meta_pickle
from ..convert import load_config
from ..data.chat import end_tokens, prompt_ids
from ..data.packing import PROBE
from ..errors import MALFORMED, Exit, IncompatibleError, LinearizeError, check_choice, os_error, reason_of
from ..probe.trace import quiet
from ..terminal.arguments import DEVICES, DTYPES
from ..train.save import load_converted, load_whole
from ..verify.child.inputs import most_tokens, writes_text

PROMPT_END = 8  # tokens of a prompt behind which new ones are decoded
LOWEST = 1e-6  # temperature; below, logits divided by it leave float32


class Loaded(NamedTuple):
    """A model that is ready to write; with `teacher` its mixers rest and softmax runs."""

    model: Any
    tokenizer: Any
    teacher: bool


class Sampling(NamedTuple):
    """How tokens are chosen: greedily at temperature 0."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


class Stream(TextStreamer):
    """Hands over what is `shown` of the prompt, and its continuation as soon as no later token can change it; keeps the
    new tokens.

    They are decoded behind the prompt's end: by themselves those of SentencePiece lose the space before the first word.
    """

    def __init__(self, tokenizer: Any, shown: str, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self.shown, self.write, self.text, self.tokens, self.left_out = shown, write, "", list[int](), 0

    def put(self, value: torch.Tensor) -> None:
        value = value.flatten()
        if self.next_tokens_are_prompt:
            self.next_tokens_are_prompt = False
            value = value[-PROMPT_END:]
            self.left_out = len(self.tokenizer.decode(value, skip_special_tokens=True))
        else:
            if not self.tokens:
                self.write(self.shown)
            self.tokens += value.tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        shown = text[self.left_out :]
        self.left_out = max(self.left_out - len(text), 0)
        self.text += shown
        self.write(shown)


@contextlib.contextmanager
def device_memory() -> Iterator[None]:
    """Within: running out of memory, of the machine or of a device, becomes advice (exit 4)."""
    try:
        yield
    except Exception as error:
        refused = os_error(error)
        if refused is None or refused.errno != errno.ENOMEM:
            raise
        raise LinearizeError(f"{refused.strerror}. Try --dtype bfloat16, or --device cpu", Exit.RESOURCE) from error


def check_request(prompt: str, sampling: Sampling) -> None:
    """Raise LinearizeError (exit 2) for a prompt or a temperature that no model can take, and a top_p of no effect."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise LinearizeError(f"the prompt is not valid UTF-8 at character {error.start + 1}; give text") from error
    if sampling.temperature != 0 and not LOWEST <= sampling.temperature < math.inf:
        raise LinearizeError(f"--temperature {sampling.temperature:g}: give 0, the likeliest token, or >= {LOWEST:g}")
    if sampling.temperature == 0 and sampling.top_p != 1:
        message = f"--top-p {sampling.top_p:g} is for sampling, and --temperature 0 takes the likeliest token"
        raise LinearizeError(f"{message}. Add --temperature 1, or leave out --top-p")


@device_memory()
def load(
    model: str, revision: str | None, *, device: str, dtype: str, teacher: bool, trust_remote_code: bool
) -> Loaded:
    """The model of a folder or of the Hub, and its tokenizer, on a device.

    A linearized folder's code runs when it is what this version writes. Raises LinearizeError: 2 for an option, 3 for
    what cannot be loaded or needs trust, 4 for a device that is not there, 5 for the Hub.
    """
    opened = load_any(model, revision, device=device, dtype=dtype, teacher=teacher, trust_remote_code=trust_remote_code)
    return with_tokenizer(opened, model, teacher, trust_remote_code)


class Opened(NamedTuple):
    """A model of any kind in eval mode, its folder, and whether that is linearized."""

    model: Any
    folder: Path
    linearized: bool


def load_any(
    model: str, revision: str | None, *, device: str, dtype: str, teacher: bool, trust_remote_code: bool
) -> Opened:
    """`load` for models of any kind, without a tokenizer."""
    where = _device(device)
    kind = "auto" if check_choice("--dtype", dtype, DTYPES) == "keep" else getattr(torch, dtype)
    source = open_source(model, revision)
    linearized = is_linearized(source.folder)
    if teacher and not linearized:
        raise LinearizeError(f"--teacher: {model} is not linearized, softmax is all it has. Leave it out")
    if linearized:
        loaded = load_converted(source.folder, kind, trust_remote_code)
        if apart := lora_apart(source.folder):
            put_on(loaded, apart, model)
    else:
        load_config(source, trust_remote_code)  # refuses code of its own without trust
        for shard in source.shards:
            meta_pickle(shard) if source.pickled else read_header(shard)  # raise for a damaged one
        loaded = load_whole(source.folder, kind, trust_remote_code)
    return Opened(loaded.to(where).eval(), source.folder, linearized)


def put_on(model: Any, lora: Path, name: str) -> None:
    """Give a model the LoRA of a folder, which `teacher()` turns off. Raises LinearizeError (exit 3) for one that does
    not load."""
    from peft import PeftModel

    try:
        PeftModel.from_pretrained(model, str(lora))
    except (OSError, *MALFORMED, RuntimeError) as error:
        message = f"{name} has a LoRA apart from its weights, and {lora} does not load ({reason_of(error)})"
        raise LinearizeError(f"{message}. Download the model again", Exit.INCOMPATIBLE) from error


def with_tokenizer(opened: Opened, name: str, teacher: bool, trust_remote_code: bool) -> Loaded:
    """A model that writes text, and its tokenizer. Raises LinearizeError (exit 3) for another."""
    if not writes_text(opened.model):
        message = (
            f"{name} is a {type(opened.model).__name__}, which writes no text. Load it in Python, see its README.md"
        )
        raise LinearizeError(message, Exit.INCOMPATIBLE)
    tokenizer = load_tokenizer(opened.folder, opened.linearized or trust_remote_code)
    watch_tokens(opened.model, tokenizer)
    return Loaded(opened.model, tokenizer, teacher)


def _device(name: str) -> str:
    check_choice("--device", name, DEVICES)
    if name == "cuda" and not torch.cuda.is_available():
        message = "--device cuda: torch sees no CUDA device. Choose cpu; linearize doctor shows torch"
        raise LinearizeError(message, Exit.RESOURCE)
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """The tokenizer of a model folder. Raises LinearizeError (exit 3) when there is none, or only by untrusted code, or
    one that fails on a text."""
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # code in the folder raises as it likes
        if trust_remote_code and isinstance(error, OSError):
            check_code_cache()
        if not trust_remote_code and "trust_remote_code=True" in str(error):
            message = f"the tokenizer of {folder} has code of its own. Read it, then pass --trust-remote-code"
            raise LinearizeError(
                f"{message} (in a recipe, model.trust_remote_code: true)", Exit.INCOMPATIBLE
            ) from error
        raise LinearizeError(
            f"no tokenizer can be loaded from {folder}: {reason_of(error)}. Copy the source's tokenizer files there",
            Exit.INCOMPATIBLE,
        ) from error
    try:
        with quiet():
            tokenizer(PROBE)
    except Exception as error:  # what tokenizers raises has no class of its own
        raise LinearizeError(
            f"the tokenizer of {folder} cannot cut text into tokens: {reason_of(error)}. Copy the source's tokenizer "
            "files there",
            Exit.INCOMPATIBLE,
        ) from error
    return tokenizer


def check_compiles(model: Any) -> None:
    """Raise LinearizeError (exit 3) unless generate() can compile this model's decode step; None: a softmax model."""
    # A model of an earlier version has one answer for both.
    compiles = getattr(model, "compiles", getattr(model, "replays", None))
    if compiles is None or not compiles():
        raise LinearizeError(
            "--compile: a decode step can be compiled on a GPU, of a model whose layers are linear in all heads. Leave "
            "it out",
            Exit.INCOMPATIBLE,
        )


def check_tokens(model: Any, highest: int) -> None:
    """Raise LinearizeError (exit 3) for a token, the `highest` of a text, that a model's embedding does not have."""
    weight = model.get_input_embeddings().weight
    rows = getattr(weight, "ds_shape", weight.shape)[0]  # of DeepSpeed's shards, the whole
    if highest >= rows:
        raise LinearizeError(
            f"the tokenizer makes token {highest}, the model's embedding has {rows} rows: they do not belong together. "
            "Put the model's own tokenizer into its folder",
            Exit.INCOMPATIBLE,
        )


def watch_tokens(model: Any, tokenizer: Any) -> None:
    """Make each pass of a model `check_tokens` where its tokenizer, with what was added to it, has more tokens than the
    embedding has rows: most texts have none of those."""
    embedding = model.get_input_embeddings()
    if len(tokenizer) > len(embedding.weight):
        embedding.register_forward_pre_hook(lambda _, ids: check_tokens(model, int(ids[0].max())))


def check_fits(model: Any, prompt: int, new: int) -> None:
    """Raise LinearizeError (exit 2) where `prompt` and `new` tokens are more than a model takes."""
    most = most_tokens(model)
    if most is not None and prompt + new > most + 1:  # the last token is not read again
        message = f"{type(model).__name__} takes at most {most} tokens, and the prompt has {prompt}"
        instead = f"Give --max-new-tokens {most + 1 - prompt}, or less" if prompt <= most else "Shorten it"
        raise LinearizeError(f"--max-new-tokens {new}: {message}. {instead}")


class Numbers(LogitsProcessor):
    """Raises LinearizeError (exit 6) for logits of NaN, of which the likeliest token would be the first one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not bool((scores < math.inf).all()):  # -inf stands for tokens that are not to be written
            raise LinearizeError(
                "the model's logits are not finite. linearize verify DIR --strict names the weights that are not",
                Exit.CHECK_FAILED,
            )
        return scores


@device_memory()
def generate(
    loaded: Loaded,
    prompt: str,
    sampling: Sampling,
    write: Callable[[str], None],
    compiled: bool = False,
    chat: bool = False,
) -> dict[str, Any]:
    """Continue `prompt`; `write` gets it, then pieces of new text as they become known. With `chat` it is a user's
    message, and `write` gets the answer alone. Returns what `--json` prints.

    `tokens_per_s` counts new tokens over the whole time, the prompt's pass included; with `compiled` torch.compile
    makes the decode step. Raises LinearizeError: 2 for a prompt without a token and more tokens than the model takes, 3
    where no step can be compiled, without a chat template and for settings that transformers refuses, 6 for logits of
    NaN.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    if compiled:
        check_compiles(None if loaded.teacher else model)
    # A model's own settings may have beams, which cannot be streamed, and a top_k, which would cut what top_p leaves.
    sampled = sampling.temperature > 0
    style: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1}
    if chat:
        if not prompt:  # a variable of the shell without a value; the template would ask all the same
            raise LinearizeError("the message is empty; give some text")
        given = prompt_ids(tokenizer, [{"role": "user", "content": prompt}], "--chat")
        style["eos_token_id"] = end_tokens(model, tokenizer)
    else:
        given = tokenizer(prompt)["input_ids"]
    if not given:
        raise LinearizeError("the prompt has no token; give some text")
    check_tokens(model, max(given))
    check_fits(model, len(given), sampling.max_new_tokens)
    ids = torch.tensor([given], device=model.device)
    stream = Stream(tokenizer, "" if chat else prompt, write)
    if sampled:
        style |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    if compiled:
        style["compile_config"] = CompileConfig()
    torch.manual_seed(sampling.seed)
    began = time.perf_counter()
    style["logits_processor"] = LogitsProcessorList([Numbers()])
    try:
        with quiet(), loaded.model.teacher() if loaded.teacher else contextlib.nullcontext():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampling.max_new_tokens,
                do_sample=sampled,
                streamer=stream,
                **style,
            )
    except (TypeError, ValueError, LookupError) as error:
        settings = model.generation_config.to_diff_dict()
        settings.pop("transformers_version", None)
        if not settings:
            raise
        raise LinearizeError(
            f"transformers cannot generate ({type(error).__name__}: {reason_of(error)}) with what the model's "
            f"generation_config.json sets ({', '.join(settings)}). Correct or remove that file",
            Exit.INCOMPATIBLE,
        ) from error
    seconds = time.perf_counter() - began
    return {
        "prompt": prompt,
        "text": stream.text,
        "tokens": stream.tokens,
        "tokens_per_s": len(stream.tokens) / seconds,
        "prompt_tokens": len(given),
        "softmax": loaded.teacher or not hasattr(model, "teacher"),
    }


# ---------------------------------------------------------------- one part of a model


# Of what share the memory has: a sigmoid of this is 0 or 1 in float32, whatever stands beside it.
CERTAIN = 1e6


def switch_off(model: Any, part: str, name: str) -> None:
    """Give all weight to the other part where a layer has both: an exact window, and a linear memory beside it
    (`w` of kernels/window/window.py). Raises IncompatibleError where no layer of the model `name` has both."""
    parts = (part for mixer in mixers_of(model).values() for part in mixer.modules())
    blended: list[Any] = [window for window in parts if hasattr(window, "far_logit")]
    if not blended:
        message = f"--without {part}: no layer of {name} has a linear memory and an exact window, so one of them"
        raise IncompatibleError(f"{message} is all it has. Leave it out")
    with torch.no_grad():
        for window in blended:
            window.far_logit.fill_(-CERTAIN if part == "memory" else CERTAIN)
