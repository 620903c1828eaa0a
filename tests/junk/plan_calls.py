"""Plans, layouts, machines, batches and ranks, as users call them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

import flexcp
from flexcp import Layout, Machine, Plan, testing
from flexcp.plan import load_machine, save_machine
from flexcp.testing import tolerance
from tests.junk.calls import Call, call, refusals
from tests.junk.samples import (
    CAUSAL,
    DIM,
    DOCUMENTS,
    HALF,
    IDS,
    LAYOUT,
    LAYOUTS,
    MACHINE,
    MACHINE_FILE,
    ON_RANK,
    PAIR,
    PLAN,
    PLAN_FILE,
    RANKS,
    SCHEDULES,
    TOKENS,
    X,
    on_ranks,
)
from tests.junk.values import (
    a,
    absent,
    anything,
    either,
    flag,
    function,
    integers,
    listed,
    masklike,
    nothing,
    number,
    one_of,
    path,
    tensor,
    text,
    whole,
)


def _masks_by_name(given: object) -> bool:
    return isinstance(given, Mapping) and bool(given) and all(map(masklike, given.values()))


def plan_calls() -> dict[str, Call]:
    """Plans, layouts and machines."""
    runs = listed(listed(listed(whole())))
    seconds = number(0)
    return {
        "make_plan": call(
            flexcp.make_plan,
            mask=(CAUSAL, either(masklike, _masks_by_name)),
            seq_len=(8, TOKENS),
            mesh=(2, either(RANKS, listed(RANKS))),
            layout=("auto", either(one_of(*LAYOUTS), a(Layout))),
            schedule=("auto", one_of(*SCHEDULES)),
            block_size=(4, whole(1)),
            num_heads=(2, whole(1)),
            num_kv_heads=(2, either(absent, whole(1))),
            head_dim=(4, whole(1)),
            dtype=(torch.float32, one_of(torch.float32)),
            batch=(1, whole(1)),
            machine=(None, either(absent, a(Machine), one_of("h100"))),
            flops_per_token=(None, either(absent, number(0))),
            token_slack=(None, either(absent, number(0))),
        ),
        "Plan.shard": call(
            PLAN.shard, x=(X, tensor), dim=(2, DIM), rank=(0, whole(0, 1)),
            batch_dim=(0, DIM),
        ),
        "Plan.shard on ranks": call(
            on_ranks(lambda plan, **given: plan.shard(**given)), x=(X, tensor), dim=(2, DIM),
            batch_dim=(0, DIM),
        ),
        "Plan.unshard": call(
            on_ranks(lambda plan, **given: plan.unshard(**given)), x=(HALF, tensor), dim=(2, DIM),
            batch_dim=(0, DIM),
        ),
        "Plan.positions": call(PLAN.positions, rank=(0, whole(0, 1))),
        "Plan.on": call(PLAN.on, mesh=(2, either(whole(2, 2), PAIR))),
        "Plan.schedule_of": call(PLAN.schedule_of, mask=(None, either(absent, one_of("")))),
        "Plan.mask_name": call(PLAN.mask_name, mask=(None, either(absent, one_of("")))),
        "Layout.of_runs": call(
            Layout.of_runs, runs=([[(0, 4)], [(4, 8)]], runs),
            seq_len=(8, either(absent, TOKENS)), name=("x", text),
        ),
        "Layout.of_positions": call(
            Layout.of_positions,
            positions=([torch.arange(4), torch.arange(4, 8)], listed(integers(1, 2))),
            name=("x", text),
        ),
        "Layout.of_rows": call(
            Layout.of_rows,
            rows=([torch.arange(4), torch.arange(4, 8)], listed(integers(1))),
            seq_len=(8, TOKENS), batch_elements=(1, whole(1)), name=("x", text),
        ),
        "Layout.stacked": call(
            Layout.stacked, layouts=([LAYOUT, LAYOUT], listed(a(Layout))),
            name=("x", either(absent, text)),
        ),
        "Layout.positions": call(LAYOUT.positions, rank=(0, whole(0, 1))),
        "Layout.rows_of": call(LAYOUT.rows_of, rank=(0, whole(0, 1))),
        "Layout.shard": call(
            LAYOUT.shard, x=(X, tensor), dim=(2, DIM), rank=(0, whole(0, 1)), batch_dim=(0, DIM)
        ),
        "Layout.unshard": call(
            LAYOUT.unshard, parts=([LAYOUT.shard(X, 2, 0), LAYOUT.shard(X, 2, 1)], listed(tensor)),
            dim=(2, DIM), batch_dim=(0, DIM),
        ),
        "Layout.restore": call(
            LAYOUT.restore, parts=([LAYOUT.shard(X, 2, 0), LAYOUT.shard(X, 2, 1)], listed(tensor)),
            dim=(2, DIM), batch_dim=(0, DIM),
        ),
        "Machine": call(
            Machine,
            name=("x", text), flops=(1e12, number(1e-300)), ranks_per_node=(8, whole(1)),
            intra_bandwidth=(1e9, number(1e-300)), inter_bandwidth=(1e9, number(1e-300)),
            latency=(1e-6, seconds), message=(1e-6, seconds), launch=(1e-6, seconds),
            hidden=(0.95, number(0, 1)), backward=(2.5, seconds), memory=(0.0, seconds),
            node_bandwidth=(0.0, seconds),
        ),
        "Machine.preset": call(Machine.preset, name=("h100", nothing)),
        "Machine.measure": refusals(
            Machine.measure, seconds=(0.001, number(1e-3, 60)),
            attention=(None, either(absent, function)),
        ),
        "save_plan": call(
            flexcp.save_plan, plan=(PLAN, a(Plan)), path=("plan.json", path)
        ),
        "load_plan": call(
            flexcp.load_plan, path=(PLAN_FILE, nothing), mask=(None, either(absent, masklike))
        ),
        "save_machine": call(
            save_machine, machine=(MACHINE, a(Machine)), path=("machine.json", path)
        ),
        "load_machine": call(load_machine, path=(MACHINE_FILE, nothing)),
    }  # fmt: skip


def of_one(value: object) -> bool:
    """Whether something may be called with one argument; what it raises is its own affair."""
    return callable(value)


MESH = object()
"""Stands for the rank's own mesh, and for a style of its plan."""


def batch_calls() -> dict[str, Call]:
    """Batches, losses, modules and ranks."""

    def parallelized(plan: Plan, **given: Any) -> Any:
        mesh = plan.ranks.mesh if given.get("mesh") is MESH else given["mesh"]
        model = given["model"]
        model = deepcopy(model) if isinstance(model, torch.nn.Module) else model
        style = flexcp.ContextParallel(plan)
        styles = {"0": style} if given["styles"] is MESH else given["styles"]
        return flexcp.parallelize(model, mesh, styles)

    def using(plan: Plan, plan_of_step: Any) -> Any:
        style = flexcp.ContextParallel()
        flexcp.parallelize(torch.nn.Linear(2, 2), plan.ranks.mesh, style)
        return style.using(plan if plan_of_step is MESH else plan_of_step).__enter__()

    return {
        "shard_batch": call(
            on_ranks(lambda plan, **given: flexcp.shard_batch(plan=plan, **given)),
            batch=({"input_ids": IDS, "labels": IDS}, nothing),
            documents=(None, DOCUMENTS),
            restart_positions=(False, flag),
            shift_labels=(True, flag),
            ignore_index=(-100, whole()),
        ),
        "shard_batch by": call(
            flexcp.shard_batch,
            batch=({"input_ids": IDS}, nothing),
            plan=(testing.simulate(PLAN.on, 2)[0], nothing),
        ),
        "cross_entropy": call(
            flexcp.cross_entropy,
            logits=(torch.randn(8, 5), nothing),
            labels=(torch.zeros(8, dtype=torch.int64), nothing),
            num_scored=(8, either(whole(0), integers(0))),
            gradients=("summed", one_of("summed", "averaged")),
            ranks=(None, either(absent, RANKS)),
            ignore_index=(-100, whole()),
        ),
        "plan_ahead": refusals(
            lambda **given: list(flexcp.plan_ahead(**given)),
            batches=([[3, 5], [8]], anything),
            plan_of=(lambda lengths: PLAN, of_one),
            mesh=(None, either(absent, whole(2, 2), PAIR)),
            ahead=(1, whole(1)),
            processes=(0, whole(0, 0)),
            depends_on=(None, either(absent, of_one)),
        ),
        "ContextParallel": call(
            flexcp.ContextParallel,
            plan=(ON_RANK, either(absent, a(Plan))),
            mask=(None, either(absent, one_of(""))),
            first_head=(0, whole(0)),
        ),
        "ContextParallel.with_mask": call(
            flexcp.ContextParallel(ON_RANK).with_mask,
            mask=("", one_of("")),
            first_head=(0, either(absent, whole(0))),
        ),
        "ContextParallel.using": call(on_ranks(using), plan_of_step=(MESH, nothing)),
        "parallelize": call(
            on_ranks(parallelized),
            model=(torch.nn.Sequential(torch.nn.Linear(2, 2)), nothing),
            mesh=(MESH, nothing),
            styles=(MESH, nothing),
        ),
        "simulate": refusals(
            testing.simulate,
            fn=(lambda mesh: 1, function),
            world_size=(2, either(whole(1, 4096), PAIR)),
        ),
        "spawn": refusals(
            testing.spawn,
            fn=(lambda mesh: 1, function),
            world_size=(1, either(whole(1, 256), PAIR)),
            timeout=(60.0, number(1e-320, 1e9)),
            threads=(1, whole(1, 4096)),
        ),
        "tolerance": call(tolerance.tolerance, dtype=(torch.float32, one_of(torch.float32))),
    }
