"""The configurations of the training methods; the meaning of a value is its comment in conf/method/."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from src.typed import Count, Fraction, NonNegative, Positive, Range, Size

Beta = Annotated[float, Range(0, 0.999999)]  # what of a moment is kept at an update


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every method, by update; see `src.methods.learning_rate`."""

    name: str  # here, so that it is the first key of all
    learning_rate: Positive
    rate_factor: Positive
    warmup: Size
    decay_horizon: Count | None
    decay_to: Fraction


@dataclass(frozen=True)
class SketchMethod(Schedule):
    """See `src.sketch.optimizer.SketchOptimizer`."""

    name: Literal["sketch"]
    rank: Count
    projection: Literal["rademacher", "gaussian", "stiefel", "srht", "coordinate", "countsketch"]
    reconstruction: Literal["one_sided", "two_sided"]
    co_rank: Count | None
    refresh_every: Count | Literal["never"]
    direction: Literal["row_adam", "adam", "sgd"]
    moments: Literal["reset", "transfer"]
    preserve_norm: bool
    learning_rate_is: Literal["factor", "ratio"]
    beta1: Beta
    beta2: Beta
    eps: Positive
    weight_decay: NonNegative
    clip_norm: Literal["sketch", "estimate", "none"]
    max_grad_norm: Positive
    storage: Literal["master", "stochastic", "plain"]
    unreached: Literal["raise", "skip"]


@dataclass(frozen=True)
class DenseMethod(Schedule):
    """See `src.methods.dense.DenseOptimizer`."""

    name: Literal["dense"]
    direction: Literal["adamw", "sgd"]
    train_all: bool
    beta1: Beta
    beta2: Beta
    eps: Positive
    weight_decay: NonNegative
    max_grad_norm: Positive | None
    storage: Literal["master", "plain"]


@dataclass(frozen=True)
class LoraMethod(Schedule):
    """See `src.methods.lora.LoraOptimizer`."""

    name: Literal["lora"]
    rank: Count
    alpha: Positive
    initialisation: Literal["kaiming", "gaussian"]
    freeze_a: bool
    beta1: Beta
    beta2: Beta
    eps: Positive
    weight_decay: NonNegative
    max_grad_norm: Positive | None


@dataclass(frozen=True)
class PackageMethod(Schedule):
    """What the methods below have in common; see `src.methods.packages.PackageOptimizer`."""

    layerwise: bool
    weight_decay: NonNegative
    max_grad_norm: Positive | None


@dataclass(frozen=True)
class GaloreMethod(PackageMethod):
    """GaLore, arXiv 2403.03507, by the package galore-torch."""

    name: Literal["galore"]
    rank: Count
    update_gap: Count
    scale: Positive
    side: Literal["std", "right", "left", "full"]
    beta1: Beta
    beta2: Beta
    eps: Positive


@dataclass(frozen=True)
class ApolloMethod(PackageMethod):
    """APOLLO, arXiv 2412.05270, by the package apollo-torch."""

    name: Literal["apollo"]
    rank: Count
    update_gap: Count
    scale: Positive
    scale_type: Literal["channel", "tensor"]
    beta1: Beta
    beta2: Beta
    eps: Positive


@dataclass(frozen=True)
class FloraMethod(PackageMethod):
    """Flora, arXiv 2402.03293, by the package flora-opt."""

    name: Literal["flora"]
    rank: Count
    update_gap: Count
    beta1: Annotated[float, Range(0, 0.999999, above=True)]
    decay_rate: Annotated[float, Range(-1, 0)]
    clip_threshold: Positive
    scale_parameter: bool


@dataclass(frozen=True)
class AdafactorMethod(PackageMethod):
    """Adafactor, arXiv 1804.04235, of transformers."""

    name: Literal["adafactor"]
    beta1: Beta | None
    decay_rate: Annotated[float, Range(-1, 0)]
    clip_threshold: Positive
    scale_parameter: bool


@dataclass(frozen=True)
class Adam8bitMethod(PackageMethod):
    """AdamW with moments of eight bits, arXiv 2110.02861, by the package bitsandbytes."""

    name: Literal["adam8bit"]
    beta1: Beta
    beta2: Beta
    eps: Positive
    min_8bit_size: Size


@dataclass(frozen=True)
class CustomMethod(Schedule):
    """`path.py:name`, a callable (model, targets, seed, settings) that returns a `src.methods.Method`."""

    name: Literal["custom"]
    source: str
    settings: dict[str, Any]
