"""Optimizers of other people's packages as methods: each makes its own step, and what it cannot do is not added."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from src import config as cfg
from src.methods.dense import clip
from src.randomness import hash_key
from src.sketch.merge import Moved, sampled


class PackageOptimizer:
    """A package's optimizer on the targets' weights; the rest of the model is frozen.

    Its step cannot be split, so there is no displacement to predict or to scale: `propose` clips, `apply(1.0)` steps.
    With `layerwise` each matrix is stepped in backward, as soon as its gradient is there, and the gradient freed: what
    these packages do instead of holding all gradients. Every backward pass is then an update.

    Random numbers are functions of (seed, matrix, number of draws): the packages' own generators are seeded so, and
    torch's are not touched. Weights narrower than float32 are changed in their own precision, as the packages do.

    Args:
        config: of one of the packages.
        targets: layers whose weights no other module shares.
    """

    splits = False  # no proposal before the step

    def __init__(self, config: cfg.PackageMethod, model: nn.Module, targets: Mapping[str, nn.Linear], seed: int):
        model.requires_grad_(False)
        self._parameters = [module.weight for module in targets.values()]
        for parameter in self._parameters:
            parameter.requires_grad_(True)
        self._optimizer = _optimizer(config, self._parameters)
        self.param_groups = self._optimizer.param_groups
        self._config = config
        for index, parameter in enumerate(self._parameters):  # else the seeds would be 1, 2, 3, ... in every run
            if "seed" in self._optimizer.state[parameter]:
                self._optimizer.state[parameter]["seed"] = hash_key("projection", seed, index) & (2**63 - 1)
        self.in_backward = config.layerwise  # the weights are others after backward
        self._moved = Moved()
        self._squared_norms: list[Tensor] = []  # of the gradients that backward consumed
        if config.layerwise:
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._step_in_backward)

    @torch.no_grad()
    def propose(self) -> dict[str, float]:
        """Clip the gradients; layerwise their norm alone is returned, since the update is made.

        Raises:
            FloatingPointError: a gradient holds NaN or infinity; nothing has been changed, unless layerwise.
        """
        if not self.in_backward:
            return clip([p for p in self._parameters if p.grad is not None], self._config.max_grad_norm)
        norm = float(torch.stack(self._squared_norms).sum().sqrt()) if self._squared_norms else 0.0
        if not norm < float("inf"):
            raise FloatingPointError(
                f"the gradient is not finite (norm {norm}), and backward has used it for an update"
            )
        return {"gradient_norm": norm, "clip_scale": 1.0}

    def tangents(self) -> Any:
        raise RuntimeError(self._no_displacement())

    def displacement_norm(self) -> float:
        raise RuntimeError(self._no_displacement())

    def _no_displacement(self) -> str:
        return (
            f"method={self._config.name}: the package makes its step in one piece, so nothing is known of its "
            "displacement before it is made."
        )

    def apply(self, step_scale: float) -> dict[str, float]:
        """Make the package's step, matrix by matrix, and clear the gradients; layerwise it is made already.

        Returns:
            moved_share, as `DenseOptimizer.apply` has it.

        Raises:
            ValueError: a step scale other than 1.
        """
        if step_scale != 1.0:
            raise ValueError(f"method={self._config.name} makes its step in full, got the step scale {step_scale}")
        # The packages pass over what has no gradient. One matrix at a time needs one sample of weights at a time.
        gradients = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for parameter, _ in gradients:
            parameter.grad = None
        for parameter, gradient in gradients:
            parameter.grad = gradient
            self._step(parameter)
        share = self._moved.share()
        self._moved, self._squared_norms = Moved(), []
        return {"moved_share": share}

    def state_dict(self) -> dict[str, Any]:
        """Return each matrix's state, a package's objects as plain values; rates are the caller's."""
        return {
            "state": [
                {key: _plain(value) for key, value in self._optimizer.state[parameter].items()}
                for parameter in self._parameters
            ]
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from such a state, whose tensors are taken over.

        Raises:
            ValueError: it has another number of matrices.
        """
        tables = getattr(self._optimizer, "name2qmap", {})  # of bitsandbytes: all matrices' states have the same two
        for parameter, saved in zip(self._parameters, state_dict["state"], strict=True):
            state = self._optimizer.state[parameter] = dict(saved)
            if "projector" in state:
                state["projector"] = _projector(self._config, state["projector"])
            for key, table in (("qmap1", "dynamic"), ("qmap2", "udynamic")):
                if key in state:
                    state[key] = tables[table] = tables[table].to(parameter.device)

    def memory(self) -> dict[str, list[Tensor]]:
        """Return the living tensors by component."""
        found: dict[str, list[Tensor]] = {"optimizer_state": [], "projections": []}
        for parameter in self._parameters:
            for key, value in self._optimizer.state[parameter].items():
                found["projections" if key == "projector" else "optimizer_state"] += _tensors(_plain(value))
        return found | {"gradients": [p.grad for p in self._parameters if p.grad is not None]}

    @torch.no_grad()
    def _step_in_backward(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._squared_norms.append(parameter.grad.double().square().sum())
        self._step(parameter)

    def _step(self, parameter: Tensor) -> None:
        """Step the one matrix that has a gradient now, and free that."""
        before = sampled(parameter)
        self._optimizer.step()
        parameter.grad = None
        if projector := self._optimizer.state[parameter].get("projector"):
            _compact(projector)
        self._moved.count(parameter, before)


def _optimizer(config: cfg.PackageMethod, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Return the package's optimizer for the weights of linear layers."""
    options: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    match config:
        case cfg.GaloreMethod():
            from galore_torch import GaLoreAdamW

            group = {"params": parameters, "rank": config.rank, "update_proj_gap": config.update_gap}
            group |= {"scale": config.scale, "proj_type": config.side}
            options |= {"betas": (config.beta1, config.beta2), "eps": config.eps, "no_deprecation_warning": True}
            return GaLoreAdamW([group], **options)
        case cfg.ApolloMethod():
            from apollo_torch import APOLLOAdamW

            group = {"params": parameters, "rank": config.rank, "update_proj_gap": config.update_gap}
            group |= {"scale": config.scale, "scale_type": config.scale_type, "proj": "random", "proj_type": "std"}
            return APOLLOAdamW([group], betas=(config.beta1, config.beta2), eps=config.eps, **options)
        case cfg.FloraMethod():
            from flora_opt.optimizers.torch.flora import Flora

            options |= {"rank": config.rank, "kappa": config.update_gap}
            make = partial(Flora, **options)
        case cfg.AdafactorMethod():
            from transformers.optimization import Adafactor

            make = partial(Adafactor, **options)
        case cfg.Adam8bitMethod():
            from bitsandbytes.optim import AdamW8bit

            options |= {"min_8bit_size": config.min_8bit_size}
            return AdamW8bit(parameters, betas=(config.beta1, config.beta2), eps=config.eps, **options)
        case _:
            raise AssertionError(config)
    return make(
        parameters,
        beta1=config.beta1,
        decay_rate=config.decay_rate,
        clip_threshold=config.clip_threshold,
        scale_parameter=config.scale_parameter,
        relative_step=False,  # the rate is the schedule's
    )


def _projector(config: cfg.PackageMethod, values: dict[str, Any]) -> Any:
    """Return the package's projector object with saved attributes."""
    if isinstance(config, cfg.GaloreMethod):
        from galore_torch.galore_projector import GaLoreProjector as Projector
    else:
        from apollo_torch.random_projector import GradientProjector as Projector
    projector = Projector(values["rank"])
    vars(projector).update(values)
    return projector


def _compact(projector: Any) -> None:
    """Let go of what is behind a projector's basis: GaLore's, of float32, is a view of all singular vectors."""
    basis = projector.ortho_matrix
    parts = basis if isinstance(basis, list) else [basis]
    if any(part.untyped_storage().nbytes() > part.nbytes for part in parts):
        projector.ortho_matrix = [part.clone() for part in parts] if isinstance(basis, list) else basis.clone()


def _plain(value: Any) -> Any:
    """Return a projector's attributes, and anything else as it is."""
    return dict(vars(value)) if hasattr(value, "ortho_matrix") else value


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a state's value: one, none, or those in a list or dict of them."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
