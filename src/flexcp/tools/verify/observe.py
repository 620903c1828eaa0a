"""Watching one call of a step from outside: what the model was given, and what came out.

Nothing in the step has to cooperate. Hooks on the model's modules see integer arguments (tokens and
positions) and logits; a torch function mode, which belongs to one thread and so to one rank, sees
embeddings, attention and `torch.arange`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flexcp.compat.intercept import SDPA, Interception
from flexcp.errors import FlexCPError
from flexcp.ops import attention
from flexcp.torch_names import is_in_backward_pass

_CASTS = (Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type_as)
_WATCHED = frozenset({attention, functional.embedding, torch.arange, *_CASTS})


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of attention, as the rank made it."""

    function: str
    """Which: "scaled_dot_product_attention", "flex_attention" or "attention" (over a plan)."""
    q: Tensor
    """[B, H, rows, D]"""
    k: Tensor
    """[B, G, rows, D]"""
    v: Tensor
    """[B, G, rows, Dv]"""
    out: Tensor
    """[B, H, rows, Dv]"""
    positions: Tensor | None = None
    """int64, what the plan takes the rows for; [rows] or [B, rows]."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What says which pairs may attend: is_causal, attn_mask or block_mask; not kept on ranks."""


@dataclass(eq=False)
class Observation:
    """What one call of a step let see. It is filled as the step runs."""

    loss: Tensor | None = None
    """The loss that the step returned; a scalar."""
    logits: Tensor | None = None
    """[tokens, vocabulary] The model's output, if it was called once and gave such."""
    logits_gradient: Tensor | None = None
    """[tokens, vocabulary] The gradient of the loss by the logits."""
    integers: dict[str, Tensor] = field(default_factory=dict)
    """Integer tensors that modules and embeddings were called with, by their first place."""
    calls: list[AttentionCall] = field(default_factory=list)
    """Calls of attention, in order."""
    counted: list[int] = field(default_factory=list)
    """Lengths that `torch.arange` was called with inside of the model."""
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """By parameter."""
    coarsest: torch.dtype | None = None
    """The least precise type that numbers were converted to on their way, if they were."""


def observe(
    step: Callable[[nn.Module], Any], model: nn.Module, *, backward: bool = True
) -> Observation:
    """Runs a step on a model that nobody else uses, and its backward pass if it does not itself."""
    seen = Observation()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    outputs: list[Any] = []
    with _hooks(model, seen, outputs), _Watch(seen):
        loss = loss_of(step(model))
        if backward and loss.requires_grad and all(p.grad is None for p in model.parameters()):
            loss.backward()
    seen.loss = loss.detach()
    logits = _logits(outputs[0]) if len(outputs) == 1 else None
    if logits is not None:
        width = logits.shape[-1]
        seen.logits = logits.detach().reshape(-1, width)
        seen.logits_gradient = None if logits.grad is None else logits.grad.reshape(-1, width)
    if backward:
        seen.gradients = {name: _whole(p.grad) for name, p in model.named_parameters()}
    _refuse_updates(before, model)
    return seen


def loss_of(result: Any) -> Tensor:
    """The loss in what a step returned: itself, its first element, or its `loss`."""
    loss = result
    if isinstance(result, Mapping):
        loss = result.get("loss")
    elif getattr(result, "loss", None) is not None:
        loss = result.loss
    elif isinstance(result, (tuple, list)) and result:
        loss = result[0]
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    raise FlexCPError(
        "a step that returns its loss: a scalar tensor, (loss, ...), or something with .loss",
        f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(result).__name__,
        "return the loss of this rank's tokens",
    )


@contextmanager
def _hooks(model: nn.Module, seen: Observation, outputs: list[Any]) -> Iterator[None]:
    def given(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if is_in_backward_pass():
                return
            if not name:
                seen.counted.clear()  # what was counted before the model began is the step's affair
            for key, x in [*((str(i), x) for i, x in enumerate(args)), *kwargs.items()]:
                if _is_integer(x):
                    seen.integers.setdefault(f"{name or 'model'}({key})", x.detach().clone())

        return hook

    def returned(_: nn.Module, __: Any, output: Any) -> None:
        if not is_in_backward_pass():
            logits = _logits(output)
            if logits is not None and logits.requires_grad and not logits.is_leaf:
                logits.retain_grad()
            outputs.append(output)

    handles = [
        module.register_forward_pre_hook(given(name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    handles.append(model.register_forward_hook(returned))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Watch(Interception):
    """Notes what goes into embeddings and attention, and who counts rows."""

    looks_into_layers = False

    def __init__(self, seen: Observation) -> None:
        super().__init__()
        self.seen = seen
        self.embeddings = 0

    def sdpa(self, *args: Any, **kwargs: Any) -> Any:
        return self._attention(SDPA, args, kwargs)

    def flex(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self._attention(function, args, kwargs)

    def _attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if not (torch.compiler.is_dynamo_compiling() or is_in_backward_pass()):
            self.seen.calls.append(_call(func, args, kwargs, result))
        return result

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in _WATCHED or torch.compiler.is_dynamo_compiling() or is_in_backward_pass():
            return func(*args, **kwargs)
        if func is attention:
            return self._attention(func, args, kwargs)
        result = func(*args, **kwargs)
        if func is functional.embedding:
            key = f"embedding {self.embeddings}"
            self.seen.integers.setdefault(key, args[0].detach().clone())
            self.embeddings += 1
        elif func is torch.arange:
            self.seen.counted.append(result.shape[0])
        else:
            self._cast(args[0].dtype, result.dtype)
        return result

    def _cast(self, before: torch.dtype, after: torch.dtype) -> None:
        if not (before.is_floating_point and after.is_floating_point):
            return
        coarsest = self.seen.coarsest
        seen = torch.finfo(before if coarsest is None else coarsest).eps
        if torch.finfo(after).eps > seen:
            self.seen.coarsest = after


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> AttentionCall:
    q, k, v = (
        args[i] if len(args) > i else kwargs[name]
        for i, name in enumerate(
            ("query", "key", "value") if func is not attention else ("q", "k", "v")
        )
    )
    out = result[0] if isinstance(result, tuple) else result
    q, k, v, out = (x.detach().clone() for x in (q, k, v, out))
    if func is attention:
        plan = args[3] if len(args) > 3 else kwargs["plan"]
        return AttentionCall("attention", q, k, v, out, positions=plan.positions())
    names = (
        ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        if func is SDPA
        else ("score_mod", "block_mask")
    )
    options = {**dict(zip(names, args[3:], strict=False)), **kwargs}
    kept = {n: options.get(n) for n in ("is_causal", "attn_mask", "block_mask")}
    return AttentionCall(func.__name__, q, k, v, out, options=kept)


def _is_integer(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32) and x.dim() > 0


def _logits(output: Any) -> Tensor | None:
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif getattr(output, "logits", None) is not None:
        found = output.logits
    elif isinstance(output, (tuple, list)):
        found = next((x for x in output if isinstance(x, Tensor) and x.dim() >= 2), None)
    if isinstance(found, Tensor) and found.dim() >= 2 and found.is_floating_point():
        return found
    return None


def _whole(gradient: Tensor | None) -> Tensor | None:
    """Parameters that are sharded over ranks have their gradient put together."""
    if gradient is None:
        return None
    put_together = getattr(gradient, "full_tensor", None)
    whole: Tensor = gradient if put_together is None else put_together()
    return whole.detach().clone()


def _refuse_updates(before: Mapping[str, Tensor], model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if type(p.data) is Tensor and name in before and not torch.equal(p.detach(), before[name]):
            raise FlexCPError(
                "a step that computes a loss and gradients",
                f"one that changes the parameter {name!r}",
                "leave the optimizer out of it",
            )
