"""Shapes of models by name: heads, head dimension, layers and windows of well-known ones.

The numbers are those of the models' published Transformers configurations. A configuration file,
or a folder with a `config.json`, says the same of any other model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexcp.errors import FlexCPError, did_you_mean, quote


@dataclass(frozen=True)
class ModelShape:
    """What attention of a model looks like."""

    name: str
    layers: int
    heads: int
    """Query heads."""
    kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens that a layer with a sliding window sees, its own included."""
    window_layers: int = 0
    """How many of the layers have the window; the others see everything before them."""
    note: str = ""
    """What the numbers leave out."""

    @property
    def masks(self) -> tuple[str | None, list[str]]:
        """The model's own: one expression, or several with a name each.

        >>> MODELS["gemma-3-1b"].masks
        (None, ['full=causal', 'sliding=causal & sliding_window(511)'])
        """
        if self.window is None:
            return "causal", []
        local = f"causal & sliding_window({self.window - 1})"
        if self.window_layers >= self.layers:
            return local, []
        return None, ["full=causal", f"sliding={local}"]


def _of(name: str, *numbers: int, window: int | None = None, local: int = 0) -> ModelShape:
    layers, heads, kv_heads, head_dim = numbers
    return ModelShape(name, layers, heads, kv_heads, head_dim, window, local)


MODELS = {
    shape.name: shape
    for shape in (
        _of("llama-2-7b", 32, 32, 32, 128),
        _of("llama-2-13b", 40, 40, 40, 128),
        _of("llama-2-70b", 80, 64, 8, 128),
        _of("llama-3-8b", 32, 32, 8, 128),
        _of("llama-3-70b", 80, 64, 8, 128),
        _of("llama-3-405b", 126, 128, 8, 128),
        _of("llama-3.1-8b", 32, 32, 8, 128),
        _of("llama-3.1-70b", 80, 64, 8, 128),
        _of("llama-3.1-405b", 126, 128, 8, 128),
        _of("llama-3.2-1b", 16, 32, 8, 64),
        _of("llama-3.2-3b", 28, 24, 8, 128),
        _of("llama-3.3-70b", 80, 64, 8, 128),
        _of("qwen2.5-0.5b", 24, 14, 2, 64),
        _of("qwen2.5-1.5b", 28, 12, 2, 128),
        _of("qwen2.5-3b", 36, 16, 2, 128),
        _of("qwen2.5-7b", 28, 28, 4, 128),
        _of("qwen2.5-14b", 48, 40, 8, 128),
        _of("qwen2.5-32b", 64, 40, 8, 128),
        _of("qwen2.5-72b", 80, 64, 8, 128),
        _of("qwen3-0.6b", 28, 16, 8, 128),
        _of("qwen3-1.7b", 28, 16, 8, 128),
        _of("qwen3-4b", 36, 32, 8, 128),
        _of("qwen3-8b", 36, 32, 8, 128),
        _of("qwen3-14b", 40, 40, 8, 128),
        _of("qwen3-32b", 64, 64, 8, 128),
        _of("qwen3-30b-a3b", 48, 32, 4, 128),
        _of("qwen3-235b-a22b", 94, 64, 4, 128),
        _of("mistral-7b", 32, 32, 8, 128),
        _of("mistral-nemo-12b", 40, 32, 8, 128),
        _of("mistral-small-24b", 40, 32, 8, 128),
        _of("mistral-large-123b", 88, 96, 8, 128),
        _of("mixtral-8x7b", 32, 32, 8, 128),
        _of("mixtral-8x22b", 56, 48, 8, 128),
        _of("gemma-2-2b", 26, 8, 4, 256, window=4096, local=13),
        _of("gemma-2-9b", 42, 16, 8, 256, window=4096, local=21),
        _of("gemma-2-27b", 46, 32, 16, 128, window=4096, local=23),
        _of("gemma-3-1b", 26, 4, 1, 256, window=512, local=22),
        _of("gemma-3-4b", 34, 8, 4, 256, window=1024, local=29),
        _of("gemma-3-12b", 48, 16, 8, 256, window=1024, local=40),
        _of("gemma-3-27b", 62, 32, 16, 128, window=1024, local=52),
        _of("phi-3-mini", 32, 32, 32, 96),
        _of("phi-4", 40, 40, 10, 128),
        _of("olmo-2-7b", 32, 32, 32, 128),
        _of("gpt-oss-20b", 24, 64, 8, 64, window=128, local=12),
        _of("gpt-oss-120b", 36, 64, 8, 64, window=128, local=18),
        ModelShape(
            "deepseek-v3", 61, 128, 128, 192,
            note="values are 128 wide, not 192: bytes and memory are at most what is said",
        ),
    )
}  # fmt: skip
"""Well-known models."""

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
}
"""What configurations call things."""


def model_shape(text: str) -> ModelShape:
    """A model of the table, or that of a Transformers configuration: a file, or its folder.

    >>> model_shape("Llama-3-70B").kv_heads
    8
    >>> model_shape("llama-3-80b")
    Traceback (most recent call last):
    ...
    flexcp.errors.FlexCPError: expected a model that is known, or a config.json, got 'llama-3-80b';
    did you mean llama-3-8b?
    """
    name = text.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    for ending in ("-instruct", "-base", "-it", "-hf"):
        name = name.removesuffix(ending)
    path = Path(text)
    try:
        path = path / "config.json" if path.is_dir() else path
        is_config = path.suffix == ".json" or path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        is_config = False
    if is_config:
        return _of_config(path)
    found = MODELS.get(name) or MODELS.get(name.replace("meta-llama", "llama"))
    if found is None:
        raise FlexCPError(
            "a model that is known, or a config.json",
            quote(text),
            did_you_mean(name, MODELS)
            or f"pass a Transformers config.json, its folder, or one of {', '.join(MODELS)}",
        )
    return found


def _of_config(path: Path) -> ModelShape:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or "something that is not JSON"
        raise _unreadable(path, got) from None
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    if not isinstance(config, dict):
        raise _unreadable(path, f"a {type(config).__name__}")
    layers, heads = (_number(path, config, name) for name in ("layers", "heads"))
    kv_heads = _number(path, config, "kv_heads", heads)
    note = ""
    if config.get("qk_rope_head_dim"):  # multi-head latent attention, as it is trained
        kv_heads = heads
        head_dim = config["qk_rope_head_dim"] + config.get("qk_nope_head_dim", 0)
        if config.get("v_head_dim") not in (None, head_dim):
            note = MODELS["deepseek-v3"].note.replace("128", str(config["v_head_dim"]), 1)
            note = note.replace("192", str(head_dim))
    elif config.get("head_dim"):
        head_dim = config["head_dim"]
    else:
        head_dim = _number(path, config, "hidden") // heads
    window, local = _windows(config, layers)
    name = str(config.get("_name_or_path") or config.get("model_type") or path.parent.name or path)
    if not all(isinstance(n, int) and n > 0 for n in (layers, heads, kv_heads, head_dim)):
        raise _unreadable(path, f"heads of {quote(head_dim)}")
    return ModelShape(name, layers, heads, kv_heads, head_dim, window, local, note)


def _windows(config: dict[str, Any], layers: int) -> tuple[int | None, int]:
    window = config.get("sliding_window")
    if not isinstance(window, int) or window < 1 or config.get("use_sliding_window") is False:
        return None, 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        local = sum(kind == "sliding_attention" for kind in kinds)
        return (window, local) if local else (None, 0)
    every = config.get("sliding_window_pattern")
    if isinstance(every, int) and every > 0:
        return window, layers - layers // every
    return window, layers // 2 if config.get("model_type") == "gemma2" else layers


def _number(path: Path, config: dict[str, Any], what: str, usual: int | None = None) -> int:
    for name in _NAMES[what]:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    if usual is None:
        raise _unreadable(path, f"none of {', '.join(_NAMES[what])}")
    return usual


def _unreadable(path: Path, got: str) -> FlexCPError:
    return FlexCPError(
        f"a Transformers configuration in {quote(str(path))}",
        got,
        "pass the config.json of a model, its folder, or a name such as llama-3-70b",
    )
