"""flexcp: exact attention over a sequence that is sharded across devices, for any mask."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexcp import kernels, masks, testing
    from flexcp.ahead import plan_ahead
    from flexcp.batch import cross_entropy, shard_batch
    from flexcp.errors import FlexCPError
    from flexcp.grid import BlockGrid, BlockKind, build_block_grid
    from flexcp.integrations.context_parallel import ContextParallel
    from flexcp.integrations.parallelize import parallelize
    from flexcp.layout import Layout
    from flexcp.masks import Mask
    from flexcp.ops import attention, flex_attention, varlen_attention
    from flexcp.plan import Machine, Plan, load_plan, make_plan, save_plan
    from flexcp.tools.verify import verify

__all__ = [
    "BlockGrid",
    "BlockKind",
    "ContextParallel",
    "FlexCPError",
    "Layout",
    "Machine",
    "Mask",
    "Plan",
    "attention",
    "build_block_grid",
    "cross_entropy",
    "flex_attention",
    "kernels",
    "load_plan",
    "make_plan",
    "masks",
    "parallelize",
    "plan_ahead",
    "save_plan",
    "shard_batch",
    "testing",
    "varlen_attention",
    "verify",
]

_HOMES = {
    "flexcp.ahead": ("plan_ahead",),
    "flexcp.batch": ("cross_entropy", "shard_batch"),
    "flexcp.grid": ("BlockGrid", "BlockKind", "build_block_grid"),
    "flexcp.errors": ("FlexCPError",),
    "flexcp.integrations.context_parallel": ("ContextParallel",),
    "flexcp.integrations.parallelize": ("parallelize",),
    "flexcp.layout": ("Layout",),
    "flexcp.masks": ("Mask",),
    "flexcp.plan": ("Machine", "Plan", "load_plan", "make_plan", "save_plan"),
    "flexcp.ops": ("attention", "flex_attention", "varlen_attention"),
    "flexcp.tools.verify": ("verify",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_SUBPACKAGES = ("kernels", "masks", "testing")


def __getattr__(name: str) -> object:
    """Public names load on first use: the command line must answer before torch is imported."""
    if name in _SUBPACKAGES:
        return import_module(f"flexcp.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'flexcp' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
