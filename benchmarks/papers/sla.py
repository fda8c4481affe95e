"""Claims of "Softmax Linear Attention: Reclaiming Global Competition" (arXiv 2602.01744).

Its models have 340M parameters and rows of 4,096 tokens. Its figure of speed (one H20) prints no numbers: what it calls
slight, marginal or mild is taken as at most 5 %.
"""

from __future__ import annotations

from benchmarks.measured import Text
from benchmarks.paper import Claim

BASES = ("gla", "retnet", "gdn")
COST = 0.95


def over(base: str, tokens: int = 4096, decode: bool = False) -> tuple[Text, Text]:
    """The model with SLA, and with its base alone."""
    model = Text("llama-340m", tokens, "sla", f"faithful=true base={base}", decode=decode)
    return model, model._replace(mechanism=base, options="faithful=true")


CLAIMS = (
    *(Claim(f"train-{base}", "figure 3b", f"training on rows of 4,096, tokens/s beside {base}", "rate", *over(base),
            at_least=COST) for base in BASES),
    *(Claim(f"memory-{base}", "figure 3a", f"peak of memory in training, {base} / SLA", "memory", *over(base),
            at_least=COST) for base in BASES),
    *(Claim(f"decode-{base}", "figure 3c", f"decode after 2,048 tokens, beside {base}", "speed",
            *over(base, 2048, True), at_least=COST) for base in BASES),
    Claim("decode-gdn-long", "figure 3c", "the same after 16,384 tokens", "speed", *over("gdn", 16384, True),
          at_least=COST),
    Claim("train-gla-long", "figure 3b", "training on rows of 16,384, tokens/s beside gla", "rate", *over("gla", 16384),
          at_least=COST),
    Claim("retrieval", "table 2", "SWDE, SQuAD and FDA ahead of each base", needs="SlimPajama, 15B tokens"),
    Claim("needles", "table 3", "needles of RULER, 1K to 8K", needs="SlimPajama, 15B tokens"),
    Claim("language", "table 4", "perplexity and zero-shot results ahead of each base", needs="SlimPajama, 15B tokens"),
    Claim("scale", "figure 1", "perplexity from 80M to 340M parameters", needs="SlimPajama, 15B tokens each"),
    Claim("heads", "figure 2", "more gain with more heads", needs="SlimPajama, 15B tokens each"),
)  # fmt: skip
