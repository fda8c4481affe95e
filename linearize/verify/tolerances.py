"""How far two computations of the same model may differ. Each limit says what it was measured from.

A difference is the largest one between two tensors over the largest value of the reference.
"""

from __future__ import annotations

# `linearize verify`: two runs of the same maths, each in the dtype of the key. In float32 two orders of the same sums
# differ by 1e-7 to 6e-6 on small models, broken code by 1e-3 and more. Models compute in float32, whatever dtype their
# weights are stored in; one that fits memory only as it is stored is held to the rounding of that dtype.
# Measured on 2026-11-25 (two cores of a CPU, torch 2.13): the eight checks of child/behaviours.py that compare, rows of
# 100 tokens, random Llama and Qwen3 models of four layers with three seeds each, eight mechanisms at their defaults,
# which are 384 differences for each dtype. Beside each limit: 95 of 100 are below the first number, the second is the
# largest, the third says how many are over the limit. Those are of gla and retnet, of one random model: at one token
# the sum of a head nearly cancels (5e-4, where the median of its tokens is 1.3), and the norm behind it divides the
# rounding of the sum by next to nothing. float32 is as far from float64 there (2.6e-4), and the mean KL of all tokens
# is 9e-10.
BY_DTYPE = {
    "float64": 1e-4,  # 2.6e-7, 5.4e-7, none; held to the limit of float32
    "float32": 1e-4,  # 6.8e-6, 2.3e-4, one
    "float16": 1e-2,  # 2.9e-3, 1.1e-1, two
    "bfloat16": 5e-2,  # 1.1e-2, 1.1e-1, one
}
# `verify --strict`, in float32: about three times what 95 of 100 are below. Six of the 384 are over it.
STRICT = 2e-5
# Two processes that run the same float32 maths on one CPU differ by the order of additions alone, as above: a saved
# model reloaded, a folder upgraded, steps through a cache beside one pass, adapters merged, a pipeline of diffusers.
RELOADED = 1e-4
# Weights rounded to bfloat16, on the demo's teacher and two random models with all mechanisms. Mean KL in nats: 2e-5 to
# 1.5e-3; root mean square of the difference over that of the outputs: 2e-3 to 3.9e-2. One tensor of a mixer set to zero
# gave 1.6e-2 and 7.2e-2 at least.
ROUNDED_KL = 1e-2
ROUNDED_RMS = 6e-2
# An ONNX graph by onnx's reference evaluator beside its model in float32 (over 1 where no logit is as large). Small
# models of three architectures with gla, gdn, retnet and the window alone, with and without a window, nine stored in
# float32 and three in bfloat16: 4e-7 to 1.7e-6.
ONNX = 1e-4
# A mixer divided among 2 and 4 processes beside the whole one, in float32, at six sizes of 8 to 32 query heads: those
# whose heads are computed apart, 0 to 2.2e-7; sla, whose heads compete, 3.7e-2 to 7.9e-1.
DIVIDED = 1e-4
# A converted model beside the same weights in a known format (`linearize export --as`), and an engine beside
# transformers, in float32, over the largest logit. Random models of four layers on 2026-11-28: mlx-lm 8.7e-7, llama.cpp
# 3.9e-6; float32 itself is 3.8e-6 from float64 on the last one.
NATIVE = 1e-4
# Some tokens of a large model amplify rounding: SmolLM2-135M with windows of 928 and untrained sinks, beside its
# GraniteSWA, is 1.9e-4 apart at one of 933 random tokens and 7.5e-5 at another, below 1.4e-5 at all others (two cores
# of a CPU, torch 2.13, 2026-11-30). Embeddings times 1 + 2^-23 of normal noise move the same two tokens by 1.3e-4 to
# 3.3e-4 and by 3.1e-5 to 9.0e-5, with three seeds. A token may differ by so many times what noise moves it, where that
# is more than NATIVE.
AMPLIFIED = 4
