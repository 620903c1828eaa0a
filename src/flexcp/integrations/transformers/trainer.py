"""TrainerMixin: Transformers' Trainer on sequences that are sharded over ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexcp.errors import FlexCPError
from flexcp.integrations.transformers.attached import Attached, attach, attached_to
from flexcp.integrations.transformers.batch import NAMES_OF_DOCUMENTS
from flexcp.integrations.transformers.model_source_probes import leaves_the_loss_to_its_base
from flexcp.integrations.transformers.unsupported import check_options
from flexcp.plan import Ranks

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the class next to this one in the bases is the Trainer


class TrainerMixin(_Trainer):
    """Context parallelism for Trainer: `class T(TrainerMixin, Trainer)`, run on several ranks.

    Ranks of the mesh get the same batches, each computes its part, and loss, gradients and
    metrics are those of one process. Processes beyond the mesh are data-parallel. In a single
    process it does nothing.

    Args:
        args: What the Trainer takes.
        mesh: The ranks that hold a sequence together: a DeviceMesh whose ranks follow each other.
            All processes by default, or the mesh that the model is attached to already.
        kwargs: What the Trainer takes.

    >>> from transformers import Trainer
    >>> class ShardedTrainer(TrainerMixin, Trainer):
    ...     pass
    >>> ShardedTrainer.__mro__[1].__name__
    'TrainerMixin'
    """

    def __init__(self, *args: Any, mesh: Any = None, **kwargs: Any) -> None:
        self._flexcp_mesh = mesh
        self._flexcp_counts_all_ranks = False
        if mesh is not None or int(os.environ.get("WORLD_SIZE", "1")) > 1:  # as torchrun says
            check_loss(type(self))
        super().__init__(*args, **kwargs)
        if self.context_parallel is not None:
            check_loss(type(self))
            self._refuse_what_would_go_wrong()

    @property
    def context_parallel(self) -> Attached | None:
        """The attached model; None in a single process."""
        mesh = self._mesh()
        if mesh is None or self.model is None:
            return None
        attached = attached_to(self.model)
        return attach(self.model, mesh) if attached is None else attached

    def _mesh(self) -> Any:
        if self._flexcp_mesh is None and self.model is not None:
            attached = attached_to(self.model)
            self._flexcp_mesh = None if attached is None else attached.mesh
        if self._flexcp_mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            from torch.distributed.device_mesh import init_device_mesh

            device = self.args.device.type
            self._flexcp_mesh = init_device_mesh(device, (dist.get_world_size(),))
        return self._flexcp_mesh

    def _refuse_what_would_go_wrong(self) -> None:
        for wrong, expected, got, fix in (
            (
                self.label_smoother is not None,
                "label_smoothing_factor=0",
                str(self.args.label_smoothing_factor),
                "the Trainer would smooth labels that are shifted once too often",
            ),
            (
                self.compute_loss_func is not None,
                "the model's own loss",
                "compute_loss_func",
                "override compute_loss, and use flexcp.cross_entropy on this rank's logits",
            ),
            (
                not self.args.average_tokens_across_devices,
                "average_tokens_across_devices=True",
                "False",
                "losses of parts of a sequence only add up when divided by one number of tokens",
            ),
            (
                self.args.train_sampling_strategy == "batch_rebalance",
                'train_sampling_strategy "random", "sequential" or "group_by_length"',
                "batch_rebalance",
                "it deals batches out by process, not by group of ranks",
            ),
        ):
            if wrong:
                raise FlexCPError(expected, got, fix)
        if self.context_parallel is not None:
            check_options({}, self.context_parallel.model)

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's, with data loaders that know which ranks share a sequence."""
        from flexcp.integrations.accelerate import check_parallelism, share_batches

        check_parallelism(getattr(self.args, "parallelism_config", None))
        super().create_accelerator_and_postprocess()
        mesh = self._mesh()
        if mesh is not None:
            share_batches(self.accelerator, mesh)

    def get_cp_size(self) -> int:
        """How many ranks see the same batch, which the Trainer divides its counts by."""
        mesh = self._mesh()
        if mesh is None:
            return super().get_cp_size()
        return 1 if self._flexcp_counts_all_ranks else Ranks.of(mesh).size

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        # Older versions of the Trainer don't divide what all ranks count together by get_cp_size.
        self._flexcp_counts_all_ranks = True
        try:
            counted = super()._get_num_items_in_batch(batch_samples, device)
        finally:
            self._flexcp_counts_all_ranks = False
        return None if counted is None else counted // self.get_cp_size()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """This rank's part of the loss; the mean over all processes is the loss of one."""
        cp = self.context_parallel
        if cp is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        local = cp.shard(inputs)
        items = num_items_in_batch
        if items is None and self.model_accepts_loss_kwargs and "num_items_in_batch" in local:
            # A trainer may divide by the tokens that it sees, here a part of them, unless told.
            parts = 1 if cp.gradients == "summed" else cp.ranks
            groups = self.accelerator.num_processes // cp.ranks
            items = local["num_items_in_batch"] * parts * groups
        with _gathering_all_ranks(self.accelerator):
            found = super().compute_loss(model, local, return_outputs, items)
        loss, outputs = found if return_outputs else (found, None)
        if items is None and cp.gradients == "summed":
            loss = loss * cp.ranks  # gradients will be averaged over processes
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """The loss and the logits of whole sequences, on every rank."""
        cp = self.context_parallel
        if cp is not None and not any(inputs.get(name) is not None for name in self.label_names):
            inputs = cp.shard(self._prepare_inputs(inputs))  # else compute_loss does it
        loss, logits, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )
        if cp is None:
            return loss, logits, labels
        if loss is not None:
            loss = cp.sum_over_ranks(loss) / cp.ranks
        return loss, _map(cp.unshard, logits), labels

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's; of ranks that share a sequence, the results of one count."""
        if self._mesh() is None:
            return super().evaluation_loop(*args, **kwargs)
        self.gather_function = self._gather_once
        result = super().evaluation_loop(*args, **kwargs)
        if self.model_wrapped is self.model and not self.is_fsdp_enabled:
            # Accelerate takes a model that was prepared for evaluation for one that is ready to be
            # trained: without DDP, so that nobody would add up gradients. It has no public way to
            # take that back; False is what it reads where the mark was never set.
            model: Any = self.model
            model._is_accelerate_prepared = False
        return result

    def _gather_once(self, data: Any) -> Any:
        size, state = self.get_cp_size(), self.accelerator.gradient_state
        found = _map(lambda x: _first_of_each(x, size), self.accelerator.gather(data))
        if state.end_of_dataloader and state.remainder > 0:
            return _map(lambda x: x[: state.remainder], found)
        return found

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[no-untyped-call]
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // self.get_cp_size()

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns: Any = self._signature_columns  # which the Trainer first declares as None
        columns += [name for name in NAMES_OF_DOCUMENTS if name not in columns]


def check_loss(trainer: type) -> None:
    """Raises if a trainer's loss is not the sum over tokens that the mixin can take parts of.

    >>> from transformers import Trainer
    >>> class Sharded(TrainerMixin, Trainer):
    ...     pass
    >>> check_loss(Sharded)
    """
    bases = trainer.__mro__[trainer.__mro__.index(TrainerMixin) + 1 :]
    for base in (b for b in bases if "compute_loss" in vars(b)):
        known = (base.__module__.split(".")[0], base.__name__)
        if known in (("transformers", "Trainer"), ("trl", "SFTTrainer")):
            return
        if not leaves_the_loss_to_its_base(vars(base)["compute_loss"]):
            raise FlexCPError(
                "a trainer whose loss is a sum over tokens, such as Trainer and TRL's SFTTrainer",
                f"{base.__name__}, which computes a loss of its own",
                "run it without TrainerMixin; or override compute_loss in the class that has "
                "TrainerMixin as a base, shard there with self.context_parallel.shard(inputs), and "
                "return a loss whose mean over all processes is that of one",
            )


@contextmanager
def _gathering_all_ranks(accelerator: Any) -> Iterator[None]:
    """Metrics of a step are sums over what every rank has, also in the last batch of an epoch.

    Accelerate would take entries of what was gathered for samples there, and drop those that fill
    the batch up: with them the counts of some ranks.
    """
    accelerator.gather_for_metrics = accelerator.gather
    try:
        yield
    finally:
        del accelerator.gather_for_metrics


def _first_of_each(gathered: Tensor, size: int) -> Tensor:
    """[dp * n, ...] From [dp * cp * n, ...]: what the first rank of every group has."""
    parts = gathered.chunk(dist.get_world_size())
    return torch.cat(parts[::size])


def _map(fn: Any, data: Any) -> Any:
    """Applies fn to every tensor in nested tuples, lists and dicts."""
    if isinstance(data, Tensor):
        return fn(data)
    if isinstance(data, dict):
        return {name: _map(fn, x) for name, x in data.items()}
    if isinstance(data, tuple | list):
        return type(data)(_map(fn, x) for x in data)
    return data
