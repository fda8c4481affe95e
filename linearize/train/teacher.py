"""The teacher that a recipe names: find it, check that it fits the student, load it.

It gives logits alone. Stages that compare attention outputs keep the student's own model with softmax as their teacher.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from ..checkpoint.provenance import check_code
from ..checkpoint.shards import combined_sha256, file_hashes, known_sha256
from ..checkpoint.source import SMALL_FILES, Source, open_source
from ..convert import load_config
from ..data.kinds import kind_of
from ..demo import named_base
from ..errors import IncompatibleError, LinearizeError
from ..hub.download import download
from ..measure.generate import load_any, load_tokenizer
from ..probe.trace import quiet
from ..recipe.models import Scratch, Teacher
from ..recipe.recipe import Recipe
from ..terminal.output import short
from ..verify.child.inputs import auto_class, most_tokens
from .chunked_head import obstacle
from .save import meta_model
from .student import Student


@dataclass(frozen=True)
class Named:
    """A teacher, found."""

    source: Source
    dtype: str | None
    trust_remote_code: bool
    origin: str = ""  # the folder, file or Hub repository of `source`

    @property
    def name(self) -> str:
        """What people call it, without a path of this machine."""
        return self.source.name

    def facts(self) -> dict[str, Any]:
        """Provenance: `model`, `commit` and `sha256`, which is None without weights."""
        return {"model": self.source.name, "commit": self.source.revision, "sha256": self.sha256}

    @property
    def sha256(self) -> str | None:
        """The hash of the model's files; None where weights of the Hub, or of a GGUF file, were not read yet."""
        return sha256_of(self.source) if self.source.shards else None

    def downloaded(self) -> Named:
        """With the weights of a model that is to be loaded; of the Hub those of the commit that was found."""
        if self.source.shards:
            return self
        return dataclasses.replace(self, source=open_source(self.origin, self.source.revision))


def find_teacher(recipe: Recipe, commit: str | None = None) -> Named | None:
    """The teacher that a recipe names, None where it names none; of the Hub at `commit`, where given, and without
    weights.

    Raises LinearizeError: 3 for what is no checkpoint, 5 for the Hub.
    """
    asked = recipe.teacher
    if asked is None:
        return None
    return Named(open_teacher(asked, commit), asked.dtype, asked.trust_remote_code, named_base(asked.model))


def open_teacher(asked: Teacher, commit: str | None = None) -> Source:
    """The checkpoint of a teacher that is named: a folder with its shards, of the Hub and of a GGUF file the config
    alone."""
    name = named_base(asked.model)
    local = os.path.isdir(os.path.expanduser(name))
    source = open_source(name, asked.revision if local else commit or asked.revision, weights=local)
    if asked.model == "demo":
        return dataclasses.replace(source, name="demo")
    return source if local else dataclasses.replace(source, shards=())


def sha256_of(source: Source) -> str:
    """One hash of a checkpoint: names and bytes of its config and its weights."""
    files = sorted({source.folder / "config.json", *source.shards})
    return combined_sha256(file_hashes(source.folder, files, known_sha256))


def load_teacher(named: Named, device: torch.device) -> Any:
    """The teacher's model, frozen, on the device."""
    loaded = load_any(
        str(named.source.folder),
        None,
        device="cpu",
        dtype=named.dtype or "keep",
        teacher=False,
        trust_remote_code=named.trust_remote_code,
    )
    return loaded.model.requires_grad_(False).to(device)


def meta_teacher(named: Named, device: str = "meta") -> Any:
    """Its model without weights; on another `device` they are random."""
    dtype = None if named.dtype is None else getattr(torch, named.dtype)
    if named.source.converted:
        check_code(named.source.folder, named.trust_remote_code)
        model = meta_model(named.source.folder, None, dtype, True, device)
    else:
        config = load_config(named.source, named.trust_remote_code)
        trust = named.trust_remote_code
        loader = getattr(transformers, auto_class(config))
        kept = dtype or getattr(config, "dtype", None) or torch.float32
        try:
            with quiet(), torch.device(device):
                model = loader.from_config(config, dtype=kept, trust_remote_code=trust)
        except ValueError as error:  # of a model that no Auto class of text makes
            raise IncompatibleError(f"teacher: {named.name} is a {config.model_type}, which writes no text") from error
    return model.eval().requires_grad_(False)


def give_teacher(named: Named, student: Student, device: str) -> None:
    """Give a student without weights such a teacher, to count or to time a step."""
    student.other = meta_teacher(named, device)
    student.vocabulary = min(map(vocabulary_of, (student.model, student.other)))


def teacher_line(named: Named, model: Any) -> str:
    """One sentence on a teacher, whose `model` was loaded."""
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return f"the teacher is {named.name}: {short(numbers)} parameters in {str(model.dtype).removeprefix('torch.')}"


# ---------------------------------------------------------------- does it fit


def check_teacher(named: Named | None, recipe: Recipe, model: Any) -> None:
    """Refuse a teacher that does not fit the student `model`, which may be without weights; before anything is written.

    Raises LinearizeError: 2 for the student itself, 3 for a model or tokenizer that does not fit.
    """
    if named is None:
        return
    check_differs(named, recipe)
    if kind_of(model) != "text":
        message = f"teacher: {type(model).__name__} writes no text, and only models of text take another teacher"
        raise IncompatibleError(f"{message}. Leave it out")
    tokenizer = base_tokenizer(recipe)
    teacher = meta_teacher(named)
    check_teacher_model(named, teacher, recipe)
    check_tokenizers(named, tokenizer)
    common_vocabulary(vocabulary_of(model), vocabulary_of(teacher), tokenizer, named.name)


def check_differs(named: Named, recipe: Recipe) -> None:
    """Refuse (exit 2) the converted model that training starts from as its own teacher, where the first stage learns
    from nothing else: its loss would be 0 from the first step on. After a stage that changes the student, or beside a
    cross entropy, such a teacher holds it back, which somebody may want."""
    base, first = recipe.model.base, recipe.stages[0]
    if recipe.convert is not None or isinstance(base, Scratch) or not first.learns_logits or first.learns_labels:
        return
    if not named.source.converted:
        return
    local = os.path.isdir(os.path.expanduser(named_base(base)))
    student = open_source(named_base(base), recipe.model.revision, weights=local)
    theirs = named.facts()
    if local and theirs["sha256"] is not None:
        same = student.converted and sha256_of(student) == theirs["sha256"]
    else:
        same = student.converted and (student.name, student.revision) == (theirs["model"], theirs["commit"])
    if same:
        raise LinearizeError(
            f"teacher: {named.name} is the model that training starts from: student and teacher compute the same, and "
            f"the loss of {first.name} is 0 from its first step on. Name the model that was converted, or leave "
            "teacher out: then the same model with softmax teaches"
        )


def check_teacher_model(named: Named, teacher: Any, recipe: Recipe) -> None:
    """Refuse (exit 3) a teacher that writes no text, takes too few tokens, or does not do what a stage asks for."""
    kind = type(teacher).__name__
    if kind_of(teacher) != "text" or teacher.config.is_encoder_decoder:
        raise IncompatibleError(f"teacher: {named.name} is a {kind}, which writes no text")
    most = most_tokens(teacher)
    for stage in recipe.stages:
        length = recipe.data_for(stage).pack.seq_len
        if most is not None and length > most:
            message = f"{stage.name}: data.pack.seq_len is {length}, and the teacher {named.name} takes {most} tokens"
            raise IncompatibleError(f"{message}. Set it to {most}, or less")
        if stage.chunk_size and stage.learns_logits and (reason := obstacle(teacher)):
            raise IncompatibleError(f"{stage.name}: {reason} (the teacher); set loss.chunk_size: null")


def check_tokenizers(named: Named, ours: Any) -> None:
    """Raise LinearizeError (exit 3) naming the first token that a teacher's tokenizer has otherwise."""
    folder = named.source.folder
    if named.source.revision is not None:
        folder = download_small(named.source.name, named.source.revision)
    theirs = load_tokenizer(folder, named.trust_remote_code or named.source.converted)
    mine, other = ({place: token for token, place in t.get_vocab().items()} for t in (ours, theirs))
    first = min((place for place in mine.keys() | other.keys() if mine.get(place) != other.get(place)), default=None)
    if first is not None:
        names = [f"{vocabulary[first]!r}" if first in vocabulary else "absent" for vocabulary in (mine, other)]
        raise IncompatibleError(
            f"teacher: {named.name} has another tokenizer: token {first} is {names[0]} in the base's, {names[1]} in "
            "the teacher's. Take a teacher of the same family, with the same tokenizer"
        )


def base_tokenizer(recipe: Recipe) -> Any:
    """The tokenizer of a recipe's base; of a Hub repository it is downloaded without weights."""
    base = recipe.model.base
    name = (base.tokenizer or base.config) if isinstance(base, Scratch) else base
    if not isinstance(name, str):
        raise LinearizeError("teacher: model.base has no tokenizer to compare. Name it: model.base.tokenizer")
    name = named_base(name)
    folder = Path(os.path.expanduser(name))
    if folder.suffix == ".gguf":
        folder = open_source(name, None, weights=False).folder
    elif not folder.is_dir():
        folder = download_small(name, None if isinstance(base, Scratch) else recipe.model.revision)
    converted = (folder / "linearize.json").exists()
    return load_tokenizer(folder, recipe.model.trust_remote_code or converted)


def download_small(name: str, revision: str | None) -> Path:
    """A Hub repository's files beside its weights."""
    return download(name, revision, SMALL_FILES)[0]


def vocabulary_of(model: Any) -> int:
    """How many tokens a model's logits have, by its config."""
    return int(model.config.get_text_config().vocab_size)


def common_vocabulary(ours: int, theirs: int, tokenizer: Any, name: str) -> int:
    """The tokens that both models have logits of; embeddings may be padded. Raises LinearizeError (exit 3) where the
    tokenizer has more."""
    common = min(ours, theirs)
    if tokenizer.vocab_size > common:
        raise IncompatibleError(
            f"teacher: the tokenizer has {tokenizer.vocab_size} tokens, but the base or {name} has logits for only "
            f"{common} of them. Choose a teacher with logits for all"
        )
    return common
