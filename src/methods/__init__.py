"""Training methods: what turns accumulated gradients into a displacement of the weights.

A method's gradients are accumulated by `loss.backward()`. An update is then `propose`, which fixes the displacement and
leaves the weights alone, and `apply`, which adds the displacement times the step scale, weight decay included.
"""

import math
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor, nn

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

    def memory(self) -> dict[str, list[Tensor]]:
        """Return the tensors that are alive now, by component of `src.memory.COMPONENTS`; a user's own need not."""
        ...

    def displacement_norm(self) -> float:
        """Return the proposed displacement's norm. A user's own need not: then control probes every update."""
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
                storage=config.storage,
            )
        case cfg.LoraMethod():
            from src.methods.lora import LoraOptimizer

            return LoraOptimizer(
                model,
                targets,
                config.rank,
                config.alpha,
                seed,
                config.initialisation,
                config.freeze_a,
                lr=config.learning_rate,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                weight_decay=config.weight_decay,
                max_grad_norm=config.max_grad_norm,
            )
        case cfg.PackageMethod():
            from src.methods.packages import PackageOptimizer

            return PackageOptimizer(config, model, targets, seed)
        case cfg.CustomMethod():
            method: Method = load_source(config.source, "method.source")(model, targets, seed, config.settings)
            for member in _MEMBERS:
                if not hasattr(method, member):
                    raise cfg.ConfigError(
                        f"method.source={config.source} makes a {type(method).__name__} without {member}, which a "
                        "method needs. See src.methods.Method."
                    )
            return method


def check_packages(config: cfg.Method) -> None:
    """Refuse a method whose packages are not installed.

    Raises:
        ConfigError: in one sentence.
    """
    needed = {
        "lora": ["peft"],
        "galore": ["galore_torch", "bitsandbytes"],
        "apollo": ["apollo_torch", "bitsandbytes"],
        "flora": ["flora_opt", "bitsandbytes", "accelerate"],
        "adam8bit": ["bitsandbytes"],
    }.get(config.name, [])
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise cfg.ConfigError(
            f"method={config.name} needs the package {' and '.join(missing)}, which is not installed. Type: "
            "pip install -e '.[peers]'"
        )


def co_rank(config: cfg.SketchMethod) -> int | None:
    """Return L of a two-sided sketch, 2 R + 1 unless told otherwise, or None."""
    return None if config.reconstruction == "one_sided" else config.co_rank or 2 * config.rank + 1


def learning_rate(config: cfg.Method, update: int) -> float:
    """Return the rate of an update (from 1): linear warm-up to the peak, then half a cosine down to `decay_to` of it.

    The peak is `learning_rate * rate_factor`.

    The cosine spans `decay_horizon` updates, whatever the run's length; null keeps the rate constant.
    """
    rate = config.learning_rate * config.rate_factor
    if update <= config.warmup:
        return rate * update / config.warmup
    if config.decay_horizon is None:
        return rate
    x = min((update - config.warmup) / max(config.decay_horizon - config.warmup, 1), 1.0)
    return rate * (config.decay_to + (1.0 - config.decay_to) * (1.0 + math.cos(math.pi * x)) / 2.0)
