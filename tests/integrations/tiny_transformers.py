"""Transformers of diffusers with few parameters, and calls of them with awkward lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model and what it is called with."""

    make: Callable[[], nn.Module]
    arguments: Callable[[], dict[str, Any]]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
        num_attention_heads=3, joint_attention_dim=6, pooled_projection_dim=5,
        axes_dims_rope=(2, 2, 4),
    )  # fmt: skip


def flux_arguments(height: int = 3, width: int = 5, text: int = 4) -> dict[str, Any]:
    image = height * width
    places = torch.cartesian_prod(*(torch.arange(float(n)) for n in (1, height, width)))
    return {
        "hidden_states": numbers(2, image, 4),
        "encoder_hidden_states": numbers(2, text, 6),
        "pooled_projections": numbers(2, 5),
        "timestep": torch.tensor([0.3, 0.8]),
        "img_ids": places,
        "txt_ids": torch.zeros(text, 3),
    }


def sd3(dual: tuple[int, ...] = (0,)) -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=3, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=6, caption_projection_dim=16,
        pooled_projection_dim=5, out_channels=3, pos_embed_max_size=8,
        dual_attention_layers=dual, qk_norm="rms_norm",
    )  # fmt: skip


def sd3_arguments(height: int = 6, width: int = 10, text: int = 7) -> dict[str, Any]:
    return {
        "hidden_states": numbers(2, 3, height, width),
        "encoder_hidden_states": numbers(2, text, 6),
        "pooled_projections": numbers(2, 5),
        "timestep": torch.tensor([3, 8]),
    }


def wan(image_dim: int | None = None) -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=3,
        out_channels=3, text_dim=6, freq_dim=8, ffn_dim=16, num_layers=2, rope_max_seq_len=16,
        image_dim=image_dim, added_kv_proj_dim=None if image_dim is None else 24,
    )  # fmt: skip


def wan_arguments(frames: int = 3, height: int = 2, width: int = 10, text: int = 5) -> dict:
    return {
        "hidden_states": numbers(2, 3, frames, height, width),
        "timestep": torch.tensor([3, 8]),
        "encoder_hidden_states": numbers(2, text, 6),
    }


def wan_arguments_by_token() -> dict[str, Any]:
    given = wan_arguments()
    return given | {"timestep": torch.randint(0, 9, (2, 3 * 1 * 5))}


CASES = {
    "Flux": Case(flux, flux_arguments),
    "SD3": Case(lambda: sd3(()), sd3_arguments),
    "SD3.5, whose first layer attends to the image twice": Case(sd3, sd3_arguments),
    "Wan": Case(wan, wan_arguments),
    "Wan, with a timestep for each token": Case(wan, wan_arguments_by_token),
}
