"""The Trainer of Transformers, on several processes that hold sequences together."""

from __future__ import annotations

import os

import pytest
import torch
from accelerate import DistributedType, ParallelismConfig, PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from flexcp import FlexCPError
from flexcp.comm.rank_errors import RankError
from flexcp.integrations import transformers as hf
from flexcp.integrations.transformers.trainer import check_loss
from flexcp.testing import spawn
from flexcp.testing.tolerance import relative_error
from tests.integrations.tiny_models import make, restarting, tokens


class ShardedTrainer(hf.TrainerMixin, Trainer):
    pass


def samples(count, *, packed=False):
    """Sequences of which different numbers of tokens are scored."""
    found = []
    for i in range(count):
        ids = tokens(1, 40, seed=i)[0]
        sample = {"input_ids": ids, "labels": ids.masked_fill(torch.arange(40) < 2 * i, -100)}
        if packed:
            sample["position_ids"] = restarting([13 + i], 40)
        found.append(sample)
    return found


def launched(rank, ranks):
    """What torchrun would have set."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def arguments(folder, **changes):
    settings = {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.5,
        "optim": "sgd",  # Adam would divide rounding errors by themselves
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "all",
    }
    return TrainingArguments(**(settings | changes))


def accuracy(predicted):
    right = predicted.predictions.argmax(-1)[:, :-1] == predicted.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "samples": len(predicted.label_ids)}


def run(folder, *, mesh=None, packed=False, count=11, evaluated=7, first=True, **changes):
    """Evaluates, trains for three steps, and evaluates again."""
    model, args = make("qwen3"), arguments(folder, **changes)
    if changes.get("fsdp"):
        assert args.device.type == "cpu"
        # Accelerate has FSDP on devices other than CPUs alone; it runs on gloo all the same.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    trainer = ShardedTrainer(
        model=model,
        args=args,
        train_dataset=samples(count, packed=packed),
        eval_dataset=samples(evaluated, packed=packed),
        compute_metrics=accuracy,
        mesh=mesh,
    )
    metrics = [trainer.evaluate()] if first else []
    trainer.train()
    metrics.append(trainer.evaluate())
    sharded = any(isinstance(p, DTensor) for p in trainer.model.parameters())
    assert sharded == bool(changes.get("fsdp"))
    logged = [log for log in trainer.state.log_history if "grad_norm" in log]
    return {
        "loss": [log["loss"] for log in logged],
        "grad_norm": [log["grad_norm"] for log in logged],
        "eval_loss": [m["eval_loss"] for m in metrics],
        "accuracy": [m["eval_accuracy"] for m in metrics],
        "samples": [m["eval_samples"] for m in metrics],
        "tokens": [trainer.state.num_input_tokens_seen],
        "parameters": torch.cat(
            [whole(p).detach().reshape(-1) for p in trainer.model.parameters()]
        ),
    }


def whole(parameter):
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def assert_same(actual, expected):
    for name, value in expected.items():
        both = [torch.as_tensor(x, dtype=torch.float64) for x in (actual[name], value)]
        assert relative_error(*both) < 1e-5, name


@pytest.mark.parametrize("packed", [False, True])
def test_two_processes_train_and_evaluate_as_one(tmp_path, packed):
    expected = run(tmp_path, packed=packed)

    def rank(mesh):
        launched(mesh.get_rank(), 2)
        return run(tmp_path, packed=packed)

    for actual in spawn(rank, 2):
        assert_same(actual, expected)


FSDP2 = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {
        "version": 2,
        "fsdp_version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
        "activation_checkpointing": True,
    },
}
CHECKPOINTS = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
}


@pytest.mark.parametrize("how", [CHECKPOINTS, FSDP2], ids=["ddp", "fsdp2"])
def test_groups_of_ranks_are_data_parallel(tmp_path, how):
    common = {"count": 12, "evaluated": 8, "gradient_accumulation_steps": 1}
    common["first"] = "fsdp" not in how  # Accelerate asks for an optimizer before
    twice = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    expected = run(tmp_path, **common, **twice)

    def rank(mesh):
        launched(mesh.get_rank(), 4)
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        return run(tmp_path, mesh=both["cp"], **common, **how)

    for actual in spawn(rank, 4):
        assert_same(actual, expected)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"label_smoothing_factor": 0.1}, "expected label_smoothing_factor=0, got 0.1"),
        ({"average_tokens_across_devices": False}, "expected average_tokens_across_devices=True"),
        ({"train_sampling_strategy": "batch_rebalance"}, "got batch_rebalance"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_settings_that_would_go_wrong_are_refused(tmp_path, changes, what):
    def rank(mesh):
        launched(mesh.get_rank(), 2)
        ShardedTrainer(model=make(), args=arguments(tmp_path, **changes))

    with pytest.raises(RankError, match=what) as caught:
        spawn(rank, 2)
    assert isinstance(caught.value.__cause__, FlexCPError)


def test_own_losses_are_refused(tmp_path):
    def rank(mesh):
        launched(mesh.get_rank(), 2)
        ShardedTrainer(
            model=make(), args=arguments(tmp_path), compute_loss_func=lambda *args, **kwargs: None
        )

    with pytest.raises(RankError, match="got compute_loss_func"):
        spawn(rank, 2)


def test_ranks_of_a_mesh_must_be_neighbours(tmp_path):
    def rank(mesh):
        launched(mesh.get_rank(), 4)
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
        ShardedTrainer(model=make(), args=arguments(tmp_path), mesh=both["cp"])

    with pytest.raises(RankError, match=r"a mesh of neighbouring ranks, \[0, 1\] here"):
        spawn(rank, 4)


class Contrastive(Trainer):
    def compute_loss(self, model, inputs, *_, **__):
        return model(**inputs).logits.logsumexp(0).mean()


class Watched(Trainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.watched = True
        return loss


def test_trainers_with_a_loss_of_their_own_are_refused_before_anything_is_built():
    class Sharded(hf.TrainerMixin, Contrastive):
        pass

    class Delegating(hf.TrainerMixin, Watched):
        pass

    with pytest.raises(FlexCPError, match="got Contrastive, which computes a loss of its own"):
        Sharded(model=make(), mesh=2)
    check_loss(Delegating)


@pytest.mark.parametrize("name", ["cp_size", "tp_size"])
def test_sequences_are_never_shared_out_twice(tmp_path, name):
    config = ParallelismConfig(**{name: 2})
    with pytest.raises(FlexCPError, match=f"got {name}=2"):
        ShardedTrainer(model=make(), args=arguments(tmp_path, parallelism_config=config))
