"""Pictures, reports and tables of masks and plans, with nothing but torch and Python itself."""

from flexcp.viz.figure import save_figure
from flexcp.viz.picture import Picture, picture_by_rank, picture_of
from flexcp.viz.report import report_page, save_report
from flexcp.viz.strategies import Strategy, strategies
from flexcp.viz.table import table

__all__ = [
    "Picture",
    "Strategy",
    "picture_by_rank",
    "picture_of",
    "report_page",
    "save_figure",
    "save_report",
    "strategies",
    "table",
]
