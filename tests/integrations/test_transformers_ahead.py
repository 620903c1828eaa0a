"""Batches of a Transformers model, planned while the steps before them run."""

import copy

import pytest

from flexcp import FlexCPError
from flexcp.comm.rank_errors import RankError
from flexcp.integrations import transformers as hf
from flexcp.integrations.transformers.attached import SHARDING
from flexcp.testing import simulate
from flexcp.testing.tolerance import relative_error
from tests.integrations.tiny_models import batch_of, make, one_process

KINDS = ("packed", "plain", "packed")


def test_batches_that_were_planned_ahead_give_the_loss_of_one_process():
    model = make("gemma3")
    batches = [batch_of(kind) for kind in KINDS]

    def rank(mesh):
        cp = hf.attach(copy.deepcopy(model), mesh)
        losses, plans = [], []
        for local in cp.shard_ahead(batches, ahead=2):
            losses.append(cp.sum_over_ranks(cp.model(**local).loss))
            plans.append(local[SHARDING].plan)
        return losses, plans[0] is plans[2], len(set(plans))

    alone = [one_process(model, batch)[1] for batch in batches]
    for losses, kept, plans in simulate(rank, 2):
        assert (kept, plans) == (True, 2)
        assert all(relative_error(*pair) < 1e-6 for pair in zip(losses, alone, strict=True))


def test_a_batch_that_cannot_be_planned_is_refused_when_the_loop_comes_to_it():
    seen = []

    def rank(mesh):
        cp = hf.attach(make(), mesh)
        short = {"input_ids": batch_of("plain")["input_ids"][:, :1]}
        for local in cp.shard_ahead([batch_of("plain"), short], ahead=2):
            seen.append(local)

    with pytest.raises(RankError, match="at least one token for each of 2 ranks") as caught:
        simulate(rank, 2)
    assert isinstance(caught.value.__cause__, FlexCPError)
    assert seen  # the batch before
