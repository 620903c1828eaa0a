"""Mistakes with masks, losses and gradients are found, and called by their names."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import flexcp
from flexcp import masks
from verify.decoder import (
    DOCUMENTS,
    LENGTHS,
    Decoder,
    make_batch,
    one_process,
    over_plan,
)
from verify.planted import (
    BOTH_WAYS,
    CAUSAL,
    ShiftsAfterShardingCausally,
    Step,
    causal_only,
    find,
    small,
)

WINDOW = masks.causal() & masks.document(lengths=LENGTHS) & masks.sliding_window(5)


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
