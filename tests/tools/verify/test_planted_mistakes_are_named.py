"""Each mistake that people make with sharded sequences is found, and called by its name."""

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
    plan_for,
)

CAUSAL = masks.causal()
BOTH_WAYS = masks.document(lengths=LENGTHS)


class Step:
    """A rank's step that is right; mistakes override one part of it."""

    layout = "head_tail"

    def __init__(self, mesh=None):
        self.mesh, self.of_rank = mesh, {}

    def __call__(self, model, batch, mesh):
        mine = self.of_rank.setdefault(mesh, type(self)(mesh))  # ranks share nothing
        return mine.run(model, batch)

    def run(self, model, batch):
        local = self.shard(batch, self.plan())
        with self.attend():
            logits = model(local["input_ids"], self.positions(local))
        return self.loss(logits, local)

    def plan(self, mask=DOCUMENTS):
        if mask not in self.of_rank:
            self.of_rank[mask] = plan_for(self.mesh, mask, layout=self.layout)
        return self.of_rank[mask]

    def shard(self, batch, plan):
        return flexcp.shard_batch(batch, plan, documents=LENGTHS, restart_positions=True)

    def positions(self, local):
        return local["position_ids"]

    def attend(self):
        return over_plan(self.plan())

    def loss(self, logits, local):
        return flexcp.cross_entropy(logits, local["labels"], local["num_scored"])


def small():
    return Decoder(layers=1)


def find(step, *, single=one_process, mask=DOCUMENTS, model=small, world_size=2, **options):
    verdict = flexcp.verify(
        model, make_batch(), parallel=step(), single=single, mask=mask, world_size=world_size,
        **options,
    )  # fmt: skip
    assert not verdict.passed
    return verdict.first_failure


def test_the_step_without_a_mistake_passes():
    verdict = flexcp.verify(
        small, make_batch(), parallel=Step(), single=one_process, mask=DOCUMENTS, world_size=3
    )
    assert {check.status for check in verdict.checks} == {"passed"}, str(verdict)


class ShiftsAfterSharding(Step):
    def shard(self, batch, plan):
        return flexcp.shard_batch(batch, plan, shift_labels=False, documents=LENGTHS,
                                  restart_positions=True)  # fmt: skip

    def loss(self, logits, local):
        labels = local["labels"][:, 1:].flatten()
        total = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")
        return total / (TOTAL - 1)


def causal_only(model, batch):
    return one_process(model, batch, masks.causal(), [TOTAL])


class ShiftsAfterShardingCausally(ShiftsAfterSharding):
    def plan(self, mask=CAUSAL):
        return super().plan(mask)

    def positions(self, local):
        return self.plan().positions().expand_as(local["input_ids"])


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


class NumbersAcrossDocuments(Step):
    def positions(self, local):
        return self.plan().positions().expand_as(local["input_ids"])


def test_positions_that_do_not_restart_in_documents():
    failure = find(NumbersAcrossDocuments)
    assert failure.name == "positions"
    assert "don't restart" in failure.cause


class DropsTheDocumentMask(Step):
    def attend(self):
        return over_plan(self.plan(CAUSAL))


def test_the_document_mask_dropped_on_ranks():
    failure = find(DropsTheDocumentMask)
    assert failure.name == "leakage"
    assert "document mask is dropped" in failure.cause
    assert "on the ranks" in failure.found


def test_the_document_mask_dropped_everywhere():
    failure = find(DropsTheDocumentMask, single=None)
    assert failure.name == "leakage"
    assert "in one process already" in failure.found
    assert "does not apply the mask that was given" in failure.cause


WINDOW = masks.causal() & masks.document(lengths=LENGTHS) & masks.sliding_window(5)


class IgnoresTheWindow(Step):
    pass


def windowed(model, batch):
    return one_process(model, batch, WINDOW)


def test_a_window_ignored_on_ranks():
    failure = find(IgnoresTheWindow, single=windowed, mask=WINDOW)
    assert failure.name == "leakage"
    assert "window" in failure.cause


class SeesTheFuture(Step):
    def attend(self):
        return over_plan(self.plan(BOTH_WAYS))


def test_the_causal_mask_dropped():
    failure = find(SeesTheFuture)
    assert failure.name == "leakage"
    assert "causal mask is dropped" in failure.cause


class AttendsToItsOwnRows(ShiftsAfterShardingCausally):
    def attend(self):
        return torch.enable_grad()


def test_attention_over_a_ranks_own_rows():
    failure = find(AttendsToItsOwnRows, single=causal_only, mask=masks.causal())
    assert failure.name == "reach"
    assert "own rows only: scaled_dot_product_attention is called on the shard" in failure.cause


class AveragesOverItsOwnTokens(Step):
    def loss(self, logits, local):
        return functional.cross_entropy(logits.flatten(0, 1), local["labels"].flatten())


def test_a_mean_over_each_ranks_own_tokens():
    failure = find(AveragesOverItsOwnTokens)
    assert failure.name == "scaling"
    assert "mean over each rank's own tokens" in failure.cause
    assert find(AveragesOverItsOwnTokens, gradients="averaged").name == "scaling"


class ScalesForAveraging(Step):
    def loss(self, logits, local):
        return super().loss(logits, local) * self.mesh.size()


def test_a_loss_scaled_for_averaging_where_gradients_are_summed():
    failure = find(ScalesForAveraging)
    assert failure.name == "scaling"
    assert "scaled for gradients that are averaged" in failure.cause
    verdict = flexcp.verify(
        small, make_batch(), parallel=ScalesForAveraging(), single=one_process, mask=DOCUMENTS,
        gradients="averaged",
    )  # fmt: skip
    assert verdict.passed, str(verdict)


class DividesByRanks(Step):
    def loss(self, logits, local):
        return super().loss(logits, local) / self.mesh.size()


def test_a_loss_divided_by_the_number_of_ranks():
    failure = find(DividesByRanks)
    assert failure.name == "scaling"
    assert "divided by the number of ranks" in failure.cause


class Reduces(Step):
    """A step with its backward pass and the reduction of gradients in it."""

    skip = ""

    def run(self, model, batch):
        mesh = self.mesh
        loss = super().run(model, batch)
        loss.backward()
        for name, p in model.named_parameters():
            if name != self.skip:
                p.grad = self.combine(mesh.transport.all_reduce(p.grad))
        return mesh.transport.all_reduce(loss.detach())

    def combine(self, total):
        return total


def test_a_step_that_reduces_by_itself_passes():
    verdict = flexcp.verify(
        small, make_batch(), parallel=Reduces(), single=one_process, mask=DOCUMENTS,
        gradients="reduced",
    )  # fmt: skip
    assert {check.status for check in verdict.checks} == {"passed"}, str(verdict)


class ReducesToTheMean(Reduces):
    def combine(self, total):
        return total / self.mesh.size()


def test_gradients_averaged_instead_of_summed():
    failure = find(ReducesToTheMean, gradients="reduced")
    assert failure.name == "gradients"
    assert "averaged over ranks instead of summed" in failure.cause


class ForgetsOne(Reduces):
    skip = "attention.0.qkv.bias"


def test_a_parameter_whose_gradient_is_not_reduced():
    failure = find(ForgetsOne, gradients="reduced")
    assert failure.name == "gradients"
    assert "parameter attention.0.qkv.bias" in failure.where
    assert "this parameter's gradient is not reduced" in failure.cause
    assert "1 of 13 parameters" in failure.found


def test_gradients_that_are_reduced_already():
    failure = find(Reduces, gradients="summed", losses="reduced")
    assert failure.name == "gradients"
    assert "the whole gradient already" in failure.cause


class Detaches(Step):
    def attend(self):
        class Detached(over_plan):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                if func is functional.scaled_dot_product_attention:
                    q, k, v = args
                    return flexcp.attention(q, k.detach(), v, self.plan)
                return func(*args, **(kwargs or {}))

        return Detached(self.plan())


def test_a_gradient_that_is_cut_off():
    failure = find(Detaches)
    assert failure.name == "gradients"
    assert failure.measured > 1e-6


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


def test_dropout_is_called_by_its_name():
    failure = find(Step, model=lambda: Decoder(layers=1, dropout=0.1))
    assert failure.name == "repeatable"
    assert "dropout" in failure.cause


class OtherScale(Step):
    def attend(self):
        return over_plan(self.plan(), scale=0.3)


def test_another_scale_of_attention():
    failure = find(OtherScale)
    assert failure.name == "logits"
    assert "scale" in failure.cause
    assert "first in attention call 0" in failure.where


class Raises(Step):
    def loss(self, logits, local):
        if self.mesh.get_rank() == 1 and self.mesh.size() > 1:
            raise KeyError("mislaid")
        return super().loss(logits, local)


def test_a_rank_that_raises():
    verdict = flexcp.verify(
        small, make_batch(), parallel=Raises(), single=one_process, mask=DOCUMENTS
    )
    assert verdict.first_failure.name == "runs"
    assert "rank 1 raised KeyError" in verdict.first_failure.found
    with pytest.raises(flexcp.tools.verify.VerificationError, match="FAILED at runs") as raised:
        verdict.raise_if_failed()
    assert isinstance(raised.value.__cause__.__cause__, KeyError)
