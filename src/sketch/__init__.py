"""Low-rank gradient sketches for linear layers; torch only, usable alone in anybody's loop."""

from src.sketch.context import sketching
from src.sketch.layer import SketchedLayers, select_targets
from src.sketch.optimizer import SketchOptimizer

__all__ = ["SketchOptimizer", "SketchedLayers", "select_targets", "sketching"]
