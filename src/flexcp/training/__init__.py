"""A small, real training run over packed documents, on any number of ranks.

Nothing here imports torch before it is used: the command line reads its options from TrainConfig.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from flexcp.training.config import TrainConfig
from flexcp.training.events import Event, Finished

if TYPE_CHECKING:
    from flexcp.training.data import PackedDocuments, load_corpus
    from flexcp.training.loop import train
    from flexcp.training.model import ByteTransformer

__all__ = [
    "ByteTransformer",
    "Event",
    "Finished",
    "PackedDocuments",
    "TrainConfig",
    "load_corpus",
    "train",
]

_HOMES = {
    "ByteTransformer": "model",
    "PackedDocuments": "data",
    "load_corpus": "data",
    "train": "loop",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'flexcp.training' has no attribute {name!r}")
    return getattr(import_module(f"flexcp.training.{_HOMES[name]}"), name)
