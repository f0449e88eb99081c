"""The dense baseline: AdamW or SGD on full gradients, split into propose and apply."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor, nn

from src.sketch.merge import Moved, sampled


class DenseOptimizer(torch.optim.Optimizer):
    """torch.optim.AdamW or SGD (no momentum) with decoupled weight decay, in two halves.

    The displacement -lr m / (sqrt(v) + eps) - lr wd W (bias-corrected) is never held for more than one parameter.
    At step scale 1 the update has the bits of `torch.optim.AdamW(foreach=False)`.

    Args:
        model, targets: the linear layers' weights are trained and all else is frozen; with `train_all` every
            parameter is trained.
        max_grad_norm: threshold of the global gradient norm; None does not clip.
        storage: of weights narrower than float32: "master" adds up updates in float32 copies, moments in float32 too;
            "plain" has everything in the weights' own precision, which loses updates below it.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, nn.Linear],
        lr: float,
        direction: Literal["adamw", "sgd"] = "adamw",
        train_all: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        storage: Literal["master", "plain"] = "master",
    ):
        model.requires_grad_(train_all)
        for module in targets.values():
            module.weight.requires_grad_(True)
        self.direction = direction
        self.max_grad_norm = max_grad_norm
        # A tied weight is one parameter of several modules: each of its uses carries the tangent.
        self._owners = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        ]
        super().__init__(
            [{"params": list({id(p): p for _, _, p in self._owners}.values())}],
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
        )
        self.storage = storage
        for parameter in self.param_groups[0]["params"]:
            if storage == "master" and parameter.dtype.itemsize < 4:
                self.state[parameter]["master"] = parameter.detach().float()

    @torch.no_grad()
    def propose(self) -> dict[str, float]:
        """Clip the gradients and advance the moments; weights stay as they are.

        Raises:
            FloatingPointError: a gradient holds NaN or infinity; nothing has been changed.
        """
        (group,) = self.param_groups
        parameters = [p for p in group["params"] if p.grad is not None]
        metrics = clip(parameters, self.max_grad_norm)
        beta1, beta2 = group["betas"]
        for parameter in parameters:
            if self.direction == "adamw":
                state = self.state[parameter]
                stored = state.get("master", parameter)
                gradient = parameter.grad.to(stored.dtype)
                if "step" not in state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(stored)
                    state["exp_avg_sq"] = torch.zeros_like(stored)
                state["step"] += 1
                state["exp_avg"].lerp_(gradient, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        return metrics

    @contextmanager
    def tangents(self) -> Iterator[None]:
        """Make every trained parameter a dual number that carries its displacement, while its module runs."""

        def enter(name: str, parameter: nn.Parameter) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any) -> None:
                dual = fwad.make_dual(parameter.detach(), self._displacement(parameter).to(parameter.dtype))
                module._parameters[name] = dual  # type: ignore[assignment]

            return hook

        def leave(name: str, parameter: nn.Parameter) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                module._parameters[name] = parameter

            return hook

        hooks = []
        for module, name, parameter in self._owners:
            if parameter.grad is not None:
                hooks.append(module.register_forward_pre_hook(enter(name, parameter)))
                hooks.append(module.register_forward_hook(leave(name, parameter), always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def apply(self, step_scale: float) -> dict[str, float]:
        """W <- (1 - a lr wd) W - a lr D, parameter by parameter; clears the gradients.

        Returns:
            moved_share, the share of the trained weights that are others now, from up to 65536 weights a parameter.
        """
        (group,) = self.param_groups
        moved = Moved()
        for parameter in group["params"]:
            if parameter.grad is not None:
                before = sampled(parameter)
                stored = self.state.get(parameter, {}).get("master", parameter)
                stored.mul_(1 - step_scale * group["lr"] * group["weight_decay"])
                self._add_direction(stored, parameter, step_scale)
                if stored is not parameter:
                    parameter.copy_(stored)
                moved.count(parameter, before)
        self.zero_grad()
        return {"moved_share": moved.share()}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Propose and apply in full; takes no closure."""
        if closure is not None:
            raise ValueError("DenseOptimizer.step takes no closure: call loss.backward(), then step().")
        self.propose()
        self.apply(1.0)

    def memory(self) -> dict[str, list[Tensor]]:
        """Return the living tensors by component."""
        (group,) = self.param_groups
        states = [(key, value) for state in self.state.values() for key, value in state.items() if key != "step"]
        return {
            "gradients": [p.grad for p in group["params"] if p.grad is not None],
            "optimizer_state": [value for key, value in states if key != "master"],
            "master_weights": [value for key, value in states if key == "master"],
        }

    @torch.no_grad()
    def displacement_norm(self) -> float:
        """Return the norm of the proposed displacement, weight decay included, one parameter after the other."""
        (group,) = self.param_groups
        squares = [self._displacement(p).square().sum() for p in group["params"] if p.grad is not None]
        return float(torch.stack(squares).sum().sqrt())

    def _displacement(self, parameter: Tensor) -> Tensor:
        (group,) = self.param_groups
        stored = self.state.get(parameter, {}).get("master", parameter.detach())
        displacement = stored * (-group["lr"] * group["weight_decay"])
        self._add_direction(displacement, parameter, 1.0)
        return displacement

    def _add_direction(self, into: Tensor, parameter: Tensor, step_scale: float) -> None:
        """Add -step_scale lr D to `into`, for the parameter's current gradient and moments."""
        (group,) = self.param_groups
        if self.direction == "sgd":
            assert parameter.grad is not None
            into.add_(parameter.grad.to(into.dtype), alpha=-step_scale * group["lr"])
            return
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        denominator = (state["exp_avg_sq"].sqrt() / (1 - beta2 ** state["step"]) ** 0.5).add_(group["eps"])
        into.addcdiv_(state["exp_avg"], denominator, value=-step_scale * group["lr"] / (1 - beta1 ** state["step"]))


def clip(parameters: list[Tensor], max_grad_norm: float | None) -> dict[str, float]:
    """Clip gradients to a global norm, as clip_grad_norm_ has it, bits included; return their norm and the factor.

    Args:
        max_grad_norm: None does not clip.

    Raises:
        FloatingPointError: a gradient holds NaN or infinity; nothing has been changed.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if not norm < float("inf"):
        raise FloatingPointError(f"the gradient is not finite (norm {norm}); no update was made")
    clip_scale = 1.0
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        clip_scale = min(1.0, max_grad_norm / (float(norm) + 1e-6))
    return {"gradient_norm": float(norm), "clip_scale": clip_scale}
