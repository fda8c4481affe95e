"""Random changes in training: of a picture a part, mirrored or not, then torchvision's RandAugment; of its pixel values
a rectangle that becomes noise; of two images of a batch a blend, or a rectangle of one in the other.

What becomes of a picture is a function of its seed, so a run that goes on sees the pictures that it would have seen.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ResourceError

Bounds = tuple[float, float]
Augment = Callable[[Any, int], Any]
"""A changed copy of a PIL image; the seed decides how."""

AREA, SHAPE = (0.08, 1.0), (3 / 4, 4 / 3)  # of a crop: its share of the picture, and its width over its height
TRIES = 10  # to find a crop within the picture
OPERATIONS, STRENGTH = 2, 9  # RandAugment's, as DeiT has them
ERASED, ERASED_SHAPE = (0.02, 1 / 3), (0.3, 10 / 3)  # of random erasing (arXiv 1708.04896), as of a crop
OTHERS, SHARE = "other_labels", "label_share"  # of a batch of mixed images: the second labels, the share of the first


def augmentation(name: str | None) -> Augment | None:
    """The change that a recipe's `data.augment` names. Raises LinearizeError (exit 4) where its library is missing."""
    if name is None:
        return None
    return crop if name == "crop" else RandAugment()


def crop(picture: Any, seed: int) -> Any:
    """A part of the picture of a random size, shape and place, mirrored half of the time."""
    random = _uniform(seed)
    width, height = picture.size
    box = _rectangle(random, width, height, AREA, SHAPE)
    if box is None:  # the middle, of a picture that has room for no crop
        side = min(width, height)
        box = (width - side) // 2, (height - side) // 2, (width + side) // 2, (height + side) // 2
    from PIL import Image

    part = picture.crop(box)
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if next(random) < 0.5 else part


class RandAugment:
    """`crop`, then two random operations of torchvision on the part."""

    def __init__(self) -> None:
        try:
            transforms = importlib.import_module("torchvision.transforms")
        except ImportError as error:
            raise ResourceError(
                f'data.augment randaugment needs: pip install "linearize[augment]" ({error}). crop needs Pillow alone'
            ) from error
        self.change = transforms.RandAugment(OPERATIONS, STRENGTH)

    def __call__(self, picture: Any, seed: int) -> Any:
        part = crop(picture, seed)
        with torch.random.fork_rng(devices=[]):  # its random numbers are torch's own
            torch.manual_seed(seed)
            return self.change(part)


def erase(pixels: Tensor, chance: float, seed: int) -> Tensor:
    """Pixel values [C,h,w] of which, by that chance, one rectangle of random size, shape and place is normal noise."""
    random, (_, height, width) = _uniform(seed), pixels.shape
    if next(random) >= chance:
        return pixels
    box = _rectangle(random, width, height, ERASED, ERASED_SHAPE, smaller=True)
    if box is not None:
        left, top, right, bottom = box
        pixels, generator = pixels.clone(), torch.Generator().manual_seed(seed)
        pixels[:, top:bottom, left:right] = torch.randn((len(pixels), bottom - top, right - left), generator=generator)
    return pixels


def mixed(batch: dict[str, Tensor], mixup: float, cutmix: float, seed: int) -> dict[str, Tensor]:
    """A batch of images, each with the one at the same place from the end mixed in, and both labels.

    The share of the first is from a beta distribution, both of whose parameters are `mixup` (arXiv 1710.09412: values
    are blended) or `cutmix` (arXiv 1905.04899: a rectangle is replaced, the share is what is left). Where both are
    above 0, each has half of the batches; the seed decides.
    """
    random = np.random.default_rng(seed)
    cuts = cutmix > 0 and (mixup == 0 or random.random() < 0.5)
    alpha = cutmix if cuts else mixup
    share = float(random.beta(alpha, alpha))
    pixels, others = batch["pixel_values"], batch["pixel_values"].flip(0)
    if cuts:
        height, width = pixels.shape[-2:]
        h, w = (round(side * math.sqrt(1 - share)) for side in (height, width))
        y, x = int(random.integers(height)), int(random.integers(width))
        rows = slice(max(y - h // 2, 0), min(y - h // 2 + h, height))
        columns = slice(max(x - w // 2, 0), min(x - w // 2 + w, width))
        whole = pixels.clone()
        whole[..., rows, columns] = others[..., rows, columns]
        share = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)
    else:
        whole = share * pixels + (1 - share) * others
    return batch | {"pixel_values": whole, OTHERS: batch["labels"].flip(0), SHARE: pixels.new_tensor(share)}


def _uniform(seed: int) -> Iterator[float]:
    """Random numbers from 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield float(torch.rand((), generator=generator))


def _between(bounds: Bounds, share: float) -> float:
    return bounds[0] + (bounds[1] - bounds[0]) * share


def _rectangle(
    random: Iterator[float], width: int, height: int, areas: Bounds, shapes: Bounds, smaller: bool = False
) -> tuple[int, int, int, int] | None:
    """Left, top, right and bottom of a rectangle of a random area, shape and place in a picture, which it may fill
    unless it is to be `smaller`; None where TRIES found none."""
    for _ in range(TRIES):
        area = width * height * _between(areas, next(random))
        shape = math.exp(_between((math.log(shapes[0]), math.log(shapes[1])), next(random)))
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        x, y = next(random), next(random)
        if 0 < w <= width - smaller and 0 < h <= height - smaller:
            left, top = round(x * (width - w)), round(y * (height - h))
            return left, top, left + w, top + h
    return None
