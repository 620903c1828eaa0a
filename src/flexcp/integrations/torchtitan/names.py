"""What flexcp uses of torchtitan, looked up here alone."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from flexcp.errors import FlexCPError


@dataclass(frozen=True)
class Names:
    """torchtitan's functions that context parallelism goes through, and its attention."""

    prepare_input: Any
    """Shards a batch, after its masks were made."""
    apply_to_forward: Any
    """Makes attention modules parallel, with `parallelism.spmd_backend` "partial_dtensor"."""
    validate: Any
    """Is asked before modules are made parallel as their configuration says: "spmd_types"."""
    trainer: Any
    flex: Any
    sdpa: Any
    varlen: Any
    varlen_metadata: Any

    @classmethod
    def find(cls) -> Names:
        """Imports torchtitan; raises if it is not installed, or lacks one of the names."""
        attention = "torchtitan.models.common.attention"
        return cls(
            _find("torchtitan.distributed.context_parallel", "prepare_context_parallel_input"),
            _find("torchtitan.distributed.context_parallel", "apply_cp_to_forward"),
            _find("torchtitan.distributed.full_dtensor", "validate_config"),
            _find("torchtitan.trainer", "Trainer"),
            _find(attention, "FlexAttention"),
            _find(attention, "ScaledDotProductAttention"),
            _find(attention, "VarlenAttention"),
            _find(attention, "VarlenMetadata"),
        )


def _find(module: str, name: str) -> Any:
    try:
        installed = version("torchtitan")
    except PackageNotFoundError:
        raise FlexCPError(
            "torchtitan to be installed", "no such package", "pip install torchtitan"
        ) from None
    try:
        return getattr(import_module(module), name)
    except (ModuleNotFoundError, AttributeError):
        raise FlexCPError(
            f"a torchtitan that has {module}.{name}",
            f"torchtitan {installed}, which has not",
            "install a version that docs/versions.md names",
        ) from None
