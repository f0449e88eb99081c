"""An optimizer over sketches: clip, direction, merge into the weights, redraw.

Legend: M output width, N input width, R rank.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from src.sketch.direction import adam, check_transfer, row_adam, second_moment_like, transfer
from src.sketch.layer import SketchedLayers


class SketchOptimizer(torch.optim.Optimizer):
    """Merges W <- (1 - a lr wd) W - a lr D A into the original weights, a being the step scale.

    `step()` is `propose()` and `apply(1.0)`; between the two the displacement may be inspected (`tangents`) and its
    scale chosen. The parameter groups hold the sketches, so learning-rate schedulers work as with any optimizer.

    Args:
        layers: the sketched layers.
        lr: learning rate; RowAdam's and Adam's are in units of Adam's.
        direction: "row_adam", "adam" or "sgd" (D = S), see `src.sketch.direction`.
        beta1: Adam's; beta2, eps: RowAdam's and Adam's.
        moments: what becomes of Adam's moments at a redraw: "reset" or "transfer".
        preserve_norm: scale each layer's D to the norm of its S (arXiv 2610.06647).
        lr_is: "factor" of D; or "ratio", then the whole update is scaled so that ||{D A}||_F / ||{W}||_F = lr over the
            layers with a gradient, weight decay apart (arXiv 2610.06647, with 6e-5).
        weight_decay: decoupled, scaled by the learning rate and by the step scale.
        max_grad_norm: the threshold of global norm clipping.
        clip_norm: the norm that is compared with it: "sketch" is ||S||_F, whose square is the unbiased estimate of the
            gradient's squared norm; "estimate" is ||S A||_F, the norm of the step's gradient estimate, larger by about
            sqrt(N / R); "none" does not clip.
        refresh_every: updates between two draws of the projections, or "never". S A is an unbiased estimate of the
            gradient only right after a redraw: later the weights depend on A.
    """

    def __init__(
        self,
        layers: SketchedLayers,
        lr: float,
        direction: Literal["row_adam", "adam", "sgd"] = "row_adam",
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        clip_norm: Literal["sketch", "estimate", "none"] = "sketch",
        refresh_every: int | Literal["never"] = 1,
        moments: Literal["reset", "transfer"] = "reset",
        preserve_norm: bool = False,
        lr_is: Literal["factor", "ratio"] = "factor",
    ):
        if not lr >= 0.0:
            raise ValueError(f"lr must be at least 0, got {lr}")
        if direction == "adam" and moments == "transfer" and refresh_every != "never":
            check_transfer(beta1, refresh_every, layers.rank, max(m.in_features for m in layers.modules.values()))
        self.layers = layers
        self.direction = direction
        self.clip_norm = clip_norm
        self.max_grad_norm = max_grad_norm
        self.refresh_every = refresh_every
        self.moments = moments
        self.preserve_norm = preserve_norm
        self.lr_is = lr_is
        self.updates = 0
        self._lefts_MR: dict[str, Tensor] = {}
        self._decay = 0.0
        super().__init__(
            [{"params": list(layers.parameters.values()), "param_names": list(layers.parameters)}],
            {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay},
        )

    @torch.no_grad()
    def propose(self) -> dict[str, float]:
        """Clip the sketches and compute the displacement; weights stay as they are.

        Returns:
            sketch_norm and estimate_norm before clipping, and clip_scale, the factor the sketches were multiplied by.

        Raises:
            FloatingPointError: a sketch holds NaN or infinity; nothing has been changed.
            RuntimeError: there is no gradient at all.
        """
        sketches = [p.grad for p in self.layers.parameters.values() if p.grad is not None]
        if not sketches:
            raise RuntimeError("no gradient reached a sketched layer: call loss.backward() before the update")
        sketch_norm = float(torch.linalg.vector_norm(torch.stack([s.norm() for s in sketches])))
        estimate_norm = float(self.layers.estimate_norm())
        norm = {"sketch": sketch_norm, "estimate": estimate_norm, "none": 0.0}[self.clip_norm]
        if not (sketch_norm < float("inf")):
            raise FloatingPointError(f"the sketched gradient is not finite (norm {sketch_norm}); no update was made")
        clip_scale = min(1.0, self.max_grad_norm / norm) if norm > 0 else 1.0
        self._lefts_MR = {}
        for name, parameter in self.layers.parameters.items():
            if parameter.grad is not None:
                parameter.grad.mul_(clip_scale)
                self._lefts_MR[name] = self._left(parameter)
        if self.lr_is == "ratio":
            self._scale_to_ratio()
        (group,) = self.param_groups
        self._decay = group["lr"] * group["weight_decay"]
        return {"sketch_norm": sketch_norm, "estimate_norm": estimate_norm, "clip_scale": clip_scale}

    def tangents(self) -> Any:
        """Return a context in which forward-mode derivatives carry the proposed displacement."""
        return self.layers.tangents(self._lefts_MR, self._decay)

    @torch.no_grad()
    def apply(self, step_scale: float) -> None:
        """Merge the proposed displacement times `step_scale`, clear the sketches, redraw the projections if due."""
        for name, left_MR in self._lefts_MR.items():
            weight_MN = self.layers.modules[name].weight
            weight_MN.addmm_(
                left_MR.to(weight_MN.dtype),
                self.layers.projection(name),
                beta=1.0 - step_scale * self._decay,
                alpha=step_scale,
            )
        self._lefts_MR = {}
        self.zero_grad()
        self.updates += 1
        old = self.layers.draw
        self._redraw()
        if self.direction == "adam" and self.layers.draw != old:
            self._carry_moments(old)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Propose and apply in full. A closure is refused: evaluating it again would sketch under a used projection."""
        if closure is not None:
            raise ValueError("SketchOptimizer.step takes no closure: call loss.backward(), then step().")
        self.propose()
        self.apply(1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as any optimizer does, with the number of updates, which the projections follow from."""
        return super().state_dict() | {"updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state: moments, parameter groups, projections."""
        super().load_state_dict(state_dict)
        self.updates = state_dict["updates"]
        self._redraw()

    def _redraw(self) -> None:
        if self.refresh_every != "never":
            self.layers.draw = self.updates // self.refresh_every

    def _left(self, parameter: Tensor) -> Tensor:
        """Return -lr D (M, R)."""
        (group,) = self.param_groups
        sketch_MR = parameter.grad
        assert sketch_MR is not None
        if self.direction == "sgd":  # its norm is S's by itself
            return sketch_MR * -group["lr"]
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            if self.direction == "adam":
                state["first_moment"] = torch.zeros_like(sketch_MR)
                state["second_moment"] = torch.zeros_like(sketch_MR)
            else:
                state["second_moment"] = second_moment_like(sketch_MR)
        state["step"] += 1
        beta2, eps = group["beta2"], group["eps"]
        if self.direction == "adam":
            first_MR, second_MR = state["first_moment"], state["second_moment"]
            direction_MR = adam(sketch_MR, first_MR, second_MR, state["step"], group["beta1"], beta2, eps)
        else:
            direction_MR = row_adam(sketch_MR, state["second_moment"], state["step"], beta2, eps)
        if self.preserve_norm:
            norm = direction_MR.norm()
            direction_MR.mul_(torch.where(norm > 0, sketch_MR.norm() / norm, 1.0))
        return direction_MR.mul_(-group["lr"])

    def _scale_to_ratio(self) -> None:
        """Scale the left factors so that the update's norm is lr times the weights'; an update of zeros stays one."""
        (group,) = self.param_groups
        weights = [self.layers.modules[name].weight for name in self._lefts_MR]
        whole = torch.linalg.vector_norm(torch.stack([weight.norm().double() for weight in weights]))
        norm = float(self.layers.estimate_norm(self._lefts_MR))
        if norm > 0:
            for left_MR in self._lefts_MR.values():
                left_MR.mul_(group["lr"] * float(whole) / norm)

    def _carry_moments(self, old_draw: int) -> None:
        """Bring Adam's moments from the former projections to the new ones."""
        for name, parameter in self.layers.parameters.items():
            state = self.state.get(parameter)
            if not state:
                continue
            if self.moments == "reset":
                state["step"] = 0
                state["first_moment"].zero_()
                state["second_moment"].zero_()
            else:
                dtype = state["first_moment"].dtype
                old_RN = self.layers.projection(name, dtype, old_draw)
                transfer(state["first_moment"], state["second_moment"], old_RN, self.layers.projection(name, dtype))
