"""ContextParallel: a ParallelStyle for modules that call torch's attention functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flexcp.compat.flex_attention import flex_attention as compat_flex_attention
from flexcp.errors import FlexCPError
from flexcp.integrations._calls import PlannedAttention, is_within_causal
from flexcp.integrations._recomputation import kept_for_recomputation
from flexcp.integrations._torch_flex import TORCH_FLEX_ATTENTION, make_overridable
from flexcp.ops.attention import flex_attention
from flexcp.ops.passes import transport_of
from flexcp.plan import Plan

_FLEX = (flex_attention, compat_flex_attention, TORCH_FLEX_ATTENTION)
_STYLE = "_flexcp_context_parallel"
_OWN = "_flexcp_own_forward"


class ContextParallel(ParallelStyle):
    """Attention of a module over a sharded sequence; for torch's `parallelize_module`.

    While the module runs, its calls of `F.scaled_dot_product_attention` and `flex_attention`
    (torch's or flexcp's, imported under any name) are those of the whole sequence, as the plan
    says: query, key and value are this rank's rows, and a `score_mod` sees global positions.
    Everything else in the module runs as it is.

    The mask is the plan's. A call may repeat it, or say less: `is_causal=True` under a plan for
    packed documents is fine, `is_causal=True` under a plan for full attention is an error. So are
    an `attn_mask`, dropout, and whatever else a plan can't do; nothing is dropped.

    Args:
        plan: Whose rows are whose, and which pairs attend; or None, if every step has a plan of its
            own: see `using`.
        mask: The name of the mask, if plans have several.
        first_head: Under tensor parallelism, the number of this rank's first query head, which a
            `score_mod` then counts from.

    >>> import flexcp
    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> class Attention(nn.Module):
    ...     def forward(self, x):
    ...         return functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> x = torch.randn(1, 2, 10, 4)
    >>> def rank(mesh):
    ...     plan = flexcp.make_plan(flexcp.masks.causal(), 10, mesh, num_heads=2, head_dim=4)
    ...     module = parallelize_module(Attention(), mesh, flexcp.ContextParallel(plan))
    ...     return plan.unshard(module(plan.shard(x, 2)), 2)
    >>> torch.allclose(flexcp.testing.simulate(rank, 3)[0], Attention()(x), atol=1e-6)
    True
    """

    def __init__(
        self, plan: Plan | None = None, *, mask: str | None = None, first_head: int = 0
    ) -> None:
        super().__init__()
        self.mask = mask
        self.first_head = first_head
        self._step = _Step()
        if plan is not None:
            self._require(plan)
            self._step.plan = plan

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self._step.plan

    def with_mask(self, mask: str, *, first_head: int | None = None) -> ContextParallel:
        """The same style for modules with another mask of the same plans.

        >>> cp = ContextParallel()
        >>> layers = {"layers.0.attn": cp.with_mask("full"), "layers.1.attn": cp.with_mask("local")}
        """
        first_head = self.first_head if first_head is None else first_head
        other = ContextParallel(mask=mask, first_head=first_head)
        other._step = self._step
        if self.plan is not None:
            other._require(self.plan)
        return other

    @contextmanager
    def using(self, plan: Plan) -> Iterator[Plan]:
        """The plan of a step, for all modules of this style and of those made by `with_mask`.

        Packed documents differ between batches, and so do their plans. Regions that are
        checkpointed in the body are recomputed under its plan, also if the backward pass comes
        after it.
        """
        self._require(plan)
        with self._step.holding(plan):
            yield plan

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """In the body, modules of this style run as if they had none: on whole sequences."""
        with self._step.holding(None, disabled=True):
            yield

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        for name, other in module.named_modules():
            if _STYLE in vars(other):
                raise FlexCPError(
                    "modules that have no ContextParallel yet",
                    f"{type(other).__name__} {name!r}, which has" if name else "one that has",
                    "parallelize each module once; change its plan with using(plan)",
                )
        self._step.bind(device_mesh)
        if self.plan is not None:
            self._require(self.plan)
        make_overridable()
        kept = vars(module)
        kept[_STYLE], kept[_OWN] = self, kept.get("forward")
        kept["forward"] = MethodType(_forward, module)
        module.register_forward_pre_hook(_must_be_called)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """A copy of a model has the style of the model, and takes its plans from there."""
        return self

    def _require(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise FlexCPError(
                "a plan, as flexcp.make_plan returns it",
                f"{type(plan).__name__}",
                "pass ContextParallel(plan), or ContextParallel() and then using(plan)",
            )
        transport_of(plan)
        self._step.require_mesh(plan)
        if self.mask is not None or len(plan.grids) == 1:
            # Settled now: inside torch.compile, there is no planning.
            is_within_causal(plan, plan.mask_name(self.mask))


@dataclass(eq=False)
class _Step:
    """What the styles of one model share: the mesh, and the plan in force."""

    mesh: Any = None
    plan: Plan | None = None
    is_disabled: bool = False
    is_recomputing: bool = False
    has_changed: bool = False
    """Whether there has been more than one plan."""

    @contextmanager
    def holding(
        self, plan: Plan | None, *, disabled: bool = False, recomputing: bool = False
    ) -> Iterator[None]:
        """Sets the plan, here and wherever the body is recomputed."""
        before = (self.plan, self.is_disabled, self.is_recomputing)
        self.has_changed = self.has_changed or plan is not self.plan
        self.plan, self.is_disabled, self.is_recomputing = plan, disabled, recomputing
        try:
            with kept_for_recomputation(
                lambda: self.holding(plan, disabled=disabled, recomputing=True)
            ):
                yield
        finally:
            self.plan, self.is_disabled, self.is_recomputing = before

    def bind(self, mesh: Any) -> None:
        if self.mesh is not None and _members(mesh) != _members(self.mesh):
            raise FlexCPError(
                f"the mesh that this style has been applied with, {self.mesh}",
                f"{mesh}",
                "make a ContextParallel for each mesh, and in a simulation for each rank",
            )
        self.mesh = mesh

    def require_mesh(self, plan: Plan) -> None:
        mesh = plan.ranks.mesh
        if self.mesh is not None and _members(mesh) != _members(self.mesh):
            raise FlexCPError(
                f"a plan for the mesh of parallelize_module, {self.mesh}",
                f"one for {mesh}",
                "pass the same mesh, such as mesh['cp'], to make_plan and to parallelize_module",
            )


def _members(mesh: Any) -> object:
    """What tells one mesh from another."""
    ranks = getattr(mesh, "mesh", None)
    if isinstance(ranks, torch.Tensor):
        return tuple(ranks.shape), tuple(ranks.flatten().tolist())
    transport = getattr(mesh, "transport", None)
    return id(mesh) if transport is None else id(transport)


def _must_be_called(module: nn.Module, args: Any) -> None:
    """Does nothing; a hook keeps nn.TransformerEncoderLayer from going around the module's call."""


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, with its attention over the whole sequence."""
    style: ContextParallel = vars(module)[_STYLE]
    step = style._step
    if step.is_disabled:
        return _own_forward(module, *args, **kwargs)
    plan = step.plan
    if plan is None:
        raise FlexCPError(
            "a plan for ContextParallel",
            "none",
            "pass ContextParallel(plan), or run the model within using(plan)",
        )
    planned = PlannedAttention(plan, plan.mask_name(style.mask), style.first_head)
    mode = _Answering(planned, [])
    if torch.compiler.is_compiling():
        with mode:
            out = _own_forward(module, *args, **kwargs)
    else:
        _require_own_plan(step)
        with _in_force(mode):
            out = _own_forward(module, *args, **kwargs)
    if not mode.answered:
        raise FlexCPError(
            "a module that calls F.scaled_dot_product_attention or flex_attention",
            f"{type(module).__name__}, whose forward called neither",
            "parallelize the module that calls one of them, with such attention switched on "
            "(nn.MultiheadAttention: need_weights=False)",
        )
    return out


def _own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the module did before: that of its class, unless it was given another one."""
    own: Callable[..., Any] | None = vars(module)[_OWN]
    if own is None:
        return type(module).forward(module, *args, **kwargs)
    return own(*args, **kwargs)


def _require_own_plan(step: _Step) -> None:
    """What is recomputed must be so under the plan that it ran under."""
    if step.has_changed and not step.is_recomputing and torch._C._current_graph_task_id() != -1:
        raise FlexCPError(
            "recomputation by torch.utils.checkpoint within using(plan)",
            "a module that runs in a backward pass, while plans change between steps",
            "use torch.utils.checkpoint.checkpoint or checkpoint_wrapper within using(plan)",
        )


@contextmanager
def _in_force(mode: _Answering) -> Iterator[None]:
    """Also for what the module itself checkpoints."""
    with (
        kept_for_recomputation(lambda: _in_force(_Answering(mode.planned, mode.answered))),
        mode,
    ):
        yield


class _Answering(TorchFunctionMode):
    """Sees every torch function that is called, under any name, on this thread alone."""

    def __init__(self, planned: PlannedAttention, answered: list[str]) -> None:
        super().__init__()
        self.planned = planned
        self.answered = answered

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is functional.scaled_dot_product_attention:
            self.answered.append("sdpa")
            return self.planned.sdpa(*args, **kwargs)
        if func in _FLEX:
            self.answered.append("flex")
            return self.planned.flex(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            return self._multi_head()(*args, **kwargs)
        return _pass(func, args, kwargs)

    def _multi_head(self) -> Callable[..., Any]:
        """Torch's function, which modes see as one call, with its own attention answered."""

        def sdpa(*args: Any, **kwargs: Any) -> Any:
            self.answered.append("sdpa")
            return self.planned.sdpa(*args, **kwargs)

        whole: Any = functional.multi_head_attention_forward
        names = {"scaled_dot_product_attention": sdpa, "has_torch_function": lambda _: False}
        inner = FunctionType(whole.__code__, {**whole.__globals__, **names})
        inner.__defaults__, inner.__kwdefaults__ = whole.__defaults__, whole.__kwdefaults__
        return inner


def _pass(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is not attention runs as it is."""
    if torch.compiler.is_compiling() and isinstance(func, FunctionType):
        name = func.__name__
        # torch.compile knows such a method of a tensor, but not the function that it is made of.
        if getattr(torch.Tensor, name, None) is func:
            return getattr(args[0], name)(*args[1:], **kwargs)
    return func(*args, **kwargs)
