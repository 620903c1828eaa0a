"""Which values of a Diffusers transformer have tokens for rows, and which modules attend to them.

A structure is written down for each class of model, and holds for that class alone: a model that
has none is refused by name. What it says is checked whenever the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

from flexcp.errors import FlexCPError

Lengths = Callable[[Any, Mapping[str, Any]], dict[str, int]]


@dataclass(frozen=True)
class TokenRows:
    """A tensor, or a list of tensors, with a row for each token of a stream."""

    stream: str
    """ "image" (or video), or "text": streams are sharded each by itself."""
    dim: int
    """Which dimension has the tokens."""


@dataclass(frozen=True)
class Structure:
    """Where a class of models has its tokens."""

    lengths: Lengths
    """Tokens of each stream, from the model and the arguments that it is called with."""
    arguments: Mapping[str, TokenRows]
    """Arguments of the model that are sharded before it runs."""
    inputs: Mapping[tuple[str, str], TokenRows]
    """By module and name: arguments of modules that are sharded before they run."""
    outputs: Mapping[str, tuple[TokenRows, ...]]
    """By module: results that are sharded."""
    attention: Mapping[str, tuple[str, ...]]
    """By pattern: modules that attend over all ranks, and their streams in order of rows."""
    cross_attention: tuple[str, ...]
    """Patterns of modules whose keys are whole on every rank."""
    last: str
    """The module after which nothing has parameters: its rows are those of all ranks again."""
    processors: frozenset[str]
    """Attention processors that are known to attend by one call for each module."""


def _flux_lengths(model: Any, given: Mapping[str, Any]) -> dict[str, int]:  # noqa: ARG001
    image, text = given["hidden_states"], given["encoder_hidden_states"]
    return {"text": text.shape[1], "image": image.shape[1]}


def _sd3_lengths(model: Any, given: Mapping[str, Any]) -> dict[str, int]:
    image, text = given["hidden_states"], given["encoder_hidden_states"]
    size = model.config.patch_size
    height, width = (n // size for n in image.shape[-2:])
    return {"text": text.shape[1], "image": height * width}


def _wan_lengths(model: Any, given: Mapping[str, Any]) -> dict[str, int]:
    sizes = zip(given["hidden_states"].shape[-3:], model.config.patch_size, strict=True)
    frames, height, width = (n // size for n, size in sizes)
    return {"image": frames * height * width}


_IMAGE, _TEXT = TokenRows("image", 1), TokenRows("text", 1)

STRUCTURES = {
    "FluxTransformer2DModel": Structure(
        lengths=_flux_lengths,
        arguments={
            "hidden_states": _IMAGE,
            "encoder_hidden_states": _TEXT,
            "img_ids": TokenRows("image", -2),
            "txt_ids": TokenRows("text", -2),
            "controlnet_block_samples": _IMAGE,
            "controlnet_single_block_samples": _IMAGE,
        },
        inputs={},
        outputs={},
        attention={
            "transformer_blocks.*.attn": ("text", "image"),
            "single_transformer_blocks.*.attn": ("text", "image"),
        },
        cross_attention=(),
        last="proj_out",
        processors=frozenset({"FluxAttnProcessor"}),
    ),
    "SD3Transformer2DModel": Structure(
        lengths=_sd3_lengths,
        arguments={"block_controlnet_hidden_states": _IMAGE},
        inputs={},
        outputs={"pos_embed": (_IMAGE,), "context_embedder": (_TEXT,)},
        attention={
            "transformer_blocks.*.attn": ("image", "text"),
            "transformer_blocks.*.attn2": ("image",),
        },
        cross_attention=(),
        last="proj_out",
        processors=frozenset({"JointAttnProcessor2_0", "FusedJointAttnProcessor2_0"}),
    ),
    "WanTransformer3DModel": Structure(
        lengths=_wan_lengths,
        arguments={"timestep": _IMAGE},  # where every token has one
        inputs={("blocks.0", "hidden_states"): _IMAGE},
        outputs={"rope": (_IMAGE, _IMAGE)},
        attention={"blocks.*.attn1": ("image",)},
        cross_attention=("blocks.*.attn2",),
        last="proj_out",
        processors=frozenset({"WanAttnProcessor"}),
    ),
}
"""By the name of the class in `diffusers`."""


def structure_of(model: nn.Module) -> Structure:
    """The structure of a model; raises if it is not known to be right for it."""
    for cls in type(model).__mro__:
        known = STRUCTURES.get(cls.__name__)
        if known is None or cls.__module__.partition(".")[0] != "diffusers":
            continue
        if type(model).forward is not vars(cls)["forward"]:
            raise FlexCPError(
                f"the forward pass of {cls.__name__}",
                f"{type(model).__name__}, which has one of its own",
                "attach to the class of diffusers itself; for models of your own see "
                "flexcp.parallelize",
            )
        return known
    raise FlexCPError(
        f"a transformer of diffusers whose structure is known: {', '.join(STRUCTURES)}",
        f"{type(model).__name__}",
        "pass pipeline.transformer; for other models see flexcp.parallelize",
    )


def diffusers_version() -> str:
    """The version that is installed, for messages."""
    try:
        return version("diffusers")
    except PackageNotFoundError:
        return "unknown"
