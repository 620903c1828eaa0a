"""A small, real training run over packed documents, on any number of ranks.

Nothing here imports torch before it is used: the command line reads its options from TrainConfig.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from flexcp.tools.train.config import TrainConfig
from flexcp.tools.train.events import Event, Finished

if TYPE_CHECKING:
    from flexcp.tools.train.data import PackedDocuments, load_corpus
    from flexcp.tools.train.loop import train
    from flexcp.tools.train.model import ByteTransformer

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
        raise AttributeError(f"module 'flexcp.tools.train' has no attribute {name!r}")
    return getattr(import_module(f"flexcp.tools.train.{_HOMES[name]}"), name)
