"""Models, trainers and PyTorch's context parallelism, as users call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from flexcp import Layout, Machine, testing
from flexcp.compat import context_parallel as cp
from flexcp.integrations import accelerate
from flexcp.integrations import transformers as hf
from tests.junk.calls import Call, call, refusals
from tests.junk.samples import BLOCK_MASK, DOCUMENTS, IDS, LAYOUTS, SCHEDULES
from tests.junk.values import a, absent, either, flag, listed, nothing, one_of, tensor, whole

none_of_them = either(absent, one_of([], (), {}))
MESH = object()
"""Stands for the rank's own mesh."""


@cache
def model() -> LlamaForCausalLM:
    """A tiny one, of which every rank has its copy."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=16,
        )
    )  # fmt: skip


def _attach(**given: Any) -> Any:
    def rank(mesh: Any) -> Any:
        mine = {k: mesh if v is MESH else v for k, v in given.items()}
        attached = hf.attach(**mine)
        attached.detach()

    return testing.simulate(rank, 1)


def _detach(model: Any) -> Any:
    def rank(mesh: Any) -> None:
        hf.attach(one, mesh)
        try:
            hf.detach(model)
        finally:
            if getattr(one, "_flexcp", None) is not None or model is not one:
                hf.detach(one)

    one = globals()["model"]()
    return testing.simulate(rank, 1)


def _attached(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(**given: Any) -> Any:
        def rank(mesh: Any) -> Any:
            attached = hf.attach(model(), mesh)
            try:
                attached.shard({"input_ids": IDS, "labels": IDS})
                return function(attached, **given)
            finally:
                attached.detach()

        return testing.simulate(rank, 1)

    return run


@contextmanager
def _one_process() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield init_device_mesh("cpu", (1,))
        finally:
            dist.destroy_process_group()


def _on_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function with a mesh of this process in place of MESH."""

    def run(**given: Any) -> Any:
        if given["mesh"] is not MESH:
            return function(**given)
        with _one_process() as mesh:
            return function(**{**given, "mesh": mesh})

    return run


def integration_calls() -> dict[str, Call]:
    """Transformers, Accelerate, and `flexcp.compat.context_parallel`."""
    options = {
        "gradients": ("summed", one_of("summed", "averaged")),
        "layout": ("auto", either(one_of(*LAYOUTS), a(Layout))),
        "schedule": ("auto", one_of(*SCHEDULES)),
        "block_size": (128, whole(1, 1 << 20)),
        "machine": (None, either(absent, a(Machine), one_of("h100"))),
    }
    balancer = {
        "world_size": (2, whole(1, 1 << 14)),
        "device": ("cpu", either(a(torch.device), whole(0))),
    }
    torchs: dict[str, Call] = {
        "set_rotate_method": call(cp.set_rotate_method, rotate_method=("allgather", nothing)),
        "context_parallel": call(
            _on_mesh(lambda **given: cp.context_parallel(**given).__enter__()),
            mesh=(MESH, nothing),
            buffers=([], none_of_them),
            buffer_seq_dims=([], none_of_them),
            no_restore_buffers=(None, none_of_them),
        ),
        "context_parallel_unshard": call(
            _on_mesh(cp.context_parallel_unshard),
            mesh=(MESH, nothing),
            buffers=([], none_of_them),
            seq_dims=([], none_of_them),
        ),
        "_context_parallel_shard": call(
            _on_mesh(cp._context_parallel_shard),
            mesh=(MESH, nothing),
            buffers=([], none_of_them),
            seq_dims=([], none_of_them),
        ),
        "_HeadTailLoadBalancer": refusals(
            cp._HeadTailLoadBalancer, seq_length=(8, whole(0)), **balancer
        ),
        "_PerDocumentHeadTailLoadBalancer": refusals(
            cp._PerDocumentHeadTailLoadBalancer,
            seq_length_per_doc=([[4, 4]], listed(listed(whole(0)))),
            **balancer,
        ),
        "_PTRRLoadBalancer": refusals(
            cp._PTRRLoadBalancer,
            block_mask=(BLOCK_MASK, nothing),
            world_size=(2, whole(1, 1 << 14)),
        ),
    }
    return {
        "attach": call(_attach, model=(model(), nothing), mesh=(MESH, nothing), **options),
        "detach": call(_detach, model=(model(), nothing)),
        "Attached.shard": call(
            _attached(lambda attached, **given: attached.shard(**given)),
            batch=({"input_ids": IDS, "labels": IDS}, nothing),
            documents=(None, DOCUMENTS),
            score_across_documents=(True, flag),
        ),
        "Attached.unshard": call(
            _attached(lambda attached, **given: attached.unshard(**given)),
            x=(torch.zeros(1, 8, 3), tensor),
            dim=(1, whole(-9, 9)),
        ),
        "Attached.sum_over_ranks": call(
            _attached(lambda attached, **given: attached.sum_over_ranks(**given)),
            x=(torch.zeros(1), tensor),
        ),
        "share_batches": call(
            accelerate.share_batches,
            accelerator=(Accelerator(cpu=True), nothing),
            mesh=(1, whole(1, 1)),
        ),
        **{name: replace(one, raises_as_torch=True) for name, one in torchs.items()},
    }
