"""LoRA (arXiv 2106.09685): adapters of the package peft, trained by the project's own optimizer, so that control works.

Legend: M output width, N input width, R rank. An adapted layer computes x W^T + (alpha / R) x A^T B^T.
"""

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from src.methods.dense import DenseOptimizer
from src.randomness import hash_key

_ADAPTER = "default"  # peft's own name for the only one


class LoraOptimizer(DenseOptimizer):
    """Puts adapters into the targets, in place, and trains them; all else is frozen. `options`: see `DenseOptimizer`.

    The adapters are modules of the model: who samples from it samples with them, and `model.state_dict()` has them.
    They are float32 where the weights are narrower, as in peft's own training.

    Args:
        alpha: the adapters' product counts alpha / rank.
        initialisation: of A: kaiming, peft's default, or gaussian with a standard deviation of 1 / rank. B starts at 0.
        freeze_a: train B alone (LoRA-FA, arXiv 2308.03303); no gradient or moment of A is made.
        seed: the initial A are a function of it.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, nn.Linear],
        rank: int,
        alpha: float,
        seed: int,
        initialisation: Literal["kaiming", "gaussian"] = "kaiming",
        freeze_a: bool = False,
        **options: Any,
    ):
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import cast_adapter_dtype

        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,  # type: ignore[arg-type]  # which it divides by the rank and uses for nothing else
            target_modules=list(targets),
            init_lora_weights=True if initialisation == "kaiming" else initialisation,
        )
        with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
            torch.manual_seed(hash_key("initialisation", seed, "adapters") & (2**63 - 1))
            inject_adapter_in_model(config, model, _ADAPTER)
        cast_adapter_dtype(model, _ADAPTER)
        a, b = (
            {f"{name}.{part}": getattr(model.get_submodule(name), part)[_ADAPTER] for name in targets}
            for part in ("lora_A", "lora_B")
        )
        self._adapters = [module.weight for module in (*a.values(), *b.values())]
        super().__init__(model, b if freeze_a else a | b, **options)

    def memory(self) -> dict[str, list[Tensor]]:
        """Return the living tensors by component; the adapters, frozen or not, are weights."""
        return super().memory() | {"weights": self._adapters}


def merged(model: Any) -> Any:
    """Return the plain model that computes the same: a copy with the adapters in its weights, or the model without any.

    Equal to the rounding of the weights' own precision.
    """
    if not _adapted(model):
        return model
    model = copy.deepcopy(model)
    for name, layer in _adapted(model).items():
        layer.merge(safe_merge=True)
        model.set_submodule(name, layer.get_base_layer())
    return model


def _adapted(model: nn.Module) -> dict[str, Any]:
    """Return peft's layers by name; told by what they can do, so that peft need not be installed."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "get_base_layer")}
