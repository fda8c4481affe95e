"""Held-out perplexity, accuracy and KL, or how far maps of images are from the teacher's; and the distance of each
mixer's output from softmax's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from linearize_kernels.hf.attention_hooks import evaluating

from ..data.batches import Batch, Samples, blank, collate, is_dense, is_numbers, real_tokens, targets
from ..data.kinds import has_head
from ..errors import Exit, LinearizeError
from ..train.chunked_head import logits_of, predictions_of, stretches
from ..train.losses import IGNORED, cross_entropy, row_error
from ..train.predictions import divergence
from ..train.stages import Listener, listen
from ..train.student import Student

SUMS = 9  # figures that an evaluation adds up, in `sums_of`
NEAR = 0.01  # nats, and of the teacher's perplexity: a student so near before any training has little to learn
CHANCE = 0.5  # of the vocabulary's size: a random model has about all of it as perplexity


def check_finite(who: str, *figures: float | None) -> None:
    """Raise LinearizeError (exit 6) where a model's figures are NaN: nothing can be compared with it, or learned from
    it."""
    if any(figure is not None and math.isnan(figure) for figure in figures):
        raise LinearizeError(
            f"{who} predicts no finite numbers on this text. Try float32; if it does the same there, its weights are "
            "damaged: download it, or train it, again",
            Exit.CHECK_FAILED,
        )


def random_teacher_warning(ppl: float, words: int) -> str:
    """A warning about a teacher whose perplexity is near that of guessing among the `words` of its vocabulary. It is
    empty for any other teacher."""
    if ppl < CHANCE * words:
        return ""
    return (
        f"warning: the teacher's perplexity {ppl:,.0f} is near its vocabulary of {words:,} tokens: on this text it is "
        "nearly random, and a student can learn nothing from it. Check the model, its tokenizer and the text"
    )


def batches(samples: Samples, size: int, max_tokens: int, accelerator: Accelerator) -> Iterator[Batch]:
    """This process's share of the first samples, in order, `size` at a time, up to max_tokens tokens over all.

    Every process gets as many batches of as many samples, for shards are gathered together: what is missing is a sample
    without tokens.
    """
    count = sample_count(samples, max_tokens)
    for start in range(0, count, size * accelerator.num_processes):
        own = start + size * accelerator.process_index
        items = [samples[i] for i in range(own, min(own + size, count))]
        missing = min(size, count - start) - len(items)
        yield collate([*items, *[blank(samples[0])] * missing], accelerator.device)


def sample_count(samples: Samples, max_tokens: int) -> int:
    """How many samples an evaluation of at most `max_tokens` tokens reads, at least one."""
    return max(1, min(len(samples), max_tokens // samples.seq_len))


class Score(NamedTuple):
    """exp of the mean loss in nats, at most 1e304, the share of targets that the model puts first, and the mean
    KL(teacher, student) in nats a target; None for the teacher's own.

    Of maps of images there are no targets: `agreement` is the share of patches or pixels where student and teacher put
    the same class first, with `kl` in nats each; of numbers `error` is ||s - t||^2 / ||t||^2, the mean over images. A
    model without a head has the error of its last hidden states, the mean over rows. `teacher_ppl` is the teacher's of
    the same targets, which is another in rows of another length.
    """

    ppl: float | None
    accuracy: float | None
    kl: float | None = None
    teacher_ppl: float | None = None
    agreement: float | None = None
    error: float | None = None


def note_of_little(student: Score, teacher: Score) -> str:
    """A note where a student is near its teacher before any training; empty where it is not."""
    if student.ppl is None or teacher.ppl is None or student.kl is None:
        return ""
    ratio = student.ppl / teacher.ppl
    if ratio > 1 + NEAR or student.kl > NEAR:
        return ""
    return (
        f"note: before any training the student has {ratio:.3f} times its teacher's perplexity, with a KL of "
        f"{student.kl:.4f} nats. On this text it is this near as it is, so distilling can show little"
    )


def note_farther(stages: Sequence[Mapping[str, Any]]) -> str:
    """A note where a student ends farther from its teacher than it was as converted, by the `stages` of a report; empty
    where it is nearer, and where KL was not measured before and after."""
    kl = [row["kl"] for row in stages if row.get("kl") is not None]
    if len(kl) < 2 or stages[0]["name"] != "converted" or kl[-1] <= (1 + NEAR) * kl[0]:
        return ""
    return (
        f"note: training took the student away from its teacher: its KL is {kl[-1]:.4f} nats, and was {kl[0]:.4f} as "
        "converted. Learning rates were too high for a student that begins so near: try a tenth of them"
    )


@torch.no_grad()
def score(model: Any, data: Iterator[Batch], accelerator: Accelerator, student: Student | None = None) -> Score | None:
    """Over every target of every process; None where there is none, and for a model without a head alone.

    With a `student`, whose model this is, its teacher, if it has one, reads the same.
    """
    student = student if student is not None and student.has_teacher else None
    sums = torch.zeros(SUMS, dtype=torch.float64, device=accelerator.device)
    with evaluating(model):
        for batch in data:
            sums += sums_of(model, batch, accelerator.autocast, student)
    return _score_of(sums, accelerator, student is not None)


@torch.no_grad()
def sums_of(model: Any, batch: Batch, autocast: Callable[[], Any], student: Student | None = None) -> Tensor:
    """Over the targets of a batch: the sum of losses, hits, the sum of KL from the teacher of `student`, how many there
    are, and the sum of the teacher's losses. Of dense maps KL and agreement, each the sum of means over an image, and
    how many images there are; then the sum of errors of numbers, and of how many. float64 [SUMS]. Of long rows the
    logits are made some tokens at a time."""
    wanted = targets(batch)
    sums = torch.zeros(SUMS, dtype=torch.float64, device=wanted.device)
    parts = stretches(model, batch)
    read = logits_of(model, batch, autocast, parts)
    theirs = None if student is None else predictions_of(student, batch, autocast, parts)
    for part in parts:
        logits, own = read(part), wanted[:, part]
        if not has_head(model):
            if student is not None and theirs is not None:
                sums[-2] += feature_error(logits, theirs(part), batch).double()
                sums[-1] += batch["valid"].any(1).sum()
            continue
        if "pixel_values" in batch and is_dense(logits, batch):
            if student is not None and theirs is not None:
                sums += _dense_sums(student, logits, theirs(part), batch["valid"])
            continue
        asked = own != IGNORED
        loss, hits = cross_entropy(logits, own, num_tokens=1.0), (logits.argmax(-1) == own).sum()
        kl = beside = loss.new_zeros(())
        if student is not None and theirs is not None:
            other = theirs(part)
            kl = divergence(student, logits, other, asked, num_tokens=1.0)
            beside = cross_entropy(other, own, num_tokens=1.0)
        sums[:5] += torch.stack([one.double() for one in (loss, hits, kl, asked.sum(), beside)])
    return sums


def feature_error(ours: Tensor, theirs: Any, batch: Batch) -> Tensor:
    """The sum over rows of the relative error of hidden states [B,T,hidden] at real tokens."""
    real, valid = real_tokens(batch), batch["valid"].any(1)
    if real is not None:
        ours, theirs = (x.masked_fill(~real[..., None], 0.0) for x in (ours, theirs))
    return row_error(ours.flatten(1), theirs.flatten(1), valid, 1.0)


def _dense_sums(student: Student, ours: Tensor, theirs: Any, valid: Tensor) -> Tensor:
    """The sums of a batch's maps."""
    found = divergence(student, ours, theirs, valid, num_tokens=1.0).double()
    count, none = valid.sum().double(), found.new_zeros(())
    if is_numbers(ours):
        return torch.stack([none, none, none, none, none, none, none, found, count])
    same = agreed(ours, theirs, valid).double()
    return torch.stack([none, none, found, none, none, same, count, none, none])


def agreed(ours: Tensor, theirs: Tensor, valid: Tensor) -> Tensor:
    """The share of an image's N parts where two distributions [B,N,K] have the same likeliest class, summed over the
    images that are valid [B,1]."""
    return ((ours.argmax(-1) == theirs.argmax(-1)).double().mean(1) * valid[:, 0]).sum()


def _score_of(sums: Tensor, accelerator: Accelerator, compared: bool) -> Score | None:
    """From a process's sums, as `sums_of` has them."""
    loss_sum, hits_sum, kl_sum, total, beside, same, mapped, error, numbered = accelerator.reduce(sums, "sum").tolist()
    if mapped:
        return Score(None, None, kl_sum / mapped, agreement=same / mapped)
    if numbered:
        return Score(None, None, error=error / numbered)
    if not total:
        return None
    ppl, teacher_ppl = (math.exp(min(one / total, 700.0)) for one in (loss_sum, beside))
    return Score(ppl, hits_sum / total, *((kl_sum / total, teacher_ppl) if compared else ()))


class Fidelity(Listener):
    """Sums squared errors, powers and cosines of each attention module's output, student against teacher."""

    own_call = True

    def __init__(self, student: Student) -> None:
        super().__init__(student)
        self.sums: dict[int, Tensor] = {}
        self.real: Tensor | None = None

    @torch.no_grad()
    def compare(self, mixer: Any, y: Tensor, target: Tensor) -> None:
        kept = torch.ones(y.shape[:-1], dtype=torch.bool, device=y.device) if self.real is None else self.real
        ours, theirs = y[kept].float(), target[kept].float()
        cosine = torch.cosine_similarity(ours, theirs, dim=-1).sum()
        sums = torch.stack([(ours - theirs).square().sum(), theirs.square().sum(), cosine, kept.sum()])
        self.sums[mixer.site.layer] = self.sums.get(mixer.site.layer, 0) + sums


def layer_fidelity(student: Student, data: Iterator[Batch], accelerator: Accelerator) -> list[dict[str, float]]:
    """Per layer, on the teacher's hidden states: relative squared error and mean cosine of the module's output."""
    listener = Fidelity(student)
    for batch in data:
        listener.real = real_tokens(batch)
        with accelerator.autocast():
            listen(student, listener, batch)
    rows = []
    for layer, sums in sorted(listener.sums.items()):
        error, power, cosine, count = accelerator.reduce(sums, "sum").tolist()
        rows.append({"layer": layer, "relative_mse": error / power, "cosine": cosine / count})
    return rows
