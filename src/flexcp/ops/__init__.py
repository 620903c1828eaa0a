"""A tensor's way through attention: on one device, and over a plan."""

from flexcp.ops.attention import flex_attention
from flexcp.ops.parallel import attention

__all__ = ["attention", "flex_attention"]
