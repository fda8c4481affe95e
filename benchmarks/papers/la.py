"""Claims of "Transformer Based Linear Attention with Optimized GPU Kernel Implementation" (arXiv 2510.21956).

Its operators are causal, 4 rows of 16 heads of 128 in fp32 on an A6000. Its Gated LA is that of
flash-linear-attention; here it is linearize's GLA, and fla's where it is named, for fla tunes itself for minutes.
"""

from __future__ import annotations

from benchmarks.measured import Operator, Text
from benchmarks.paper import Claim
from linearize.bench.case import Shape


def shape(T: int, D: int = 128, dtype: str = "float32") -> Shape:
    return Shape(4, T, 16, 16, D, dtype=dtype)


OURS, GATED = Operator("la", shape(10_000)), Operator("gla", shape(10_000))
FLA = GATED._replace(whose="fla")
HALF = Operator("la", shape(10_000, dtype="bfloat16"))
PYTHIA = Text("pythia-1.4b", 8192, "la", "faithful=true")
FEW = Operator("la", shape(3000, dtype="bfloat16"))


def beside_gla(T: int, D: int = 128) -> tuple[Operator, Operator]:
    return Operator("la", shape(T, D)), Operator("gla", shape(T, D))


CLAIMS = (
    Claim("speed", "table 1", "forward, 10,000 tokens, over Gated LA", "speed", OURS, GATED, published=3.3),
    Claim("memory", "table 1", "its peak of memory, Gated LA / LA", "memory", OURS, GATED, published=3.6),
    Claim("softmax", "table 1", "forward, 10,000 tokens, over FlashAttention-2, in bf16", "speed", HALF,
          HALF._replace(whose="softmax"), published=4.0),
    Claim("softmax-memory", "table 1", "its peak of memory, FlashAttention-2 / LA, in bf16", "memory", HALF,
          HALF._replace(whose="softmax"), published=1.0),
    Claim("pythia-softmax", "section 5.2", "training of Pythia-1.4B on rows of 8,192, over softmax", "rate", PYTHIA,
          PYTHIA._replace(softmax=True), published=1.8),
    Claim("pythia-gated", "section 5.2", "training of Pythia-1.4B on rows of 8,192, over GLA", "rate", PYTHIA,
          PYTHIA._replace(mechanism="gla"), published=2.8),
    Claim("crossing", "section 5.1", "forward, 3,000 tokens, over FlashAttention-2, in bf16", "speed", FEW,
          FEW._replace(whose="softmax"), at_least=1.0),
    Claim("linear", "figure 2", "forward, tokens/s with 100,000 tokens over 10,000", "rate",
          Operator("la", shape(100_000)), OURS, at_least=0.95),
    *(Claim(f"tokens-{T}", "figure 2", f"forward, {T:,} tokens, over Gated LA", "speed", *beside_gla(T), published=3.3)
      for T in (1000, 3000, 30_000, 100_000)),
    *(Claim(f"dim-{D}", "figure 2", f"forward, 4,096 tokens, heads of {D}, over Gated LA", "speed",
            *beside_gla(4096, D), at_least=1.0) for D in (32, 64, 128, 256)),
    Claim("backward", "figure 3", "forward + backward, 10,000 tokens, over Gated LA", "speed",
          OURS._replace(backward=True), GATED._replace(backward=True), at_least=1.0),
    Claim("backward-memory", "figure 3", "its peak of memory, Gated LA / LA", "memory",
          OURS._replace(backward=True), GATED._replace(backward=True), at_least=1.0),
    Claim("tokens-300000", "figure 2", "forward, 300,000 tokens, over Gated LA", "speed", *beside_gla(300_000),
          published=3.3),
    Claim("fla", "table 1", "forward, 10,000 tokens, over Gated LA of fla", "speed", OURS, FLA, published=3.3),
    Claim("fla-memory", "table 1", "its peak of memory, Gated LA of fla / LA", "memory", OURS, FLA, published=3.6),
    Claim("movement", "figure 4", "share of the time in which data are moved", needs="a profiler of memory traffic"),
    Claim("loss", "figure 5", "losses of LA, Gated LA and softmax meet", needs="Wiki-40B, 8 GPUs"),
    Claim("accuracy", "table 2", "MMLU, PIQA and ARC near softmax", needs="Wiki-40B, MMLU, PIQA, ARC"),
)  # fmt: skip
