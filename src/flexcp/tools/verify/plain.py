"""What flexcp itself does with a plain PyTorch model, whose attention is SDPA or FlexAttention."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from flexcp.batch import cross_entropy, shard_batch
from flexcp.compat.intercept import SDPA, Interception, in_force
from flexcp.errors import FlexCPError
from flexcp.integrations._torch_flex import refusing_by_name
from flexcp.integrations.context_parallel import ContextParallel
from flexcp.layout import Layout
from flexcp.masks import Mask, MaskMod, causal, full
from flexcp.ops import flex_attention
from flexcp.plan import Plan, make_plan
from flexcp.tools.verify.observe import AttentionCall, _logits
from flexcp.torch_names import constant_in_graphs

_TOKENS = ("input_ids", "tokens", "inputs", "input", "ids", "idx", "x")
_POSITIONS = ("position_ids", "positions", "pos", "input_pos")


@dataclass(frozen=True, eq=False)
class Plain:
    """How to run a model that maps tokens to logits, on one process and on ranks."""

    mask: Mask | MaskMod | None
    """What may attend; None takes what the model itself asks of attention."""
    tokens: str
    """The name of the tokens in a batch."""
    documents: Tensor | None
    """int64 [B, S] or [S], if several are packed into a sequence."""
    restart_positions: bool
    """Whether positions count from 0 in each document."""
    layout: str | Layout
    """For the plan."""
    schedule: str
    """For the plan."""
    gradients: str
    """What happens to the ranks' gradients: "summed" or "averaged"."""
    plans: dict[Any, Plan] = field(default_factory=dict)
    """By mesh: every rank makes its plan once for all of its batches."""

    def single(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """The loss of one process, over the whole sequence."""
        tokens: Tensor = batch[self.tokens]
        shape = (tokens.shape[0], tokens.shape[1])
        labels = batch.get("labels", tokens).clone()
        ids = None if self.documents is None else self.documents.expand(shape)
        places = torch.arange(shape[1]).expand(shape)
        if "position_ids" in batch:
            places = batch["position_ids"]
        elif ids is not None and self.restart_positions:
            places = torch.stack([_restarted(row) for row in ids])
        if ids is not None:
            labels[:, 1:][ids[:, 1:] != ids[:, :-1]] = -100
        padding = batch.get("attention_mask")
        if padding is not None:
            labels[padding == 0] = -100
        with refusing_by_name(), in_force(lambda: _Attend(self.mask)):
            logits = logits_of(model, tokens, places)
        flat = logits[:, :-1].flatten(0, 1)
        flat = flat if flat.dtype == torch.float64 else flat.float()
        return functional.cross_entropy(flat, labels[:, 1:].flatten())

    def parallel(self, model: nn.Module, batch: Mapping[str, Any], mesh: Any, like: Any) -> Tensor:
        """The loss of a rank's tokens; `like` is a call of attention in one process."""
        call: AttentionCall = like
        tokens: Tensor = batch[self.tokens]
        plan = self.plans.get(mesh) or make_plan(
            self.mask_of(call),
            tokens.shape[1],
            mesh,
            layout=self.layout,
            schedule=self.schedule,
            block_size=16,
            num_heads=call.q.shape[1],
            num_kv_heads=call.k.shape[1],
            head_dim=call.q.shape[3],
            dtype=call.q.dtype,
            batch=tokens.shape[0],
        )
        self.plans[mesh] = plan
        local = shard_batch(
            {"labels": tokens, **batch},
            plan,
            documents=self.documents,
            restart_positions=self.restart_positions,
        )
        parallelize_module(model, mesh, ContextParallel(plan))
        logits = logits_of(model, local[self.tokens], local["position_ids"])
        return cross_entropy(
            logits,
            local["labels"],
            local["num_scored"],
            gradients=cast(Any, self.gradients),
            ranks=mesh.size(),
        )

    def mask_of(self, call: AttentionCall) -> Mask | MaskMod:
        """The mask that was given, or what a call of attention says."""
        if self.mask is not None:
            return self.mask
        block_mask = call.options.get("block_mask")
        if isinstance(block_mask, Mask):
            return block_mask
        if call.options.get("attn_mask") is not None or block_mask is not None:
            raise FlexCPError(
                "a mask as a rule, since a dense one can't be sharded",
                "an attn_mask or BlockMask, made inside the model",
                "pass mask= with a Mask or mask_mod of global positions",
            )
        return causal() if call.options.get("is_causal") else full()


def logits_of(model: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
    """The logits of a model, called with what its forward takes: tokens, and positions if it can.

    >>> class Tiny(nn.Module):
    ...     def forward(self, tokens, positions):
    ...         return torch.stack([tokens, positions], -1).float()
    >>> logits_of(Tiny(), torch.tensor([[7]]), torch.tensor([[3]]))
    tensor([[[7., 3.]]])
    """
    # of the class: a parallel style may have put a wrapper around the instance's own
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    first = next((n for n in names if n in _TOKENS), names[0] if names else "")
    place = next((n for n in names if n in _POSITIONS), None)
    given = {first: tokens} if place is None else {first: tokens, place: positions}
    output = model(**given)
    logits = _logits(output)
    if logits is None or logits.shape[:2] != tokens.shape:
        raise FlexCPError(
            "a model that maps tokens [B, S] to logits [B, S, vocabulary]",
            f"shape {tuple(logits.shape)}" if logits is not None else type(output).__name__,
            "pass parallel= and single=: how your code gets its loss on a rank and in one process",
        )
    return logits


class _Attend(Interception):
    """Attention under a mask within one process, by the oracle: nothing that the ranks run."""

    looks_into_layers = False

    def __init__(self, mask: Mask | MaskMod | None) -> None:
        super().__init__()
        self.mask = mask
        self.trains_flex_op_on_cpu = mask is not None  # `flex_op` then refuses, and says why

    def sdpa(self, *args: Any, **kwargs: Any) -> Any:
        return self._attend(SDPA, _sdpa, args, kwargs)

    def flex(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self._attend(function, flex_attention, args, kwargs)

    def flex_op(self, *args: Any, **kwargs: Any) -> Any:
        if self.mask is not None:
            _refuse_torch_flex()
        return super().flex_op(*args, **kwargs)

    def _attend(
        self, function: Any, signature: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.mask is None:
            return function(*args, **kwargs)
        names = list(inspect.signature(signature).parameters)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("dropout_p"):
            raise FlexCPError(
                "attention without dropout, since dropped pairs would differ on the ranks",
                f"dropout_p={given['dropout_p']}",
                "set it to 0, or call model.eval() in the factory",
            )
        options: dict[str, Any] = {n: given.get(n) for n in ("scale", "sinks", "score_mod")}
        return flex_attention(
            given["query"],
            given["key"],
            given["value"],
            block_mask=self.mask,
            enable_gqa=True,
            kernel_options={"kernel": "reference"},
            **options,
        )


def _refuse_torch_flex() -> NoReturn:
    raise FlexCPError(
        "attention that can be given the mask: F.scaled_dot_product_attention or "
        "flexcp.flex_attention",
        "torch's flex_attention",
        "import flex_attention from flexcp.compat.flex_attention, which is the same otherwise",
    )


# Run while dynamo traces the operator: it can't trace errors.
constant_in_graphs(_refuse_torch_flex)


def _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):  # type: ignore[no-untyped-def]
    """The names of its arguments: the function itself is not written in Python."""


def _restarted(ids: Tensor) -> Tensor:
    _, lengths = torch.unique_consecutive(ids, return_counts=True)
    return torch.cat([torch.arange(int(n)) for n in lengths])
