"""Moving rows between ranks: the interface of a transport, and one within a single process."""

from flexcp.comm.interface import Pending, Transport
from flexcp.comm.labels import CollectiveLabel, MessageLabel, RoundLabel
from flexcp.comm.simulated import RankError, SimulatedMesh, SimulatedTransport, World

__all__ = [
    "CollectiveLabel",
    "MessageLabel",
    "Pending",
    "RankError",
    "RoundLabel",
    "SimulatedMesh",
    "SimulatedTransport",
    "Transport",
    "World",
]
