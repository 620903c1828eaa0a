"""Mistakes with tokens, labels and positions of a shard are found, and called by their names."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import flexcp
from flexcp import masks
from verify.decoder import (
    DOCUMENTS,
    LENGTHS,
    TOTAL,
    Decoder,
    make_batch,
    one_process,
    over_plan,
)
from verify.planted import (
    CAUSAL,
    ShiftsAfterShardingCausally,
    Step,
    causal_only,
    find,
    small,
)


def test_the_step_without_a_mistake_passes():
    verdict = flexcp.verify(
        small, make_batch(), parallel=Step(), single=one_process, mask=DOCUMENTS, world_size=3
    )
    assert {check.status for check in verdict.checks} == {"passed"}, str(verdict)


class ShiftsContiguousPartsAfterSharding(ShiftsAfterShardingCausally):
    layout = "contiguous"


@pytest.mark.parametrize("step", [ShiftsAfterShardingCausally, ShiftsContiguousPartsAfterSharding])
def test_labels_shifted_after_sharding(step):
    failure = find(step, single=causal_only, mask=masks.causal())
    assert failure.name == "labels"
    assert "shifted after sharding" in failure.cause
    assert "flexcp.shard_batch" in failure.fix


class ShiftsTwice(Step):
    def loss(self, logits, local):
        labels = functional.pad(local["labels"], (0, 1), value=-100)[:, 1:]
        return flexcp.cross_entropy(logits, labels, local["num_scored"])


def test_labels_shifted_twice():
    failure = find(ShiftsTwice)
    assert failure.name == "labels"
    assert "shifted twice" in failure.cause


class NeverShifts(Step):
    def shard(self, batch, plan):
        return flexcp.shard_batch(batch, plan, shift_labels=False, documents=LENGTHS,
                                  restart_positions=True)  # fmt: skip


def test_labels_that_are_not_shifted():
    failure = find(NeverShifts)
    assert failure.name == "labels"
    assert "not shifted" in failure.cause


class ScoresEndsOfDocuments(Step):
    def shard(self, batch, plan):
        local = flexcp.shard_batch(batch, plan, documents=LENGTHS, restart_positions=True)
        return {**local, "labels": flexcp.shard_batch(batch, plan)["labels"]}


def test_labels_across_documents():
    failure = find(ScoresEndsOfDocuments)
    assert failure.name == "labels"
    assert "ends of documents" in failure.cause
    assert failure.measured == len(LENGTHS) - 1


class CountsThrough(Step):
    layout = "contiguous"  # the first rank would count so from 0, too

    def shard(self, batch, plan):
        return flexcp.shard_batch(batch, plan, documents=LENGTHS)


class CutsTwoTokensLater(Step):
    layout = "contiguous"

    def attend(self):
        first, second, *rest = LENGTHS
        moved = masks.document(lengths=[first + 2, second - 2, *rest])
        return over_plan(self.plan(CAUSAL & moved))


def test_documents_that_are_cut_elsewhere():
    failure = find(CutsTwoTokensLater, world_size=4)
    assert failure.name == "reach"
    assert "a mask hides what it should not" in failure.cause


def test_positions_that_run_through_documents():
    failure = find(CountsThrough)
    assert failure.name == "positions"
    assert "don't restart in each document" in failure.cause


class CountsLocally(Step):
    def positions(self, local):
        return torch.arange(local["input_ids"].shape[1]).expand_as(local["input_ids"])


def test_local_position_ids():
    failure = find(CountsLocally)
    assert failure.name == "positions"
    assert "counted from 0 on every rank" in failure.cause
    assert "model(1)" in failure.where


def test_a_model_that_counts_its_rows_itself():
    failure = flexcp.verify(
        lambda: Decoder(layers=1, counts=True), make_batch(), mask=masks.causal(), world_size=2
    ).first_failure
    assert failure.name == "positions"
    assert "torch.arange(" in failure.cause
    assert "q of the first attention" in failure.found


def test_a_model_that_mixes_the_tokens_of_a_rank():
    class Centred(Decoder):
        def __init__(self):
            super().__init__(layers=1)
            self.embed.register_forward_hook(lambda _, __, x: x - x.mean(1, keepdim=True))

    failure = flexcp.verify(Centred, make_batch(), mask=masks.causal()).first_failure
    assert failure.name == "positions"
    assert "a mean, a shift or a convolution over the sequence" in failure.cause
    assert failure.fix.startswith("compute what mixes tokens over all ranks")


class NumbersAcrossDocuments(Step):
    def positions(self, local):
        return self.plan().positions().expand_as(local["input_ids"])


def test_positions_that_do_not_restart_in_documents():
    failure = find(NumbersAcrossDocuments)
    assert failure.name == "positions"
    assert "don't restart" in failure.cause


class OtherOrder(Step):
    def shard(self, batch, plan):
        local = super().shard(batch, plan)
        return {
            n: x.flip(1) if isinstance(x, torch.Tensor) and x.dim() == 2 else x
            for n, x in local.items()
        }


def test_rows_in_another_order_than_the_plans():
    failure = find(OtherOrder)
    assert failure.name == "order"
    assert "another rule than the plan's layout" in failure.cause


class CutsEvenly(Step):
    """Rows as integer division gives them: the rest is lost."""

    def run(self, model, batch):
        size, rank = self.mesh.size(), self.mesh.get_rank()
        each = TOTAL // size
        part = slice(rank * each, (rank + 1) * each)
        tokens, labels = batch["input_ids"][:, part], batch["labels"][:, part]
        positions = torch.arange(TOTAL)[part].expand_as(tokens)
        logits = model(tokens, positions)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_tokens_lost_by_uneven_division():
    failure = find(CutsEvenly, world_size=3)
    assert failure.name == "tokens"
    assert failure.measured == TOTAL % 3
    assert "does not divide" in failure.cause


class Overlaps(CutsEvenly):
    def run(self, model, batch):
        part = slice(0, 60) if self.mesh.get_rank() == 0 else slice(50, TOTAL)
        tokens, labels = batch["input_ids"][:, part], batch["labels"][:, part]
        logits = model(tokens, torch.arange(TOTAL)[part].expand_as(tokens))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_tokens_on_two_ranks():
    failure = find(Overlaps, world_size=2)
    assert failure.name == "tokens"
    assert failure.where == "position 50 is on ranks [0, 1]"
    assert "overlap" in failure.cause


class NeverShards(CutsEvenly):
    def run(self, model, batch):
        return one_process(model, batch) / self.mesh.size()


def test_a_batch_that_is_not_sharded():
    failure = find(NeverShards)
    assert failure.name == "tokens"
    assert "not sharded" in failure.cause
