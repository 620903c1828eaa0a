"""Accelerate: ranks that share a sequence are given the same batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator  # type: ignore[import-untyped]

from flexcp.errors import FlexCPError, require
from flexcp.plan import Ranks


def share_batches(accelerator: Accelerator, mesh: Any) -> None:
    """Makes the data loaders that are prepared from now on give one batch to all ranks of a mesh.

    By default Accelerate gives every process batches of its own. Groups of ranks that hold their
    sequences together still get different batches, as in data parallelism.

    Args:
        accelerator: Whose `prepare` will be called.
        mesh: The mesh that the model is attached to; its ranks must follow each other.

    >>> from accelerate import Accelerator
    >>> from flexcp.testing import simulate
    >>> simulate(lambda mesh: share_batches(Accelerator(cpu=True), mesh), 1)
    [None]
    """
    require("accelerator", accelerator, Accelerator, "pass the Accelerator of the loop")
    check_parallelism(getattr(accelerator, "parallelism_config", None))
    size = Ranks.of(mesh).size
    _require_neighbours(mesh, accelerator.process_index, size)
    if accelerator.num_processes % size:
        raise FlexCPError(
            f"a number of processes that {size} ranks per sequence divide",
            f"{accelerator.num_processes}",
            "start a multiple of the mesh's size",
        )
    if accelerator.dataloader_config.dispatch_batches:
        raise FlexCPError(
            "dispatch_batches=False: every rank reads the batches by itself",
            "True",
            "leave dispatch_batches out, or set it to False",
        )
    accelerator.dataloader_config.dispatch_batches = False
    groups = accelerator.num_processes // size
    # What Accelerate asks to find out which processes get the same batches.
    accelerator._prepare_device_mesh = lambda: _DataMesh({"dp_replicate": groups, "cp": size})


def check_parallelism(config: Any) -> None:
    """Raises if Accelerate is to share out sequences or heads itself, beside flexcp.

    Args:
        config: A `ParallelismConfig` of Accelerate, or None.

    >>> check_parallelism(None)
    """
    for name in ("cp_size", "sp_size", "tp_size"):
        size = getattr(config, name, None) or 1
        if size > 1:
            raise FlexCPError(
                f"a ParallelismConfig without {name}: flexcp shares out sequences by its own mesh",
                f"{name}={size}",
                f"leave {name} out, and pass the ranks that share a sequence as a mesh: "
                'init_device_mesh(device, (dp, cp), mesh_dim_names=("dp", "cp"))["cp"]',
            )


def _require_neighbours(mesh: Any, rank: int, size: int) -> None:
    """Accelerate counts processes in the order of their ranks."""
    if getattr(mesh, "mesh", None) is None:
        return
    ranks = sorted(int(r) for r in mesh.mesh.reshape(-1).tolist())
    first = rank // size * size
    if ranks != list(range(first, first + size)):
        raise FlexCPError(
            f"a mesh of neighbouring ranks, {list(range(first, first + size))} here",
            f"ranks {ranks}",
            'make it the last dimension: init_device_mesh(device, (dp, cp), ("dp", "cp"))["cp"]',
        )


@dataclass(frozen=True)
class _DataMesh:
    """As much of a DeviceMesh as the preparation of data loaders looks at."""

    sizes: dict[str, int]

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def __getitem__(self, name: str) -> _Axis:
        return _Axis(self.sizes[name])


@dataclass(frozen=True)
class _Axis:
    ranks: int

    def size(self) -> int:
        return self.ranks
