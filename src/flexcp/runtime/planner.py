"""make_plan for people: a plan that can run, where it was made with a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from flexcp.blocks import BlockGrid
from flexcp.comm.transport import ProcessTransport
from flexcp.layout import Layout
from flexcp.masks import Mask, MaskMod
from flexcp.plan import Machine, Plan, Ranks
from flexcp.plan import make_plan as plan_for


def make_plan(
    mask: Mask | MaskMod | BlockGrid | Mapping[str, Mask | MaskMod | BlockGrid],
    seq_len: int,
    mesh: Any,
    *,
    layout: str | Layout = "auto",
    schedule: str = "auto",
    block_size: int = 128,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    machine: Machine | str | None = None,
) -> Plan:
    """Who owns which tokens, what moves when, and what that costs; see `flexcp.plan.make_plan`.

    With a DeviceMesh, or the mesh that `testing.simulate` gives, the plan can also be run: it
    knows how its ranks reach each other.

    >>> import flexcp
    >>> make_plan(flexcp.masks.causal(), 1000, 4).stats().imbalance < 1.05
    True
    """
    ranks = Ranks.of(mesh)
    if ranks.mesh is not None and ranks.transport is None:
        ranks = replace(ranks, transport=ProcessTransport.of_mesh(mesh))
    return plan_for(
        mask,
        seq_len,
        ranks,
        layout=layout,
        schedule=schedule,
        block_size=block_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        batch=batch,
        machine=machine,
    )
