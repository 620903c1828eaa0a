"""Moving rows between ranks: the interface of a transport, and one within a single process."""

from flexcp.comm.interface import Pending, Transport
from flexcp.comm.labels import CallLabel, PassLabel, RoundLabel
from flexcp.comm.rank_errors import RankError
from flexcp.comm.simulated import SimulatedMesh, SimulatedTransport, World

__all__ = [
    "CallLabel",
    "PassLabel",
    "Pending",
    "RankError",
    "RoundLabel",
    "SimulatedMesh",
    "SimulatedTransport",
    "Transport",
    "World",
]
