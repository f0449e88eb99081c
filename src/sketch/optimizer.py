"""An optimizer over sketches: clip, direction, merge into the weights, redraw.

Legend: M output width, N input width, R rank, L co-rank.
"""

import fnmatch
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from src.sketch.direction import adam, check_transfer, reconstruct, row_adam, transfer
from src.sketch.layer import Displacement, SketchedLayers, check_own_weights
from src.sketch.merge import Moved, merge, merge_stochastically, sampled, squared_norm
from src.sketch.projection import Projections

# The co-sketch of a layer has the layer's name with this behind it.
_CO = ":co"

_CHOICES = {
    "direction": ("row_adam", "adam", "sgd"),
    "clip_norm": ("sketch", "estimate", "none"),
    "moments": ("reset", "transfer"),
    "lr_is": ("factor", "ratio"),
    "storage": ("master", "stochastic", "plain"),
    "unreached": ("raise", "skip"),
}


class SketchOptimizer(torch.optim.Optimizer):
    """Merges W <- (1 - a lr wd) W - a lr D A into the original weights, a being the step scale.

    `step()` is `propose()` and `apply(1.0)`; between the two the displacement may be inspected (`tangents`) and its
    scale chosen. The parameter groups hold the sketches, whose `.grad` are gradients to schedulers, gradient scalers
    and `torch.nn.utils.clip_grad_norm_`; their squared norm is the unbiased estimate of the gradient's.

    Outcomes: a sketch that is exactly zero is a gradient of zeros, as to any optimizer (decay and moments go on);
    NaN or infinity, a target that no gradient reached, or no gradient at all raise before anything has changed.

    Args:
        layers: the sketched layers.
        lr: learning rate; RowAdam's and Adam's are in units of Adam's.
        direction: "row_adam", "adam" or "sgd" (D = S), see `src.sketch.direction`.
        beta1: Adam's; beta2, eps: RowAdam's and Adam's.
        moments: what becomes of Adam's moments at a redraw: "reset" or "transfer".
        preserve_norm: scale each layer's D to the norm of its S (arXiv 2610.06647).
        lr_is: "factor" of D; or "ratio", then the whole update is scaled so that ||{D A}||_F = lr ||{W}||_F over the
            layers with a gradient, weight decay apart (arXiv 2610.06647, with 6e-5). Of several groups each keeps its
            part of the update's direction, and the first one's lr is the ratio.
        weight_decay: decoupled, scaled by the learning rate and by the step scale.
        max_grad_norm: the threshold of global norm clipping.
        clip_norm: the norm that is compared with it: "sketch" is ||S||_F; "estimate" is ||S A||_F, the norm of the
            step's gradient estimate, larger by about sqrt(N / R); "none" does not clip.
        refresh_every: updates between two draws of the projections, or "never". S A is an unbiased estimate of the
            gradient only right after a redraw: later the weights depend on A.
        storage: what adds up updates below the precision of weights that are narrower than float32: "master", float32
            copies of the targets; "stochastic", a rounding that is right in expectation (bfloat16); "plain", nothing.
            Float32 and wider weights are merged in place whatever is said here.
        unreached: what a target without a gradient is: a mistake ("raise"), or left alone in this update ("skip"), as
            the experts of a mixture that no token chose.
        groups: parameter groups with values of their own: each a dict of `targets` (patterns as in `select_targets`)
            and of any of lr, beta1, beta2, eps, weight_decay, name. Other layers form the last group.
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
        storage: Literal["master", "stochastic", "plain"] = "master",
        unreached: Literal["raise", "skip"] = "raise",
        groups: list[dict[str, Any]] | None = None,
    ):
        choices = (direction, clip_norm, moments, lr_is, storage, unreached)
        for name, value in zip(_CHOICES, choices, strict=True):
            if value not in _CHOICES[name]:
                raise ValueError(f"{name} must be one of {', '.join(_CHOICES[name])}, got {value!r}")
        if not max_grad_norm > 0.0:
            raise ValueError(f"max_grad_norm must be above 0, got {max_grad_norm}; clip_norm='none' does not clip")
        if refresh_every != "never" and not (type(refresh_every) is int and refresh_every >= 1):
            raise ValueError(f"refresh_every must be a whole number of at least 1 or 'never', got {refresh_every!r}")
        narrow = {m.weight.dtype for m in layers.modules.values() if m.weight.dtype.itemsize < 4}
        if storage == "stochastic" and not narrow <= {torch.bfloat16}:
            raise ValueError(f"storage='stochastic' rounds to bfloat16, and weights are {narrow}: use 'master'")
        if direction == "adam" and layers.co_rank is not None:
            raise ValueError("direction=adam has moments of one sketch, a two-sided estimate has two: use row_adam")
        self.layers = layers
        self.direction = direction
        self.clip_norm = clip_norm
        self.max_grad_norm = max_grad_norm
        self.refresh_every = refresh_every
        self.moments = moments
        self.preserve_norm = preserve_norm
        self.lr_is = lr_is
        self.storage = storage
        self.unreached = unreached
        self.updates = 0
        self.metrics: dict[str, float] = {}
        self._displacements: dict[str, Displacement] | None = None
        super().__init__(
            self._grouped(groups or []),
            {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay},
        )
        self._make_masters()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of sketches, as the constructor does; other parameters need an optimizer of their own.

        Raises:
            ValueError: a parameter that is no sketch; a value out of range; moments that would be transferred with a
                beta1 that lets them grow, see `check_transfer`.
        """
        param_group["params"] = list(param_group["params"])
        own = {id(p) for p in self.layers.sketch_parameters()}
        if not {id(p) for p in param_group["params"]} <= own:
            raise ValueError(
                "SketchOptimizer trains sketched layers only: give other parameters to an optimizer of their own, "
                'made beside SketchedLayers(..., freeze="targets").'
            )
        values = self.defaults | param_group
        for name, below in (("lr", None), ("weight_decay", None), ("beta1", 1.0), ("beta2", 1.0), ("eps", None)):
            if not 0.0 <= values[name] < (below or float("inf")):
                limit = f" and below {below:g}" if below else ""
                raise ValueError(f"{name} must be at least 0{limit}, got {values[name]}")
        if self.direction == "adam" and self.moments == "transfer" and self.refresh_every != "never":
            widest = max(module.in_features for module in self.layers.modules.values())
            check_transfer(values["beta1"], self.refresh_every, self.layers.rank, widest)
        super().add_param_group(param_group)

    @torch.no_grad()
    def average(self, group: Any = None) -> None:
        """Replace each sketch by its mean over the processes of a group, before the step.

        All processes draw the same projections, so the mean of sketches is the sketch of the mean gradient.
        DistributedDataParallel does not do it: sketches are no parameters of the model.
        """
        parameters = self.layers.sketch_parameters()
        reached = [parameter.grad is not None for parameter in parameters]
        counts = torch.tensor(reached, dtype=torch.int32, device=parameters[0].device)
        torch.distributed.all_reduce(counts, group=group)
        processes = torch.distributed.get_world_size(group)
        for parameter, count in zip(parameters, counts.tolist(), strict=True):
            if 0 < count < processes and self.unreached == "raise":  # in all of them, or the others would wait
                raise RuntimeError(
                    f"a gradient reached a target in {count} of {processes} processes. If it is an expert that is not "
                    'always chosen, say unreached="skip".'
                )
            if count:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.distributed.all_reduce(parameter.grad, group=group)
                parameter.grad /= processes

    @torch.no_grad()
    def propose(self) -> dict[str, float]:
        """Clip the sketches and turn them into a displacement, which takes their place; the weights stay as they are.

        Returns:
            sketch_norm and estimate_norm before clipping, and clip_scale, the factor the sketches were multiplied by.

        Raises:
            FloatingPointError: a sketch holds NaN or infinity; nothing has been changed.
            RuntimeError: a target, or all of them, got no gradient; weights were changed behind their masters. Nothing
                has been changed.
        """
        sketches = self._sketches()
        self._check_masters(sketches)
        sketch_norm = float(torch.nn.utils.get_total_norm(sketches.values()))
        two_sided = self.layers.co_rank is not None
        whole_norm = float(torch.nn.utils.get_total_norm(self.layers.sketches())) if two_sided else sketch_norm
        if not whole_norm < float("inf"):
            raise FloatingPointError(f"the sketched gradient is not finite (norm {whole_norm}); no update was made")
        pairs = {name: self._estimate(name, sketch_MR) for name, sketch_MR in sketches.items()}
        estimate_norm = self._norm(pairs)
        if not estimate_norm < float("inf"):
            raise FloatingPointError(
                f"the gradient's estimate is not finite (norm {estimate_norm}); no update was made"
            )
        clip_scale = 1.0
        if self.clip_norm != "none":  # as torch.nn.utils.clip_grad_norm_ has it
            norm = sketch_norm if self.clip_norm == "sketch" else estimate_norm
            clip_scale = min(1.0, self.max_grad_norm / (norm + 1e-6))
        del sketches
        for parameter in self.layers.sketch_parameters():
            parameter.grad = None  # the directions take the sketches' memory
        displacements = {}
        for group in self.param_groups:
            for name in dict.fromkeys(name.removesuffix(_CO) for name in group["param_names"]):
                if name in pairs:
                    left_MR, right_RN = pairs.pop(name)
                    left_MR = self._direction(name, left_MR.mul_(clip_scale), group)
                    displacements[name] = Displacement(left_MR, right_RN, group["lr"] * group["weight_decay"])
        if self.lr_is == "ratio":
            self._scale_to_ratio(displacements)
        self._displacements = displacements
        self.metrics = {"sketch_norm": sketch_norm, "estimate_norm": estimate_norm, "clip_scale": clip_scale}
        return self.metrics

    def tangents(self) -> Any:
        """Return a context in which forward-mode derivatives carry the proposed displacement."""
        return self.layers.tangents(self._proposed())

    @torch.no_grad()
    def apply(self, step_scale: float) -> dict[str, float]:
        """Merge the proposed displacement times `step_scale` and redraw the projections if due.

        Returns:
            moved_share, the share of the stored weights that are others now, from up to 65536 weights a matrix.
        """
        displacements, self._displacements = self._proposed(), None
        moved = Moved()
        for name, (left_MR, right_RN, decay) in displacements.items():
            weight_MN = self.layers.modules[name].weight.detach()
            before = sampled(weight_MN)
            right_RN = self.layers.projection(name) if right_RN is None else right_RN
            keep = 1.0 - step_scale * decay
            master_MN = self.state.get(self.layers.parameters[name], {}).get("master")
            if master_MN is not None:
                merge(master_MN, left_MR, right_RN, keep, step_scale)
                weight_MN.copy_(master_MN)
            elif self.storage == "stochastic" and weight_MN.dtype == torch.bfloat16:
                key = (self.layers.seed, self.updates, name)
                merge_stochastically(weight_MN, left_MR, right_RN, keep, step_scale, *key)
            else:
                merge(weight_MN, left_MR, right_RN, keep, step_scale)
            moved.count(weight_MN, before)
        del displacements
        self.updates += 1
        old = self.layers.projections
        if self._redraw() and self.direction == "adam":
            self._carry_moments(old)
        self.metrics = {**self.metrics, "moved_share": moved.share()}
        return {"moved_share": moved.share()}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Propose and apply in full. A closure is refused: evaluating it again would sketch under a used projection."""
        if closure is not None:
            raise ValueError("SketchOptimizer.step takes no closure: call loss.backward(), then step().")
        self.propose()
        self.apply(1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as any optimizer does, with what the projections follow from: numbers and names only."""
        layers = self.layers
        made_with = {name: getattr(layers, name) for name in ("seed", "rank", "co_rank", "family")}
        made_with |= {"direction": self.direction}
        return super().state_dict() | {"updates": self.updates, "made_with": made_with}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, on any device: moments, master weights, parameter groups, projections.

        Raises:
            ValueError: the state is of other projections or of other layers, or in another order.
        """
        own = self.state_dict()["made_with"]
        for name, value in state_dict["made_with"].items():
            if value != own[name]:
                raise ValueError(
                    f"the state was made with {name}={value} and this optimizer has {own[name]}: its moments belong to "
                    "other sketches. Use the same values."
                )
        groups = (state_dict["param_groups"], self.param_groups)
        theirs, ours = ([group["param_names"] for group in found] for found in groups)
        if theirs != ours:
            raise ValueError("the state has other layers, groups or another order of them. Sketch the same targets.")
        super().load_state_dict(state_dict)
        self.updates = state_dict["updates"]
        self._displacements = None
        self.zero_grad()
        for state in self.state.values():
            if self.storage != "master":  # a state of another storage
                state.pop("master", None)
        self._make_masters()
        self._redraw()

    def memory(self) -> dict[str, list[Tensor]]:
        """Return the tensors alive now: sketches (and the directions made from them), projections, moments, masters."""
        directions = [t for d in (self._displacements or {}).values() for t in (d.left_MR, d.right_RN) if t is not None]
        state = [(key, tensor) for state in self.state.values() for key, tensor in state.items()]
        return {
            "sketches": self.layers.sketches() + directions,
            "projections": self.layers.projection_tensors(),
            "optimizer_state": [tensor for key, tensor in state if key.endswith("_moment")],
            "master_weights": [tensor for key, tensor in state if key == "master"],
        }

    def displacement_norm(self) -> float:
        """Return the norm of the proposed displacement, weight decay apart; expected over the draw of A."""
        squares = [
            left_MR.square().sum() * self.layers.modules[name].in_features / left_MR.shape[1]
            for name, (left_MR, _, _) in self._proposed().items()
        ]
        return float(torch.stack(squares).sum().sqrt())

    def _proposed(self) -> dict[str, Displacement]:
        if self._displacements is None:
            raise RuntimeError("no displacement was proposed: call propose() first")
        return self._displacements

    def _make_masters(self) -> None:
        """Give narrow weights their float32 masters, where they have none."""
        for name, module in self.layers.modules.items():
            if self.storage == "master" and module.weight.dtype.itemsize < 4:
                self.state[self.layers.parameters[name]].setdefault("master", module.weight.detach().float())

    def _grouped(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return parameter groups as torch has them, from groups of targets; layers that none names come last."""
        left = dict(self.layers.modules)
        found = []
        for group in groups:
            if unknown := set(group) - {"targets", "name", "lr", "beta1", "beta2", "eps", "weight_decay"}:
                raise ValueError(f"groups: {unknown.pop()!r} is no value of a group: use targets, name, lr, beta1, ...")
            named = [name for pattern in group["targets"] for name in _matching(self.layers.modules, pattern)]
            if taken := [name for name in named if name not in left]:
                raise ValueError(f"groups: {taken[0]} is in two groups; a layer belongs to one")
            found.append((dict.fromkeys(named), {key: value for key, value in group.items() if key != "targets"}))
            for name in dict.fromkeys(named):
                del left[name]
        if left:
            found.append((dict.fromkeys(left), {}))
        return [self._param_group(list(names)) | values for names, values in found]

    def _param_group(self, names: list[str]) -> dict[str, Any]:
        params = {name: self.layers.parameters[name] for name in names}
        params |= {name + _CO: self.layers.co_parameters[name] for name in names if self.layers.co_parameters}
        return {"params": list(params.values()), "param_names": list(params)}

    def _sketches(self) -> dict[str, Tensor]:
        """Return the sketches S of the layers that a gradient reached."""
        check_own_weights(self.layers.modules)
        grads = {name: p.grad for name, p in self.layers.parameters.items()}
        found = {name: grad for name, grad in grads.items() if grad is not None}
        if not found:
            raise RuntimeError(
                "no gradient reached a sketched layer: call loss.backward() before the update. With reentrant "
                "checkpointing and frozen embeddings nothing does: use use_reentrant=False, or call "
                "model.enable_input_require_grads()."
            )
        if self.unreached == "raise" and len(found) < len(grads):
            missing = [name for name in grads if name not in found]
            raise RuntimeError(
                f"no gradient reached {missing[0]} ({len(missing)} of {len(grads)} targets): it would never be "
                "trained. Leave it out of the targets; or, if it is an expert that is not always chosen, say "
                'unreached="skip".'
            )
        return found

    def _check_masters(self, names: Iterable[str]) -> None:
        """Refuse weights that are no longer their masters' rounding, as far as a sample of them tells."""
        differs = {}
        for name in names:
            weight_MN = self.layers.modules[name].weight
            if self.storage == "master" and weight_MN.dtype.itemsize < 4:
                master_MN = self.state.get(self.layers.parameters[name], {}).get("master")
                if master_MN is None:
                    raise RuntimeError(
                        f"{name} became {weight_MN.dtype} after the optimizer was made, which has no float32 master of "
                        "it. Convert the model first."
                    )
                differs[name] = (sampled(master_MN).to(weight_MN.dtype) != sampled(weight_MN)).any()
        place = next(iter(differs.values())).device if differs else None  # the host waits once
        if differs and torch.stack([found.to(place) for found in differs.values()]).any():
            name = next(name for name, found in differs.items() if found)
            raise RuntimeError(
                f"the weights of {name} were changed, and their float32 master copy was not: the step would undo the "
                "change. Load the optimizer's state with the model's, or make the optimizer after loading."
            )

    def _estimate(self, name: str, sketch_MR: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the factors of a layer's gradient estimate: S and None for A, or those of the two-sided one."""
        if self.layers.co_rank is None:
            return sketch_MR, None
        co_sketch_LN = self.layers.co_parameters[name].grad
        assert co_sketch_LN is not None
        return reconstruct(sketch_MR, co_sketch_LN, self.layers.co_projection(name))

    def _norm(self, pairs: dict[str, tuple[Tensor, Tensor | None]]) -> float:
        """Return the norm of all the products left right together."""
        one_sided = {name: left for name, (left, right) in pairs.items() if right is None}
        squares = [self.layers.estimate_norm(one_sided).square()]
        for left_MR, right_RN in pairs.values():
            if right_RN is not None:  # right right^T = (N / R) I
                squares.append(left_MR.double().square().sum() * (right_RN.shape[1] / right_RN.shape[0]))
        place = squares[-1].device  # the sum is made there, and the host waits once
        return float(torch.stack([square.to(place) for square in squares]).sum().sqrt())

    def _redraw(self) -> bool:
        """Make the projections of the current update; tell whether they are others than before."""
        draw = 0 if self.refresh_every == "never" else self.updates // self.refresh_every
        if draw == self.layers.draw:
            return False
        self.layers.draw = draw
        return True

    def _direction(self, name: str, sketch_MR: Tensor, group: dict[str, Any]) -> Tensor:
        """Return -lr D (M, R), in the sketch's memory where the direction allows."""
        if self.direction == "sgd":  # its norm is S's by itself
            return sketch_MR.mul_(-group["lr"])
        state = self.state[self.layers.parameters[name]]
        if "step" not in state:
            state["step"] = 0
            if self.direction == "adam":
                state["first_moment"] = torch.zeros_like(sketch_MR)
                state["second_moment"] = torch.zeros_like(sketch_MR)
            else:
                state["second_moment"] = sketch_MR.new_zeros(sketch_MR.shape[0])
        state["step"] += 1
        beta2, eps = group["beta2"], group["eps"]
        norm = sketch_MR.norm() if self.preserve_norm else None
        if self.direction == "adam":
            first_MR, second_MR = state["first_moment"], state["second_moment"]
            direction_MR = adam(sketch_MR, first_MR, second_MR, state["step"], group["beta1"], beta2, eps)
        else:
            direction_MR = row_adam(sketch_MR, state["second_moment"], state["step"], beta2, eps)
        if norm is not None:
            own = direction_MR.norm()
            direction_MR.mul_(torch.where(own > 0, norm / own, 1.0))
        return direction_MR.mul_(-group["lr"])

    def _scale_to_ratio(self, displacements: dict[str, Displacement]) -> None:
        """Scale the left factors so that the update's norm is lr times the weights'; an update of zeros stays one."""
        squares = [squared_norm(self.layers.modules[name].weight) for name in displacements]
        whole = torch.stack(squares).sum().sqrt()
        norm = self._norm({name: (left, right) for name, (left, right, _) in displacements.items()})
        if norm > 0:
            for left_MR, _, _ in displacements.values():
                left_MR.mul_(self.param_groups[0]["lr"] * float(whole) / norm)

    def _carry_moments(self, old: Projections) -> None:
        """Bring Adam's moments from the former projections to the new ones."""
        for name, parameter in self.layers.parameters.items():
            state = self.state.get(parameter, {})
            if "step" not in state:
                continue
            if self.moments == "reset":
                state["step"] = 0
                state["first_moment"].zero_()
                state["second_moment"].zero_()
            else:
                old_RN, new_RN = self.layers.projection(name, old), self.layers.projection(name)
                transfer(state["first_moment"], state["second_moment"], old_RN, new_RN)


def _matching(names: dict[str, Any], pattern: str) -> list[str]:
    """Return the names that a pattern of `select_targets` matches."""
    found = [name for name in names if name.rsplit(".", 1)[-1] == pattern or fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(f"groups: the pattern {pattern!r} matches none of the sketched layers")
    return found
