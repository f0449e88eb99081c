"""Sketches of the weight gradients of linear layers, accumulated in backward.

Legend: T tokens (all leading axes flattened), M output width, N input width, R rank.

For y = x W^T with input X (T, N) and output gradient H (T, M) the weight gradient is G = H^T X (M, N). A sketched layer
keeps P = X A^T (T, R) for backward instead of X and accumulates S = G A^T = H^T P (M, R); G is never formed. S is the
`.grad` of a parameter that is always zero and takes no memory: a sketch therefore behaves as a gradient everywhere
(accumulation over microbatches, clipping, gradient scalers, optimizers).
"""

import fnmatch
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from src.sketch.projection import FAMILIES, Family, Group, Projections, stable_name


def select_targets(model: nn.Module, patterns: list[str]) -> dict[str, nn.Linear]:
    """Return the linear layers that the patterns name, by module path, in the model's order.

    A pattern is the last part of a path (`q_proj`) or a shell pattern for the whole path (`*.layers.0.*_proj`).
    Works on the meta device.

    Raises:
        ValueError: a pattern matches nothing, or something that is no `torch.nn.Linear`.
    """
    if isinstance(patterns, str):
        raise ValueError(f"patterns are a list, got the text {patterns!r}: use [{patterns!r}]")
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


class Displacement(NamedTuple):
    """The change dW = left right - decay W of a weight (M, N); `right` None stands for the layer's projection A."""

    left_MR: Tensor
    right_RN: Tensor | None
    decay: float


class _Keep(torch.autograd.Function):
    """Keeps P (and X) for backward before the layer's product is taken.

    Returns a tensor of y's shape, of one number, that `_Attach` hangs onto y; y's gradient H comes back by it and gives
    `sketch` the gradient H^T P and `co_sketch` B H^T X. A layer that is computed again for backward (checkpointing) so
    has all that it must keep before its product, and torch spares the product of the last one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        sketch: Tensor,
        x: Tensor | None,
        co_sketch: Tensor | None,
        co_projection: Callable[[], Tensor] | None,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(projected, x)
        ctx.dtype = sketch.dtype
        ctx.co_projection = co_projection
        one = torch.zeros((), dtype=dtype, device=projected.device)
        return one.expand(*projected.shape[:-1], sketch.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads
        projected, x = ctx.saved_tensors
        grad_MT = grad_y.reshape(-1, grad_y.shape[-1]).T
        sketch_MR = grad_MT @ projected.reshape(-1, projected.shape[-1]).to(grad_y.dtype)
        co_sketch_LN = None
        if x is not None:
            projected_LT = ctx.co_projection().to(grad_y.dtype) @ grad_MT
            co_sketch_LN = (projected_LT @ x.reshape(-1, x.shape[-1]).to(grad_y.dtype)).to(ctx.dtype)
        return None, sketch_MR.to(ctx.dtype), None, co_sketch_LN, None, None


class _Attach(torch.autograd.Function):
    """The identity on y, whose gradient `kept` gets too. Of a layer's backward it comes first, and refuses for all."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, kept: Tensor, is_current: Callable[[], bool]) -> Tensor:
        ctx.is_current = is_current
        return y.detach()  # no view to autograd: the layer's output may be changed in place as any other

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (grad_y,) = grads
        # once_differentiable would let torch.autograd.grad drop the second derivative unsaid
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True through a sketched layer: a second derivative also depends on the weight, which a "
                "sketch does not see. Take the sketches off for it: layers.remove()."
            )
        if not ctx.is_current():
            raise RuntimeError(
                "backward of a forward pass made before the projections were redrawn: its sketch would belong to no "
                "projection. Call loss.backward() before optimizer.step()."
            )
        return grad_y if ctx.needs_input_grad[0] else None, grad_y, None


class _Projected(NamedTuple):
    """An X A^T, for whoever reads the same X at the same version in the same precision.

    Each layer takes it once, as memory may change where no version tells.
    """

    x: weakref.ref[Tensor]
    version: int
    precision: torch.dtype
    value: Tensor
    readers: set[str]


class SketchedLayers:
    """The sketched linear layers of a model and the projections of the current draw.

    A forward hook on a target that is registered later, with prepend=True, and gives another output stands between the
    layer and its sketch: register such a hook first.

    `parameters` maps each target's path to its sketch, an (M, R) parameter of zeros whose `.grad` is S (float32, or
    float64 for float64 weights). A projection is a function of (seed, draw, layer path): a base shared by all layers
    of an input width times the signs of a group, the layers of one parent module and width. So q, k and v, or gate and
    up, which read one X, have one A and keep one X A^T; it is recognised by the tensor X itself and its version.

    With `co_rank`, L, there is a second sketch, Z = B G (L, N) with B (L, M), in `co_parameters`. It needs X in
    backward, and so keeps what the one-sided sketch saves unless the layer is recomputed there (checkpointing).

    Args:
        model: the model; its targets must be `torch.nn.Linear` layers on the device where they will be trained.
        targets: layers by module path, from `select_targets`.
        rank: R; at R = N nothing is saved.
        seed: the run's seed.
        projection: a name of `src.sketch.projection.FAMILIES`, or what `Projections` takes as a family.
        co_rank: L, None for the one-sided sketch; below 2 R the estimate, which inverts B Q, is easily ill-conditioned.
        freeze: "all" parameters of the model, or the weights of the "targets" alone, the rest being somebody else's.
        share: False gives each layer an A of its own, drawn and kept whole, as the published scheme does (arXiv
            2610.06647): for comparisons.

    Raises:
        ValueError: a rank below 1 or above a width; a weight that is flattened, sharded or shared.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, nn.Linear],
        rank: int,
        seed: int,
        projection: Family | Callable[..., Tensor] = "rademacher",
        co_rank: int | None = None,
        freeze: Literal["all", "targets"] = "all",
        share: bool = True,
    ):
        if isinstance(projection, str) and projection not in FAMILIES:
            raise ValueError(f"projection must be one of {', '.join(FAMILIES)}, got {projection!r}")
        if freeze not in ("all", "targets"):
            raise ValueError(f"freeze must be all or targets, got {freeze!r}")
        check_rank(targets, rank, co_rank)
        check_weights(model, targets)
        for name, module in targets.items():
            if any(getattr(hook, "sketches", False) for hook in module._forward_hooks.values()):
                raise ValueError(
                    f"{name} is sketched already, and would be trained twice. Take those sketches off first."
                )
        self.modules = dict(targets)
        self.rank = rank
        self.co_rank = co_rank
        self.seed = seed
        self._share = share
        self.family = projection if isinstance(projection, str) else getattr(projection, "__name__", "custom")
        self._family = FAMILIES[projection] if isinstance(projection, str) else projection
        self._groups: dict[str, Group] = {}
        self._co_groups: dict[str, Group] = {}
        self._projected: dict[Group, _Projected] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.co_parameters: dict[str, nn.Parameter] = {}
        for name, module in self.modules.items():
            weight = module.weight
            zero = torch.zeros((), dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
            self.parameters[name] = nn.Parameter(zero.expand(module.out_features, rank))
            label = f"{_label(name)}:{module.in_features}" if share else stable_name(name)
            self._groups[name] = Group(label, module.in_features, zero.dtype, zero.device)
            if co_rank is not None:
                self.co_parameters[name] = nn.Parameter(zero.expand(co_rank, module.in_features))
                self._co_groups[name] = Group(stable_name(name), module.out_features, zero.dtype, zero.device)
        self.draw = 0
        if freeze == "all":
            model.requires_grad_(False)
        for module in self.modules.values():
            module.weight.requires_grad_(False)
        self._hooks: list[RemovableHandle] = []
        for name, module in self.modules.items():
            before, after = self._hooks_of(name)
            self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(after, with_kwargs=True, prepend=True, always_call=True))

    def remove(self) -> None:
        """Take the hooks off the model; its weights stay as they are."""
        for hook in self._hooks:
            hook.remove()

    @property
    def draw(self) -> int:
        """The number of the current projections; setting it makes others."""
        return self._draw

    @draw.setter
    def draw(self, draw: int) -> None:
        self._draw = draw
        for parameter in self.sketch_parameters():
            parameter.grad = None  # sketches of the former projections
        made = self._family, self.rank, self.seed, draw
        self.projections = Projections(*made, "projection", self._groups.values(), self._share)
        self._projected.clear()
        if self.co_rank is not None:
            made = self._family, self.co_rank, self.seed, draw
            self._co_projections = Projections(*made, "co-projection", self._co_groups.values())

    def projection(self, name: str, projections: Projections | None = None) -> Tensor:
        """Return A (R, N) of a layer, in its sketch's dtype; of the current draw, or of another's projections."""
        return (projections or self.projections).of(self._groups[name])

    def co_projection(self, name: str) -> Tensor:
        """Return B (L, M) of a layer, in its sketch's dtype."""
        return self._co_projections.of(self._co_groups[name])

    def sketch_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose `.grad` are sketches."""
        return [*self.parameters.values(), *self.co_parameters.values()]

    def sketches(self) -> list[Tensor]:
        """Return the sketches that there are now."""
        return [parameter.grad for parameter in self.sketch_parameters() if parameter.grad is not None]

    def projection_tensors(self) -> list[Tensor]:
        """Return the tensors that the projections are kept as."""
        return self.projections.tensors() + (self._co_projections.tensors() if self.co_rank is not None else [])

    def estimate_norm(self, lefts_MR: Mapping[str, Tensor]) -> Tensor:
        """Return ||{L A}||_F over the layers of the given left factors L, 0-d float64.

        From R x R Gram matrices: ||L A||^2 = <L (A A^T), L>.
        """
        squares = [torch.zeros((), dtype=torch.float64)]
        for name, left_MR in lefts_MR.items():
            gram_RR = self.projections.gram(self._groups[name])
            squares.append(((left_MR @ gram_RR) * left_MR).sum().double())
        place = squares[-1].device  # the sum is made there, and the host waits once
        return torch.stack([square.to(place) for square in squares]).sum().clamp(min=0).sqrt()

    @contextmanager
    def tangents(self, displacements: Mapping[str, Displacement]) -> Iterator[None]:
        """Add to each target's output the tangent of its displacement dW = L A - decay W.

        For use inside `torch.autograd.forward_ad.dual_level()`: dy = x dW^T = (x A^T) L^T - decay (y - bias).
        """

        def inject(name: str, displacement: Displacement) -> Callable[..., Tensor]:
            left_MR, right_RN, decay = displacement

            def hook(module: nn.Linear, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
                x = _input_of(args, kwargs)
                primal, y = fwad.unpack_dual(x).primal, fwad.unpack_dual(output)
                if right_RN is not None:
                    projected = primal @ right_RN.to(primal.dtype).T
                else:
                    projected = self._project(name, x, primal)
                tangent = projected @ left_MR.to(projected.dtype).T
                if decay:
                    without_bias = y.primal if module.bias is None else y.primal - module.bias
                    tangent = tangent - decay * without_bias
                return fwad.make_dual(y.primal, tangent if y.tangent is None else y.tangent + tangent)

            return hook

        hooks = [
            self.modules[name].register_forward_hook(inject(name, displacement), with_kwargs=True, prepend=True)
            for name, displacement in displacements.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hooks_of(self, name: str) -> tuple[Callable[..., None], Callable[..., Tensor | None]]:
        """Return the hooks before and after a layer's forward."""
        kept: list[tuple[Tensor, int, Tensor]] = []

        def before(module: nn.Linear, args: Any, kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled() and module is self.modules[name]:  # a copy of the model has the hooks too
                x = _input_of(args, kwargs)
                kept[:] = [(x, _version(x), self._keep(name, x))]

        def after(module: nn.Linear, args: Any, kwargs: dict[str, Any], output: Tensor | None) -> Tensor | None:
            ours = kept.pop() if kept else None
            if output is None or not torch.is_grad_enabled() or module is not self.modules[name]:
                return None  # no output: the forward was broken off
            x = _input_of(args, kwargs)
            if ours is None or ours[0] is not x or ours[1] != _version(x):  # a hook between gave it another input
                ours = x, 0, self._keep(name, x)
            made_with = self.projections
            return _Attach.apply(output, ours[2], lambda: self.projections is made_with)

        after.sketches = True  # type: ignore[attr-defined]
        return before, after

    def _keep(self, name: str, x: Tensor) -> Tensor:
        """Keep what the sketch of a layer with the input x needs; return what is to be attached to its output."""
        if x.device != self.parameters[name].device:
            raise RuntimeError(
                f"{name} was sketched on {self.parameters[name].device} and runs on {x.device}. Move the model "
                "to its device before you sketch it."
            )
        value = x.detach()
        co_parameter = self.co_parameters.get(name)
        return _Keep.apply(
            self._project(name, x, value),
            self.parameters[name],
            None if co_parameter is None else value,
            co_parameter,
            None if co_parameter is None else lambda: self.co_projection(name),
            _precision(value),
        )

    def _project(self, name: str, x: Tensor, value: Tensor) -> Tensor:
        """Return x A^T, which layers of a group that read the same tensor share; `value` is x without its history."""
        if _unversioned(x):  # and a compiler finds equal terms itself
            return value @ self.projection(name).to(value.dtype).T
        group = self._groups[name]
        known = self._projected.get(group)
        precision = _precision(value)
        same = known is not None and (known.version, known.precision) == (x._version, precision)
        if known is None or not same or known.x() is not x or name in known.readers:
            projected = value @ self.projection(name).to(value.dtype).T
            reference = weakref.ref(x, lambda gone: self._forget(group, gone))
            known = self._projected[group] = _Projected(reference, x._version, precision, projected, set())
        known.readers.add(name)
        return known.value

    def _forget(self, group: Group, gone: Any) -> None:
        if group in self._projected and self._projected[group].x is gone:
            del self._projected[group]


def check_own_weights(targets: Mapping[str, nn.Linear]) -> None:
    """Refuse a weight that is computed anew whenever it is read.

    Raises:
        ValueError: in one sentence.
    """
    for name, module in targets.items():
        if "weight" not in module._parameters:
            raise ValueError(
                f"model.targets: the weight of {name} is computed (a parametrization, weight norm), so nothing can be "
                "merged into it. Leave it out of model.targets."
            )


def _place(parameter: Tensor) -> tuple[torch.device, int]:
    """Return what two parameters of the same memory have in common."""
    address = 0 if parameter.device.type == "meta" else parameter.data_ptr()
    return parameter.device, address or id(parameter)


def _input_of(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Tensor:
    return args[0] if args else kwargs["input"]


def _unversioned(x: Tensor) -> bool:
    """Tell whether torch counts no versions of a tensor."""
    return torch.compiler.is_compiling() or x.is_inference() or torch.is_inference_mode_enabled()


def _version(x: Tensor) -> int:
    """Return a number that changes with the tensor, 0 where torch counts none."""
    return 0 if _unversioned(x) else x._version


def _precision(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer takes an input; autocast leaves float64 as it is."""
    kind = x.device.type
    narrowed = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if narrowed else x.dtype


def _label(name: str) -> str:
    """Return the path that the layers of a group have in common.

    That of the parent module; numbered children (of a Sequential) follow each other and are groups of their own.
    """
    path = stable_name(name)
    parent, _, leaf = path.rpartition(".")
    return path if leaf.isdigit() else parent


def check_rank(targets: Mapping[str, nn.Linear], rank: int, co_rank: int | None = None) -> None:
    """Refuse a rank that no projection of some target can have; works on the meta device.

    Raises:
        ValueError: a rank below 1 or above an input width; a co-rank below the rank or above an output width.
    """
    if not targets:
        raise ValueError("there is no target layer: name at least one pattern, as q_proj")
    name, width = min(((name, module.in_features) for name, module in targets.items()), key=lambda pair: pair[1])
    if not 1 <= rank <= width:
        raise ValueError(
            f"method.rank must lie between 1 and the smallest input width of a target, {width} ({name}), got {rank}: "
            f"a wider sketch is larger than the gradient. Use method.rank={max(1, width // 4)} or another model."
        )
    if co_rank is None:
        return
    name, height = min(((name, module.out_features) for name, module in targets.items()), key=lambda pair: pair[1])
    if not rank <= co_rank <= height:
        raise ValueError(
            f"method.co_rank must lie between method.rank={rank} and the smallest output width of a target, {height} "
            f"({name}), got {co_rank}: the estimate inverts B Q, co_rank x rank, and no sketch is wider than the "
            f"gradient. Use method.rank={max(1, height // 4)} method.co_rank={max(1, height // 2)}."
        )


def check_weights(model: nn.Module, targets: Mapping[str, nn.Linear]) -> None:
    """Refuse a target that cannot be sketched alone; works on the meta device.

    Raises:
        ValueError: a weight that is flattened or sharded, or that another module uses too (sketch and prediction would
            miss that use).
    """
    check_own_weights(targets)
    users = Counter(_place(p) for module in model.modules() for p in module.parameters(recurse=False))
    for name, module in targets.items():
        own = "forward" in vars(module) and not hasattr(module, "_hf_hook")  # accelerate's, which calls the layer's own
        if type(module).forward is not nn.Linear.forward or own:
            raise ValueError(
                f"model.targets: {name} is a {type(module).__name__} that computes something else than x W^T, so its "
                "gradient is none of W. Leave it out of model.targets."
            )
        if not module.weight.is_floating_point() or module.weight.dtype.itemsize < 2:
            raise ValueError(
                f"model.targets: the weight of {name} is {module.weight.dtype}: nothing can be merged into quantised "
                "weights. Load the model in float32 or bfloat16."
            )
        if module.weight.shape != (module.out_features, module.in_features):
            raise ValueError(
                f"model.targets: the weight of {name} has the shape {tuple(module.weight.shape)} instead of "
                f"{(module.out_features, module.in_features)}: it is flattened or sharded, and a sketch needs the "
                "matrix. Build the sketch without a wrapper that reshapes parameters."
            )
        if users[_place(module.weight)] > 1:
            raise ValueError(
                f"model.targets: {name} shares its weight with another module (tied embeddings, say), whose part of "
                "the gradient a sketch would miss. Leave it out of model.targets, or use method=dense."
            )
