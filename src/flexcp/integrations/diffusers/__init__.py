"""Context parallelism for the transformers of Hugging Face Diffusers: `attach`, then call."""

from flexcp.integrations.diffusers.attached import AttachedTransformer, attach, detach

__all__ = ["AttachedTransformer", "attach", "detach"]
