"""The losses of distillation: logit KL over all tokens or a teacher's top k, cross entropy, cosine of features,
relative error of attention outputs and of maps of numbers. Which of them a stage adds up is in terms.py and stages.py.

Letters: B batch, T time, V vocabulary, H heads, D value dim. KL and cross entropy run over the vocabulary in
chunks: in float32 (float64 for float64 logits) they hold a few [B, T, chunk_size] and some [B, T, 1], never
[B, T, V]. They save the logits as they came; the gradient is the closed form, written in the logits' dtype.

`num_tokens` divides the sum over tokens. Given the count of a whole step (all micro batches, all ranks), the
gradients add up to those of the mean; by default it is the count of this call. Without tokens the loss is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import losses_triton

_CHUNK_ELEMENTS = 1 << 24  # 64 MiB in float32: few launches, yet small beside the logits of a long batch
IGNORED = -100
# How one vector is made of a row's last hidden states: their mean, or the first one (a class token).
Pooling = Literal["mean", "first"]


def logit_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    valid: Tensor,
    *,
    temperature: float = 1.0,
    num_tokens: Tensor | float | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """tau^2 KL(softmax(z_T / tau) || softmax(z_S / tau)), the mean over valid tokens: a scalar.

    Both logits are [B, T, V], aligned (no shift); valid [B, T] bool; tau = temperature. The teacher gets no
    gradient; the student's is tau (p_S - p_T) / num_tokens. An entry of -inf in both adds nothing. `chunk_size` is
    the number of vocabulary entries taken at once.
    """
    if student_logits.shape != teacher_logits.shape or valid.shape != student_logits.shape[:-1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (student_logits, teacher_logits, valid))
        raise ValueError(f"student, teacher, valid must be [B, T, V], [B, T, V], [B, T]; they are {shapes}")
    weight = _weight(valid, num_tokens, student_logits)
    if chunk_size is None and not losses_triton.fits(student_logits, teacher_logits):
        chunk_size = _default_chunk(student_logits)
    loss: Tensor = _LogitKL.apply(student_logits, teacher_logits.detach(), weight, temperature, chunk_size)
    return loss


def shared(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Two logits [B, T, V] of one tokenizer cut to the tokens that both have: embeddings may be padded differently."""
    size = min(ours.shape[-1], theirs.shape[-1])
    return ours[..., :size], theirs[..., :size]


def cross_entropy(
    logits: Tensor, targets: Tensor, *, num_tokens: Tensor | float | None = None, chunk_size: int | None = None
) -> Tensor:
    """-log softmax(logits[t])[targets[t]], the mean over targets that are not -100: a scalar.

    logits [B, T, V], targets [B, T] int64. `chunk_size` as in `logit_kl`.
    """
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets {tuple(targets.shape)} do not fit logits {tuple(logits.shape)}")
    weight = _weight(targets != IGNORED, num_tokens, logits)
    if chunk_size is None and not losses_triton.fits(logits):
        chunk_size = _default_chunk(logits)
    loss: Tensor = _CrossEntropy.apply(logits, targets, weight, chunk_size)
    return loss


def next_token_targets(labels: Tensor) -> Tensor:
    """labels [B, T], one place to the left. Shifting them and not the logits saves a copy of [B, T, V] both ways."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def cosine_distance(student: Tensor, teacher: Tensor, real: Tensor | None, share: Tensor | float = 1.0) -> Tensor:
    """1 - cos(s, t), the mean over real tokens, times `share`, in float32: a scalar.

    student and teacher [B, T, D]; real [B, T] bool, or None for all. The teacher gets no gradient.
    """
    distance = 1.0 - torch.cosine_similarity(_widened(student), _widened(teacher.detach()), dim=-1)
    if real is None:
        return share * distance.mean()
    return share * distance.masked_fill(~real, 0.0).sum() / real.sum().clamp(min=1)


def pooled(hidden: Tensor, real: Tensor | None, pooling: Pooling) -> Tensor:
    """One vector of each row [B,D], in float32: the mean of hidden [B,T,D] over real tokens [B,T] (None: all), or the
    first token's."""
    if pooling == "first":
        return _widened(hidden[:, 0])
    if real is None:
        return _widened(hidden).mean(1)
    return _widened(hidden).masked_fill(~real[..., None], 0.0).sum(1) / real.sum(1, keepdim=True).clamp(min=1)


def embedding_distance(student: Tensor, teacher: Tensor, rows: Tensor | float) -> Tensor:
    """1 - cos(s, t) of each row, the sum over `rows`, in float32: a scalar. student and teacher [B,D]; the teacher gets
    no gradient."""
    return (1.0 - torch.cosine_similarity(_widened(student), _widened(teacher.detach()), dim=-1)).sum() / rows


def similarity_error(student: Tensor, teacher: Tensor, rows: Tensor | float) -> Tensor:
    """The squared difference of the cosines of each pair of rows of a pass: for each row the mean over the others, the
    sum over `rows`. student and teacher [B,D]; 0 for a single row; the teacher gets no gradient.

    It is what a search compares texts by, whichever way all vectors are turned together (after arXiv 1907.09682).
    """
    ours, theirs = (F.normalize(_widened(x), dim=-1) for x in (student, teacher.detach()))
    error = (ours @ ours.T - theirs @ theirs.T).square()
    return error.sum() / max(len(ours) - 1, 1) / rows


def relative_mse(student: Tensor, teacher: Tensor, valid: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """sum ||s - t||^2 / (sum ||t||^2 + eps) over valid tokens, in float32: a scalar free of a layer's scale.

    student and teacher [B, T, H, D]; valid [B, T] bool, or None for all. The teacher gets no gradient.
    """
    return square_error(student, teacher, valid) / (square_sum(teacher.detach(), valid) + eps)


def row_error(
    student: Tensor, teacher: Tensor, valid: Tensor, num_rows: Tensor | float, *, eps: float = 1e-6
) -> Tensor:
    """sum ||s - t||^2 / (||t||^2 + eps) of each valid row, the sum over num_rows, in float32: a scalar free of scale.

    student and teacher [B, P]; valid [B] bool; others may hold NaN. The teacher gets no gradient. An error relative to
    its own row, not to the batch's, adds up over micro batches.
    """
    if student.shape != teacher.shape or valid.shape != student.shape[:1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (student, teacher, valid))
        raise ValueError(f"student, teacher, valid must be [B, P], [B, P], [B]; they are {shapes}")
    ours, theirs = (_widened(x).masked_fill(~valid[:, None], 0.0) for x in (student, teacher.detach()))
    return ((ours - theirs).square().sum(1) / (theirs.square().sum(1) + eps)).sum() / num_rows


def square_error(student: Tensor, teacher: Tensor, valid: Tensor | None = None) -> Tensor:
    """sum ||s - t||^2 over valid tokens, in float32 (float64 stays): a scalar.

    student and teacher [B, T, H, D]; valid [B, T] bool, or None for all; others may hold NaN. The teacher gets no
    gradient. Like KL it holds some tokens in float32 at a time.
    """
    error: Tensor = _SquareError.apply(student, teacher.detach(), valid)
    return error


def square_sum(o: Tensor, valid: Tensor | None) -> Tensor:
    """sum ||o||^2 over valid tokens, in float32 (float64 stays); o [B, T, H, D], valid [B, T] bool or None for all."""
    return _widened(o if valid is None else torch.where(valid[..., None, None], o, 0.0)).square().sum()


class _SquareError(torch.autograd.Function):
    """By the kernel of losses_triton.py where that fits, else some tokens at a time."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, valid: Tensor | None) -> Tensor:
        ctx.fused = losses_triton.fits(student)
        if ctx.fused:
            student, teacher = student.contiguous(), teacher.contiguous()
            valid = None if valid is None else valid.contiguous().view(torch.uint8)
        ctx.save_for_backward(student, teacher, valid)
        if ctx.fused:
            return losses_triton.error_rows(student, teacher, valid).sum()
        total = student.new_zeros((), dtype=torch.promote_types(student.dtype, torch.float32))
        for part in _token_chunks(student):
            total += _differences(student, teacher, valid, part).square_().sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher, valid = ctx.saved_tensors
        if ctx.fused:
            return losses_triton.error_gradient(student, teacher, valid, 2.0 * grad_output), None, None
        grad = torch.empty_like(student)
        for part in _token_chunks(student):
            grad[:, part] = _differences(student, teacher, valid, part).mul_(2.0 * grad_output)
        return grad, None, None


class _LogitKL(torch.autograd.Function):
    """Some of the vocabulary at a time; with `chunk_size` None by the kernels of losses_triton.py."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, weight: Tensor, tau: float, chunk_size: int | None
    ) -> Tensor:
        if chunk_size is None:
            student, teacher, weight = (x.contiguous() for x in (student, teacher, weight))
            kl, lse_s, lse_t = losses_triton.kl_rows(student, teacher, weight, tau)
        else:
            lse_s, lse_t = _logsumexp(student, tau, chunk_size), _logsumexp(teacher, tau, chunk_size)
            kl = torch.zeros_like(weight)
            for part in _chunks(student, chunk_size):
                log_p_s = _log_probs(student[..., part], lse_s, tau)
                log_p_t = _log_probs(teacher[..., part], lse_t, tau)
                p_t = log_p_t.exp()
                # p_T = 0 adds 0, also where the difference is -inf + inf.
                kl += (p_t * log_p_t.sub_(log_p_s).masked_fill_(p_t == 0, 0.0)).sum(-1)
        ctx.save_for_backward(student, teacher, weight, lse_s, lse_t)
        ctx.tau, ctx.chunk_size = tau, chunk_size
        return tau**2 * _weighted_sum(kl, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher, weight, lse_s, lse_t = ctx.saved_tensors
        factor = ctx.tau * grad_output * weight
        if ctx.chunk_size is None:
            grad = losses_triton.kl_gradient(student, teacher, factor, lse_s, lse_t, ctx.tau)
            return grad, None, None, None, None
        factor, grad = factor[..., None], torch.empty_like(student)
        for part in _chunks(student, ctx.chunk_size):
            difference = _log_probs(student[..., part], lse_s, ctx.tau).exp_()
            difference -= _log_probs(teacher[..., part], lse_t, ctx.tau).exp_()
            grad[..., part] = difference.mul_(factor).masked_fill_(factor == 0, 0.0)
        return grad, None, None, None, None


class _CrossEntropy(torch.autograd.Function):
    """Some of the vocabulary at a time; with `chunk_size` None by the kernels of losses_triton.py."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, weight: Tensor, chunk_size: int | None) -> Tensor:
        if chunk_size is None:
            logits, targets, weight = (x.contiguous() for x in (logits, targets, weight))
            loss, lse = losses_triton.nll_rows(logits, targets, weight)
        else:
            lse = _logsumexp(logits, 1.0, chunk_size)
            loss = (lse - logits.gather(-1, targets.clamp(min=0)[..., None]))[..., 0]
        ctx.save_for_backward(logits, targets, weight, lse)
        ctx.chunk_size = chunk_size
        return _weighted_sum(loss, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, weight, lse = ctx.saved_tensors
        if ctx.chunk_size is None:
            return losses_triton.nll_gradient(logits, targets, grad_output * weight, lse), None, None, None
        factor, index = (grad_output * weight)[..., None], targets.clamp(min=0)[..., None]
        grad = torch.empty_like(logits)
        for part in _chunks(logits, ctx.chunk_size):
            p = _log_probs(logits[..., part], lse, 1.0).exp_()
            grad[..., part] = p.mul_(factor).masked_fill_(factor == 0, 0.0)
        at_target = (logits.gather(-1, index) - lse).exp() - 1  # p - 1 in one rounding, not in two
        grad.scatter_(-1, index, at_target.mul_(factor).masked_fill_(factor == 0, 0.0).to(grad.dtype))
        return grad, None, None, None


def _logsumexp(logits: Tensor, tau: float, chunk_size: int) -> Tensor:
    """log sum_v exp(logits[..., v] / tau) -> [B, T, 1] in the working precision."""
    parts = [_widened(logits[..., part]).div(tau).logsumexp(-1, keepdim=True) for part in _chunks(logits, chunk_size)]
    return torch.cat(parts, -1).logsumexp(-1, keepdim=True)


def _log_probs(part: Tensor, lse: Tensor, tau: float) -> Tensor:
    """part / tau - lse, a new tensor in the precision of lse (type promotion widens without a copy)."""
    return torch.sub(part, lse * tau).div_(tau) if tau != 1 else torch.sub(part, lse)


def _weight(valid: Tensor, num_tokens: Tensor | float | None, logits: Tensor) -> Tensor:
    """What a token's loss is multiplied with, [B, T]: 1 / num_tokens, or 0 where it is not valid."""
    weight = valid.to(torch.promote_types(logits.dtype, torch.float32))
    total = valid.sum() if num_tokens is None else torch.as_tensor(num_tokens, device=logits.device)
    return weight / total.clamp(min=1)


def _weighted_sum(loss: Tensor, weight: Tensor) -> Tensor:
    return (loss.masked_fill(weight == 0, 0.0) * weight).sum()  # NaN at invalid tokens stays there


def _token_chunks(x: Tensor) -> Iterator[slice]:
    """Parts of the tokens of x [B, T, H, D]."""
    tokens = max(1, _CHUNK_ELEMENTS * x.shape[1] // max(1, x.numel()))
    return (slice(i, i + tokens) for i in range(0, x.shape[1], tokens))


def _differences(student: Tensor, teacher: Tensor, valid: Tensor | None, part: slice) -> Tensor:
    """s - t of some tokens, a new tensor in the working precision; 0 where a token is not valid, whatever it holds."""
    difference = _widened(student[:, part]) - _widened(teacher[:, part])
    return difference if valid is None else difference.masked_fill_(~valid[:, part, None, None], 0.0)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _default_chunk(logits: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // max(1, logits.shape[:-1].numel()))


def _chunks(logits: Tensor, chunk_size: int) -> Iterator[slice]:
    return (slice(i, i + chunk_size) for i in range(0, logits.shape[-1], chunk_size))
