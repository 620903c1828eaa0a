"""enable: torchtitan's functions for context parallelism stand for flexcp's until disabled."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from flexcp.errors import FlexCPError
from flexcp.integrations.torchtitan.attention import ParallelModules
from flexcp.integrations.torchtitan.names import Names
from flexcp.integrations.torchtitan.planning import BatchMasks, layout_of, plan_of
from flexcp.layout import Layout
from flexcp.plan import Machine

_lock = threading.Lock()
_current: Enabled | None = None
"""What is enabled, if anything is."""


@dataclass(eq=False)
class Enabled:
    """flexcp in the place of torchtitan's context parallelism; made by `enable`."""

    layout: str | Layout | None
    schedule: str
    machine: Machine | str | None
    names: Names
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _modules: WeakKeyDictionary[Any, ParallelModules] = field(default_factory=WeakKeyDictionary)
    """By process group of the mesh."""

    def disable(self) -> None:
        """Gives torchtitan its own functions back; calling it again does nothing.

        Models that were made meanwhile keep flexcp's attention, and need flexcp enabled to run.
        """
        global _current
        with _lock:
            for undo in reversed(self._undo):
                undo()
            self._undo = []
            if _current is self:
                _current = None

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *error: object) -> None:
        self.disable()

    def prepare_context_parallel_input(
        self,
        inputs: Tensor,
        labels: Tensor,
        extra_kwargs: dict[str, Any],
        cp_mesh: Any,
        device: Any,  # noqa: ARG002
        load_balancer_type: str | None = "headtail",
        ptrr_mask_key: str | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """As torchtitan's: this rank's part of a batch. Masks become the plan that they are in."""
        modules = self._modules.get(cp_mesh.get_group())
        if modules is None:
            raise FlexCPError(
                "a model whose attention was made parallel with flexcp enabled",
                "a batch for one that was not",
                "enable flexcp before the trainer is made",
            )
        positions = extra_kwargs["positions"]
        batch, seq_len = inputs.shape[:2]
        masks = BatchMasks.of(extra_kwargs.get("attention_masks"), modules, positions, self.names)
        layout = self.layout
        if layout is None:
            ranks = cp_mesh.size()
            layout = layout_of(load_balancer_type, masks, ptrr_mask_key, seq_len, ranks)
        machine = self.machine
        if machine is None and inputs.device.type == "cpu":
            machine = "cpu-gloo"
        plan = plan_of(
            masks, seq_len, batch, cp_mesh, layout, self.schedule, machine, modules.shape
        )
        sharded = {"positions": plan.shard(positions, 1), "attention_masks": masks.planned(plan)}
        return plan.shard(inputs, 1), plan.shard(labels, 1), extra_kwargs | sharded

    def apply_cp_to_forward(self, attention_modules: Sequence[nn.Module], cp_mesh: Any) -> None:
        """As torchtitan's: makes attention modules attend over all ranks."""
        known = self._modules.setdefault(cp_mesh.get_group(), ParallelModules())
        for module in attention_modules:
            known.add(module, self.names)

    def validate_config(self, parallel_dims: Any, model: nn.Module) -> None:
        """As torchtitan's, which refuses attention other than FlexAttention.

        In this way of making models parallel, a module's configuration says that its keys and
        values are gathered. They stay where they are instead.
        """
        if not parallel_dims.cp_enabled:
            self.names.validate(parallel_dims, model)
            return
        if parallel_dims.spmd_backend != "spmd_types":
            raise FlexCPError(
                "parallelism.spmd_backend spmd_types or partial_dtensor",
                f"{parallel_dims.spmd_backend}",
                "pass --parallelism.spmd_backend spmd_types, or call disable()",
            )
        kinds = (self.names.flex, self.names.varlen, self.names.sdpa)
        found = [m for m in model.modules() if isinstance(m, kinds) and _gathers_keys(m)]
        if not found:
            raise FlexCPError(
                "a model with attention whose keys are gathered over ranks",
                f"{type(model).__name__}, which has none",
                "leave context parallelism off for this model, or call disable()",
            )
        for module in found:
            _leave_keys_sharded(module)
        self.apply_cp_to_forward(found, parallel_dims.get_mesh("cp"))

    def _put(self, original: Any, ours: Any) -> None:
        """Lets every name of a function in torchtitan stand for another, until disabled."""
        _rename(original, ours)
        self._undo.append(lambda: _rename(ours, original))

    def _admit_varlen(self) -> None:
        """Before a trainer is made, lets its model's configuration pass with VarlenAttention."""
        trainer = self.names.trainer
        own = trainer.__init__

        @wraps(own)
        def init(this: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            with _lock:
                self._admit_varlen_in(type(config.model_spec.model))
            own(this, config, *args, **kwargs)

        self._set(trainer, "__init__", init)

    def _admit_varlen_in(self, config_class: Any) -> None:
        own = config_class.update_from_config
        if hasattr(own, "admits_varlen"):
            return
        varlen = self.names.varlen.Config

        @wraps(own)
        def update_from_config(this: Any, *, config: Any, **kwargs: Any) -> None:
            # It refuses VarlenAttention together with a degree above 1, and asks for it otherwise
            # only to share out experts.
            parallelism = config.parallelism
            attention = this.first_attention
            if (
                parallelism.expert_parallel_degree == 1
                and attention is not None
                and isinstance(attention.inner_attention, varlen)
            ):
                one = dataclasses.replace(parallelism, context_parallel_degree=1)
                config = dataclasses.replace(config, parallelism=one)
            own(this, config=config, **kwargs)

        update_from_config.admits_varlen = True  # type: ignore[attr-defined]
        self._set(config_class, "update_from_config", update_from_config)

    def _set(self, owner: Any, name: str, new: Any) -> None:
        before = vars(owner).get(name)
        setattr(owner, name, new)

        def undo() -> None:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)


def enable(
    *,
    layout: str | Layout | None = None,
    schedule: str = "auto",
    machine: Machine | str | None = None,
) -> Enabled:
    """Makes torchtitan's trainers run context parallelism on flexcp's plans, from now on.

    To be called before a trainer is made. Its configuration stays what it is:
    `--parallelism.context_parallel_degree` switches context parallelism on, and
    `--parallelism.context_parallel_load_balancer` says who gets which tokens. It may be "headtail"
    or "ptrr", which give every rank the rows that torchtitan gives it, or one of flexcp's layouts,
    such as "auto" and "balanced". VarlenAttention works too.

    Three functions of torchtitan and the way that its trainers read configurations stand for
    flexcp's until `disable`; the result is a context manager that calls it.

    Args:
        layout: In place of what the configuration says; as for `flexcp.make_plan`.
        schedule: As for `flexcp.make_plan`.
        machine: As for `flexcp.make_plan`; None is "cpu-gloo" on CPUs.

    >>> import flexcp
    >>> try:
    ...     enable().disable()
    ... except flexcp.FlexCPError as error:
    ...     assert "torchtitan" in str(error)  # not installed, or of another version
    """
    global _current
    names = Names.find()
    with _lock:
        if _current is not None:
            raise FlexCPError(
                "torchtitan without flexcp", "flexcp enabled already", "call disable() first"
            )
        enabled = _current = Enabled(layout, schedule, machine, names)
    enabled._put(names.prepare_input, enabled.prepare_context_parallel_input)
    enabled._put(names.apply_to_forward, enabled.apply_cp_to_forward)
    enabled._put(names.validate, enabled.validate_config)
    enabled._admit_varlen()
    return enabled


def _rename(before: Any, after: Any) -> None:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torchtitan":
            continue
        for attribute, value in list(vars(module).items()):
            if value is before:
                setattr(module, attribute, after)


def _gathers_keys(module: Any) -> bool:
    """Whether a module's configuration has its keys gathered."""
    config = module._sharding_config
    if config is None or not config.in_src_shardings or not config.in_dst_shardings:
        return False
    before, after = (
        list(x.values())[1:2] for x in (config.in_src_shardings, config.in_dst_shardings)
    )
    return before != after


def _leave_keys_sharded(module: Any) -> None:
    config = module._sharding_config
    layouts = config.in_src_shardings
    local = dataclasses.replace(config.local_map, in_grad_placements=tuple(layouts.values()))
    module._sharding_config = dataclasses.replace(
        config, in_dst_shardings=dict(layouts), local_map=local
    )
