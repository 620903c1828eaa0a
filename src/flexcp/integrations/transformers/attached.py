"""attach, shard, detach: a Transformers model over a sequence that is sharded across ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

from flexcp.ahead import plan_ahead
from flexcp.batch import positions_within
from flexcp.comm.summing import sum_in_place
from flexcp.errors import FlexCPError, check_flags, require
from flexcp.integrations.gradients import sum_gradients
from flexcp.integrations.transformers import unsupported
from flexcp.integrations.transformers.attention import IMPLEMENTATION, UNDER_WAY, Sharding
from flexcp.integrations.transformers.batch import (
    document_ids,
    local_part,
    shape_of,
    shifted_labels,
)
from flexcp.integrations.transformers.global_masks import TokenFacts
from flexcp.integrations.transformers.model_source_probes import counts_from_zero, infers_documents
from flexcp.integrations.transformers.planning import BatchPlan, BatchPlans
from flexcp.integrations.transformers.rope import rotary_modules, tell_the_last_position
from flexcp.layout import Layout
from flexcp.ops.arguments import check_gradients
from flexcp.plan import Machine, Plan, Ranks
from flexcp.plan.make import require_block_size, require_machine, require_names
from flexcp.torch_names import never_compiled_by_itself

SHARDING = "flexcp_sharding"
"""The name under which a sharding travels in a batch."""


@dataclass(eq=False)
class Attached:
    """A model whose attention runs over a mesh; made by `attach`.

    It has state for a reason: plans are kept from batch to batch, and `detach` must know what to
    put back.
    """

    model: PreTrainedModel
    """The model."""
    mesh: Any
    """The ranks that hold a sequence together."""
    gradients: Literal["summed", "averaged"]
    """What is done with the gradients of the ranks outside of this."""
    options: Mapping[str, Any]
    """How to plan: what `flexcp.make_plan` takes."""
    plan: Plan | None = None
    """The plan of the last batch that was sharded."""
    _plans: BatchPlans = field(default_factory=BatchPlans)
    _undo: list[RemovableHandle] = field(default_factory=list)
    _needs_last_position: bool = False
    _previous: str | None = None
    """The model's own attention implementation, while it has ours."""

    @property
    def ranks(self) -> int:
        """How many ranks hold a sequence together."""
        return Ranks.of(self.mesh).size

    def shard(
        self,
        batch: Mapping[str, Any],
        *,
        documents: Tensor | Sequence[int] | None = None,
        score_across_documents: bool = True,
    ) -> dict[str, Any]:
        """This rank's part of a batch, with all that must be done on the whole of it done.

        The masks of all layer types are asked of the model for the whole batch, one plan is made
        for them, and tokens, positions and shifted labels are picked by it. The model returns
        logits of this rank's tokens, and a loss that adds up over ranks to that of one process.

        Args:
            batch: What the model would be called with in one process: input_ids [B, S], and
                labels, attention_mask (padding on either side) and position_ids if there are any.
                Documents that are packed into a sequence are named by "document_ids" or "seq_idx"
                [B, S], or, as always in Transformers, by position_ids that start again, if there
                is no attention_mask.
            documents: Document ids [S] or [B, S], or lengths, if the batch doesn't name them.
            score_across_documents: Whether the first token of a document is predicted from the
                document before it. In Transformers it is, so True is what one process does.

        Returns:
            The arguments for the model.
        """
        check_flags(score_across_documents=score_across_documents)
        facts = self._facts(batch, documents)
        if batch.get("labels") is not None or batch.get("shift_labels") is not None:
            unsupported.check_labels(self.model)
        shape = shape_of(batch)
        ids = document_ids(batch, documents, shape)
        positions = self._positions(batch, ids, shape)
        infers = infers_documents(unsupported.decoder_of(self.model))
        if not infers and ids is None:
            self._warn_of_unseen_documents(batch, shape)
        found = self._plan(facts)
        plan = found.plan
        borders = None
        if not score_across_documents:
            borders = facts.documents if facts.packed is None else facts.packed
        labels = shifted_labels(batch, borders)
        parts = self.ranks if self.gradients == "averaged" else 1
        local = local_part(batch, plan, shape, positions, labels, parts)
        last = positions.max() if self._needs_last_position else None
        jumps = infers and find_packed_sequence_indices(local["position_ids"]) is not None
        local[SHARDING] = Sharding(plan, found.names, last, infers, jumps)
        self.plan = plan
        return local

    def shard_ahead(
        self,
        batches: Iterable[Mapping[str, Any]],
        *,
        ahead: int = 1,
        score_across_documents: bool = True,
    ) -> Iterator[dict[str, Any]]:
        """This rank's part of each batch, as `shard` gives it, planned while the steps before run.

        A thread makes the plans, as in `flexcp.plan_ahead`: for `ahead` batches beyond the one that
        the loop is at. Batches name their documents themselves.
        """
        Ranks.of(self.mesh).connected()  # what a mesh needs first, ranks make together: here

        def plan_of(batch: Mapping[str, Any]) -> Plan:
            return self._plan(self._facts(batch, None)).plan

        for batch, _ in plan_ahead(batches, plan_of, ahead=ahead):
            yield self.shard(batch, score_across_documents=score_across_documents)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Rows of all ranks in their original order, such as logits; by the last batch's plan."""
        return self._last_plan().unshard(x, dim)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum over ranks, without gradient: of losses, the loss of one process."""
        require("x", x, Tensor, "pass a tensor, such as a loss")
        if x.is_nested or x.layout != torch.strided:
            raise FlexCPError("a dense tensor", f"one of {x.layout}", "call .to_dense()")
        total = x.detach().clone()
        sum_in_place([total], self.mesh)
        return total

    def sum_gradients(self) -> None:
        """Adds up the gradients of all parameters over the ranks; for loops without DDP or FSDP.

        Every rank's gradient then is that of one process.
        """
        sum_gradients(self.model, self.mesh)

    def detach(self) -> None:
        """Gives the model its own attention back; calling it again does nothing."""
        for handle in self._undo:
            handle.remove()
        self._undo = []
        if self._previous is not None:
            _set_implementation(self.model, self._previous)
            self._previous = None

    def _facts(
        self, batch: Mapping[str, Any], documents: Tensor | Sequence[int] | None
    ) -> TokenFacts:
        """What of a batch its masks depend on."""
        require("batch", batch, Mapping, "pass what the model would be called with")
        unsupported.check_batch(batch, self.model)
        shape = shape_of(batch)
        infers = infers_documents(unsupported.decoder_of(self.model))
        positions = batch.get("position_ids") if infers else None
        ids = document_ids(batch, documents, shape)
        return TokenFacts.of(shape, batch.get("attention_mask"), positions, ids)

    def _plan(self, facts: TokenFacts) -> BatchPlan:
        return self._plans.of(facts, self.model, self.mesh, self.options)

    def _positions(
        self, batch: Mapping[str, Any], documents: Tensor | None, shape: tuple[int, int]
    ) -> Tensor:
        tokens = batch.get("input_ids")
        device = batch["inputs_embeds"].device if tokens is None else tokens.device
        given = batch.get("position_ids")
        if given is not None:
            positions: Tensor = given
            return positions.to(device).expand(shape)
        if documents is not None:
            return positions_within(documents.to(device))
        if not counts_from_zero(unsupported.decoder_of(self.model)):
            raise FlexCPError(
                "position_ids in the batch",
                f"none, and {type(self.model).__name__} has its own rule for them",
                "pass position_ids [B, S], as they are to be in one process",
            )
        return torch.arange(shape[1], device=device).expand(shape)

    def _warn_of_unseen_documents(self, batch: Mapping[str, Any], shape: tuple[int, int]) -> None:
        positions = batch.get("position_ids")
        if positions is None or batch.get("attention_mask") is not None:
            return
        if find_packed_sequence_indices(positions.expand(shape)) is not None:
            warnings.warn(
                f"position_ids start again, but {type(self.model).__name__} does not take that for "
                "documents in Transformers, so tokens attend across them, as in one process. Name "
                "documents by document_ids to keep them apart.",
                stacklevel=3,
            )

    def _last_plan(self) -> Plan:
        if self.plan is None:
            raise FlexCPError("a batch that was sharded before", "none", "call shard(batch) first")
        return self.plan

    def __deepcopy__(self, memo: dict[int, Any]) -> Attached:
        # A copied model is attached as well, to the same mesh: process groups can't be copied.
        copied = memo[id(self)] = copy.copy(self)
        copied.model = copy.deepcopy(self.model, memo)
        copied._undo = copy.deepcopy(self._undo, memo)
        copied._plans = copy.deepcopy(self._plans)
        return copied

    def _begin_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert isinstance(module, PreTrainedModel)
        sharding = kwargs.get(SHARDING)
        if not isinstance(sharding, Sharding):
            raise FlexCPError(
                "an attached model to be called with what cp.shard(batch) returned",
                "a call without it",
                "call model(**cp.shard(batch)); to use the model as before, generation included, "
                "call cp.detach()",
            )
        used = module.config.get_text_config(decoder=True)._attn_implementation
        if used != IMPLEMENTATION:
            raise FlexCPError(
                f"the attention implementation {IMPLEMENTATION!r}, which attach has set",
                repr(used),
                "attach to the model after changing its attention implementation",
            )
        if kwargs.get("past_key_values") is not None:
            raise FlexCPError(
                "no key-value cache", "past_key_values", "call cp.detach() to generate"
            )
        unsupported.check_options(kwargs, module)
        UNDER_WAY.forward_pass.sharding = sharding
        rest = {name: x for name, x in kwargs.items() if name not in (SHARDING, "attention_mask")}
        return args, {**rest, "use_cache": False}

    def _end_forward(self, *_: Any) -> None:
        UNDER_WAY.forward_pass.sharding = None

    never_compiled_by_itself(_begin_forward)
    never_compiled_by_itself(_end_forward)


def attach(
    model: nn.Module,
    mesh: Any,
    *,
    gradients: Literal["summed", "averaged"] = "summed",
    layout: str | Layout = "auto",
    schedule: str = "auto",
    block_size: int = 128,
    machine: Machine | str | None = None,
) -> Attached:
    """Makes a decoder from Transformers run on sequences that are sharded over a mesh.

    From now on the model is called with what `shard` returns, on every rank of the mesh, with the
    same batch. Its parameters are not touched: wrap it in DDP or FSDP as usual.

    Args:
        model: The model, or a module that wraps it.
        mesh: A DeviceMesh of one dimension, or of two for hybrid schedules; or the mesh that
            `testing.simulate` gives.
        gradients: "summed" if the gradients of the ranks will be added up, as `sum_gradients`
            does: then losses add up to the loss of one process. "averaged" if they will be
            averaged, as DDP and FSDP do: then losses average to it.
        layout: As for `flexcp.make_plan`.
        schedule: As for `flexcp.make_plan`.
        block_size: As for `flexcp.make_plan`.
        machine: As for `flexcp.make_plan`; None is "cpu-gloo" for a model on the CPU.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from flexcp.testing import simulate
    >>> tokens = torch.arange(10)[None]
    >>> def rank(mesh):
    ...     config = LlamaConfig(
    ...         vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...         num_attention_heads=2,
    ...     )
    ...     cp = attach(LlamaForCausalLM(config), mesh)
    ...     out = cp.model(**cp.shard({"input_ids": tokens, "labels": tokens}))
    ...     return out.logits.shape[1]
    >>> simulate(rank, 2)
    [5, 5]
    """
    check_gradients(gradients)
    require_names(layout, schedule)
    require_block_size(block_size)
    require_machine(machine)
    target = unsupported.language_model(model)
    if attached_to(target) is not None:
        raise FlexCPError(
            "a model that is not attached to a mesh",
            f"a {type(target).__name__} that is",
            "call detach() first; simulated ranks need a copy of the model each",
        )
    unsupported.check_model(target)
    if Ranks.of(mesh).rank is None:
        raise FlexCPError(
            "a DeviceMesh, or the mesh that testing.simulate gives",
            f"the number of ranks {mesh}",
            'pass init_device_mesh("cuda", (ranks,))',
        )
    if machine is None and target.device.type == "cpu":
        machine = "cpu-gloo"
    _own_config(target)
    planning = {
        "layout": layout,
        "schedule": schedule,
        "block_size": block_size,
        "machine": machine,
    }
    attached = Attached(target, mesh, gradients, planning)
    attached._previous = target.config.get_text_config(decoder=True)._attn_implementation
    _set_implementation(target, IMPLEMENTATION)
    attached._undo += [
        target.register_forward_pre_hook(attached._begin_forward, with_kwargs=True),
        target.register_forward_hook(attached._end_forward, always_call=True),
    ]
    for module in rotary_modules(target):
        attached._needs_last_position = True
        attached._undo += tell_the_last_position(module)
    return attached


def detach(model: nn.Module) -> None:
    """Gives an attached model its own attention back.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> from flexcp.testing import simulate
    >>> def rank(mesh):
    ...     config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=0)
    ...     model = LlamaModel(config)
    ...     attach(model, mesh)
    ...     detach(model)
    ...     return model.config._attn_implementation
    >>> simulate(rank, 1)
    ['sdpa']
    """
    attached = attached_to(model)
    if attached is None:
        raise FlexCPError(
            "an attached model",
            f"a {type(unsupported.language_model(model)).__name__} that is not",
            "call attach(model, mesh) first",
        )
    attached.detach()


def attached_to(model: nn.Module) -> Attached | None:
    """What a model, or the one that a module wraps, is attached by: the owner of its hooks."""
    for hook in unsupported.language_model(model)._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Attached):
            return owner
    return None


def _own_config(model: PreTrainedModel) -> None:
    """Gives the model a configuration of its own: several models may have been made from one."""
    memo: dict[int, Any] = {}
    copy.deepcopy(model.config, memo)
    for module in model.modules():
        if id(getattr(module, "config", None)) in memo:
            module.config = memo[id(module.config)]


def _set_implementation(model: PreTrainedModel, name: str) -> None:
    """For the decoder alone: a vision tower keeps its attention."""
    text = model.config.get_text_config(decoder=True)
    of_text = [key for key in model.config.sub_configs if getattr(model.config, key) is text]
    model.set_attn_implementation({of_text[0]: name} if of_text else name)
