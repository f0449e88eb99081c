"""Training methods: what turns accumulated gradients into a displacement of the weights.

A method's gradients are accumulated by `loss.backward()`. An update is then `propose`, which fixes the displacement and
leaves the weights alone, and `apply`, which adds the displacement times the step scale, weight decay included.
"""

import math
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from src import config as cfg
from src.custom import load_source

_MEMBERS = ("param_groups", "propose", "tangents", "apply", "state_dict", "load_state_dict")


class Method(Protocol):
    """What the trainer needs; `torch.optim.Optimizer` supplies the parameter groups."""

    param_groups: list[dict[str, Any]]

    def propose(self) -> dict[str, float]:
        """Compute the displacement from the accumulated gradients and return its metrics.

        Raises:
            FloatingPointError: the gradients are not finite.
        """
        ...

    def tangents(self) -> AbstractContextManager[None]:
        """Return a context in which forward-mode derivatives carry the proposed displacement."""
        ...

    def apply(self, step_scale: float) -> dict[str, float] | None:
        """Add the displacement times the step scale to the weights and clear the gradients; return metrics, if any."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes from update to update, between two of them, as `torch.optim.Optimizer` does.

        Tensors and plain values: a checkpoint holds nothing else. What is missing here makes a resumed run another one.
        """
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from such a state."""
        ...


def build(config: cfg.Method, model: nn.Module, targets: dict[str, nn.Linear], seed: int) -> Method:
    """Return the method of a configuration; it freezes what it does not train."""
    match config:
        case cfg.SketchMethod():
            from src.sketch.layer import SketchedLayers
            from src.sketch.optimizer import SketchOptimizer

            return SketchOptimizer(
                SketchedLayers(model, targets, config.rank, seed, config.projection, co_rank(config)),
                lr=config.learning_rate,
                direction=config.direction,
                beta1=config.beta1,
                beta2=config.beta2,
                eps=config.eps,
                weight_decay=config.weight_decay,
                clip_norm=config.clip_norm,
                max_grad_norm=config.max_grad_norm,
                refresh_every=config.refresh_every,
                moments=config.moments,
                preserve_norm=config.preserve_norm,
                lr_is=config.learning_rate_is,
                storage=config.storage,
                unreached=config.unreached,
            )
        case cfg.DenseMethod():
            from src.methods.dense import DenseOptimizer

            return DenseOptimizer(
                model,
                targets,
                lr=config.learning_rate,
                direction=config.direction,
                train_all=config.train_all,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                weight_decay=config.weight_decay,
                max_grad_norm=config.max_grad_norm,
            )
        case cfg.CustomMethod():
            method: Method = load_source(config.source, "method.source")(model, targets, seed, config.settings)
            for member in _MEMBERS:
                if not hasattr(method, member):
                    raise cfg.ConfigError(
                        f"method.source={config.source} makes a {type(method).__name__} without {member}, which a "
                        "method needs. See src.methods.Method."
                    )
            return method


def co_rank(config: cfg.SketchMethod) -> int | None:
    """Return L of a two-sided sketch, 2 R + 1 unless told otherwise, or None."""
    return None if config.reconstruction == "one_sided" else config.co_rank or 2 * config.rank + 1


def learning_rate(config: cfg.Method, update: int) -> float:
    """Return the rate of an update (from 1): linear warm-up, then half a cosine down to `learning_rate * decay_to`.

    The cosine spans `decay_horizon` updates, whatever the run's length; null keeps the rate constant.
    """
    rate = config.learning_rate
    if update <= config.warmup:
        return rate * update / config.warmup
    if config.decay_horizon is None:
        return rate
    x = min((update - config.warmup) / max(config.decay_horizon - config.warmup, 1), 1.0)
    return rate * (config.decay_to + (1.0 - config.decay_to) * (1.0 + math.cos(math.pi * x)) / 2.0)
