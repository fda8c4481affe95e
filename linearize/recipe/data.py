"""The data section of a recipe: where text or images come from, and how text is packed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator

from ..demo import TEXTS
from ..errors import did_you_mean
from ..terminal.output import counted, short
from .types import (
    Alpha,
    Count,
    Listed,
    Names,
    Positive,
    Ratio,
    RowLength,
    Strict,
    Temperature,
    Text,
    TokenCount,
    as_list,
)
from .yaml import shown

CHAT = "chat"  # in place of a file of prompts: the teacher asks, and answers
# How names of files of text end.
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


def unreadable(name: str) -> str:
    """Why a file of this name is not read as text; empty where it is."""
    if name.endswith(SUFFIXES):
        return ""
    packed = name.endswith((".gz", ".xz", ".bz2", ".zst", ".zip"))
    remedy = ". It is compressed: unpack it first" if packed else ""
    return f"must be a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file, not {shown(name)}{remedy}"


def _data_file(name: str, info: ValidationInfo) -> str:
    if reason := unreadable(name):
        if ((info.context or {}).get("folder", Path()) / Path(name).expanduser()).is_dir():
            raise ValueError(f"{shown(name)} is a folder. Write its files, each by its name")
        raise ValueError(reason)
    return name


def _prompts(name: str, info: ValidationInfo) -> str:
    return name if name == CHAT else _data_file(name, info)


def _array_file(name: str) -> str:
    if not name.endswith(".npz"):
        raise ValueError(f"must be a .npz file, not {shown(name)}")
    return name


class FileSource(Strict):
    files: Annotated[
        Listed[Annotated[Text, AfterValidator(_data_file)]],
        BeforeValidator(as_list, json_schema_input_type=str | list[str]),
    ]
    """.txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet; relative paths start at the recipe's folder."""


class DatasetSource(Strict):
    path: Text
    """A Hugging Face dataset."""
    name: Text | None = None
    """The dataset's configuration, where it has several."""
    data_files: Names = ()
    """Read only these files of the dataset, by name or pattern: "en/*.parquet"."""
    split: Text = "train"
    """The part of the dataset, such as train or train[:1%]."""
    streaming: bool = False
    """Read over the network as far as needed, instead of downloading all."""
    image_key: Text | None = None
    """The column of images, for a vision model; text is found by data.pack.text_key."""
    label_key: Text | None = None
    """The column of their classes."""

    @field_validator("image_key")
    @classmethod
    def _not_streamed(cls, key: str | None, info: ValidationInfo) -> str | None:
        if key is not None and info.data.get("streaming"):
            raise ValueError("images cannot be streamed; set streaming: false")
        return key

    @field_validator("label_key")
    @classmethod
    def _with_images(cls, key: str | None, info: ValidationInfo) -> str | None:
        if key is not None and info.data.get("image_key") is None:
            raise ValueError("goes with image_key")
        return key


class ImageSource(Strict):
    images: Text
    """A folder with one folder of images per class; relative paths start at the recipe's folder."""
    classes: Text | None = None
    """A file that says which of the model's classes each folder is. Lines `FOLDER NAME`, in the order of the model's
    classes, as in ImageNet's LOC_synset_mapping.txt; or JSON, {FOLDER: number or name} or {number: [FOLDER, NAME]}."""


class ArraySource(Strict):
    arrays: Annotated[Text, AfterValidator(_array_file)]
    """A .npz file: `images`, uint8 [N,height,width,3] or float pixel values [N,3,height,width], and `labels` [N]."""


class DemoSource(Strict):
    demo: Literal["train", "heldout", "packages"]
    """Two parts of the running Python's standard library, or the sources of the packages that linearize needs."""


class OwnText(Strict):
    """What the teacher writes, for want of data: in large batches, kept in the run's cache, the same for a seed."""

    tokens: TokenCount
    """Tokens that it writes, to the end of the batch that reaches them."""
    prompts: Annotated[Text, AfterValidator(_prompts)] | None = None
    """What a text begins with; null: the token that begins a text, alone; chat: the teacher writes a user's message by
    its chat template, then answers it; or a file: of messages it answers what comes before the assistant, of text it
    goes on from the beginning. Prompts are taken in turn, and again from the first."""
    prompt_tokens: Count = 64
    """Of a text in `prompts`, the first so many tokens are the prompt."""
    length: RowLength = 1024
    """Tokens that it writes of one text at most."""
    stop: Literal["end", "never"] = "end"
    """end: a text ends where the teacher ends it; never: the teacher goes on for `length` tokens."""
    temperature: Temperature = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that have this total probability."""
    batch: Count | None = None
    """Texts that each step goes on with; null: as many as fit the device's memory, up to 2,048."""

    @field_validator("stop")
    @classmethod
    def _answers_end(cls, stop: str, info: ValidationInfo) -> str:
        if stop == "never" and info.data.get("prompts") == CHAT:
            raise ValueError("must be end with prompts: chat: a message that does not end has no answer")
        return stop


class TeacherSource(Strict):
    teacher: OwnText
    """The teacher writes the text itself: the base with softmax, or the recipe's own teacher."""


OfText = (
    Annotated[FileSource, Tag("files")] | Annotated[DatasetSource, Tag("path")] | Annotated[DemoSource, Tag("demo")]
)
TextSources = Annotated[
    OfText | Annotated[TeacherSource, Tag("teacher")],
    Discriminator(
        lambda value: _source_tag(value), "rule", "must be a mapping with exactly one of files, path, demo, teacher"
    ),
]


class Weighted(Strict):
    source: TextSources
    """Files, a dataset, the demo's text or the teacher's own."""
    weight: Positive = 1.0
    """Its share of the blocks is this over the sum of all weights."""


class MixSource(Strict):
    mix: Listed[Weighted]
    """Sources of text that are trained on together. Small ones are repeated within an epoch."""


SOURCES: dict[str, type[Strict]] = {
    "files": FileSource,
    "path": DatasetSource,
    "demo": DemoSource,
    "images": ImageSource,
    "arrays": ArraySource,
    "teacher": TeacherSource,
    "mix": MixSource,
}


def holds_images(source: Any) -> bool:
    """Whether a source is one of images: of a recipe, or a mapping as records of runs hold it."""
    fields = dict(source or {})
    return bool({"images", "arrays"} & fields.keys()) or fields.get("image_key") is not None


def unit_of(source: Any) -> str:
    """What a recipe's budgets and figures count of a source: images, latents or tokens."""
    return "images" if holds_images(source) else "latents" if "latents" in dict(source or {}) else "tokens"


# Keys by which sources name folders and files, beside `files`.
LOCAL = ("images", "arrays", "classes")


def local_paths(source: Any, start: Path) -> tuple[Path, ...]:
    """The files, or the folder and its file of classes, that a source names; relative ones begin at `start`, ~ is the
    user's folder."""
    names: tuple[str, ...] = getattr(source, "files", ())
    names += tuple(name for key in LOCAL if (name := getattr(source, key, None)) is not None)
    if isinstance(source, TeacherSource) and source.teacher.prompts not in (None, CHAT):
        names += (str(source.teacher.prompts),)
    return tuple(start / Path(name).expanduser() for name in names)


def rooted(source: Mapping[str, Any], start: Path) -> dict[str, Any]:
    """A resolved source whose relative paths begin at `start`, with paths that can be read from anywhere."""
    found = {key: str(start / Path(source[key]).expanduser()) for key in LOCAL if source.get(key) is not None}
    files = {"files": [str(start / Path(name).expanduser()) for name in source["files"]]} if "files" in source else {}
    return {**source, **found, **files}


def _source_tag(value: Any) -> str | None:
    """The one key that tells the sources apart, or the nearest, so that its typo is what gets reported."""
    if not isinstance(value, dict):
        return next((tag for tag, source in SOURCES.items() if isinstance(value, source)), None)
    tags = [tag for tag in SOURCES if tag in value]
    tags = tags or [tag for tag in SOURCES if any(did_you_mean(key, [tag]) for key in value)]
    return tags[0] if len(tags) == 1 else None


Alone = OfText | Annotated[ImageSource, Tag("images")] | Annotated[ArraySource, Tag("arrays")]
Source = Annotated[
    Alone, Discriminator(_source_tag, "rule", f"must be a mapping with exactly one of {', '.join([*SOURCES][:-2])}")
]
TrainSource = Annotated[
    Alone | Annotated[TeacherSource, Tag("teacher")] | Annotated[MixSource, Tag("mix")],
    Discriminator(
        _source_tag, "rule", f"must be a mapping with exactly one of {', '.join(SOURCES)}, such as {{files: [a.txt]}}"
    ),
]


def parts_of(source: Any) -> list[tuple[Any, float]]:
    """The sources of a mix and their shares, which add up to 1; of another source itself."""
    if not isinstance(source, MixSource):
        return [(source, 1.0)]
    total = sum(part.weight for part in source.mix)
    return [(part.source, part.weight / total) for part in source.mix]


def described(source: Any) -> str:
    """A source as a person would name it: its files, or its dataset with configuration and split."""
    if isinstance(source, MixSource):
        return " + ".join(f"{share:.0%} {described(part)}" for part, share in parts_of(source))
    if isinstance(source, FileSource):
        first, rest = ", ".join(source.files[:3]), len(source.files) - 3
        return first + (f" and {counted(rest, 'more file')}" if rest > 0 else "")
    if isinstance(source, DemoSource):
        return TEXTS[source.demo]
    if isinstance(source, DatasetSource):
        parts = (source.name, *source.data_files, source.split)
        return f"{source.path} ({', '.join(part for part in parts if part)})"
    if isinstance(source, TeacherSource):
        prompts = {None: "", CHAT: " from chats"}.get(source.teacher.prompts, f" from {source.teacher.prompts}")
        return f"{short(source.teacher.tokens)} tokens that the teacher writes{prompts}"
    return str(source.images if isinstance(source, ImageSource) else source.arrays)


class Pack(Strict):
    seq_len: RowLength = 2048
    """Tokens in a block: the longest context that the student learns."""
    text_key: Text = "text"
    """The key, or column, that holds the text."""
    rows: Literal["packed", "texts"] = "packed"
    """packed: documents one after another, cut every seq_len tokens; texts, for sentence encoders: one text a row, in
    turn 1, 2, 4 and 8 sentences of a document, with padding."""


OF_IMAGES = ("augment", "erase", "mixup", "cutmix", "repeats")  # keys of `Data` that text has no use for


class Data(Strict):
    train: TrainSource
    """Text or images to learn from; `{teacher: ...}`: text that the teacher writes itself."""
    eval: Source | None = None
    """Held-out text or images; null: nothing is evaluated."""
    pack: Pack = Pack()
    """How text is cut into blocks."""
    augment: Literal["crop", "randaugment"] | None = None
    """How training changes its images, differently each time: crop (8 to 100 % of the image, mirrored half of
    the time); randaugment (crop, then two random operations of strength 9; needs torchvision); null: none."""

    erase: Ratio = 0.0
    """Random erasing: the share of training images in which one rectangle, 2 to 33 % of the image, becomes noise."""
    mixup: Alpha = 0.0
    """Mixup: each image, and its class, is blended with another of the batch. The share is drawn from a beta
    distribution with this alpha; 0: none."""
    cutmix: Alpha = 0.0
    """CutMix: a rectangle of each image, and that share of its class, is replaced by another image of the batch. The
    share is drawn from a beta distribution with this alpha; 0: none. With mixup, each gets half of the batches."""
    repeats: Count = 1
    """Repeated augmentation: this factor of copies of each image, each changed otherwise, in a row. An epoch is as
    long as before, so it has fewer different images."""

    @field_validator(*OF_IMAGES)
    @classmethod
    def _of_images(cls, value: Any, info: ValidationInfo) -> Any:
        changed = value != cls.model_fields[str(info.field_name)].default
        if changed and "train" in info.data and not holds_images(info.data["train"]):
            raise ValueError("is for images, and data.train holds text")
        return value


class StagePack(Strict):
    seq_len: RowLength | None = None
    """Tokens in a block; null: the recipe's."""
    text_key: Text | None = None
    """The key, or column, that holds the text; null: the recipe's."""
    rows: Literal["packed", "texts"] | None = None
    """packed, or one of the texts that sentence encoders read in each row; null: the recipe's."""


class StageData(Strict):
    """A stage's own data; null inherits the recipe's."""

    train: TrainSource | None = None
    """Text or images to learn from; null: the recipe's."""
    eval: Source | None = None
    """Held-out text or images; null: the recipe's."""
    pack: StagePack = StagePack()
    """How text is cut into blocks."""
