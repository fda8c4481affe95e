"""A diffusion transformer beside its teacher: errors of predictions by noise level, and samples as a PNG."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..page.drawing import pillow
from ..terminal.progress import Advance, progress, silent
from ..train.loop import seed_for
from .latents import inputs_of

if TYPE_CHECKING:
    from .train import Distiller

Predict = Callable[[dict[str, Any]], Tensor]
# Latents of one pass.
ROWS = 8
SAMPLES = "a picture of samples"


def latents_compared(tuner: Distiller) -> int:
    """How many latents predictions are compared on."""
    return min(tuner.recipe.eval.max_latents, len(tuner.held.latents))


@torch.no_grad()
def compare_predictions(tuner: Distiller, advance: Advance = silent) -> list[dict[str, float]]:
    """By noise level: `error`, |student - teacher| / |teacher| of predictions, and `cosine` of the two. `advance` is
    told of latents that are done, of `latents_compared` at each level."""
    device, table = tuner.accelerator.device, []
    count = latents_compared(tuner)
    for level in tuner.recipe.eval.levels:
        sums = torch.zeros(4, dtype=torch.float64)
        for start in range(0, count, ROWS):
            rows = list(range(start, min(start + ROWS, count)))
            latents, prompts = tuner.held.batch(rows, device)
            generator = torch.Generator().manual_seed(seed_for(tuner.recipe.seed, start))
            noised, time = tuner.noise.at(
                latents,
                torch.randn(latents.shape, generator=generator).to(device),
                torch.full((len(rows),), level, device=device),
            )
            inputs = inputs_of(tuner.model, noised, time, prompts)
            ours, theirs = tuner.predict(inputs).double().cpu(), tuner.target(inputs).double().cpu()
            pairs = ((ours - theirs).square(), theirs.square(), ours.square(), ours * theirs)
            sums += torch.stack([one.sum() for one in pairs])
            advance(len(rows))
        wrong, of, own, product = sums.tolist()
        record = {"level": level, "error": (wrong / max(of, 1e-30)) ** 0.5}
        table.append(record | {"cosine": product / max(of * own, 1e-30) ** 0.5})
    return table


@torch.no_grad()
def sample(tuner: Distiller, predict: Predict) -> Tensor:
    """Latents [N,C,..] made of noise with the first prompts: Euler steps of flow matching, or DDIM."""
    device, noise, asked = tuner.accelerator.device, tuner.noise, tuner.recipe.eval
    rows = [row % len(tuner.held.latents) for row in range(asked.samples)]
    latents, prompts = tuner.held.batch(rows, device)
    x = torch.randn(latents.shape, generator=torch.Generator().manual_seed(tuner.recipe.seed)).to(device)
    levels = torch.linspace(1.0, 0.0, asked.sampling_steps + 1, device=device)
    with progress("samples", asked.sampling_steps) as advance:
        for level, following in itertools.pairwise(levels):
            batch = level.repeat(len(x))
            _, time = noise.at(x, x, batch)
            predicted = predict(inputs_of(tuner.model, x, time, prompts)).float()
            predicted = predicted[:, : x.shape[1]]  # a learned variance follows
            advance(1)
            if noise.kind == "flow":
                x = x + (following - level) * predicted
                continue
            alpha, then = (noise.alphas[round(float(one) * (noise.steps - 1))].to(device) for one in (level, following))
            clean = (x - (1 - alpha).sqrt() * predicted) / alpha.sqrt()
            x = clean if following == 0 else then.sqrt() * clean + (1 - then).sqrt() * predicted
    return x


def setback(before: list[dict[str, float]], after: list[dict[str, float]]) -> str | None:
    """What is said where training led away from the teacher's predictions."""
    was, now = (sum(row["error"] for row in table) / len(table) for table in (before, after))
    if now <= was:
        return None
    return (
        f"warning: the predictions are further from the teacher's than before training: a mean error of {now:.3f} over "
        f"noise levels, was {was:.3f}. Lower the learning rates, and let them fall: schedule: {{name: cosine}}"
    )


def picture(tuner: Distiller) -> bytes:
    """A PNG with a row of the student's samples above its teacher's; without a VAE of the first channels of latents.

    Raises LinearizeError (exit 4) without pillow.
    """
    Image, decode = pillow(SAMPLES), tuner.decode
    images = [sample(tuner, predict) for predict in (tuner.predict, tuner.target)]
    images = [(decode(x) if decode is not None else x).float().cpu() for x in images]
    flat = [x if x.ndim == 4 else x[:, :, 0] for x in images]  # of films the first frame
    shown = [x[:, :3] if x.shape[1] >= 3 else x[:, :1].expand(-1, 3, -1, -1) for x in flat]
    if decode is None:  # on one scale, or two rows could not be compared
        low, high = min(float(x.min()) for x in shown), max(float(x.max()) for x in shown)
        shown = [(x - low) / max(high - low, 1e-6) for x in shown]
    else:
        shown = [x / 2 + 0.5 for x in shown]
    factor = max(1, 64 // shown[0].shape[-1])
    grid = torch.cat([torch.cat(list(torch.nn.functional.pad(x, (1, 1, 1, 1))), 2) for x in shown], 1)
    grid = (grid.nan_to_num().clamp(0, 1) * 255).round().byte().permute(1, 2, 0)
    image = Image.fromarray(grid.numpy()).resize(
        (grid.shape[1] * factor, grid.shape[0] * factor), Image.Resampling.NEAREST
    )
    target = io.BytesIO()
    image.save(target, "PNG")
    return target.getvalue()
