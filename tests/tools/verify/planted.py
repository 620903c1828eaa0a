"""A rank's step that is right, from which planted mistakes differ in one part."""

from __future__ import annotations

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
