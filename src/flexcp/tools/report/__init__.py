"""Pictures, reports and tables of masks and plans, with nothing but torch and Python itself."""

from flexcp.tools.report.figure import save_figure
from flexcp.tools.report.picture import Picture, picture_by_rank, picture_of
from flexcp.tools.report.report import report_page, save_report
from flexcp.tools.report.strategies import Strategy, strategies
from flexcp.tools.report.table import table

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
