"""Checks of who sees whom: a token is changed, and exactly those who may see it change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexcp.tools.verify.evidence import Evidence, Probe, not_observed
from flexcp.tools.verify.receptive_field import ReceptiveField
from flexcp.tools.verify.verdict import Check

_CLEARLY = 10.0
"""An influence counts as one if it is so many times larger than what rounding explains."""


def choose_places(
    tokens: Tensor, owners: Tensor, field: ReceptiveField | None, count: int, is_padding: Tensor
) -> list[int]:
    """Tokens to change: the first, and those before borders of ranks and of documents.

    Args:
        tokens: [B, S]
        owners: int64 [B * S] The rank of each token.
        field: What the mask allows, if it is known.
        count: How many.
        is_padding: bool [B * S] What is no token.

    >>> owners = torch.tensor([0, 0, 0, 1, 1, 1])
    >>> choose_places(torch.zeros(1, 6), owners, None, 3, torch.zeros(6).bool())
    [0, 2, 3]
    """
    seq_len = tokens.shape[1]
    wanted = (~is_padding).nonzero().flatten().tolist()[:1]
    last = torch.arange(tokens.numel()) % seq_len == seq_len - 1
    change = torch.zeros(tokens.numel(), dtype=torch.bool)
    change[:-1] = owners[1:] != owners[:-1]
    wanted += (change & ~last).nonzero().flatten().tolist()[:1]
    if field is not None:
        # the last token of a document: whoever is next must not see it
        apart = torch.zeros(tokens.numel(), dtype=torch.bool)
        apart[:-1] = field.documents[1:] != field.documents[:-1]
        wanted += (apart & ~last).nonzero().flatten().tolist()[:2]
        wanted += _least_seen(field, tokens.numel(), seq_len)
    wanted += [seq_len // 3, tokens.numel() - seq_len // 2 - 1, seq_len // 2]
    return [p for p in dict.fromkeys(wanted) if owners[p] >= 0 and not is_padding[p]][:count]


def _least_seen(field: ReceptiveField, total: int, seq_len: int) -> list[int]:
    """An early token that some later ones of its document may not see: beyond a window."""
    for place in range(1, total, max(1, seq_len // 7)):
        later = torch.arange(total) > place
        if bool((field.component(place) & later & ~field.from_place(place)).any()):
            return [place]
    return []


def check_reach(evidence: Evidence) -> Check:
    """Whoever sees a token in one process sees it on the ranks."""
    if not evidence.probes:
        return not_observed("reach", "the logits of single tokens were not seen")
    noise = evidence.noise
    owners = evidence.owners()
    crossed = 0
    for probe in evidence.probes:
        masked = _masked_in_one_process(evidence, probe)
        if masked is not None:
            return masked
        expected = (probe.alone > _CLEARLY * noise) & ~evidence.is_padding
        missed = expected & (probe.together <= noise)
        home = owners == owners[probe.place]
        crossed += int((expected & ~home).sum())
        if not bool(missed.any()):
            continue
        elsewhere = any(
            bool((p.together > noise)[owners != owners[p.place]].any()) for p in evidence.probes
        )
        cause = "keys and values of other ranks don't arrive, or a mask hides what it should not"
        if not elsewhere and not bool((missed & home).any()):
            cause = f"each rank attends to its own rows only{_called(evidence)}"
        return _unnoticed(
            missed,
            f"{int(missed.sum())} of {int(expected.sum())} tokens miss a change that they see in "
            "one process",
            evidence.at(probe.place),
            evidence.at(int(missed.nonzero()[0])),
            (cause, "call flexcp.attention(q, k, v, plan) with the rank's rows, for every layer"),
        )
    found = f"{len(evidence.probes)} tokens changed, seen by {crossed} on other ranks"
    return Check("reach", "passed", found, 0, 0)


def _masked_in_one_process(evidence: Evidence, probe: Probe) -> Check | None:
    """A failed check if one process already masks a token that the given mask shows directly.

    However small a weight is, it moves some bit of the logits; only what is masked moves none.
    """
    if evidence.receptive_field is None:
        return None
    direct = evidence.receptive_field.directly_from(probe.place) & ~evidence.is_padding
    masked = direct & (probe.alone == 0)
    if not bool(masked.any()):
        return None
    found = (
        f"{int(masked.sum())} of {int(direct.sum())} tokens don't see one that the mask shows "
        "them, in one process already"
    )
    changed, unmoved = evidence.name(probe.place), evidence.name(int(masked.nonzero()[0]))
    cause = (
        "the model applies a narrower mask than the one that was given, or its attention has no "
        "effect: weights are zero, or too small to move a bit"
    )
    fix = "pass the mask that the model applies; verify with weights that are not zero"
    return _unnoticed(masked, found, changed, unmoved, (cause, fix))


def _unnoticed(
    missed: Tensor, found: str, changed: str, unmoved: str, cause_and_fix: tuple[str, str]
) -> Check:
    """A failed check: tokens, bool [B * S], that a change should have moved, and the first one."""
    where = f"the token at {changed} was changed; {unmoved}, did not notice"
    return Check("reach", "failed", found, float(missed.sum()), 0, where, *cause_and_fix)


def _called(evidence: Evidence) -> str:
    kinds = {c.function for one in evidence.together for c in one.calls} - {"attention"}
    return f": {sorted(kinds)[0]} is called on the shard" if kinds else ""


def check_leakage(evidence: Evidence) -> Check:
    """Nobody sees a token who may not."""
    if not evidence.probes:
        return not_observed("leakage", "the logits of single tokens were not seen")
    noise = evidence.noise
    hidden = 0
    for probe in evidence.probes:
        allowed = probe.alone > noise
        if evidence.receptive_field is not None:
            allowed = evidence.receptive_field.from_place(probe.place)
            leaked = ~allowed & (probe.alone > noise) & ~evidence.is_padding
            if bool(leaked.any()):
                return _leak(evidence, probe, leaked, "in one process already")
        leaked = ~allowed & (probe.together > noise) & ~evidence.is_padding
        if bool(leaked.any()):
            return _leak(evidence, probe, leaked, "on the ranks")
        hidden += int((~allowed).sum())
    against = "the mask" if evidence.receptive_field is not None else "one process"
    found = f"{hidden} tokens that may not see a change, by {against}, don't"
    return Check("leakage", "passed", found, 0, 0)


def _leak(evidence: Evidence, probe: Probe, leaked: Tensor, who: str) -> Check:
    first = int(leaked.nonzero()[0])
    place, seq_len, field = probe.place, evidence.seq_len, evidence.receptive_field
    others = torch.arange(leaked.numel())
    if bool((leaked & (others // seq_len != place // seq_len)).any()):
        kind, cause = "batch elements", "batch elements see each other"
    elif bool((leaked & (others < place)).any()):
        kind, cause = "later tokens", "tokens see later ones: the causal mask is dropped"
    elif field is not None and bool((leaked & ~field.component(place)).any()):
        kind, cause = "documents", "documents see each other: the document mask is dropped"
        if evidence.alone.calls and who == "on the ranks":
            cause += ", or made from a shard's own positions"
    else:
        kind, cause = "hidden tokens", "a limit of the mask (window, chunk) is dropped"
    fix = (
        "give the mask of the whole sequence to flexcp.make_plan, as masks.causal() & "
        "masks.document(...), and attend with flexcp.attention over that plan"
    )
    if who != "on the ranks":
        cause += ", also without sharding: the model does not apply the mask that was given"
        fix = "pass the mask that the model is to apply, or make the model apply this one"
    where = f"the token at {evidence.at(place)} was changed; {evidence.at(first)}, noticed"
    return Check(
        "leakage",
        "failed",
        f"{int(leaked.sum())} tokens see {kind} that they may not, {who}",
        float(leaked.sum()),
        0,
        where,
        cause,
        fix,
    )


def check_logits(evidence: Evidence) -> Check:
    """The logits of every token are those of one process."""
    whole = evidence.by_place(evidence.alone.logits, evidence.places_alone)
    mine = evidence.gathered([one.logits for one in evidence.together])
    if whole is None or mine is None:
        return not_observed("logits", "the model's logits were not seen, or not one per token")
    error = (whole - mine).abs().amax(1) / whole.nan_to_num().abs().max().clamp(min=1e-300)
    missing = whole.isnan().any(1) & mine.isnan().any(1)
    error = error.masked_fill(missing | evidence.is_padding, 0).nan_to_num(nan=torch.inf)
    worst = float(error.max())
    if worst <= evidence.precision:
        found = f"{whole.shape[0]} × {whole.shape[1]} agree"
        return Check("logits", "passed", found, worst, evidence.precision)
    off = error > evidence.precision
    place = int(off.nonzero()[0])
    layer = _first_layer(evidence)
    return Check(
        "logits",
        "failed",
        f"those of {int(off.sum())} tokens differ",
        worst,
        evidence.precision,
        f"{evidence.at(place)}" + (f"; {layer}" if layer else ""),
        "tokens see the right ones, but with other weights: scale, score_mod (by local positions), "
        "sinks or soft cap of attention differ, or a layer mixes tokens of a rank",
        "compare the arguments of attention on the ranks with those of one process",
    )


def _first_layer(evidence: Evidence) -> str:
    """The first attention whose output differs, if they can be lined up."""
    alone = evidence.alone.calls
    ranks: Sequence[int] = [len(one.calls) for one in evidence.together]
    if not alone or any(n != len(alone) for n in ranks):
        return ""
    for number, call in enumerate(alone):
        if call.out.dim() != 4:
            return ""
        whole = evidence.by_place(
            call.out.transpose(1, 2).flatten(2).flatten(0, 1), evidence.places_alone
        )
        mine = evidence.gathered(
            [
                one.calls[number].out.transpose(1, 2).flatten(2).flatten(0, 1)
                for one in evidence.together
            ]
        )
        if whole is None or mine is None or whole.shape != mine.shape:
            return ""
        error = (whole - mine).abs().nan_to_num().max() / whole.nan_to_num().abs().max()
        if float(error) > evidence.precision:
            return f"first in attention call {number}"
    return "attention itself agrees in every layer"
