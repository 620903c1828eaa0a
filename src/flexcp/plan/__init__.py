"""The choice of layout and schedule, with its price."""

from flexcp.plan.cost import Cost, price
from flexcp.plan.machine import PRESETS, Machine
from flexcp.plan.machine_file import load_machine, save_machine
from flexcp.plan.make import make_plan
from flexcp.plan.mesh import Ranks
from flexcp.plan.plan import Plan
from flexcp.plan.saved import load_plan, save_plan
from flexcp.plan.shape import AttentionShape
from flexcp.plan.stats import Stats

__all__ = [
    "PRESETS",
    "AttentionShape",
    "Cost",
    "Machine",
    "Plan",
    "Ranks",
    "Stats",
    "load_machine",
    "load_plan",
    "make_plan",
    "price",
    "save_machine",
    "save_plan",
]
