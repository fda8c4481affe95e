"""Sample texts of a run: held-out prompts, each continued by the teacher and by the student."""

from __future__ import annotations

from typing import Any

import torch

from linearize_kernels.hf.attention_hooks import evaluating

from ..data.packing import Blocks
from ..probe.trace import quiet
from ..verify.child.inputs import most_tokens
from .student import Student

PROMPTS = 3
PROMPT_TOKENS, NEW_TOKENS = 48, 48


@torch.no_grad()
def write_samples(student: Student, tokenizer: Any, blocks: Blocks, device: torch.device) -> list[dict[str, str]]:
    """`prompt`, `teacher` (where there is one), `student` and `text` (how it really goes on) for blocks spread over the
    held-out text.

    The likeliest token each time, so that both texts differ only where the models do. A prompt is at most half of a
    block, and fewer tokens are written where a model takes no more.
    """
    prompt = min(PROMPT_TOKENS, blocks.seq_len // 2)
    most = [most_tokens(model) or prompt + NEW_TOKENS for model in (student.model, student.other) if model is not None]
    new = min(NEW_TOKENS, min(most) - prompt)
    chosen = [blocks[number * len(blocks) // PROMPTS]["input_ids"] for number in range(min(PROMPTS, len(blocks)))]
    ids = torch.stack([block[:prompt] for block in chosen]).to(device)
    style: dict[str, Any] = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "max_new_tokens": new}
    style |= {"attention_mask": torch.ones_like(ids), "pad_token_id": tokenizer.eos_token_id}
    texts: dict[str, list[str]] = {"prompt": list(tokenizer.batch_decode(ids, skip_special_tokens=True))}
    with quiet(), evaluating(student.model):
        if student.has_teacher:
            with student.teacher() as model:
                texts["teacher"] = _continued(model, tokenizer, ids, style)
        texts["student"] = _continued(student.model, tokenizer, ids, style)
    texts["text"] = [tokenizer.decode(block[prompt : prompt + new], skip_special_tokens=True) for block in chosen]
    return [dict(zip(texts, row, strict=True)) for row in zip(*texts.values(), strict=True)]


def _continued(model: Any, tokenizer: Any, ids: torch.Tensor, style: dict[str, Any]) -> list[str]:
    """What a model writes after `ids` [B,T], greedily."""
    written = model.generate(input_ids=ids, **style)[:, ids.shape[1] :]
    return list(tokenizer.batch_decode(written, skip_special_tokens=True))
