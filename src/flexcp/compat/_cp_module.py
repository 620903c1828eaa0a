"""Context parallelism for a module that does attention, as a ParallelStyle."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.attention.flex_attention import BlockMask

from flexcp.compat._cp_gather import flex_cp_allgather
from flexcp.compat._cp_layout import dim_of, group_of
from flexcp.compat._cp_sdpa import DTensorSDPA, ShardedSDPA
from flexcp.compat.intercept import in_force, set_at_bottom, take_out
from flexcp.compat.recomputation import begin_keeping, end_keeping
from flexcp.errors import FlexCPError
from flexcp.ops.positions import on_global_positions, positions_of
from flexcp.plan.styles import StyleMark, UnappliedStyles
from flexcp.torch_names import tree_map_only


class _AttentionType(Enum):
    """What a module calls."""

    FLEX = "flex_attention"
    SDPA = "scaled_dot_product_attention"


made_styles = UnappliedStyles()
"""Every `_ContextParallel` that no module has yet; they know no mesh and no plan to be kept by."""


@dataclass(frozen=True, eq=False)
class _Running:
    """A call of a module, from its first hook to its last."""

    module: nn.Module | None
    stack: ExitStack
    """Ends the interception."""
    answered: list[str]
    """Attention functions that the module has called."""


class _ContextParallel(ParallelStyle):
    """Lets a module's attention run over a sharded sequence; for `parallelize_module`.

    With SDPA, `F.scaled_dot_product_attention`, under whatever name the module calls it, is that of
    the whole sequence while the module runs.
    With FLEX, the module is called with the keys and values of all ranks, in rank order, as the
    block mask of `_context_parallel_shard` expects them. A `score_mod` sees global positions, if it
    is an argument of the module or if the module uses flexcp's `flex_attention`; of a sequence that
    was not sharded here, it sees what PyTorch's does: this rank's queries and the gathered keys.

    Args:
        seq_dim: The sequence dimension of the module's query, key and value.
        attention_type: `_ContextParallel.AttentionType.FLEX` or `.SDPA`.
    """

    AttentionType = _AttentionType

    def __init__(self, seq_dim: int, attention_type: _AttentionType) -> None:
        super().__init__()
        self.seq_dim = seq_dim
        self.attention_type = attention_type
        self._running: list[_Running] = []
        self._mark = StyleMark(f"_ContextParallel({seq_dim}, {attention_type})")
        made_styles.expect(self._mark)

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self._mark.is_applied = True
        made_styles.forget_reported()
        hooks = _Hooks(self, mesh)
        if self.attention_type == _AttentionType.FLEX:
            module.register_forward_pre_hook(hooks.flex_input, with_kwargs=True)
        elif self.attention_type == _AttentionType.SDPA:
            module.register_forward_pre_hook(hooks.sdpa_input, with_kwargs=True)
            module.register_forward_hook(hooks.sdpa_output, always_call=True)
        else:
            raise ValueError(f"Unknown attention type: {self.attention_type}")
        return module

    def flex_input_fn(
        self,
        module: nn.Module | None,
        args: Any,
        kwargs: Any,
        mesh: DeviceMesh,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gathers key and value, and lets a score_mod see global positions."""
        positional, named = list(args), dict(kwargs)
        query, key, value = tensors = tuple(
            positional[i] if i < len(positional) else named.get(name)
            for i, name in enumerate(("query", "key", "value"))
        )
        for name, x in zip(("query", "key", "value"), tensors, strict=True):
            if not isinstance(x, Tensor):
                raise AssertionError(f"{name} must be a tensor, got {type(x).__name__}")
        assert query is not None
        assert key is not None
        name = mesh.get_group().group_name
        gathered = flex_cp_allgather(key, value, dim_of(key, self.seq_dim), name)
        for i, (name, x) in enumerate(zip(("key", "value"), gathered, strict=True), start=1):
            if i < len(positional):
                positional[i] = x
            else:
                named[name] = x
        own = () if module is None else tuple(vars(module).values())
        self._translate_score(query, positional, named, own, mesh)
        return tuple(positional), named

    def _translate_score(
        self,
        query: Tensor,
        positional: list[Any],
        named: dict[str, Any],
        own: tuple[Any, ...],
        mesh: DeviceMesh,
    ) -> None:
        at_three = positional[3] if len(positional) > 3 else None
        is_score = callable(at_three) and not isinstance(at_three, BlockMask)
        score_mod = at_three if is_score else named.get("score_mod")
        if score_mod is None:
            return
        # A block mask says it best: an argument, or else one that the module holds.
        known = [positions_of(x) for x in (*positional[3:], *named.values(), *own)]
        at = next((x for x in known if x is not None), None)
        if at is None:
            group = group_of(mesh)
            layout = group.known_layout_of(query.shape[self.seq_dim], query.device, query)
            if layout is None:
                return  # Sharded by other means, of which the score_mod may know.
            at = (layout.positions(group.rank), layout.order)
        translated = on_global_positions(score_mod, *(x.to(query.device) for x in at))
        if is_score:
            positional[3] = translated
        else:
            named["score_mod"] = translated

    def sdpa_input_fn(
        self,
        module: nn.Module | None,
        args: Any,
        kwargs: Any,
        mesh: DeviceMesh,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """From here on, the module's attention is that of the whole sequence.

        Tensors come back as DTensors that are sharded along the sequence, as PyTorch's function
        returns them. The forward of a module that has the style gets plain ones, which it may use
        together with its own parameters.
        """
        plain_args, plain_kwargs = self._begin(module, args, kwargs, mesh)

        def sharded(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return DTensor.from_local(x, mesh, [Shard(dim_of(x, self.seq_dim))], run_check=False)

        named = {name: sharded(x) for name, x in plain_kwargs.items()}
        return tuple(sharded(x) for x in plain_args), named

    def _begin(
        self, module: nn.Module | None, args: Any, kwargs: Any, mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        new_args = tuple(self._local(x) for x in args)
        new_kwargs = {name: self._local(x) for name, x in kwargs.items()}
        running = _Running(module, ExitStack(), [])
        running.stack.enter_context(in_force(lambda: ShardedSDPA(mesh, running.answered)))
        self._running.append(running)
        return new_args, new_kwargs

    def sdpa_output_fn(
        self,
        module: nn.Module | None,
        inputs: Any,  # noqa: ARG002
        outputs: Any,
        mesh: DeviceMesh,  # noqa: ARG002
    ) -> Any:
        """Ends what the input function began, also if the module has raised."""
        if self._running and self._running[-1].module is module:
            running = self._running.pop()
            running.stack.close()
            # There are no outputs if the module has raised: its own error is the one to see.
            if not running.answered and outputs is not None:
                raise FlexCPError(
                    "a module that calls F.scaled_dot_product_attention",
                    f"{type(module).__name__}, whose forward did not",
                    "parallelize the module that calls it; one that calls flex_attention takes "
                    "_ContextParallel.AttentionType.FLEX",
                )
        return tree_map_only(DTensor, lambda x: x.to_local(), outputs)

    def _local(self, x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        if x.placements != (Shard(dim_of(x, self.seq_dim)),):
            raise AssertionError(
                f"a DTensor must be sharded as Shard({self.seq_dim}), got {x.placements}"
            )
        return x.to_local()


@dataclass(frozen=True, eq=False)
class _Hooks:
    """What a module calls before and after its forward."""

    style: _ContextParallel
    mesh: DeviceMesh

    def flex_input(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.style.flex_input_fn(module, args, kwargs, self.mesh)

    def sdpa_input(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.style._begin(module, args, kwargs, self.mesh)

    def sdpa_output(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return self.style.sdpa_output_fn(module, inputs, outputs, self.mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hooks:
        """A copy of a model runs on the same mesh."""
        return self


class _Dispatcher(threading.local):
    """Whether DTensors are dispatched, on each thread."""

    def __init__(self) -> None:
        self.mode: DTensorSDPA | None = None


_dispatcher = _Dispatcher()


def _enable_context_parallel_dispatcher() -> None:
    """From now on, attention of DTensors sharded along the sequence works on this thread.

    Without it, only within `context_parallel` and modules with `_ContextParallel`.
    """
    if _dispatcher.mode is None:
        _dispatcher.mode = DTensorSDPA()
        begin_keeping(DTensorSDPA)
        set_at_bottom(_dispatcher.mode)


def _disable_context_parallel_dispatcher() -> None:
    """Undoes `_enable_context_parallel_dispatcher`."""
    if _dispatcher.mode is not None:
        take_out(_dispatcher.mode)
        end_keeping(DTensorSDPA)
        _dispatcher.mode = None
