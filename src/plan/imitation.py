"""Models and rollouts on tensors that have shapes and no memory."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


@cache
def _writes_first(func: Any) -> bool:
    """Tell whether an operator writes its first argument, which keeps its shape, and returns it."""
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [each.alias_info is not None and each.alias_info.is_write for each in (*arguments[:1], *returns)]
    return written == [True, True] and torch.Tag.inplace_view not in func.tags


class Imitation(FakeTensorMode):
    """Tensors without memory. Who asks for a value is told 1 or True, of a difference False; masks select all."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in src.memory: torch's wrapper around __torch_dispatch__ takes longer than what it wraps

    def __deepcopy__(self, memo: Any) -> "Imitation":
        return self  # a copied tensor is of the same mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is torch.ops.prim.device.default:  # half of all calls: the long way takes no other turn
            return torch.device("meta") if self.in_kernel_invocation else args[0].fake_device
        if _writes_first(func):
            return args[0]  # nothing is made: the long way would only tell shapes that do not fit
        if func is aten.mm.out and kwargs["out"].shape == (args[0].shape[0], args[1].shape[1]):
            return kwargs["out"]
        if func is aten.equal.default:
            return True
        if func is aten._local_scalar_dense.default:
            value = 1.0 if args[0].dtype.is_floating_point else 1
            return value if args[0].dtype is not torch.bool else not hasattr(args[0], "difference")
        if func is aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype is torch.bool:
            values, (mask,) = args
            return values.new_empty(mask.numel(), *values.shape[mask.ndim :])
        out: Any = self.dispatch(func, types, args, kwargs or {})
        read = args[0] if func is aten.stack.default else args[:1]
        if func is aten.ne.Tensor or (
            func in (aten.any.default, aten.stack.default) and all(hasattr(tensor, "difference") for tensor in read)
        ):
            out.difference = True
        return out


def convert(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Do as `torch.nn.Module._apply` (`to`, `half`), which swaps tensors in place, and imitated ones cannot be."""
    for own in module.modules() if recurse else [module]:
        for held in (own._parameters, own._buffers):
            for name, tensor in held.items():
                made: Any = None if tensor is None else function(tensor)
                if made is not tensor:
                    held[name] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return module


class _Operators(TorchDispatchMode):
    """Lists the operators that are called, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not func.is_view:
            self.found.append(func)
        return func(*args, **kwargs or {})


class LongRollout:
    """Stands for a model while `generate` samples two tokens, so that the second one is the last of a long response.

    Before it the cache grows to the length that it has then, and what `generate` keeps of each token is made: an id, a
    log-probability, a mark.
    """

    def __init__(self, model: Any, tokens: int):
        self.device, self.config = model.device, model.config
        self._model, self._missing = model, tokens - 2
        self._kept: list[Tensor] = []
        self._first = True

    def __call__(self, *, attention_mask: Tensor, cache: Any, **inputs: Any) -> Any:
        if not self._first and self._missing > 0:
            for number, layer in enumerate(cache.layers):
                rows, heads, _, width = layer.keys.shape
                new = layer.keys.new_empty(()).expand(rows, heads, self._missing, width)
                cache.update(new, new, number)
            shape = len(attention_mask), self._missing
            self._kept = [torch.empty(shape, dtype=kind) for kind in (torch.long, torch.float32, torch.bool)]
            attention_mask = torch.cat([attention_mask, attention_mask.new_ones(shape)], 1)
        self._first = False
        return self._model(attention_mask=attention_mask, cache=cache, **inputs)


def imitated(skeleton: nn.Module) -> Any:
    """Put tensors of the CPU, under the mode of the moment, in place of a model's on the meta device."""
    made: dict[int, Tensor] = {}
    for module in skeleton.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        made[id(tensor)] = nn.Parameter(made[id(tensor)])
                own[name] = made[id(tensor)]  # type: ignore[assignment,index]
    return skeleton


@torch.no_grad()
def parted(model: Any) -> bool:
    """Tell whether the logits are the head's of the last states: after these no other operator is called."""
    before: list[int] = []
    states: list[Any] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        before.append(len(operators.found))
        states.append(getattr(output, "last_hidden_state", None))

    hook = model.base_model.register_forward_hook(note)
    with _Operators() as operators:
        model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
        hook.remove()
        after = len(operators.found)
        if model.get_output_embeddings() is None or len(states) != 1 or states[0] is None:
            return False
        model.get_output_embeddings()(states[0])
    return operators.found[before[0] : after] == operators.found[after:]
