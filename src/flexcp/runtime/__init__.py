"""Running attention: on one device, and over a plan."""

from flexcp.runtime.attention import flex_attention

__all__ = ["flex_attention"]
