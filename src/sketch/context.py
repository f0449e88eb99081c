"""Sketching for the time of a `with`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from src.sketch.layer import SketchedLayers, select_targets
from src.sketch.optimizer import SketchOptimizer
from src.sketch.projection import Family


@contextmanager
def sketching(
    model: nn.Module,
    targets: list[str],
    rank: int,
    lr: float,
    *,
    seed: int = 0,
    projection: Family | Callable[..., Tensor] = "rademacher",
    co_rank: int | None = None,
    freeze: Literal["all", "targets"] = "all",
    **options: Any,
) -> Iterator[SketchOptimizer]:
    """Sketch a model's linear layers for the time of a `with`, and yield the optimizer that trains them.

        with sketching(model, ["q_proj", "v_proj"], rank=16, lr=1e-4) as optimizer:
            loss_of(model).backward()
            optimizer.step()

    A step clears the sketches; where one may be skipped (a gradient scaler), call `optimizer.zero_grad()` after it.
    At the end the hooks are off and what required gradients requires them again; the weights keep what was merged.

    Raises:
        RuntimeError: at the end, if there were gradients and never a step: another optimizer was stepped.

    Args:
        targets: patterns, see `select_targets`; rank to freeze: see `SketchedLayers`; options: see `SketchOptimizer`.
    """
    required = {parameter: parameter.requires_grad for parameter in model.parameters()}
    layers = SketchedLayers(model, select_targets(model, targets), rank, seed, projection, co_rank, freeze)
    try:
        optimizer = SketchOptimizer(layers, lr, **options)
        yield optimizer
        left = layers.sketches()
        if optimizer.updates == 0 and left and all(grad.isfinite().all() for grad in left):  # else a scaler skipped it
            raise RuntimeError(
                "backward passes made sketches and no step used them, so nothing was trained: call optimizer.step() of "
                "the optimizer that sketching() gives, or hand it to the trainer (optimizers=(optimizer, None))."
            )
    finally:
        layers.remove()
        for parameter, value in required.items():
            parameter.requires_grad_(value)
