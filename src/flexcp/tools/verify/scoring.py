"""Checks of the loss: the same labels, the same weight for every token, the same sum.

The gradient of a cross entropy by its logits is weight × (probabilities - one at the label). So the
gradients of logits tell which label each token is scored against, and with which weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexcp.tools.verify.evidence import Evidence, not_observed
from flexcp.tools.verify.observe import Observation
from flexcp.tools.verify.verdict import Check

_SAME = "every token weighs the same as in one process"

_FIX = (
    "shift while the whole sequence is there: flexcp.shard_batch does, and the loss after it must "
    "not shift again"
)


def check_labels(evidence: Evidence) -> Check:
    """Every token is scored against the label of one process, or not at all."""
    both = _gradients(evidence, evidence.alone, evidence.together)
    if both is None:
        return not_observed("labels", "gradients of the logits were not seen")
    whole, mine = both
    scored, found = whole.abs().amax(1) > 0, mine.abs().amax(1) > 0
    right, label = whole.argmin(1), mine.argmin(1)
    wrong = (scored != found) | (scored & found & (right != label))
    if not bool(wrong.any()):
        arbitrary = _scored_padding(evidence, scored)
        if arbitrary.numel():
            return Check(
                "labels",
                "failed",
                f"{arbitrary.numel()} tokens of padding are scored",
                float(arbitrary.numel()),
                0,
                evidence.at(int(arbitrary[0])),
                "padding is scored, but sees nothing, so that what it computes is arbitrary: with "
                "padding on the left, the first token is predicted from padding",
                "set the labels of padding and of the first token after it to -100",
            )
        text = f"{int(scored.sum())} tokens scored against the same labels"
        return Check("labels", "passed", text, 0, 0)
    place = int(wrong.nonzero()[0])
    missing, extra = scored & ~found, found & ~scored
    other = wrong & scored & found

    def says(ok: Tensor, it: Tensor, at: int) -> str:
        return f"label {int(it[at])}" if bool(ok[at]) else "no label"

    return Check(
        "labels",
        "failed",
        f"{int(other.sum())} tokens have another label, {int(missing.sum())} none, "
        f"{int(extra.sum())} one too many",
        float(wrong.sum()),
        0,
        f"{evidence.at(place)} has {says(found, label, place)}, one process "
        f"{says(scored, right, place)}",
        _label_cause(evidence, wrong, found, label, scored),
        _FIX,
    )


def _scored_padding(evidence: Evidence, scored: Tensor) -> Tensor:
    """int64 [n] Places of padding that have a label, and other logits than in one process."""
    whole = evidence.by_place(evidence.alone.logits, evidence.places_alone)
    mine = evidence.gathered([one.logits for one in evidence.together])
    if whole is None or mine is None:
        return torch.zeros(0, dtype=torch.int64)
    scale = whole.nan_to_num().abs().max()
    differs = (whole - mine).abs().nan_to_num().amax(1) > evidence.precision * scale
    return (scored & evidence.is_padding & differs).nonzero().flatten()


def _label_cause(
    evidence: Evidence, wrong: Tensor, found: Tensor, label: Tensor, scored: Tensor
) -> str:
    """What would explain every wrong label."""
    assert evidence.places is not None
    tokens, total = evidence.tokens.flatten(), evidence.tokens.numel()
    at = wrong.nonzero().flatten()
    # on its rank, which place follows each place: where a shift after sharding looks
    after = torch.full((total,), -1)
    for rows in evidence.places:
        one, next_one = rows[:-1], rows[1:]
        same = (one >= 0) & (one // evidence.seq_len == next_one // evidence.seq_len)
        after[one[same]] = next_one[same]
    border = after != torch.arange(1, total + 1)
    taken = torch.where(after >= 0, tokens[after.clamp(min=0)], -1)
    if bool(border[at].all()) and bool(((label == taken) | ~found)[at].all()):
        return (
            "labels are shifted after sharding: the label of a rank's last row, which is on "
            "another rank, is lost"
        )
    if bool((found & ~scored)[at].all()):
        return (
            "tokens without a label are scored: the ends of documents, padding, or ignored labels"
        )
    for steps, cause in (
        (0, "labels are not shifted: a token is scored against itself"),
        (2, "labels are shifted twice: before sharding, and again in the model's own loss"),
    ):
        there = (at + steps).clamp(max=total - 1)
        fits = (label[at] == tokens[there]) | ~found[at] | (at + steps >= total)
        if int(fits.sum()) >= 0.9 * at.numel() and bool(found[at].any()):
            return cause
    if bool((scored & ~found)[at].all()):
        return "labels are lost: more of them are ignored than in one process"
    return "labels are cut from the batch by another rule than tokens"


def check_scaling(evidence: Evidence) -> Check:
    """Every token weighs the same as in one process, also if ranks score different numbers."""
    alone, together = evidence.uneven_alone, evidence.uneven_together
    if alone is None:
        alone, together = evidence.alone, evidence.together
    both = _gradients(evidence, alone, together)
    if both is None:
        return not_observed("scaling", "gradients of the logits were not seen")
    whole, mine = both
    owners, size = evidence.owners(), evidence.size
    scored = whole.abs().amax(1) > 0
    weights, counts = [], []
    for rank in range(size):
        own = (owners == rank) & scored
        square = float((whole[own] ** 2).sum())
        weights.append(float((whole[own] * mine[own]).sum()) / square if square else float("nan"))
        counts.append(int(own.sum()))
    known = [(r, w) for r, w in enumerate(weights) if w == w]
    if not known:
        return not_observed("scaling", "no token is scored")
    expected = {"summed": [1.0], "averaged": [float(size)]}.get(
        evidence.gradients, [1.0, float(size)]
    )
    limit = evidence.loss_precision
    best = min(expected, key=lambda e: max(abs(w / e - 1) for _, w in known))
    off = [abs(w / best - 1) for _, w in known]
    if max(off) <= limit:
        return Check(
            "scaling", "passed", _SAME if best == 1 else f"{_SAME}, times {best:g}", max(off), limit
        )
    rank, weight = known[off.index(max(off))]
    return Check(
        "scaling",
        "failed",
        "a token of rank {} weighs {} of its share instead of {}".format(
            rank, *apart(weight, best)
        ),
        max(off),
        limit,
        f"rank {rank}, which scores {counts[rank]} of {sum(counts)} tokens"
        + ("" if evidence.uneven_alone is None else _UNEVEN),
        _weight_cause(evidence, dict(known), counts, best),
        "divide the sum of a rank's losses by the number of scored tokens of the whole batch: "
        "flexcp.cross_entropy(logits, labels, num_scored) with what flexcp.shard_batch returns; if "
        'the trainer averages gradients, pass gradients="averaged" there and here',
    )


_UNEVEN = " in a second run, where more labels are ignored so that ranks score unequal numbers"


def _weight_cause(
    evidence: Evidence, weights: dict[int, float], counts: Sequence[int], expected: float
) -> str:
    total, size, limit = sum(counts), evidence.size, evidence.loss_precision

    def all_are(expectation: Sequence[float]) -> bool:
        return all(abs(w / expectation[r] - 1) <= 10 * limit for r, w in weights.items())

    own = [total / n if n else 1.0 for n in counts]
    if all_are(own) or all_are([x / size for x in own]):
        return "the loss is a mean over each rank's own tokens: ranks with fewer weigh more"
    if all_are([float(size)] * size):
        return (
            "the loss is scaled for gradients that are averaged over ranks, but they are "
            f"{evidence.gradients}"
        )
    if all_are([1.0 if expected != 1.0 else 1 / size] * size):
        return "the loss is divided by the number of ranks once too often"
    if len({round(w, 6) for w in weights.values()}) == 1:
        return "the loss of every rank has the same wrong factor"
    return "ranks weigh their tokens differently"


def check_loss(evidence: Evidence) -> Check:
    """The losses of the ranks make up that of one process."""
    worst, text = 0.0, ""
    runs = [(evidence.alone, evidence.together)]
    if evidence.uneven_alone is not None:
        runs.append((evidence.uneven_alone, evidence.uneven_together))
    for alone, together in runs:
        assert alone.loss is not None
        expected = float(alone.loss)
        losses = [float(one.loss) for one in together if one.loss is not None]
        error = _loss_error(losses, expected, evidence.losses)
        text = text or f"{_combined(losses, evidence.losses):.6g}, one process {expected:.6g}"
        if not error <= evidence.loss_precision:  # NaN is no agreement
            fits = [
                w
                for w in ("summed", "averaged", "reduced")
                if _loss_error(losses, expected, w) <= evidence.loss_precision
            ]
            cause = "the losses of the ranks don't make up that of one process"
            if _are_means(losses, expected, evidence.losses):
                cause = (
                    "each rank's loss is about that of one process: most likely a mean over the "
                    "rank's own tokens"
                )
            if fits:
                cause = f"the losses of the ranks are to be {fits[0]}, not {evidence.losses}"
            return Check(
                "loss",
                "failed",
                "{}: {}, one process {}".format(
                    evidence.losses, *apart(_combined(losses, evidence.losses), expected)
                ),
                error,
                evidence.loss_precision,
                "ranks have " + ", ".join(f"{x:.6g}" for x in losses),
                cause,
                f'pass losses="{fits[0]}" if that is meant'
                if fits
                else "return the sum of the rank's losses, divided by the whole batch's count",
            )
        worst = max(worst, error)
    return Check("loss", "passed", f"{evidence.losses}: {text}", worst, evidence.loss_precision)


def _are_means(losses: Sequence[float], expected: float, way: str) -> bool:
    """Whether losses that are to be summed are as large as their sum should be, each of them."""
    close = all(abs(x - expected) < 0.2 * abs(expected) for x in losses)
    return way == "summed" and len(losses) > 1 and close


def apart(a: float, b: float) -> tuple[str, str]:
    """Two figures with six digits, or with as many as it takes to tell them apart.

    >>> apart(0.5, 0.25), apart(1.0, 1.00000001)
    (('0.5', '0.25'), ('1', '1.00000001'))
    """
    for digits in range(6, 18):
        texts = (f"{a:.{digits}g}", f"{b:.{digits}g}")
        if texts[0] != texts[1]:
            break
    return texts


def _combined(losses: Sequence[float], way: str) -> float:
    return sum(losses) if way == "summed" else sum(losses) / len(losses)


def _loss_error(losses: Sequence[float], expected: float, way: str) -> float:
    scale = max(abs(expected), 1e-300)
    if way == "reduced":
        return max(abs(x - expected) for x in losses) / scale
    return abs(_combined(losses, way) - expected) / scale


def _gradients(
    evidence: Evidence, alone: Observation, together: Sequence[Observation]
) -> tuple[Tensor, Tensor] | None:
    """Of logits, by place; a rank whose loss does not depend on its logits has zeros."""
    whole = evidence.by_place(alone.logits_gradient, evidence.places_alone)
    if whole is None or all(one.logits_gradient is None for one in together):
        return None
    mine = evidence.gathered(
        [
            one.logits_gradient
            if one.logits_gradient is not None or one.logits is None
            else torch.zeros_like(one.logits)
            for one in together
        ]
    )
    return None if mine is None else (whole.nan_to_num(), mine.nan_to_num())
