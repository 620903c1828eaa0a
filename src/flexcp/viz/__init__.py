"""Pictures of grids and plain-text tables, with nothing but torch and the standard library."""

from flexcp.viz.picture import Picture, picture_of
from flexcp.viz.table import table

__all__ = ["Picture", "picture_of", "table"]
