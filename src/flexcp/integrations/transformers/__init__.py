"""Context parallelism for the decoders of Hugging Face Transformers: `attach`, then `shard`."""

from flexcp.integrations.transformers.attached import Attached, attach, detach
from flexcp.integrations.transformers.trainer import TrainerMixin

__all__ = ["Attached", "TrainerMixin", "attach", "detach"]
