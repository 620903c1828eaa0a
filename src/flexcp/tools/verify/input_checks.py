"""Checks of what goes in: the same result twice, every token once, in order, at its position."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.testing.tolerance import relative_error
from flexcp.tools.verify.evidence import Evidence, not_observed
from flexcp.tools.verify.observe import Observation
from flexcp.tools.verify.verdict import Check


def check_repeatable(evidence: Evidence) -> Check:
    """A batch gives one loss and one set of logits, whatever the seed."""
    pairs = [("one process", evidence.alone, evidence.alone_again)]
    for rank, both in enumerate(zip(evidence.together, evidence.together_again, strict=True)):
        pairs.append((f"rank {rank}", *both))
    for who, one, _ in pairs:
        if one.loss is not None and not bool(one.loss.isfinite()):
            return Check(
                "repeatable",
                "failed",
                f"the loss of {who} is {float(one.loss)}",
                where=who,
                cause="a mean over no token, a division by zero, or numbers out of range",
                fix="verify a batch in which some tokens are scored; divide by the whole batch's "
                "count, which is not 0 where a rank's own may be",
            )
    worst, where = max(((_difference(a, b), who) for who, a, b in pairs), key=lambda x: x[0])
    if worst <= evidence.loss_precision:
        return Check("repeatable", "passed", "two runs agree", worst, evidence.loss_precision)
    return Check(
        "repeatable",
        "failed",
        f"two runs differ on {where}",
        worst,
        evidence.loss_precision,
        where,
        "something is random: dropout is active, or the step draws numbers or reads memory that "
        "was never written",
        "set dropout to 0 (model.eval() keeps gradients), and seed what the step draws",
    )


def _difference(a: Observation, b: Observation) -> float:
    errors = [0.0]
    for x, y in ((a.loss, b.loss), (a.logits, b.logits)):
        if x is not None and y is not None:
            errors.append(relative_error(x, y) if x.shape == y.shape else float("inf"))
    return max(errors)


def check_tokens(evidence: Evidence) -> Check:
    """Every token that one process has is on exactly one rank."""
    if evidence.places is None or evidence.places_alone is None:
        return not_observed("tokens", "no embedding of tokens was seen")
    total = evidence.tokens.numel()
    expected = torch.zeros(total, dtype=torch.int64)
    expected[evidence.places_alone[evidence.places_alone >= 0]] = 1
    held = torch.stack([_counts(rows, total) for rows in evidence.places])
    count = held.sum(0)
    wrong = (count != expected).nonzero().flatten()
    padding = sum(int((rows < 0).sum()) for rows in evidence.places)
    if wrong.numel() == 0:
        split = " + ".join(str(int(n)) for n in held.sum(1))
        more = f", and {padding} rows of padding" if padding else ""
        return Check("tokens", "passed", f"each on one rank: {split}{more}", 0, 0)
    lost, twice = count < expected, count > expected
    first = int(wrong[0])
    ranks = [r for r in range(evidence.size) if held[r, first]]
    cause = "the parts that the ranks cut out of the batch overlap, or leave a gap"
    if bool((held.sum(1) == total).all()) and evidence.size > 1:
        cause = "every rank has the whole sequence: the batch is not sharded"
    elif bool(lost.any()) and not bool(twice.any()):
        cause = "tokens fall between ranks: a length that the number of ranks does not divide"
    return Check(
        "tokens",
        "failed",
        f"{int(lost.sum())} tokens on no rank, {int(twice.sum())} on several",
        float(wrong.numel()),
        0,
        f"{evidence.name(first)} is on {f'ranks {ranks}' if ranks else 'no rank'}",
        cause,
        "cut the batch with plan.shard(x, 1) or flexcp.shard_batch, which take any length",
    )


def _counts(rows: Tensor, total: int) -> Tensor:
    return torch.bincount(rows[rows >= 0], minlength=total)


def check_order(evidence: Evidence) -> Check:
    """Attention takes a rank's rows for the tokens that they are."""
    if evidence.places is None:
        return not_observed("order", "no embedding of tokens was seen")
    seen = 0
    for rank, (one, rows) in enumerate(zip(evidence.together, evidence.places, strict=True)):
        for number, call in enumerate(one.calls):
            if call.positions is None or rows.numel() % max(call.q.shape[0], 1):
                continue
            actual = (rows % evidence.seq_len).view(call.q.shape[0], -1)
            if call.positions.shape[-1] != actual.shape[-1]:
                continue
            seen += 1
            off = ((call.positions != actual) & (rows >= 0).view_as(actual)).nonzero()
            if off.numel():
                b, i = off[0].tolist()
                taken = int(call.positions.expand_as(actual)[b, i])
                return Check(
                    "order",
                    "failed",
                    f"attention takes {off.shape[0]} rows of rank {rank} for other tokens",
                    float(off.shape[0]),
                    0,
                    f"rank {rank}, row {i}: it holds position {int(actual[b, i])}, attention call "
                    f"{number} takes it for {taken}",
                    "tokens were cut or reordered by another rule than the plan's layout",
                    "cut everything with the plan: plan.shard, plan.positions, flexcp.shard_batch",
                )
    if not seen:
        return not_observed("order", "flexcp.attention was not called")
    return Check(
        "order", "passed", f"attention finds all rows in their places, in {seen} calls", 0, 0
    )


def check_positions(evidence: Evidence) -> Check:
    """A token has the position on its rank that it has in one process."""
    if evidence.places is None or evidence.places_alone is None:
        return not_observed("positions", "no embedding of tokens was seen")
    keys = [k for k, x in evidence.alone.integers.items() if _counts_up(k, x, evidence)]
    for key in keys:
        failed = _compare_ids(evidence, key)
        if failed is not None:
            return failed
    return _compare_queries(evidence, keys)


def _counts_up(key: str, x: Tensor, evidence: Evidence) -> bool:
    """Whether these integers are positions: they rise by one from row to row, mostly."""
    if key == evidence.key or x.shape[-1] < 2 or evidence.tokens.numel() % x.shape[-1]:
        return False
    return bool(((x[..., 1:] - x[..., :-1]) == 1).double().mean() > 0.5)


def _compare_ids(evidence: Evidence, key: str) -> Check | None:
    assert evidence.places is not None
    whole = evidence.by_place(
        _per_row(evidence.alone.integers[key], evidence.places_alone), evidence.places_alone
    )
    if whole is None:
        return None
    for rank, (one, rows) in enumerate(zip(evidence.together, evidence.places, strict=True)):
        mine = _per_row(one.integers[key], rows) if key in one.integers else None
        if mine is None:
            continue
        off = ((mine != whole[rows.clamp(min=0)]) & (rows >= 0)).nonzero().flatten()
        if not off.numel():
            continue
        i, place = int(off[0]), int(rows[off[0]])
        cause = "position ids are not those of the whole sequence"
        width = one.integers[key].shape[-1]
        if _runs_through(evidence, key):
            cause = "positions don't restart in each document, as they do in one process"
        elif torch.equal(mine.view(-1, width)[0].long(), torch.arange(width)):
            cause = "positions are counted from 0 on every rank: they are local"
        return Check(
            "positions",
            "failed",
            f"{off.numel()} rows of rank {rank} have another position",
            float(off.numel()),
            0,
            f"{key}: {evidence.name(place)}, rank {rank}, row {i} has {int(mine[i])}, "
            f"one process {int(whole[place])}",
            cause,
            "pass the position_ids that flexcp.shard_batch returns, or plan.positions()",
        )
    return None


def _runs_through(evidence: Evidence, key: str) -> bool:
    """Whether positions are places in the whole sequence, on every rank: one may begin at 0."""
    assert evidence.places is not None
    for one, rows in zip(evidence.together, evidence.places, strict=True):
        mine = _per_row(one.integers[key], rows) if key in one.integers else None
        if mine is not None and not torch.equal(mine.long(), rows % evidence.seq_len):
            return False
    return True


def _per_row(x: Tensor, rows: Tensor | None) -> Tensor | None:
    """One per row of the batch, if they are given once for all of its elements."""
    if rows is None or not x.numel() or rows.numel() % x.numel():
        return None
    return x.flatten().repeat(rows.numel() // x.numel()).double()


def _compare_queries(evidence: Evidence, keys: list[str]) -> Check:
    """Before the first attention, q and k depend on a token and its position alone."""
    found = f"{len(keys)} inputs with positions agree" if keys else "no position ids were seen"
    alone, ranks = evidence.alone.calls, [one.calls for one in evidence.together]
    if not alone or not all(ranks):
        if keys:
            return Check("positions", "passed", found, 0, 0)
        return not_observed("positions", "neither position ids nor calls of attention were seen")
    worst, compared = 0.0, 0
    for part in ("q", "k"):
        whole = evidence.by_place(_by_row(getattr(alone[0], part)), evidence.places_alone)
        mine = evidence.gathered([_by_row(getattr(calls[0], part)) for calls in ranks])
        if whole is None or mine is None or whole.shape != mine.shape:
            continue
        compared += 1
        error = (whole - mine).abs().amax(1) / whole.nan_to_num().abs().max().clamp(min=1e-300)
        error = error.nan_to_num()
        worst = max(worst, float(error.max()))
        if float(error.max()) > evidence.precision:
            place = int((error > evidence.precision).nonzero()[0])
            return Check(
                "positions",
                "failed",
                f"{part} of the first attention differs where the tokens are the same",
                float(error.max()),
                evidence.precision,
                evidence.at(place),
                *_who_counts(evidence),
            )
    if not compared and not keys:
        return not_observed("positions", "neither position ids nor rows of q and k were seen")
    if compared:
        found = "q and k of the first attention agree"
    return Check("positions", "passed", found, worst, evidence.precision)


def _by_row(x: Tensor) -> Tensor | None:
    """[B * rows, H * D] of [B, H, rows, D]."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1) if x.dim() == 4 else None


_GIVE_POSITIONS = (
    "give the model position_ids of the whole sequence (flexcp.shard_batch makes them), and let it "
    "compute its position encoding from them"
)


def _who_counts(evidence: Evidence) -> tuple[str, str]:
    """Why q and k differ before the first attention, and what to do about it."""
    assert evidence.places is not None
    for rank, one in enumerate(evidence.together):
        rows = evidence.places[rank].numel() // evidence.tokens.shape[0]
        if rows in one.counted and rows not in evidence.alone.counted:
            return (
                f"positions are local: the model calls torch.arange({rows}) on rank {rank}, which "
                "counts its rows from 0",
                _GIVE_POSITIONS,
            )
    alone, ranks = evidence.alone.calls, [one.calls for one in evidence.together]
    whole = evidence.by_place(_by_row(alone[0].v), evidence.places_alone)
    mine = evidence.gathered([_by_row(calls[0].v) for calls in ranks])
    if whole is not None and mine is not None and whole.shape == mine.shape:
        error = (whole - mine).abs().nan_to_num().max() / whole.nan_to_num().abs().max()
        if float(error) > evidence.precision:  # rotary positions leave values alone
            return (
                "something before the first attention depends on which tokens share a rank: a "
                "mean, a shift or a convolution over the sequence, or positions added to "
                "embeddings",
                "compute what mixes tokens over all ranks (sum and count with an all-reduce), or "
                "on the whole sequence before it is sharded; if positions are added to "
                "embeddings, pass the position_ids that flexcp.shard_batch makes",
            )
    cause = "the position encoding of a rank's rows is not that of the whole sequence"
    return cause, _GIVE_POSITIONS
