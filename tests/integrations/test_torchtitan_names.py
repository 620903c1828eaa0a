"""What stands for torchtitan's functions, tested with stand-ins for its classes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import flexcp
from flexcp import masks, testing
from flexcp.compat.flex_attention import create_block_mask
from flexcp.integrations import torchtitan as cp_torchtitan
from flexcp.integrations.torchtitan import names as titan_names
from flexcp.integrations.torchtitan.enabled import Enabled
from flexcp.integrations.torchtitan.names import Names

LENGTH = 36


class Flex(nn.Module):
    pass


class Sdpa(nn.Module):
    pass


class Varlen(nn.Module):
    class Config:
        pass

    def __init__(self, window_size):
        super().__init__()
        self.window_size = window_size


class Metadata(NamedTuple):
    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor


def enabled(layout=None) -> Enabled:
    names = Names(None, None, None, None, Flex, Sdpa, Varlen, Metadata)
    return Enabled(layout, "auto", None, names)


POSITIONS = torch.cat([torch.arange(n) for n in (7, 20, 9, 30, 6)]).view(2, LENGTH)
STARTS = torch.tensor([0, 7, 27, 36, 66, 72])


def masks_of_documents():
    ids = (POSITIONS == 0).cumsum(1)
    causal = masks.causal() & masks.document(ids)
    return causal, causal & masks.sliding_window(4)


def block_mask(mask):
    return create_block_mask(mask.mask_mod, 2, None, LENGTH, LENGTH, device="cpu")


def attended(mesh, given, modules, pick, balancer, key=None):
    """Outputs and gradients of attention modules over ranks, put together."""
    cp = enabled()
    cp.apply_cp_to_forward(modules, mesh)
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, LENGTH, heads, 8).double() for heads in (4, 2, 2))
    inputs = torch.arange(2 * LENGTH).view(2, LENGTH)
    extra = {"positions": POSITIONS, "attention_masks": given}
    rows, labels, kwargs = cp.prepare_context_parallel_input(
        inputs, inputs, extra, mesh, "cpu", balancer, key
    )
    assert torch.equal(rows, labels)
    planned = kwargs["attention_masks"]
    found = []
    for module in modules:
        own = pick(planned, module)
        plan = own.plan
        assert torch.equal(plan.shard(inputs, 1), rows)
        assert torch.equal(plan.shard(POSITIONS, 1), kwargs["positions"])
        local = [plan.shard(x, 1).requires_grad_() for x in (q, k, v)]
        out = module.forward(
            *local, attention_masks=own, enable_gqa=True,
            out_transform=lambda out, lse: out * lse.sigmoid()[..., None],
        )  # fmt: skip
        out.square().sum().backward()
        found.append([plan.unshard(x, 1) for x in (out.detach(), *(x.grad for x in local))])
    return found


def expected(mask):
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, LENGTH, heads, 8).double().requires_grad_() for heads in (4, 2, 2))
    out, lse = flexcp.flex_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        block_mask=mask,
        enable_gqa=True,
        return_lse=True,
    )
    out = (out * lse.sigmoid()[..., None]).transpose(1, 2)
    out.square().sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


def every_kind_of_mask(mesh):
    causal, window = masks_of_documents()
    both = {"full": block_mask(causal), "near": block_mask(window), "unused": None}
    varlen = Metadata(STARTS, STARTS.clone())
    found = [
        attended(mesh, block_mask(causal), [Flex()], lambda own, _: own, "headtail")[0],
        attended(mesh, both, [Flex()], lambda own, _: own["full"], "ptrr", "near")[0],
        attended(mesh, both, [Flex()], lambda own, _: own["near"], "auto")[0],
        *attended(
            mesh, varlen, [Varlen((-1, 0)), Varlen((4, 0))], lambda own, _: own, "balanced"
        ),
    ]  # fmt: skip
    return found, attended(mesh, None, [Sdpa()], lambda own, _: own, None)[0]


def test_attention_by_any_masks_and_balancers_is_that_of_one_process():
    causal, window = masks_of_documents()
    ones = [expected(m) for m in (causal, causal, window, causal, window)]
    plain = expected(masks.causal())
    for found, sdpa in testing.spawn(every_kind_of_mask, 2):
        for case, one in zip([*found, sdpa], [*ones, plain], strict=True):
            for x, y in zip(case, one, strict=True):
                torch.testing.assert_close(x, y)


class Group:
    pass


def prepared(given, balancer="headtail", key=None, modules=None):
    group = Group()
    mesh = SimpleNamespace(get_group=lambda: group, size=lambda: 2)
    cp = enabled()
    if modules != ():
        cp.apply_cp_to_forward(modules or [Flex()], mesh)
    extra = {"positions": POSITIONS, "attention_masks": given}
    cp.prepare_context_parallel_input(POSITIONS, POSITIONS, extra, mesh, "cpu", balancer, key)


def test_what_can_not_be_planned_is_refused_by_name():
    causal, _ = masks_of_documents()
    both = {"full": block_mask(causal), "linear": Metadata(STARTS, STARTS)}
    across = Metadata(torch.tensor([0, 40, 72]), torch.tensor([0, 40, 72]))
    varlen = [Varlen((-1, 0))]
    for message, arguments in {
        "got Metadata; layers with other masks": {"given": both},
        "got None": {"given": {"full": block_mask(causal)}, "balancer": "ptrr"},
        "got 'zigzag'": {"given": block_mask(causal), "balancer": "zigzag"},
        "got a batch for one that was not": {"given": block_mask(causal), "modules": ()},
        "documents within each of 2 sequences": {"given": across, "modules": varlen},
        "got others in cu_seq_k": {"given": Metadata(STARTS, STARTS + 1), "modules": varlen},
    }.items():
        with pytest.raises(flexcp.FlexCPError, match=message):
            prepared(**arguments)


def test_modules_without_a_plan_and_unknown_ones_are_refused_by_name():
    group, module = Group(), Flex()
    mesh = SimpleNamespace(get_group=lambda: group)
    cp = enabled()
    cp.apply_cp_to_forward([module], mesh)
    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(flexcp.FlexCPError, match="Flex called with NoneType"):
        module.forward(x, x, x, attention_masks=None)
    with pytest.raises(flexcp.FlexCPError, match="got Linear"):
        cp.apply_cp_to_forward([nn.Linear(1, 1)], mesh)
    parallel = SimpleNamespace(cp_enabled=True, spmd_backend="full_dtensor")
    with pytest.raises(flexcp.FlexCPError, match="got full_dtensor"):
        cp.validate_config(parallel, module)


@dataclass
class Parallelism:
    context_parallel_degree: int
    expert_parallel_degree: int = 1


@dataclass
class Job:
    model_spec: SimpleNamespace
    parallelism: Parallelism


class Model:
    """A configuration that refuses varlen attention over ranks, as torchtitan's do."""

    first_attention = SimpleNamespace(inner_attention=Varlen.Config())

    def update_from_config(self, *, config):
        if config.parallelism.context_parallel_degree > 1:
            raise NotImplementedError("Varlen attention is not supported with CP.")


class Trainer:
    def __init__(self, config):
        config.model_spec.model.update_from_config(config=config)


@pytest.fixture
def titan(monkeypatch) -> SimpleNamespace:
    """Modules by torchtitan's names, with what enable looks for."""
    own = {"prepare_context_parallel_input": object(), "apply_cp_to_forward": object()}
    contents = {
        "distributed.context_parallel": own,
        "distributed.full_dtensor": {"validate_config": object()},
        "trainer": {"Trainer": Trainer, **own},
        "models.common.attention": {
            "FlexAttention": Flex, "ScaledDotProductAttention": Sdpa, "VarlenAttention": Varlen,
            "VarlenMetadata": Metadata,
        },
    }  # fmt: skip
    packages: dict[str, dict] = {"distributed": {}, "models": {}, "models.common": {}}
    for name, values in {**packages, **contents}.items():
        module = ModuleType(f"torchtitan.{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "torchtitan", ModuleType("torchtitan"))
    monkeypatch.setattr(titan_names, "version", lambda _: "9.9")
    return SimpleNamespace(trainer=sys.modules["torchtitan.trainer"], own=own)


def test_every_name_is_replaced_and_put_back(titan):
    before, init = dict(vars(titan.trainer)), Trainer.__init__
    with cp_torchtitan.enable() as cp:
        assert not any(vars(titan.trainer)[name] is x for name, x in titan.own.items())
        with pytest.raises(flexcp.FlexCPError, match="got flexcp enabled already"):
            cp_torchtitan.enable()
        # What is imported while it is enabled finds ours, and is put right as well.
        source = sys.modules["torchtitan.distributed.context_parallel"]
        titan.trainer.again = source.apply_cp_to_forward
        assert titan.trainer.again.__self__ is cp
    assert titan.trainer.again is titan.own["apply_cp_to_forward"]
    del titan.trainer.again
    assert dict(vars(titan.trainer)) == before
    assert Trainer.__init__ is init
    cp.disable()


def test_varlen_attention_is_admitted_as_long_as_flexcp_is_enabled(titan):
    job = Job(SimpleNamespace(model=Model()), Parallelism(2))
    own = Model.update_from_config
    with cp_torchtitan.enable():
        Trainer(job)
        Trainer(job)
        with pytest.raises(NotImplementedError):  # experts are shared out by the degree
            Trainer(Job(job.model_spec, Parallelism(2, 2)))
    assert Model.update_from_config is own
    assert job.parallelism.context_parallel_degree == 2
    with pytest.raises(NotImplementedError):
        Trainer(job)


def test_a_version_without_a_name_and_a_missing_package_are_named(titan, monkeypatch):
    del titan.trainer.Trainer
    with pytest.raises(flexcp.FlexCPError, match=r"torchtitan 9\.9, which has not"):
        cp_torchtitan.enable()

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(titan_names, "version", missing)
    with pytest.raises(flexcp.FlexCPError, match="expected torchtitan to be installed"):
        cp_torchtitan.enable()
