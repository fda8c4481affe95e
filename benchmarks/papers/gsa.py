"""Claims of "Gated Slot Attention for Efficient Linear-Time Sequence Modeling" (arXiv 2409.07146).

Its models of speed have 1.3B parameters and 16K tokens a step on an H800. Heads here are eight of 256 everywhere: the
state of GSA does not depend on them, and that of GLA is then the paper's.
"""

from __future__ import annotations

from benchmarks.measured import Text
from benchmarks.paper import Claim


def gsa(slots: int = 64, tokens: int = 2048) -> Text:
    return Text("llama-1.3b", tokens, "gsa", f"faithful=true slots={slots}")


def beside(run: Text, mechanism: str) -> Text:
    return run._replace(mechanism=mechanism, options="faithful=true")


LONG, STEP = gsa(tokens=16384), gsa()._replace(decode=True)

CLAIMS = (
    Claim("slots-64", "footnote 5", "training, tokens/s with 64 slots", "tokens/s", gsa(), published=44_100),
    Claim("gla", "figure 4a", "training on rows of 2,048, tokens/s over GLA (comparable)", "rate", gsa(),
          beside(gsa(), "gla"), at_least=0.95),
    Claim("gla-memory", "figure 4b", "peak of memory in training, GLA / GSA", "memory", gsa(), beside(gsa(), "gla"),
          published=36.2 / 38.0),
    Claim("slots-32", "footnote 5", "training, tokens/s with 32 slots", "tokens/s", gsa(32), published=46_700),
    Claim("slots-32-share", "footnote 5", "32 slots over 64", "rate", gsa(32), gsa(), published=46.7 / 44.1),
    Claim("slots-128", "footnote 5", "training, tokens/s with 128 slots", "tokens/s", gsa(128), published=37_100),
    Claim("slots-128-share", "footnote 5", "128 slots over 64", "rate", gsa(128), gsa(), published=37.1 / 44.1),
    Claim("gla-long", "figure 4a", "training on rows of 16,384, tokens/s over GLA (comparable)", "rate", LONG,
          beside(LONG, "gla"), at_least=0.95),
    Claim("softmax-memory", "figure 4b", "peak of memory in training, softmax / GSA", "memory", gsa(),
          gsa()._replace(softmax=True), published=35.9 / 38.0),
    Claim("decode-gla", "figure 4c", "decode after 2,048 tokens, over GLA", "speed", STEP, beside(STEP, "gla"),
          at_least=1.0),
    Claim("decode-retnet", "figure 4c", "decode after 2,048 tokens, over RetNet", "speed", STEP,
          beside(STEP, "retnet"), at_least=1.0),
    Claim("zero-shot", "table 1", "zero-shot results of 1.3B and 2.7B parameters", needs="SlimPajama, 100B tokens"),
    Claim("ablation", "table 2", "gates, softmax and slots by perplexity at 340M", needs="SlimPajama, 10B tokens"),
    Claim("recall", "figure 3", "recall (MQAR, FDA, SWDE, SQuAD, NQ, TriviaQA, Drop)", needs="its trained models"),
    Claim("t2r", "table 3", "Mistral 7B finetuned to GSA ahead of GLA and RetNet", needs="SlimPajama, 20B tokens"),
    Claim("long", "table 4", "Qasper, NarrativeQA, QuALITY and QMSum at 16K", needs="its finetuned Mistral 7B"),
)  # fmt: skip
