"""Images for training: a folder of classes, rows of a dataset, or arrays.

Images are decoded and processed when they are asked for, by the checkpoint's own image processor. Pixel values that
are ready are taken as they are, so that a processor is not needed.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import IncompatibleError, LinearizeError, absent, check_file, did_you_mean
from ..recipe.data import ArraySource, DatasetSource, ImageSource, local_paths
from ..train.losses import IGNORED
from .augment import Augment, erase
from .documents import open_dataset
from .packing import hashed_generator

SHOWN = 16  # classes of a line of text
HIDDEN = 0.6  # of an image's patches, where a model predicts those that it does not see (SimMIM, arXiv 2111.09886)
WIDE = ("I", "F")  # PIL's modes of 16 and 32 bits a value
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


@dataclass(frozen=True)
class Labelled:
    """Images that are not decoded yet, and the name or number of each one's class (None: not known).

    `names`: the classes in the order in which the source itself numbers them; None where it does not.
    """

    images: Sequence[Any]
    labels: Sequence[str | int | None]
    where: str
    names: Sequence[str] | None = None
    # What a file says of a class: the model's number of it, or the model's name.
    classes: Mapping[str, int | str] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __str__(self) -> str:
        return self.where


class Images:
    """Samples of a vision model. Item i is a dict of tensors: `pixel_values` [C,h,w], `labels` [1] int64 (-100
    without a class) and `valid` [1] bool, always True. An image counts as one token of a budget. Where a model predicts
    `hidden` patches of an image, `bool_masked_pos` [hidden] says which it does not see: HIDDEN of them, by `seed`.

    `note` says for a person which class got which number. Without `learns` nobody learns the classes: those that the
    model does not have are left out, with a note, instead of refused. With `augment` `changed` gives pictures that were
    changed at random, and by the chance `erased` a rectangle of their values.
    """

    seq_len = 1

    def __init__(
        self,
        found: Labelled,
        processor: Any,
        config: Any,
        learns: bool = True,
        augment: Augment | None = None,
        hidden: int = 0,
        seed: int = 0,
        erased: float = 0.0,
    ) -> None:
        if not len(found):
            raise LinearizeError(f"nothing to train on in {found.where}")
        self.found, self.processor, self.augment = found, processor, augment
        self.hidden, self.seed, self.erased = hidden, seed, erased
        try:
            self.labels, self.note = class_numbers(found, config)
        except LinearizeError as error:
            if learns:
                raise
            self.labels = [IGNORED] * len(found)
            without = "This stage needs no classes: it runs without, and its predictions are not evaluated"
            self.note = f"note: {error.message}. {without}"
        if augment is not None and is_pixels(found.images[0]):
            raise IncompatibleError(
                f"data.augment changes pictures, and {found.where} has pixel values as the model takes them. Give "
                "uint8 images, or leave it out"
            )
        self[0]  # what cannot be read or processed is told before anything is trained

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._sample(index, None)

    def changed(self, index: int, seed: int) -> dict[str, Tensor]:
        """Item `index` with its picture changed as `seed` decides; as it is where nothing is changed."""
        sample = self._sample(index, seed if self.augment is not None else None)
        if self.erased:
            sample["pixel_values"] = erase(sample["pixel_values"], self.erased, seed)
        return sample

    def _sample(self, index: int, seed: int | None) -> dict[str, Tensor]:
        sample = {
            "pixel_values": self._pixels(index, seed),
            "labels": torch.tensor([self.labels[index]]),
            "valid": torch.ones(1, dtype=torch.bool),
        }
        if self.hidden:
            order = torch.randperm(self.hidden, generator=hashed_generator(self.seed, index))
            sample["bool_masked_pos"] = order < round(HIDDEN * self.hidden)
        return sample

    def _pixels(self, index: int, seed: int | None) -> Tensor:
        image = self.found.images[index]
        if is_pixels(image):
            return torch.from_numpy(np.ascontiguousarray(image, np.float32))
        if self.processor is None:
            raise IncompatibleError(
                f"the checkpoint has no image processor for {self.found.where}. Put its preprocessor_config.json into "
                "the folder, or give arrays of float pixel values [N,C,height,width]"
            )
        picture = as_picture(image, f"{self.found.where}, image {index}")
        if seed is not None and self.augment is not None:
            picture = self.augment(picture, seed)
        return self.processor(picture, return_tensors="pt")["pixel_values"][0]


def is_pixels(image: Any) -> bool:
    """Whether it is float values that a model takes as they are."""
    return isinstance(image, np.ndarray) and image.dtype.kind == "f"


def as_picture(image: Any, where: str) -> Any:
    """A PIL image in RGB, from one, a path, or a uint8 array [height,width] or [height,width,1 or 3]."""
    from PIL import Image

    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim not in (2, 3):
            raise LinearizeError(f"{where}: {image.dtype} {image.shape} is no picture; give uint8 [height,width,3]")
        image = Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image)
    elif not isinstance(image, Path | Image.Image):
        raise LinearizeError(f"{where}: {type(image).__name__} is no image")
    named = image if isinstance(image, Path) else where
    try:
        opened = Image.open(image) if isinstance(image, Path) else image
        if opened.mode.startswith(WIDE):  # which PIL would cut off at 255
            raise ValueError(f"a value has more than 8 bits (mode {opened.mode}). Save it as 8-bit grey or RGB")
        return opened.convert("RGB")  # which decodes it
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise LinearizeError(f"cannot read the image {named}: {error}") from error


def class_numbers(found: Labelled, config: Any) -> tuple[list[int], str]:
    """The model's number of each image's class, -100 where there is none; and, for a person, which name got which.

    A source's own file of classes decides where there is one. Else a name is looked up in the config's id2label. Where
    the config has no names of its own (LABEL_0, ...), a dataset's own order decides; names of folders that are whole
    numbers are those numbers, and other names count in alphabetical order. Whole numbers are also taken where id2label
    has other names and none of these; so is the alphabetical order of WordNet's numbers (n01440764), if the model has
    as many classes: ImageNet's are numbered so.

    `config` None: the model has no head, and nothing to do with classes. Raises LinearizeError (exit 3) for classes
    that the model does not have, or has twice.
    """
    if config is None:
        return [IGNORED] * len(found), ""
    count = getattr(config, "num_labels", 0)
    names = sorted({label for label in found.labels if isinstance(label, str)})
    numbers = name_numbers(found, names, config, count)
    # A number below 0 stands for none, as where a dataset keeps its classes to itself.
    known = [numbers[x] if isinstance(x, str) else -1 if x is None else int(x) for x in found.labels]
    labels = [number if number >= 0 else IGNORED for number in known]
    if labels and max(labels) >= count:
        raise IncompatibleError(
            f"{found.where} has class {max(labels)}, the model's last is {count - 1}. A number is the model's own "
            "number of a class, from 0 on"
        )
    return labels, _mapping(found.where, sorted(names, key=lambda name: numbers[name]), numbers, config)


def name_numbers(found: Labelled, names: list[str], config: Any, count: int) -> dict[str, int]:
    """Name of a class -> its number in the model, by the rules of `class_numbers`."""
    own: dict[str, list[int]] = {}
    for number, name in (getattr(config, "id2label", None) or {}).items():
        own.setdefault(str(name), []).append(int(number))
    if found.classes is not None:
        return _by_file(found.where, names, found.classes, own, count)
    unknown = [name for name in names if name not in own]
    for name in names:
        if len(own.get(name, ())) > 1:
            message = (
                f"{found.where} has the class {name!r}, which the model has as {own[name][0]} and as {own[name][1]}"
            )
            raise IncompatibleError(f"{message}. Give the folders numbers for names")
    if not unknown:
        return {name: own[name][0] for name in names}
    unnamed = all(name.startswith("LABEL_") for name in own)
    if unnamed and found.names is not None and len(found.names) <= count:
        return {name: number for number, name in enumerate(found.names)}
    digits = [name for name in names if name.isascii() and name.isdecimal()]
    if len(unknown) == len(names) == len(digits):
        numbers = {name: int(name) for name in names}
        twice = next((name for name in names if list(numbers.values()).count(int(name)) > 1), None)
        if twice is not None:
            message = f"{found.where} has class {int(twice)} under several names, one of them {twice!r}. Leave one"
            raise IncompatibleError(message)
        return numbers
    wordnet = all(re.fullmatch(r"n\d{8}", name) for name in names)
    if (unnamed or wordnet) and len(unknown) == len(names) == count and not digits:
        return {name: number for number, name in enumerate(names)}
    file = f". Of these WordNet numbers there are {len(names)}; set `classes: FILE` next to `images`" if wordnet else ""
    raise IncompatibleError(
        f"{found.where} has the class {unknown[0]!r}, the model has {count}: {', '.join(sorted(own)[:8])}..."
        f"{did_you_mean(unknown[0], own)}{file}"
    )


def _by_file(
    where: str, names: list[str], classes: Mapping[str, int | str], own: dict[str, list[int]], count: int
) -> dict[str, int]:
    """Name of a class -> its number, by a file of classes."""
    numbers = {}
    for name in names:
        given = classes.get(name)
        if given is None:
            message = f"the file of classes has no {name!r}, a folder of {where}{did_you_mean(name, classes)}"
            raise IncompatibleError(message)
        known = [given] if isinstance(given, int) else own.get(given, [])
        if len(known) != 1 or not 0 <= known[0] < count:
            several = "several times" if len(known) > 1 else "not"
            message = (
                f"the file of classes calls {name!r} {given!r}, which the model has {several}. It has {count} classes"
            )
            raise IncompatibleError(f"{message}{did_you_mean(str(given), own)}")
        numbers[name] = known[0]
    return numbers


def _mapping(where: str, names: list[str], numbers: dict[str, int], config: Any) -> str:
    """One line: which name got which number, and what the model calls that; empty where there are no names."""
    own = {int(number): str(name) for number, name in (getattr(config, "id2label", None) or {}).items()}
    shown = []
    for name in names[:SHOWN]:
        called = own.get(numbers[name], "")
        also = f" ({called})" if called not in (name, "") and not called.startswith("LABEL_") else ""
        shown.append(f"{name} is {numbers[name]}{also}")
    rest = f", ... ({len(names)} in all)" if len(names) > SHOWN else ""
    return f"classes of {where}: {', '.join(shown)}{rest}" if names else ""


# ---------------------------------------------------------------- where they come from


def find_images(source: ImageSource | ArraySource | DatasetSource, start: Path) -> Labelled:
    """The images of a recipe's source; relative paths begin at `start`. Raises LinearizeError for what is not there."""
    if isinstance(source, ImageSource):
        folder, *classes = local_paths(source, start)
        files = image_files(folder)  # with one folder per class; those directly in it have none
        labels = [path.relative_to(folder).parts[0] if path.parent != folder else None for path in files]
        return Labelled(files, labels, str(folder), classes=read_classes(classes[0]) if classes else None)
    if isinstance(source, ArraySource):
        return from_arrays(*local_paths(source, start))
    return from_dataset(source)


def image_files(folder: Path) -> list[Path]:
    """The images in a folder and in its folders, in order of their names."""
    if not folder.is_dir():
        raise absent(folder, "no such folder")
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


def read_classes(file: Path) -> dict[str, int | str]:
    """Folder -> the model's number or name of its class, from lines `FOLDER NAME` in the order of the numbers, or from
    JSON, {FOLDER: number or name} or {number: [FOLDER, NAME]}. Raises LinearizeError for a file that is neither."""
    check_file(file)
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LinearizeError(f"cannot read the classes of {file}: {error}") from error
    if not text.lstrip().startswith("{"):
        lines = [line.split(maxsplit=1)[0] for line in text.splitlines() if line.strip()]
        twice = next((name for name in lines if lines.count(name) > 1), None) if len({*lines}) < len(lines) else None
        if twice is not None or not lines:
            what = f"{twice!r} twice" if lines else "no line"
            raise LinearizeError(f"{file} has {what}; give each folder one line, in the order of the model's classes")
        return {name: number for number, name in enumerate(lines)}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LinearizeError(f"cannot read the classes of {file}: {error}") from error
    found: dict[str, int | str] = {}
    for key, value in given.items():
        if isinstance(value, list) and value and isinstance(value[0], str) and key.isascii() and key.isdecimal():
            if value[0] in found:
                message = f"{file} has {value[0]!r} as class {found[value[0]]} and {key}; give each folder one"
                raise LinearizeError(message)
            found[value[0]] = int(key)
        elif isinstance(value, (int, str)) and not isinstance(value, bool):
            found[key] = value
        else:
            message = f"{file} has {key!r}: {str(value)[:40]!r}; give FOLDER: number or name, or number: [FOLDER, NAME]"
            raise LinearizeError(message)
    return found


def from_arrays(file: Path) -> Labelled:
    """A .npz with `images`, uint8 [N,height,width(,channels)] or pixel values [N,channels,height,width], and
    `labels` [N] where there are any."""
    check_file(file)
    try:
        with np.load(file, allow_pickle=False) as arrays:
            if "images" not in arrays:
                raise LinearizeError(f"{file} has {', '.join(arrays) or 'nothing'}, not `images`")
            images = arrays["images"]
            labels = arrays.get("labels")
    except (OSError, ValueError) as error:
        raise LinearizeError(f"cannot read {file}: {error}") from error
    if labels is not None and labels.shape != images.shape[:1]:
        raise LinearizeError(f"{file}: {len(images)} images, labels {labels.shape}")
    if labels is not None and labels.dtype.kind not in "iuU":
        raise LinearizeError(f"{file}: labels are {labels.dtype}; give whole numbers or names")
    return Labelled(list(images), [None] * len(images) if labels is None else labels.tolist(), str(file))


def count_images(source: Any, start: Path) -> int | None:
    """How many images a recipe's source has, without reading one; None of a dataset, and of what is not there."""
    if isinstance(source, ImageSource):
        return len(image_files(local_paths(source, start)[0]))
    if not isinstance(source, ArraySource):
        return None
    try:
        with zipfile.ZipFile(local_paths(source, start)[0]) as arrays, arrays.open("images.npy") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            return int(read(file)[0][0])
    except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile):  # told where it is read
        return None


class _Column(Sequence[Any]):
    """One column of a dataset, decoded row by row."""

    def __init__(self, dataset: Any, key: str) -> None:
        self.dataset, self.key = dataset, key

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index][self.key]


def from_dataset(source: DatasetSource) -> Labelled:
    """A `datasets` split with a column of images, and one of class names or numbers unless label_key is null."""
    dataset = open_dataset(source.path, source.name, source.split, data_files=source.data_files)
    assert source.image_key is not None
    for key in (source.image_key, source.label_key):
        if key not in (None, *dataset.column_names):
            raise LinearizeError(
                f"{source.path} has the columns {', '.join(dataset.column_names)}, not {key!r}."
                f"{did_you_mean(str(key), dataset.column_names)}"
            )
    labels, names = [None] * len(dataset), None
    if source.label_key is not None:
        labels = dataset[source.label_key]
        names = getattr(dataset.features[source.label_key], "names", None)
        labels = [names[x] if names and x is not None and x >= 0 else x for x in labels]
    return Labelled(_Column(dataset, source.image_key), labels, source.path, names)
