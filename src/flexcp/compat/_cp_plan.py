"""The plan of `scaled_dot_product_attention` over a sequence that a group has sharded."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexcp.comm import Transport
from flexcp.compat._cp_layout import CPGroup, PlanKey
from flexcp.compat._cp_options import _cp_options, _RotateMethod
from flexcp.layout import Layout
from flexcp.masks import causal, full
from flexcp.plan import Plan, make_plan
from flexcp.plan.mesh import Ranks

_MOST_PLANS = 32
"""Plans that a group keeps."""


def plan_for(
    group: CPGroup, q: Tensor, k: Tensor, is_causal: bool, shards: Sequence[Tensor]
) -> Plan:
    """The plan of attention [B, H, L, D] of a sequence that is sharded over a group.

    `shards` are the tensors as the caller has them, which the group may have sharded.
    """
    layout = group.layout_of(q.shape[2], q.device, *shards)
    if not group.sharded or group.sharded[-1] is not layout:
        layout = group.remember(layout)
    method = _cp_options.rotate_method
    key = PlanKey(
        layout.fingerprint(),
        is_causal,
        method,
        tuple(q.shape[:2]),
        k.shape[1],
        q.shape[3],
        q.dtype,
    )
    plans = group.plans
    if key not in plans:
        while len(plans) >= _MOST_PLANS:
            plans.pop(next(iter(plans)))
        plans[key] = make_plan(
            causal() if is_causal else full(),
            layout.seq_len,
            Ranks((group.size,), group.rank, _transport(group, layout, method), group.mesh),
            layout=layout,
            schedule="ring" if method is _RotateMethod.ALL_TO_ALL else "allgather",
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[3],
            dtype=q.dtype,
            batch=q.shape[0],
        )
    return plans[key]


def _transport(group: CPGroup, layout: Layout, method: _RotateMethod) -> Transport:
    if method is not _RotateMethod.ALL_TO_ALL or bool((layout.counts == 0).any()):
        return group.pairs
    return group.rounds_as_collectives
