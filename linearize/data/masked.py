"""Masked text, for bidirectional models: blocks of documents in which some tokens are hidden.

Of 15 % of a block's tokens 80 % become the mask, 10 % another token and 10 % stay (BERT, arXiv 1810.04805, section
3.1). Which ones is a function of the seed and the block, the same in every epoch and process. A model without a head
predicts no tokens, so none are hidden from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import IncompatibleError
from ..train.losses import IGNORED
from .packing import Blocks, MixedBlocks, hashed_generator

CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1


class MaskedBlocks:
    """Item i, each [T]: `input_ids` with masks, `attention_mask`, `labels` (the hidden tokens, else -100), `valid`.
    Without `hide` no token is hidden."""

    def __init__(self, blocks: Blocks | MixedBlocks, tokenizer: Any, seed: int, hide: bool = True) -> None:
        self.hide = hide
        if hide and tokenizer.mask_token_id is None:
            raise IncompatibleError("the tokenizer has no mask token. Name one in the model's tokenizer_config.json")
        self.blocks, self.seed, self.seq_len = blocks, seed, blocks.seq_len
        self.mask, self.vocabulary = tokenizer.mask_token_id, tokenizer.vocab_size
        self.special = torch.tensor(tokenizer.all_special_ids)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = self.blocks[index]
        ids, valid = block["input_ids"], block["valid"]
        if not self.hide:
            labels = torch.full_like(ids, IGNORED)
            return {"input_ids": ids, "attention_mask": valid.long(), "labels": labels, "valid": valid}
        generator = hashed_generator(self.seed, index)
        chance, kind = (torch.rand(len(ids), generator=generator) for _ in range(2))
        others = torch.randint(self.vocabulary, (len(ids),), generator=generator)
        chosen = (chance < CHOSEN) & valid & ~torch.isin(ids, self.special)
        hidden = torch.where(kind < MASKED, self.mask, torch.where(kind < MASKED + REPLACED, others, ids))
        return {
            "input_ids": torch.where(chosen, hidden, ids),
            "attention_mask": valid.long(),
            "labels": torch.where(chosen, ids, IGNORED),
            "valid": valid,
        }
