"""Random changes of pictures in training: a part of the picture, mirrored or not, then torchvision's RandAugment.

What becomes of a picture is a function of its seed, so a run that goes on sees the pictures that it would have seen.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import Exit, LinearizeError

Augment = Callable[[Any, int], Any]
"""A changed copy of a PIL image; the seed decides how."""

AREA, SHAPE = (0.08, 1.0), (3 / 4, 4 / 3)  # of a crop: its share of the picture, and its width over its height
TRIES = 10  # to find a crop within the picture
OPERATIONS, STRENGTH = 2, 9  # RandAugment's, as DeiT has them


def augmentation(name: str | None) -> Augment | None:
    """The change that a recipe's `data.augment` names. Raises LinearizeError (exit 4) where its library is missing."""
    if name is None:
        return None
    return crop if name == "crop" else RandAugment()


def crop(picture: Any, seed: int) -> Any:
    """A part of the picture of a random size, shape and place, mirrored half of the time."""
    random = _uniform(seed)
    width, height = picture.size
    box = _square(width, height)
    for _ in range(TRIES):
        area = width * height * _between(AREA, next(random))
        shape = math.exp(_between((math.log(SHAPE[0]), math.log(SHAPE[1])), next(random)))
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        x, y = next(random), next(random)
        if 0 < w <= width and 0 < h <= height:
            left, top = round(x * (width - w)), round(y * (height - h))
            box = (left, top, left + w, top + h)
            break
    from PIL import Image

    part = picture.crop(box)
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if next(random) < 0.5 else part


class RandAugment:
    """`crop`, then two random operations of torchvision on the part."""

    def __init__(self) -> None:
        try:
            transforms = importlib.import_module("torchvision.transforms")
        except ImportError as error:
            message = (
                f'data.augment randaugment needs: pip install "linearize[augment]" ({error}). crop needs Pillow alone'
            )
            raise LinearizeError(message, Exit.RESOURCE) from error
        self.change = transforms.RandAugment(OPERATIONS, STRENGTH)

    def __call__(self, picture: Any, seed: int) -> Any:
        part = crop(picture, seed)
        with torch.random.fork_rng(devices=[]):  # its random numbers are torch's own
            torch.manual_seed(seed)
            return self.change(part)


def _uniform(seed: int) -> Iterator[float]:
    """Random numbers from 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield float(torch.rand((), generator=generator))


def _between(bounds: tuple[float, float], share: float) -> float:
    return bounds[0] + (bounds[1] - bounds[0]) * share


def _square(width: int, height: int) -> tuple[int, int, int, int]:
    """The middle of a picture that has room for no crop."""
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side
