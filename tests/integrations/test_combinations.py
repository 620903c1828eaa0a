"""Three steps of training with ContextParallel and torch's other tools equal one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpointing
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import flexcp
from flexcp import testing

from .decoder import (
    BATCHES,
    DOCUMENTS,
    HEADS,
    KV_HEADS,
    LENGTH,
    STEPS,
    WIDTH,
    assert_same_training,
    mask_of,
    new_decoder,
    new_optimizer,
    snapshot,
    train_in_one_process,
)

one_process = cache(train_in_one_process)


def plan_of(mask, cp, tp=1):
    return flexcp.make_plan(
        mask, LENGTH, cp, block_size=8, num_heads=HEADS // tp, num_kv_heads=KV_HEADS // tp,
        head_dim=WIDTH // HEADS, dtype=torch.float32, batch=2,
    )  # fmt: skip


def sum_gradients(model, group=None):
    """What a plain loop does after its backward pass."""
    for p in model.parameters():
        local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        dist.all_reduce(local, group=group)


def train(
    model,
    style,
    cp,
    *,
    tp=1,
    dp=1,
    dp_rank=0,
    averaged_over=None,
    after_backward=None,
    steps=range(STEPS),
    optimizer=None,
):
    """The loop: a plan, this rank's part of the batch, loss, backward, and what follows it."""
    optimizer = optimizer or new_optimizer(model)
    record = []
    for step in steps:
        plan = plan_of(mask_of(step), cp, tp)
        rows = BATCHES[step].chunk(dp)[dp_rank]
        local = flexcp.shard_batch(
            {"input_ids": rows, "labels": rows},
            plan,
            documents=DOCUMENTS[step],
            restart_positions=True,
        )
        with style.using(plan):
            logits = model(local["input_ids"], local["position_ids"])
            loss = flexcp.cross_entropy(
                logits,
                local["labels"],
                local["num_scored"] * dp,
                gradients="summed" if averaged_over is None else "averaged",
                ranks=averaged_over or 1,
            )
            optimizer.zero_grad()
            loss.backward()
        if after_backward is not None:
            after_backward(model)
        optimizer.step()
        total = loss.detach() / (averaged_over or 1) / tp
        dist.all_reduce(total)
        record.append((total.item(), snapshot(model)))
    return record


def parallel_decoder(cp):
    style = flexcp.ContextParallel()
    return parallelize_module(new_decoder(), cp, {"layers.*.attn": style}), style


def test_gradients_that_the_loop_sums():
    def rank(cp):
        model, style = parallel_decoder(cp)
        return train(model, style, cp, after_backward=sum_gradients)

    for record in testing.spawn(rank, 3):
        assert_same_training(record, one_process())


def test_distributed_data_parallel():
    def rank(cp):
        model, style = parallel_decoder(cp)
        model = nn.parallel.DistributedDataParallel(model)
        return train(model, style, cp, averaged_over=2)

    for record in testing.spawn(rank, 2):
        assert_same_training(record, one_process())


def sharded_decoder(mesh, **recompute):
    """FSDP2 over all ranks, context parallel over some."""
    model, style = parallel_decoder(mesh["cp"])
    model.recompute = recompute or None
    every = mesh._flatten("dp_cp")
    for layer in model.layers:
        fully_shard(layer, mesh=every)
    return fully_shard(model, mesh=every), style


@pytest.mark.parametrize(("dp", "cp", "recompute"), [(2, 2, True), (1, 3, False)])
def test_fully_sharded_parameters(dp, cp, recompute):
    def rank(_):
        mesh = init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp", "cp"))
        model, style = sharded_decoder(mesh, **({"use_reentrant": False} if recompute else {}))
        return train(
            model, style, mesh["cp"], dp=dp, dp_rank=mesh.get_local_rank("dp"),
            averaged_over=dp * cp,
        )  # fmt: skip

    for record in testing.spawn(rank, dp * cp):
        assert_same_training(record, one_process())


TENSOR_PARALLEL = {
    "layers.*.attn.wq": ColwiseParallel(),
    "layers.*.attn.wk": ColwiseParallel(),
    "layers.*.attn.wv": ColwiseParallel(),
    "layers.*.attn.wo": RowwiseParallel(),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
}


@pytest.mark.parametrize("fully", [False, True], ids=["replicated", "fully sharded"])
def test_tensor_parallel_heads(fully):
    def rank(_):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        cp = mesh["cp"]
        model, style = parallel_decoder(cp)
        parallelize_module(model, mesh["tp"], TENSOR_PARALLEL)
        if fully:
            for layer in model.layers:
                fully_shard(layer, mesh=cp)
            fully_shard(model, mesh=cp)
            return train(model, style, cp, tp=2, averaged_over=2)
        return train(
            model, style, cp, tp=2, after_backward=lambda m: sum_gradients(m, cp.get_group())
        )

    for record in testing.spawn(rank, 4):
        assert_same_training(record, one_process())


def test_reentrant_checkpoints():
    def rank(cp):
        model, style = parallel_decoder(cp)
        model.recompute = {"use_reentrant": True}
        return train(model, style, cp, after_backward=sum_gradients)

    for record in testing.spawn(rank, 2):
        assert_same_training(record, one_process())


def test_clipping_of_gradients_that_the_loop_sums():
    def clipped(model):
        sum_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)

    def rank(cp):
        model, style = parallel_decoder(cp)
        return train(model, style, cp, after_backward=clipped)

    assert_same_training(testing.spawn(rank, 2)[1], one_process(0.3))


def test_clipping_of_gradients_that_are_fully_sharded():
    norms = []

    def clipped(model):
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        norms.append(norm.full_tensor().item())

    def rank(_):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        model, style = sharded_decoder(mesh)
        return train(model, style, mesh["cp"], averaged_over=2, after_backward=clipped), norms

    for record, found in testing.spawn(rank, 2):
        assert_same_training(record, one_process(0.3))
        assert min(found) > 0.3  # so that there was something to clip


def state_of(model, optimizer):
    """What is saved: parameters and momenta, by the names that they have in a plain model."""
    params, momenta = get_state_dict(model, optimizer)
    return {"model": params, "optimizer": momenta}


@pytest.mark.parametrize("ranks", [(1, 1), (1, 3)], ids=["one", "more"])
def test_checkpoints_resume_on_any_number_of_ranks(ranks, tmp_path):
    """Two ranks train two steps and save; others load, and their third step is the third step."""

    def begin(_):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        model, style = sharded_decoder(mesh)
        optimizer = new_optimizer(model)
        train(model, style, mesh["cp"], averaged_over=2, steps=range(2), optimizer=optimizer)
        checkpointing.save(state_of(model, optimizer), checkpoint_id=tmp_path)

    def resume(_):
        mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("dp", "cp"))
        model, style = sharded_decoder(mesh)
        optimizer = new_optimizer(model)
        state = state_of(model, optimizer)
        checkpointing.load(state, checkpoint_id=tmp_path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return train(
            model, style, mesh["cp"], averaged_over=mesh.size(), steps=[2], optimizer=optimizer
        )

    testing.spawn(begin, 2)
    for record in testing.spawn(resume, ranks[1]):
        assert_same_training(record, one_process(), first=2)
