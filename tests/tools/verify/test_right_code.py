"""Code that is right passes, whatever the world size, the mask and the kind of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp import masks
from flexcp.tools.verify import CHECKS
from verify.decoder import (
    DOCUMENTS,
    LENGTHS,
    TOTAL,
    Decoder,
    make_batch,
    one_process,
    over_plan,
    plan_for,
    right_step,
)


def passes(verdict, *, unseen=()):
    statuses = {check.name: check.status for check in verdict.checks}
    assert statuses == {n: "not observed" if n in unseen else "passed" for n in CHECKS}, verdict
    return verdict


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_plain_decoder_passes_every_check_on_any_number_of_ranks(world_size):
    passes(flexcp.verify(lambda: Decoder(layers=1), world_size=world_size, seq_len=41))


def test_packed_documents_pass_with_one_process_written_apart():
    passes(
        flexcp.verify(
            Decoder, make_batch(2), parallel=right_step, single=one_process, mask=DOCUMENTS
        )
    )


def test_a_plain_decoder_passes_under_documents_and_windows():
    mask = DOCUMENTS & masks.sliding_window(5)
    verdict = flexcp.verify(
        lambda: Decoder(layers=2), mask=mask, documents=LENGTHS, restart_positions=True
    )
    assert f"1 × {TOTAL} tokens" in passes(verdict).title


class Checkpointed(Decoder):
    def forward(self, tokens, positions):
        return checkpoint(super().forward, tokens, positions, use_reentrant=False)


@pytest.mark.parametrize("mask", [None, masks.causal() & masks.sliding_window(7)])
def test_layers_that_are_computed_again_pass(mask):
    passes(flexcp.verify(lambda: Checkpointed(layers=1), mask=mask, seq_len=41))


def test_weights_that_begin_at_zero_hide_nothing():
    def zero_output():
        model = Decoder(layers=1)
        torch.nn.init.zeros_(model.attention[0].out.weight)
        return model

    verdict = flexcp.verify(zero_output, seq_len=41)
    assert "seen by 0" not in passes(verdict)["reach"].found


def reduces_by_itself(model, batch, mesh):
    """As people write it for processes: backward, then all_reduce."""
    loss = right_step(model, batch, mesh)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group())
    return loss


def test_steps_that_use_process_groups_pass_on_gloo_ranks():
    verdict = flexcp.verify(
        lambda: Decoder(layers=1), make_batch(), parallel=reduces_by_itself, single=one_process,
        mask=DOCUMENTS, ranks="gloo", gradients="reduced", losses="summed",
    )  # fmt: skip
    passes(verdict)


def wraps_in_ddp(model, batch, mesh):
    plan = plan_for(mesh)
    wrapped = DistributedDataParallel(model)  # has to live until the backward pass
    local = flexcp.shard_batch(batch, plan, documents=LENGTHS, restart_positions=True)
    with over_plan(plan):
        logits = wrapped(local["input_ids"], local["position_ids"])
    loss = flexcp.cross_entropy(
        logits, local["labels"], local["num_scored"], gradients="averaged", ranks=mesh.size()
    )
    loss.backward()
    return loss


def test_gradients_that_ddp_averages_pass():
    verdict = flexcp.verify(
        lambda: Decoder(layers=1), make_batch(), parallel=wraps_in_ddp, single=one_process,
        mask=DOCUMENTS, ranks="gloo", gradients="reduced", losses="averaged",
    )  # fmt: skip
    assert "a model on 2 gloo ranks" in passes(verdict).title


def test_a_step_for_processes_is_told_what_it_needs():
    failure = flexcp.verify(
        lambda: Decoder(layers=1), make_batch(), parallel=lambda m, b, mesh: dist.get_rank()
    ).first_failure
    assert failure.name == "runs"
    assert failure.fix == 'pass ranks="gloo"'


def pads_to_fit(model, batch, mesh):
    """Rows of padding at the end, so that every rank has as many."""
    plan = plan_for(mesh, masks.causal(), layout="contiguous")
    local = flexcp.shard_batch(batch, plan)
    length = local["input_ids"].shape[1]
    more = -(-TOTAL // mesh.size()) - length
    tokens = functional.pad(local["input_ids"], (0, more))
    positions = functional.pad(local["position_ids"], (0, more))

    class Trimmed(over_plan):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is functional.scaled_dot_product_attention:
                out = flexcp.attention(*(x[:, :, :length] for x in args[:3]), self.plan)
                return functional.pad(out, (0, 0, 0, more))
            return func(*args, **(kwargs or {}))

    with Trimmed(plan):
        logits = model(tokens, positions)
    labels = functional.pad(local["labels"], (0, more), value=-100)
    return flexcp.cross_entropy(logits, labels, local["num_scored"])


def test_rows_that_a_step_adds_as_padding_are_no_tokens():
    verdict = flexcp.verify(
        lambda: Decoder(layers=1), make_batch(), parallel=pads_to_fit, mask=masks.causal(),
        world_size=3,
    )  # fmt: skip
    assert "1 rows of padding" in passes(verdict)["tokens"].found


def splits_the_batch_too(model, batch, mesh):
    """Data and context parallel: a mesh of two dimensions."""
    own = {n: x.chunk(mesh.shape[0])[mesh.get_coordinate()[0]] for n, x in batch.items()}
    scored = int((batch["labels"][:, 1:] != -100).sum())
    labels = functional.pad(own["labels"][:, 1:], (0, 1), value=-100)
    logits = model(own["input_ids"], torch.arange(TOTAL).expand_as(own["input_ids"]))
    return flexcp.cross_entropy(logits, labels, scored)


def test_batch_elements_may_be_split_over_ranks():
    verdict = flexcp.verify(
        lambda: Decoder(layers=1), make_batch(2), parallel=splits_the_batch_too,
        mask=masks.causal(), world_size=(2, 1),
    )  # fmt: skip
    assert "2 × 1 simulated ranks" in passes(verdict, unseen=["order"]).title


def test_a_model_that_returns_its_loss_alone_has_loss_and_gradients_compared():
    class Scored(Decoder):
        def forward(self, tokens, positions, labels, scored):
            return flexcp.cross_entropy(super().forward(tokens, positions), labels, scored)

    def step(model, batch, mesh):
        plan = plan_for(mesh)
        local = flexcp.shard_batch(batch, plan, documents=LENGTHS, restart_positions=True)
        with over_plan(plan):
            return model(
                local["input_ids"], local["position_ids"], local["labels"], local["num_scored"]
            )

    unseen = ["reach", "leakage", "logits", "labels", "scaling"]
    passes(flexcp.verify(lambda: Scored(layers=1), make_batch(), parallel=step), unseen=unseen)


def test_lower_precision_is_allowed_for():
    verdict = passes(flexcp.verify(lambda: Decoder(layers=1), seq_len=41, dtype=torch.float32))
    assert verdict["gradients"].tolerance > 1e-6
