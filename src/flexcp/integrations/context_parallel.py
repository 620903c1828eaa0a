"""ContextParallel: a ParallelStyle for modules that call torch's attention functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.hooks import RemovableHandle

from flexcp.compat.intercept import Interception, in_force
from flexcp.compat.recomputation import begin_keeping, end_keeping, kept_for_recomputation
from flexcp.errors import FlexCPError, require, whole_number
from flexcp.integrations._calls import ComparedMasks, PlannedAttention
from flexcp.integrations._torch_flex import refusing_by_name
from flexcp.plan import Plan
from flexcp.plan.styles import StyleMark, require_applied
from flexcp.torch_names import is_in_backward_pass


class ContextParallel(ParallelStyle):
    """Attention of a module over a sharded sequence; for torch's `parallelize_module`.

    While the module runs, its calls of `F.scaled_dot_product_attention` and `flex_attention`
    (torch's or flexcp's, imported under any name) are those of the whole sequence, as the plan
    says: query, key and value are this rank's rows, and a `score_mod` sees global positions.
    Everything else in the module runs as it is.

    The mask is the plan's. A call may repeat it, or say less: `is_causal=True` under a plan for
    packed documents is fine, `is_causal=True` under a plan for full attention is an error. So are
    an `attn_mask` and whatever else a plan can't do; nothing is dropped. With `dropout_p`, the seed
    comes from torch's default CPU generator, whose state must be the same on all ranks.

    A style has to be applied to a module before its plan shards a tensor, and before `using`:
    `parallelize_module` passes over patterns that match no module, and the model would then take
    this rank's rows for the whole sequence. `flexcp.parallelize` names such patterns at once.

    Args:
        plan: Whose rows are whose, and which pairs attend; or None, if every step has a plan of its
            own: see `using`.
        mask: The name of the mask, if plans have several.
        first_head: Under tensor parallelism, the number of this rank's first query head, which a
            `score_mod` and dropout then count from.

    >>> import flexcp
    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> from torch.nn import functional
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
        if mask is not None:
            require("mask", mask, str, "pass the name of one of the plan's masks")
        self.mask = mask
        self.first_head = whole_number(
            "first_head", first_head, at_least=0, fix="pass which query head is the module's first"
        )
        self._step = _Step()
        self._mark = StyleMark("ContextParallel()" if mask is None else f"ContextParallel({mask=})")
        self._step.marks.append(self._mark)
        if plan is not None:
            self._require(plan)
            self._step.set(plan)
            plan.unapplied_styles.expect(self._mark)

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self._step.plan

    def with_mask(self, mask: str, *, first_head: int | None = None) -> ContextParallel:
        """A style for modules that use another mask of this style's plans.

        >>> cp = ContextParallel()
        >>> layers = {"layers.0.attn": cp.with_mask("full"), "layers.1.attn": cp.with_mask("local")}
        """
        require("mask", mask, str, "pass the name of one of the plans' masks")
        first_head = self.first_head if first_head is None else first_head
        other = ContextParallel(mask=mask, first_head=first_head)
        other._step = self._step
        self._step.marks.append(other._mark)
        self._mark.is_applied = True  # no module needs the style that others are made of
        if self.plan is not None:
            other._require(self.plan)
            self.plan.unapplied_styles.expect(other._mark)
        return other

    @contextmanager
    def using(self, plan: Plan) -> Iterator[Plan]:
        """The plan of a step, for all modules of this style and of those made by `with_mask`.

        Packed documents differ between batches, and so do their plans. Regions that are
        checkpointed in the body are recomputed under its plan, also if the backward pass comes
        after it.
        """
        self._require(plan)
        require_applied(self._step.marks, "using(plan)")
        with self._step.holding(plan):
            yield plan

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """In the body, modules of this style run as if they had none: on whole sequences."""
        with self._step.holding(None, disabled=True):
            yield

    def remove(self, model: nn.Module) -> None:
        """Gives the modules of a model that have this style their own forward back.

        Also those that have a style made of it by `with_mask`.
        """
        for module in model.modules():
            parallel = getattr(module.forward, "__self__", None)
            if isinstance(parallel, _ParallelForward) and parallel.style._step is self._step:
                parallel.hook.remove()
                if getattr(parallel.own, "__func__", None) is type(module).forward:
                    del module.forward  # it is the class's own again
                else:
                    module.forward = parallel.own

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        for name, other in module.named_modules():
            if _has_style(other):
                raise FlexCPError(
                    "modules that have no ContextParallel yet",
                    f"{type(other).__name__} {name!r}, which has" if name else "one that has",
                    "parallelize each module once; change its plan with using(plan)",
                )
            if isinstance(other, torch.jit.ScriptModule):
                raise FlexCPError(
                    "modules of Python, whose calls of attention can be seen",
                    f"the ScriptModule {name!r}" if name else "a ScriptModule",
                    "parallelize the module before it is scripted or traced",
                )
        self._step.bind(device_mesh)
        if self.plan is not None:
            self._require(self.plan)
            self.plan.unapplied_styles.forget_reported()
        # Not by hooks, which run outside of what `torch.compile(module)` traces.
        hook = module.register_forward_pre_hook(_must_be_called)
        module.forward = _ParallelForward(self, module, module.forward, hook).run
        self._mark.is_applied = True
        self._step.marks[:] = [mark for mark in self._step.marks if not mark.is_reported]
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
        plan.require_mesh()
        self._step.require_mesh(plan)
        if self.mask is not None or len(plan.grids) == 1:
            # Settled now: inside torch.compile, there is no planning.
            ComparedMasks.of(plan).is_within_causal(plan, plan.mask_name(self.mask))


@dataclass(eq=False)
class _Step:
    """What the styles of one model share: the mesh, and the plan in force."""

    mesh: Any = None
    plan: Plan | None = None
    compared: ComparedMasks | None = None
    """What is known of the plan's masks."""
    marks: list[StyleMark] = field(default_factory=list)
    """Of the styles."""
    is_disabled: bool = False
    is_recomputing: bool = False
    has_changed: bool = False
    """Whether there has been more than one plan."""

    def set(self, plan: Plan | None) -> None:
        """Puts a plan in force."""
        self.plan = plan
        self.compared = None if plan is None else ComparedMasks.of(plan)

    @contextmanager
    def holding(
        self, plan: Plan | None, *, disabled: bool = False, recomputing: bool = False
    ) -> Iterator[None]:
        """Sets the plan, here and wherever the body is recomputed."""
        before = (self.plan, self.is_disabled, self.is_recomputing)
        self.has_changed = self.has_changed or plan is not self.plan
        self.set(plan)
        self.is_disabled, self.is_recomputing = disabled, recomputing
        try:
            with kept_for_recomputation(
                lambda: self.holding(plan, disabled=disabled, recomputing=True)
            ):
                yield
        finally:
            self.set(before[0])
            self.is_disabled, self.is_recomputing = before[1:]

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


@dataclass(frozen=True, eq=False)
class _ParallelForward:
    """A module's own forward, with its attention over the whole sequence."""

    style: ContextParallel
    module: nn.Module
    own: Callable[..., Any]
    """What the module did before."""
    hook: RemovableHandle
    """`_must_be_called`."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Stands for the module's forward."""
        style, step = self.style, self.style._step
        if step.is_disabled:
            return self.own(*args, **kwargs)
        plan = step.plan
        if plan is None or step.compared is None:
            raise FlexCPError(
                "a plan for ContextParallel",
                "none",
                "pass ContextParallel(plan), or run the model within using(plan)",
            )
        mask = plan.mask_name(style.mask)
        planned = PlannedAttention(plan, mask, style.first_head, step.compared)
        mode = _Answering(planned, [])
        if torch.compiler.is_compiling():
            with mode:
                out = self.own(*args, **kwargs)
        else:
            _require_own_plan(step)
            begin_keeping(mode.again)  # for what the module itself checkpoints
            try:
                with refusing_by_name(), mode:
                    out = self.own(*args, **kwargs)
            finally:
                end_keeping(mode.again)
        if not mode.answered:
            raise FlexCPError(
                "a module that calls F.scaled_dot_product_attention or flex_attention",
                f"{type(self.module).__name__}, whose forward called neither",
                "parallelize the module that calls one of them, with such attention switched on "
                "(nn.MultiheadAttention: need_weights=False)",
            )
        return out


def _has_style(module: nn.Module) -> bool:
    return isinstance(getattr(module.forward, "__self__", None), _ParallelForward)


def _must_be_called(module: nn.Module, args: Any) -> None:
    """Does nothing; a hook keeps nn.TransformerEncoderLayer from going around the module's call."""


def _require_own_plan(step: _Step) -> None:
    """What is recomputed must be so under the plan that it ran under."""
    if step.has_changed and not step.is_recomputing and is_in_backward_pass():
        raise FlexCPError(
            "recomputation by torch.utils.checkpoint within using(plan)",
            "a module that runs in a backward pass, while plans change between steps",
            "use torch.utils.checkpoint.checkpoint or checkpoint_wrapper within using(plan)",
        )


class _Answering(Interception):
    """A plan answers the attention functions that a module calls."""

    trains_flex_op_on_cpu = True

    def __init__(self, planned: PlannedAttention, answered: list[str]) -> None:
        super().__init__()
        self.planned = planned
        self.answered = answered

    def again(self) -> Any:
        """A context that answers the calls of what a module recomputes in its backward pass."""
        return in_force(lambda: _Answering(self.planned, self.answered))

    def sdpa(self, *args: Any, **kwargs: Any) -> Any:
        """Attention of the whole sequence, to this rank's queries."""
        self.answered.append("scaled_dot_product_attention")
        return self.planned.sdpa(*args, **kwargs)

    def flex(self, function: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Attention of the whole sequence, to this rank's queries."""
        self.answered.append("flex_attention")
        return self.planned.flex(*args, **kwargs)

    def flex_op(self, *args: Any, **kwargs: Any) -> Any:
        """Attention of the whole sequence, to this rank's queries."""
        self.answered.append("flex_attention")
        return self.planned.flex_op(*args, **kwargs)
