"""Running attention: on one device, and over a plan."""

from flexcp.runtime.attention import flex_attention
from flexcp.runtime.batch import cross_entropy, shard_batch
from flexcp.runtime.parallel import attention
from flexcp.runtime.planner import make_plan

__all__ = ["attention", "cross_entropy", "flex_attention", "make_plan", "shard_batch"]
