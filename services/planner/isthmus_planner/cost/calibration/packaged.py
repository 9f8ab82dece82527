"""The constants that come with the package, fitted to the public measurements in data/inferencemax.csv."""

from __future__ import annotations

from functools import cache

from isthmus_planner.cost import catalog
from isthmus_planner.cost.calibration import codec
from isthmus_planner.cost.calibration.measurements import Catalog
from isthmus_planner.cost.calibration.store import Calibration


def names() -> Catalog:
    """Profiles by name: the package's, or files of one's own."""
    return Catalog(catalog.accelerator, catalog.model)


@cache
def constants() -> Calibration:
    return codec.load(catalog.packaged_constants(), names(), "the package's constants")
