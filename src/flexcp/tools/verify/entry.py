"""verify: one process, N ranks, and what differs between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from traceback import walk_tb
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.batch import document_ids
from flexcp.comm.rank_errors import RankError
from flexcp.errors import FlexCPError, check_flags
from flexcp.layout import Layout
from flexcp.masks import Mask, MaskMod, causal, document
from flexcp.tools.verify.evidence import Convention, Evidence, Probe
from flexcp.tools.verify.gradients import check_gradients
from flexcp.tools.verify.hf import Transformers, is_transformers, with_documents
from flexcp.tools.verify.input_checks import (
    check_order,
    check_positions,
    check_repeatable,
    check_tokens,
)
from flexcp.tools.verify.models import build_model, name_of
from flexcp.tools.verify.observe import Observation
from flexcp.tools.verify.plain import Plain
from flexcp.tools.verify.probes import Numbering, perturbed, tokens_name, unevenly_scored
from flexcp.tools.verify.receptive_field import ReceptiveField
from flexcp.tools.verify.requests import (
    require,
    require_kinds,
    require_sizes,
    require_used,
    whole_batch,
)
from flexcp.tools.verify.run import Job, Parallel, Single, StepRunner
from flexcp.tools.verify.scoring import check_labels, check_loss, check_scaling
from flexcp.tools.verify.verdict import Check, Verdict
from flexcp.tools.verify.visibility import check_leakage, check_logits, check_reach, choose_places

CHECKS = (
    "runs",
    "repeatable",
    "tokens",
    "order",
    "positions",
    "reach",
    "leakage",
    "logits",
    "labels",
    "scaling",
    "loss",
    "gradients",
)
"""All checks, in the order in which one mistake leads to the next."""

_PROBES = 5
"""Tokens that are changed, one after the other."""


def verify(
    model: Any,
    batch: Mapping[str, Any] | None = None,
    *,
    parallel: Parallel | None = None,
    single: Single | None = None,
    mask: Mask | MaskMod | Mapping[str, Mask | MaskMod] | None = None,
    documents: Tensor | Sequence[int] | None = None,
    restart_positions: bool = False,
    world_size: int | tuple[int, ...] = 2,
    ranks: Literal["simulated", "gloo"] = "simulated",
    gradients: Convention = "summed",
    losses: Convention | None = None,
    seq_len: int = 97,
    batch_size: int = 1,
    dtype: torch.dtype | Literal["auto"] | None = "auto",
    layout: str | Layout = "auto",
    schedule: str = "auto",
    seed: int = 0,
    timeout: float = 60.0,
) -> Verdict:
    """Runs a model in one process and on ranks, and says what differs first, and why.

    It compares the loss, the logits and every parameter's gradient, and finds out what the ranks
    really compute: which tokens they have, at which positions, what these see (by changing single
    tokens), what they are scored against and with which weight. Nothing in the code under test has
    to cooperate.

    Args:
        model: A function without arguments that builds the model, or its name as
            "package.module:function"; a model; or, for Transformers, a model type such as "qwen3"
            (then a tiny random model is made), a configuration, or a folder with one. Small is
            enough: mistakes don't depend on size.
        batch: The whole batch, by name; random tokens and labels by default.
        parallel: Your code for one rank: (model, whole batch, mesh) -> loss, or (loss, ...), or
            something with `.loss`. It may run the backward pass itself. By default, what flexcp
            does with a model that maps tokens to logits.
        single: Your code for one process: (model, batch) -> loss. By default `parallel` on one
            rank.
        mask: What may attend, or a dict of the masks of all layers. With it, what tokens see is
            checked against the mask; without, against one process. For a plain model without
            `parallel`, it is also the mask that attention gets.
        documents: Ids [S] or [B, S], or lengths, of packed documents, for a model without
            `parallel`; attention is causal within each, unless a mask says otherwise.
        restart_positions: Whether positions count from 0 in each document, likewise.
        world_size: How many ranks, or the shape of a mesh such as (2, 2), for a step that uses one.
        ranks: "simulated" ranks take turns in this process; "gloo" ranks are processes, as code
            that uses torch.distributed needs them.
        gradients: What the trainer does with the ranks' gradients after the step: they are
            "summed", "averaged" (as DDP and FSDP do), or were "reduced" within the step.
        losses: What makes the ranks' losses the loss of one process; as `gradients` by default.
        seq_len: Tokens of the random batch.
        batch_size: Sequences of the random batch.
        dtype: The type to convert the model to; None leaves it. "auto" is float64, where nothing
            hides in rounding, but float32 for Transformers, whose models go through it anyway.
        layout: For a model without `parallel`, as in `make_plan`.
        schedule: As for `flexcp.make_plan`.
        seed: For weights, tokens, and whatever is random in a step.
        timeout: Seconds that a gloo rank waits for another.

    >>> import flexcp
    >>> class Tiny(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed = torch.nn.Embedding(32, 8)
    ...         self.place = torch.nn.Embedding(128, 8)
    ...     def forward(self, tokens, positions):
    ...         x = (self.embed(tokens) + self.place(positions))[:, None]
    ...         x = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    ...         return x[:, 0] @ self.embed.weight.T
    >>> flexcp.verify(Tiny, world_size=3).passed
    True
    """
    require(world_size, ranks, gradients, losses)
    require_sizes(seq_len, batch_size, seed, timeout)
    require_kinds(parallel, single, dtype, layout, schedule)
    check_flags(restart_positions=restart_positions)
    built = build_model(model, dtype, seed)
    whole = whole_batch(built, batch, documents, (batch_size, seq_len), seed)
    name = tokens_name(whole)
    tokens: Tensor = whole[name]
    ids = None if documents is None else document_ids(documents, tokens.shape[1])
    require_used(
        parallel is not None,
        single is not None,
        gradients,
        {
            "documents": documents is not None,
            "restart_positions": restart_positions,
            "layout": layout != "auto",
            "schedule": schedule != "auto",
        },
    )
    plain: Plain | None = None
    if parallel is None and is_transformers(built):
        assert gradients != "reduced"
        hf = Transformers(layout, schedule, gradients)
        single, parallel = hf.single, hf.parallel
        if ids is not None:
            whole = with_documents(whole, tokens, ids)
        mask = hf.masks(built, whole, tokens, ids) if mask is None else mask
    elif parallel is None:
        if isinstance(mask, Mapping):
            raise FlexCPError(
                "one mask, for a plain model without parallel=",
                f"{len(mask)} of them",
                "pass parallel=, where each layer names its mask",
            )
        if mask is None and ids is not None:
            mask = causal() & document(ids)
        plain = Plain(mask, name, ids, restart_positions, layout, schedule, gradients)
        single = plain.single
    title = (
        f"{name_of(model)} on {_count(world_size)} {ranks} ranks, "
        f"{tokens.shape[0]} × {tokens.shape[1]} tokens"
    )
    runner = StepRunner(built, single, parallel or _missing, world_size, ranks, seed, timeout)
    try:
        evidence = _gather(runner, plain, whole, name, mask, gradients, losses or gradients)
    except RankError as error:
        return Verdict((_did_not_run(error, ranks),), title, error)
    checks = [
        Check("runs", "passed", f"one process and {_count(world_size)} ranks"),
        *(check(evidence) for check in _ALL),
    ]
    return Verdict(tuple(checks), title)


_ALL = (
    check_repeatable,
    check_tokens,
    check_order,
    check_positions,
    check_reach,
    check_leakage,
    check_logits,
    check_labels,
    check_scaling,
    check_loss,
    check_gradients,
)


def _gather(
    runner: StepRunner,
    plain: Plain | None,
    batch: dict[str, Any],
    name: str,
    mask: Mask | MaskMod | Mapping[str, Mask | MaskMod] | None,
    gradients: Convention,
    losses: Convention,
) -> Evidence:
    tokens: Tensor = batch[name]
    numbering = Numbering.of(tokens)
    uneven = unevenly_scored(batch, name)
    jobs = [Job(batch), Job(batch, "logits")]
    jobs += [Job(numbered, "integers") for numbered in numbering.batches(batch, name)]
    jobs += [] if uneven is None else [Job(uneven)]
    alone = runner.alone(jobs)
    calls = alone[0].calls
    if plain is not None:
        if not calls:
            raise FlexCPError(
                "a model that calls scaled_dot_product_attention or flexcp.flex_attention",
                "one whose attention can't be seen",
                "pass parallel=: how your code gets its loss on a rank; in place of torch's "
                "flex_attention, import that of flexcp.compat.flex_attention",
            )
        runner = replace(runner, parallel=partial(plain.parallel, like=calls[0]))
        mask = plain.mask_of(calls[0])
    field = None
    if mask is not None:
        field = ReceptiveField.of(
            mask,
            tokens.shape[1],
            batch=tokens.shape[0],
            heads=calls[0].q.shape[1] if calls and calls[0].q.dim() == 4 else 1,
            layers=len(calls) or _layers(runner.model) or tokens.shape[1],
        )
    together = runner.together(jobs)
    last = 2 + numbering.digits
    key = numbering.key(alone[2:last])
    places_alone = None if key is None else numbering.read(alone[2:last], key)
    places = None if key is None else _places(numbering, together[2:last], key)
    evidence = Evidence(
        tokens=tokens,
        alone=alone[0],
        alone_again=alone[1],
        together=together[0],
        together_again=together[1],
        uneven_alone=None if uneven is None else alone[last],
        uneven_together=() if uneven is None else together[last],
        places_alone=places_alone,
        places=places,
        key=key,
        probes=(),
        receptive_field=field,
        gradients=gradients,
        losses=losses,
        is_padding=_padding(batch, tokens),
    )
    return _probed(evidence, runner, batch, name, numbering.base)


def _layers(model: Any) -> int:
    config = getattr(model, "config", None)
    return int(getattr(config, "num_hidden_layers", 0) or 0)


def _padding(batch: Mapping[str, Any], tokens: Tensor) -> Tensor:
    given = batch.get("attention_mask")
    if isinstance(given, Tensor) and given.shape == tokens.shape:
        return given.flatten() == 0
    return torch.zeros(tokens.numel(), dtype=torch.bool)


def _places(
    numbering: Numbering, runs: Sequence[Sequence[Observation]], key: str
) -> list[Tensor] | None:
    found = [numbering.read([run[rank] for run in runs], key) for rank in range(len(runs[0]))]
    return None if any(rows is None for rows in found) else [r for r in found if r is not None]


def _probed(
    evidence: Evidence, runner: StepRunner, batch: dict[str, Any], name: str, base: int
) -> Evidence:
    """With what changes when single tokens do, if the logits of tokens can be told apart."""
    before = evidence.by_place(evidence.alone.logits, evidence.places_alone)
    before_ranks = evidence.gathered([one.logits for one in evidence.together])
    if before is None or before_ranks is None:
        return evidence
    places = choose_places(
        evidence.tokens, evidence.owners(), evidence.receptive_field, _PROBES, evidence.is_padding
    )
    jobs = [Job(perturbed(batch, name, place, base), "logits") for place in places]
    probes = []
    for place, alone, together in zip(
        places, runner.alone(jobs), runner.together(jobs), strict=True
    ):
        after = evidence.by_place(alone.logits, evidence.places_alone)
        after_ranks = evidence.gathered([one.logits for one in together])
        if after is None or after_ranks is None:
            return evidence
        probes.append(Probe(place, _change(before, after), _change(before_ranks, after_ranks)))
    return replace(evidence, probes=tuple(probes))


def _change(before: Tensor, after: Tensor) -> Tensor:
    return (after - before).abs().amax(1) / before.nan_to_num().abs().max().clamp(min=1e-300)


def _did_not_run(error: RankError, ranks: str) -> Check:
    cause = error.__cause__ or error
    text = str(cause).splitlines()[0] if str(cause) else ""
    why, fix = "the code of a rank raised", "look at the exception: Verdict.error has it"
    if isinstance(cause, FlexCPError):
        why, fix = f"expected {cause.expected}, got {cause.got}", cause.fix
    elif ranks == "simulated" and _lacks_process_group(cause):
        why = "the step uses torch.distributed, which simulated ranks don't have"
        fix = 'pass ranks="gloo"'
    found = f"rank {error.rank} raised {type(cause).__name__}"
    return Check("runs", "failed", found, where=f"rank {error.rank}: {text}", cause=why, fix=fix)


def _lacks_process_group(error: BaseException) -> bool:
    """Whether torch.distributed itself raised an error in a process that has no process group."""
    if not dist.is_available() or dist.is_initialized():
        return False
    raised_in = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return bool(raised_in) and raised_in[-1].startswith("torch.distributed")


def _missing(*_: Any) -> Any:
    raise AssertionError("the plain step is known only after one process has run")


def _count(world_size: int | tuple[int, ...]) -> str:
    return str(world_size) if isinstance(world_size, int) else " × ".join(map(str, world_size))
