"""Ranks under examination: what is right passes, and each planted fault is found and named."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from tools.doctor.tiny import CPU, TINY

from flexcp import masks, testing
from flexcp.comm.process import ProcessTransport
from flexcp.plan import make_plan
from flexcp.tools.doctor import rank_checks, rank_speed
from flexcp.tools.doctor.findings import Finding
from flexcp.tools.doctor.ranks import RankAnswer, RankCheck, RankContext, examine_ranks


def examined(checks, ranks=2, *, budget=TINY, before=lambda rank: None, per_node=None, stop=False):
    """What the first rank says of each check, and the machines."""

    def rank(mesh):
        found, machines = [], []
        before(mesh.get_rank())
        context = RankContext.of(mesh, CPU, budget, per_node or ranks)
        examine_ranks(
            context, checks, 30.0, listen=found.append, hear_machine=machines.append,
            should_stop=lambda: stop,
        )  # fmt: skip
        return found, machines

    found, machines = testing.spawn(rank, ranks, timeout=budget.patience)[0]
    return {f.name: f for f in found if isinstance(f, Finding)}, machines


def test_ranks_that_are_right_pass_and_are_measured():
    found, machines = examined((*rank_checks.CHECKS, *rank_speed.CHECKS))
    assert {f.outcome for f in found.values()} == {"passed", "measured"}
    assert "equal one process in float64" in found["plan by ring"].said
    assert "PyTorch's ring" in found["over ranks"].said
    assert "not run" not in found["over ranks"].said
    assert "between nodes: not run, since there is one" in found["bandwidth and latency"].said
    (machine,) = machines
    assert min(machine.flops, machine.intra_bandwidth, machine.latency, machine.message) > 0
    assert machine.inter_bandwidth == machine.intra_bandwidth
    plan = make_plan(masks.causal(), 1024, 4, machine=machine)
    assert plan.stats().predicted_seconds > 0


def test_links_within_and_between_nodes_are_told_apart():
    found, (machine,) = examined(rank_speed.CHECKS[1:], 3, per_node=2)
    assert "between nodes" in found["bandwidth and latency"].said
    assert machine.ranks_per_node == 2


def wrong_rows(rank):
    """Rank 1 sends zeros to everyone."""
    right = ProcessTransport.exchange

    def exchange(self, sends, receives, *, label):
        sends = [(peer, torch.zeros_like(x)) for peer, x in sends]
        return right(self, sends, receives, label=label)

    if rank == 1:
        ProcessTransport.exchange = exchange


def test_a_rank_that_sends_wrong_rows_is_named():
    found, _ = examined(rank_checks.CHECKS[1:5:2], before=wrong_rows)
    said = found["transport"].said
    assert found["transport"].outcome == "failed"
    assert "rank 0: messages: 1 of 1 elements from rank 1 are wrong" in said
    assert "rank 1:" not in said
    assert "look at the links between these ranks" in found["transport"].fix
    assert found["plan by exchange"].outcome == "failed"
    assert "causal: " in found["plan by exchange"].said
    assert " is off by " in found["plan by exchange"].said
    assert "no answer" not in found["plan by exchange"].said


def dies(context, deadline):
    if context.rank == 1:
        os._exit(3)
    return RankAnswer()


def fails(context, deadline):
    if context.rank == 1:
        raise RuntimeError("no memory left\nand more")
    return RankAnswer()


def check(run, name="fault", ranks=2):
    said = Finding("ranks", name, "passed", "right")
    return RankCheck("ranks", name, 1.0, run, lambda *_: (said, None), "see to it", ranks)


def test_a_rank_that_dies_is_named_and_the_rest_is_not_run():
    checks = (check(dies), check(fails, "later"))

    def rank(mesh):
        found = []
        context = RankContext.of(mesh, CPU, replace(TINY, patience=0.5), 2)
        examine_ranks(context, checks, 1.0, listen=found.append, hear_machine=found.append)
        raise ValueError([f.line for f in found if isinstance(f, Finding)])

    try:
        testing.spawn(rank, 2, timeout=5)
    except Exception as error:
        text = str(error.failures[0])
    assert "FAILED    fault: nothing was heard of ranks [1]" in text
    assert "not run   later: ranks were lost before" in text


def test_a_rank_that_raises_is_named_and_the_others_go_on():
    found, _ = examined((check(fails), check(lambda *_: RankAnswer(), "later")))
    assert found["fault"].said == "rank 1: it raised RuntimeError: no memory left"
    assert found["fault"].fix == "see to it"
    assert found["later"].outcome == "passed"


def test_what_needs_more_ranks_or_was_stopped_is_not_run_and_says_why():
    found, _ = examined(rank_checks.CHECKS[:2], 1)
    assert found["devices"].outcome == "passed"
    assert "it needs 2 ranks" in found["transport"].said
    found, _ = examined(rank_checks.CHECKS[1:3], stop=True)
    assert {f.said for f in found.values()} == {"it was stopped"}
