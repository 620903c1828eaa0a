"""The plan of a batch: for the masks that the model itself defines, kept for batches like it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from flexcp.errors import FlexCPError
from flexcp.integrations.transformers.global_masks import MaskKind, TokenFacts, global_masks
from flexcp.plan import Plan, make_plan

_MOST_KEPT = 16
"""Plans kept for batches whose masks come again."""


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """A plan for the masks of all layer types, and which is whose."""

    plan: Plan
    names: dict[MaskKind, str]
    """The name in the plan of each kind of mask."""


@dataclass(eq=False)
class BatchPlans:
    """The last plans that were made; a thread may make one while another is used."""

    _kept: OrderedDict[object, BatchPlan] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(
        self, facts: TokenFacts, model: PreTrainedModel, mesh: Any, options: Mapping[str, Any]
    ) -> BatchPlan:
        """The plan of a batch; `options` are what `flexcp.make_plan` takes."""
        key = facts.key()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = _make(facts, model, mesh, options)
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return made

    def __len__(self) -> int:
        return len(self._kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchPlans:
        with self._lock:
            return BatchPlans(self._kept.copy())


def _make(
    facts: TokenFacts, model: PreTrainedModel, mesh: Any, options: Mapping[str, Any]
) -> BatchPlan:
    config = model.config.get_text_config(decoder=True)
    by_name, names = global_masks(model.config, facts)
    heads = _largest(config, "num_attention_heads")
    assert heads is not None
    plan = make_plan(
        by_name,
        facts.shape[1],
        mesh,
        num_heads=heads,
        num_kv_heads=_largest(config, "num_key_value_heads") or heads,
        head_dim=_largest(config, "head_dim") or config.hidden_size // heads,
        dtype=model.dtype,
        batch=facts.shape[0],
        **options,
    )
    if int(plan.layout.counts.min()) == 0:
        raise FlexCPError(
            f"at least one token for each of {plan.ranks.size} ranks",
            f"sequences of {facts.shape[1]} tokens",
            "Transformers' layers don't take empty sequences: use fewer ranks, or pad",
        )
    return BatchPlan(plan, names)


def _largest(config: Any, name: str) -> int | None:
    """A number of the configuration, or the largest of its layers if these differ."""
    try:
        found: int | None = getattr(config, name, None)
    except RuntimeError:  # as Transformers says that they do
        found = max(getattr(layer, name) for layer in config.per_layer_config)
    return found
