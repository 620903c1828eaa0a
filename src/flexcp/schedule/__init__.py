"""Who needs what, when: schedules as tables of rounds, and the proof that they are right."""

from flexcp.schedule.check import check_schedule
from flexcp.schedule.heads import HeadSlice, split_heads
from flexcp.schedule.hybrid import SCHEDULES, make_schedule
from flexcp.schedule.needs import Needs
from flexcp.schedule.tables import Pass, Schedule, Step, Tasks, Transfers

__all__ = [
    "SCHEDULES",
    "HeadSlice",
    "Needs",
    "Pass",
    "Schedule",
    "Step",
    "Tasks",
    "Transfers",
    "check_schedule",
    "make_schedule",
    "split_heads",
]
