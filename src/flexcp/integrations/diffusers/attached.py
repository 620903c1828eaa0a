"""attach, detach: a Diffusers transformer whose tokens are sharded while it runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flexcp.compat.recomputation import kept_for_recomputation
from flexcp.errors import FlexCPError
from flexcp.integrations.context_parallel import ContextParallel
from flexcp.integrations.diffusers.sharding import TokenSharding, TokenShardings
from flexcp.integrations.diffusers.structures import (
    Structure,
    TokenRows,
    diffusers_version,
    structure_of,
)
from flexcp.integrations.gradients import sum_gradients
from flexcp.integrations.parallelize import parallelize
from flexcp.ops.arguments import check_gradients
from flexcp.plan import Machine, Ranks


@dataclass(eq=False)
class AttachedTransformer:
    """A Diffusers transformer that runs over a mesh; made by `attach`."""

    model: nn.Module
    """The transformer."""
    mesh: Any
    """The ranks that hold the tokens together."""
    gradients: Literal["summed", "averaged"]
    """What is done with the gradients of the ranks outside of this."""
    structure: Structure
    """Where the model has its tokens."""
    _shardings: TokenShardings
    _styles: dict[tuple[str, ...], ContextParallel] = field(default_factory=dict)
    _undo: list[RemovableHandle] = field(default_factory=list)
    _running: list[_ForwardPass] = field(default_factory=list)
    """Forward passes under way, the innermost last."""

    @property
    def ranks(self) -> int:
        """How many ranks hold the tokens together."""
        return Ranks.of(self.mesh).size

    def sum_gradients(self) -> None:
        """Adds up the gradients of all parameters over the ranks; for loops without DDP or FSDP.

        Every rank's gradient then is that of one process.
        """
        sum_gradients(self.model, self.mesh)

    def count_once(self, module: nn.Module) -> None:
        """Lets a module that comes after the transformer have summed gradients too.

        Every rank runs such a module on whole tensors, and has its whole gradient: a trainer that
        adds them up would count it once for each rank. From now on each rank has its share. Where
        gradients are averaged there is nothing to do, and nothing is done.
        """
        if self.gradients == "summed":
            share = 1 / self.ranks
            for parameter in module.parameters():
                self._undo.append(parameter.register_hook(lambda grad: grad * share))

    def detach(self) -> None:
        """Gives the model its own attention back; calling it again does nothing."""
        for handle in self._undo:
            handle.remove()
        self._undo = []
        for style in self._styles.values():
            style.remove(self.model)
        self._styles = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> AttachedTransformer:
        raise FlexCPError(
            "a transformer that is not attached to a mesh, to be copied",
            f"a {type(self.model).__name__} that is",
            "call detach() first, and attach to each copy",
        )

    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        del given["self"]
        if getattr(module, "is_cache_enabled", False):
            raise FlexCPError(
                "a transformer without a cache of its blocks, which would see a rank's rows alone",
                "one with enable_cache",
                "call disable_cache() first",
            )
        sharding = self._shardings.of(self.structure.lengths(module, given), given["hidden_states"])
        run = _ForwardPass(sharding)
        run.stack.enter_context(self._holding(run))
        for streams, style in self._styles.items():
            run.stack.enter_context(style.using(sharding.plan(streams)))
        for name, rows in self.structure.arguments.items():
            if given.get(name) is not None:
                given[name] = sharding.shard(given[name], rows, name)
        return (), given

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        if not self._running:  # it failed before anything was set
            return
        run = self._running[-1]
        run.stack.close()
        if output is None:  # it raised: its own error is the one to see
            return
        expected = {*self.structure.outputs, *(at for at, _ in self.structure.inputs)}
        missing = sorted({*expected, self.structure.last} - run.reached)
        if missing:
            raise FlexCPError(
                f"{type(module).__name__} to run {', '.join(map(repr, missing))}, where its tokens "
                "are sharded",
                f"a forward pass of diffusers {diffusers_version()} that did not",
                "install a version that docs/versions.md names",
            )

    @contextmanager
    def _holding(self, run: _ForwardPass) -> Iterator[None]:
        """Makes a forward pass the one under way, here and where it is recomputed."""
        self._running.append(run)
        try:
            with kept_for_recomputation(lambda: self._holding(run)):
                yield
        finally:
            self._running.remove(run)

    def _shard_inputs(
        self,
        at: str,
        names: Mapping[str, TokenRows],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        run = self._running[-1]
        run.reached.add(at)
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        del given["self"]
        for name, rows in names.items():
            given[name] = run.sharding.shard(given[name], rows, f"{name} of {at}")
        return (), given

    def _shard_outputs(
        self,
        at: str,
        rows: tuple[TokenRows, ...],
        module: nn.Module,  # noqa: ARG002
        args: Any,  # noqa: ARG002
        output: Any,
    ) -> Any:
        run = self._running[-1]
        run.reached.add(at)
        if len(rows) == 1:
            return run.sharding.shard(output, rows[0], f"the output of {at}")
        found = zip(output, rows, strict=True)
        return tuple(run.sharding.shard(x, of, f"the output of {at}") for x, of in found)

    def _gather(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:  # noqa: ARG002
        run = self._running[-1]
        run.reached.add(self.structure.last)
        if self.gradients == "averaged" and output.requires_grad:
            # Each rank's part of the gradients is divided by the number of ranks later on.
            times = self.ranks
            output.register_hook(lambda grad: grad * times)
        return run.sharding.plan(("image",)).unshard(output, 1)


@dataclass(eq=False)
class _ForwardPass:
    """A forward pass of the model."""

    sharding: TokenSharding
    stack: ExitStack = field(default_factory=ExitStack)
    """Ends what is set for it."""
    reached: set[str] = field(default_factory=set)
    """Modules at which something was sharded or gathered."""


def attach(
    transformer: nn.Module,
    mesh: Any,
    *,
    gradients: Literal["summed", "averaged"] = "summed",
    schedule: str = "auto",
    machine: Machine | str | None = None,
) -> AttachedTransformer:
    """Makes a transformer of Diffusers share its tokens among the ranks of a mesh.

    It is called as before: every rank passes the same, whole arguments, and gets the whole result.
    In between each rank has its part of the image's and of the text's tokens, whatever their
    numbers, and attention is that of all of them. Parameters are not touched.

    Args:
        transformer: The transformer of a pipeline; its class must be known.
        mesh: A DeviceMesh of one dimension, or of two for hybrid schedules; or the mesh that
            `testing.simulate` gives.
        gradients: "summed" if the gradients of the ranks will be added up, as `sum_gradients`
            does. "averaged" if they will be averaged, as DDP and FSDP do. Either way, they then
            are the gradients of one process for the loss that every rank computes.
        schedule: As for `flexcp.make_plan`.
        machine: As for `flexcp.make_plan`; None is "cpu-gloo" for a model on the CPU.

    >>> import flexcp
    >>> def rank(mesh):
    ...     try:
    ...         attach(nn.Linear(2, 2), mesh)
    ...     except flexcp.FlexCPError as error:
    ...         return str(error).partition(", got ")[2].partition(";")[0]
    >>> flexcp.testing.simulate(rank, 1)
    ['Linear']
    """
    check_gradients(gradients)
    structure = structure_of(transformer)
    _require_free(transformer)
    if Ranks.of(mesh).rank is None:
        raise FlexCPError(
            "a DeviceMesh, or the mesh that testing.simulate gives",
            f"the number of ranks {mesh}",
            'pass init_device_mesh("cuda", (ranks,))',
        )
    if machine is None and next(transformer.parameters()).device.type == "cpu":
        machine = "cpu-gloo"
    config: Any = transformer.config
    shapes = {"num_heads": config.num_attention_heads, "head_dim": config.attention_head_dim}
    options = {"schedule": schedule, "machine": machine, **shapes}
    _require_known_attention(transformer, structure)
    attached = AttachedTransformer(
        transformer, mesh, gradients, structure, TokenShardings(mesh, options)
    )
    for streams in set(structure.attention.values()):
        patterns = [p for p, of in structure.attention.items() if of == streams]
        names = _matching(transformer, patterns)
        if names:
            style = attached._styles[streams] = ContextParallel()
            parallelize(transformer, mesh, dict.fromkeys(names, style))
    attached._undo += _hooks(attached)
    return attached


def detach(transformer: nn.Module) -> None:
    """Gives an attached transformer its own attention back.

    >>> import flexcp
    >>> try:
    ...     detach(nn.Linear(2, 2))
    ... except flexcp.FlexCPError as error:
    ...     print(str(error).partition(";")[0])
    expected an attached transformer, got a Linear that is not
    """
    attached = _attached_to(transformer)
    if attached is None:
        raise FlexCPError(
            "an attached transformer",
            f"a {type(transformer).__name__} that is not",
            "call attach(transformer, mesh) first",
        )
    attached.detach()


def _hooks(attached: AttachedTransformer) -> Iterator[RemovableHandle]:
    model, structure = attached.model, attached.structure
    yield model.register_forward_pre_hook(attached._begin, with_kwargs=True)
    yield model.register_forward_hook(attached._end, always_call=True)
    for at in dict.fromkeys(at for at, _ in structure.inputs):
        names = {name: rows for (of, name), rows in structure.inputs.items() if of == at}
        hook = partial(attached._shard_inputs, at, names)
        yield model.get_submodule(at).register_forward_pre_hook(hook, with_kwargs=True)
    for at, rows in structure.outputs.items():
        hook = partial(attached._shard_outputs, at, rows)
        yield model.get_submodule(at).register_forward_hook(hook)
    yield model.get_submodule(structure.last).register_forward_hook(attached._gather)


def _attached_to(transformer: nn.Module) -> AttachedTransformer | None:
    """What a transformer is attached by: the owner of its hooks."""
    for hook in transformer._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, AttachedTransformer):
            return owner
    return None


def _require_free(transformer: nn.Module) -> None:
    """Raises if someone shards the model's tokens already."""
    name = type(transformer).__name__
    if _attached_to(transformer) is not None:
        raise FlexCPError(
            "a transformer that is not attached to a mesh",
            f"a {name} that is",
            "call detach() first; simulated ranks need a copy of the model each",
        )
    if getattr(transformer, "_parallel_config", None) is not None:
        raise FlexCPError(
            "a transformer without diffusers' own parallelism",
            f"a {name} on which enable_parallelism was called",
            "leave enable_parallelism and ContextParallelConfig out: attach takes their place",
        )


def _matching(model: nn.Module, patterns: list[str] | tuple[str, ...]) -> list[str]:
    """Modules whose path matches one of the patterns, part by part."""
    return [
        name
        for name, _ in model.named_modules()
        if any(
            name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)
            for pattern in patterns
        )
    ]


def _require_known_attention(model: nn.Module, structure: Structure) -> None:
    """Raises if something attends that the structure does not speak of, or in another way."""
    known = set(_matching(model, (*structure.attention, *structure.cross_attention)))
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if processor is None:
            continue
        kind = type(processor).__name__
        if name not in known or kind not in structure.processors:
            raise FlexCPError(
                f"attention of {type(model).__name__} by {', '.join(sorted(structure.processors))}",
                f"{kind} in {name!r}",
                "attach to the transformer without IP-Adapters and other processors "
                "(unload_ip_adapter, set_default_attn_processor)",
            )
