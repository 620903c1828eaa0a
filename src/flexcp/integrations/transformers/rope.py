"""Rotary embeddings that depend on the length of the sequence, computed for the whole of it.

Dynamic and long RoPE choose their frequencies by the largest position that they see. A rank sees
some positions only, so the largest one of the batch is appended, and its row dropped again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flexcp.integrations.transformers.attention import UNDER_WAY


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """Those whose frequencies depend on the positions that they are given."""
    return [m for m in model.modules() if any(map(_by_length, _rope_types(m)))]


def _rope_types(module: nn.Module) -> list[str]:
    kinds = getattr(module, "rope_type", None)
    return list(kinds.values()) if isinstance(kinds, dict) else [] if kinds is None else [kinds]


def _by_length(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def tell_the_last_position(module: nn.Module) -> list[RemovableHandle]:
    """Makes a rotary module see the largest position of the whole batch."""
    return [
        module.register_forward_pre_hook(_append, with_kwargs=True),
        module.register_forward_hook(_drop),
    ]


def _append(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    sharding = UNDER_WAY.forward_pass.sharding
    if sharding is None or sharding.last_position is None:
        return None
    if "position_ids" in kwargs:
        return args, {
            **kwargs,
            "position_ids": _with(kwargs["position_ids"], sharding.last_position),
        }
    x, position_ids, *rest = args
    return (x, _with(position_ids, sharding.last_position), *rest), kwargs


def _with(position_ids: Tensor, last: Tensor) -> Tensor:
    return torch.cat([position_ids, last.to(position_ids).expand(len(position_ids), 1)], dim=1)


def _drop(_: nn.Module, __: tuple[Any, ...], result: Any) -> Any:
    sharding = UNDER_WAY.forward_pass.sharding
    if sharding is None or sharding.last_position is None:
        return None
    return tuple(x[:, :-1] for x in result) if isinstance(result, tuple) else result[:, :-1]
