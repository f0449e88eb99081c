"""Sketches of the weight gradients of linear layers, accumulated in backward.

Legend: T tokens (all leading axes flattened), M output width, N input width, R rank.

For y = x W^T with input X (T, N) and output gradient H (T, M) the weight gradient is G = H^T X (M, N). A sketched layer
keeps P = X A^T (T, R) for backward instead of X and accumulates S = G A^T = H^T P (M, R); G is never formed. S is the
`.grad` of a parameter that is always zero and takes no memory: a sketch therefore behaves as a gradient everywhere
(accumulation over microbatches, clipping, gradient scalers, optimizers).
"""

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor, nn

from src.sketch.projection import hash_key, rademacher, stable_name


def select_targets(model: nn.Module, patterns: list[str]) -> dict[str, nn.Linear]:
    """Return the linear layers that the patterns name, by module path, in the model's order.

    A pattern is the last part of a path (`q_proj`) or a shell pattern for the whole path (`*.layers.0.*_proj`).
    Works on the meta device.

    Raises:
        ValueError: a pattern matches nothing, or something that is no `torch.nn.Linear`.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    matched: dict[str, nn.Module] = {}
    for pattern in patterns:
        found = {
            name: module
            for name, module in modules.items()
            if name.rsplit(".", 1)[-1] == pattern or fnmatch.fnmatchcase(name, pattern)
        }
        wrong = sorted({type(m).__name__ for m in found.values() if not isinstance(m, nn.Linear)})
        if not found or wrong:
            last_parts = {name.rsplit(".", 1)[-1] for name, m in modules.items() if isinstance(m, nn.Linear)}
            what = f"matches {', '.join(wrong)}, which is no linear layer" if wrong else "matches no module"
            raise ValueError(
                f"model.targets: the pattern {pattern!r} {what}. The linear layers of this model are: "
                f"{', '.join(sorted(last_parts))}."
            )
        matched |= found
    return {name: module for name, module in modules.items() if name in matched and isinstance(module, nn.Linear)}


class _Accumulate(torch.autograd.Function):
    """The identity on y whose backward also gives `sketch` the gradient H^T P."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, projected: Tensor, sketch: Tensor) -> Tensor:
        ctx.save_for_backward(projected)
        ctx.dtype = sketch.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor]:
        (grad_y,) = grads
        (projected,) = ctx.saved_tensors
        sketch_MR = grad_y.reshape(-1, grad_y.shape[-1]).T @ projected.reshape(-1, projected.shape[-1])
        return grad_y if ctx.needs_input_grad[0] else None, None, sketch_MR.to(ctx.dtype)


class SketchedLayers:
    """The sketched linear layers of a model and the projections of the current draw.

    Every parameter of the model is frozen; `parameters` maps each target's path to its sketch, an (M, R) parameter of
    zeros whose `.grad` is S (float32, or float64 for float64 weights). The projection of a layer is a function of
    (seed, draw, layer path) and is made anew wherever it is needed.

    Args:
        model: the model; its targets must be `torch.nn.Linear` layers.
        targets: layers by module path, from `select_targets`.
        rank: R; at R = N nothing is saved.
        seed: the run's seed.
        projection: called as (rank, width, key, dtype, device), returns A (R, N) with E[A^T A] = I.

    Raises:
        ValueError: a rank below 1 or above an input width; a weight that is flattened, sharded or shared.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, nn.Linear],
        rank: int,
        seed: int,
        projection: Callable[..., Tensor] = rademacher,
    ):
        check_rank(targets, rank)
        check_weights(model, targets)
        self.modules = dict(targets)
        self.rank = rank
        self.seed = seed
        self.draw = 0
        self._projection = projection
        model.requires_grad_(False)
        self.parameters: dict[str, nn.Parameter] = {}
        for name, module in self.modules.items():
            dtype = torch.promote_types(module.weight.dtype, torch.float32)
            zero = torch.zeros((), dtype=dtype, device=module.weight.device)
            self.parameters[name] = nn.Parameter(zero.expand(module.out_features, rank))
        self._hooks = [module.register_forward_hook(self._accumulate(name)) for name, module in self.modules.items()]

    def remove(self) -> None:
        """Take the hooks off the model; its weights stay as they are."""
        for hook in self._hooks:
            hook.remove()

    def projection(self, name: str, dtype: torch.dtype | None = None, draw: int | None = None) -> Tensor:
        """Return A (R, N) of a layer, in its weight's dtype and of the current draw unless told otherwise."""
        weight = self.modules[name].weight
        key = hash_key("projection", self.seed, self.draw if draw is None else draw, stable_name(name))
        return self._projection(self.rank, weight.shape[1], key, dtype or weight.dtype, weight.device)

    def estimate_norm(self, lefts_MR: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return ||{L A}||_F over all layers, 0-d float64; L are the sketches unless other left factors are given.

        From R x R Gram matrices: ||L A||^2 = <L (A A^T), L>.
        """
        if lefts_MR is None:
            lefts_MR = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        total = torch.zeros((), dtype=torch.float64)
        for name, left_MR in lefts_MR.items():
            projection_RN = self.projection(name, left_MR.dtype)
            gram_RR = projection_RN @ projection_RN.T
            total += ((left_MR @ gram_RR) * left_MR).sum().double().cpu()
        return total.clamp(min=0).sqrt()

    @contextmanager
    def tangents(self, lefts_MR: Mapping[str, Tensor], decay: float) -> Iterator[None]:
        """Add to each target's output the tangent of the displacement dW = left A - decay W.

        For use inside `torch.autograd.forward_ad.dual_level()`: dy = x dW^T = (x A^T) left^T - decay (y - bias).
        """

        def inject(name: str) -> Callable[..., Tensor]:
            def hook(module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
                x, y = fwad.unpack_dual(args[0]).primal, fwad.unpack_dual(output)
                tangent = (x @ self.projection(name, x.dtype).T) @ lefts_MR[name].to(x.dtype).T
                if decay:
                    without_bias = y.primal if module.bias is None else y.primal - module.bias
                    tangent = tangent - decay * without_bias
                return fwad.make_dual(y.primal, tangent if y.tangent is None else y.tangent + tangent)

            return hook

        hooks = [self.modules[name].register_forward_hook(inject(name)) for name in lefts_MR]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _accumulate(self, name: str) -> Callable[..., Tensor | None]:
        def hook(module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if not torch.is_grad_enabled():
                return None
            x = args[0].detach()
            projected = x @ self.projection(name, x.dtype).T
            return _Accumulate.apply(output, projected, self.parameters[name])

        return hook


def check_rank(targets: Mapping[str, nn.Linear], rank: int) -> None:
    """Refuse a rank that no projection of some target can have; works on the meta device.

    Raises:
        ValueError: a rank below 1 or above an input width.
    """
    name, width = min(((name, module.in_features) for name, module in targets.items()), key=lambda pair: pair[1])
    if not 1 <= rank <= width:
        raise ValueError(
            f"method.rank must lie between 1 and the smallest input width of a target, {width} ({name}), got {rank}: "
            f"a wider sketch is larger than the gradient. Use method.rank={max(1, width // 4)} or another model."
        )


def check_weights(model: nn.Module, targets: Mapping[str, nn.Linear]) -> None:
    """Refuse a target that cannot be sketched alone; works on the meta device.

    Raises:
        ValueError: a weight that is flattened or sharded, or that another module uses too (sketch and prediction would
            miss that use).
    """
    users = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    for name, module in targets.items():
        if module.weight.shape != (module.out_features, module.in_features):
            raise ValueError(
                f"model.targets: the weight of {name} has the shape {tuple(module.weight.shape)} instead of "
                f"{(module.out_features, module.in_features)}: it is flattened or sharded, and a sketch needs the "
                "matrix. Build the sketch without a wrapper that reshapes parameters."
            )
        if users[id(module.weight)] > 1:
            raise ValueError(
                f"model.targets: {name} shares its weight with another module (tied embeddings, say), whose part of "
                "the gradient a sketch would miss. Leave it out of model.targets, or use method=dense."
            )
