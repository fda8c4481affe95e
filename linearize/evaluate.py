"""Held-out perplexity, and how close each mixer comes to the softmax that it replaced."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from linearize_kernels.seam import evaluating

from .data import Blocks
from .losses import next_token_ce
from .stages import Batch, Listener, forward, listen
from .trainable import Student


def batches(blocks: Blocks, size: int, max_tokens: int, accelerator: Accelerator) -> Iterator[Batch]:
    """This process's share of the first blocks, in order, `size` at a time, up to max_tokens tokens over all.

    Every process gets as many batches, for shards are gathered together: what is missing is a block without tokens.
    """
    count = block_count(blocks, max_tokens)
    for start in range(0, count, size * accelerator.num_processes):
        own = start + size * accelerator.process_index
        items = [blocks[i] for i in range(own, min(own + size, count))] or [_blank(blocks[0])]
        yield collate(items, accelerator.device)


def _blank(block: Batch) -> Batch:
    """The same, of which nothing counts."""
    return block | {"labels": torch.full_like(block["labels"], -100), "valid": torch.zeros_like(block["valid"])}


def block_count(blocks: Blocks, max_tokens: int) -> int:
    """How many blocks an evaluation of at most `max_tokens` tokens reads, at least one."""
    return max(1, min(len(blocks), max_tokens // blocks.seq_len))


def collate(items: list[Batch], device: torch.device) -> Batch:
    """Stack blocks and move them."""
    return {key: torch.stack([item[key] for item in items]).to(device) for key in items[0]}


@torch.no_grad()
def perplexity(model: Any, data: Iterator[Batch], accelerator: Accelerator) -> float:
    """exp of the mean next-token loss in nats, over every target of every process; at most 1e304."""
    total, count = 0.0, 0
    with evaluating(model):
        for batch in data:
            targets = int((batch["labels"][:, 1:] != -100).sum())
            with accelerator.autocast():
                loss = next_token_ce(forward(model, batch), batch["labels"])
            total, count = total + loss.item() * targets, count + targets
    sums = torch.tensor([total, count], dtype=torch.float64, device=accelerator.device)
    total, count = accelerator.reduce(sums, "sum").tolist()
    return math.exp(min(total / max(count, 1), 700.0))


class Fidelity(Listener):
    """Sums squared errors, powers and cosines of each attention module's output, student against teacher."""

    own_call = True

    def __init__(self, student: Student) -> None:
        super().__init__(student)
        self.sums: dict[int, Tensor] = {}
        self.valid = torch.empty(0)

    @torch.no_grad()
    def compare(self, mixer: Any, y: Tensor, target: Tensor) -> None:
        ours, theirs = y[self.valid].float(), target[self.valid].float()
        cosine = torch.cosine_similarity(ours, theirs, dim=-1).sum()
        sums = torch.stack([(ours - theirs).square().sum(), theirs.square().sum(), cosine, self.valid.sum()])
        self.sums[mixer.site.layer] = self.sums.get(mixer.site.layer, 0) + sums


def layer_fidelity(student: Student, data: Iterator[Batch], accelerator: Accelerator) -> list[dict[str, float]]:
    """Per layer, on the teacher's hidden states: relative squared error and mean cosine of the module's output."""
    listener = Fidelity(student)
    for batch in data:
        listener.valid = batch["valid"]
        with accelerator.autocast():
            listen(student, listener, batch)
    rows = []
    for layer, sums in sorted(listener.sums.items()):
        error, power, cosine, count = accelerator.reduce(sums, "sum").tolist()
        rows.append({"layer": layer, "relative_mse": error / power, "cosine": cosine / count})
    return rows
