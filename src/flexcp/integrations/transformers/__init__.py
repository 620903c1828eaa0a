"""Context parallelism for the decoders of Hugging Face Transformers: `attach`, then `shard`."""

from flexcp.integrations.transformers.attached import Attached, attach, detach

__all__ = ["Attached", "attach", "detach"]
