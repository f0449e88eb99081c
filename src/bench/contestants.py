"""Who takes part, and the update that all of them make on the same synthetic tokens."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from src import composition, methods, models, trainer
from src import config as cfg
from src.memory import Ledger
from src.rollout import Rollout
from src.sketch.layer import SketchedLayers
from src.sketch.optimizer import SketchOptimizer
from src.tasks import load_task
from src.trainer import Batch

# What a name on the command line stands for: overrides of src.train's, or a baseline that only exists here.
CONTESTANTS: dict[str, list[str]] = {
    "adamw": [],  # torch.optim.AdamW(foreach=False) and clip_grad_norm_ on the sketch's matrices: the yardstick
    "adamw_foreach": [],
    "adamw_all": [],  # on every parameter
    "adamw_all_foreach": [],
    "dense": ["method=dense"],
    "sketch": ["method=sketch"],
    "sketch_64": ["method=sketch", "method.rank=64"],
    "sketch_two_sided": [  # which needs the layers' inputs again
        "method=sketch",
        "method.reconstruction=two_sided",
        "method.rank=5",
        "method.co_rank=11",
        "model.gradient_checkpointing=true",
    ],
    "published_64": ["method=sketch", "method.rank=64"],  # each layer's A drawn and stored in float32
    "lora": ["method=lora"],
    "lora_frozen_a": ["method=lora", "method.freeze_a=true"],
    "galore": ["method=galore"],
    "galore_layerwise": ["method=galore", "method.layerwise=true", "method.max_grad_norm=null"],
    "apollo": ["method=apollo"],
    "flora": ["method=flora"],
    "adafactor": ["method=adafactor"],
    "adam8bit": ["method=adam8bit"],
}


@dataclass(frozen=True)
class Workload:
    """What all contestants do: the configuration, a policy that is copied, and a batch of synthetic responses."""

    config: cfg.Config
    policy: models.Policy
    batch: Batch

    @property
    def tokens(self) -> int:
        return int(self.batch.rollout.attention_BS.sum())


def synthetic_batch(config: cfg.Config, vocabulary: int, prompt_tokens: int, device: torch.device) -> Batch:
    """Return a batch of random tokens: prompts of `prompt_tokens`, responses of `max_response_tokens`, no padding."""
    rows, length = config.prompts_per_update * config.responses_per_prompt, config.max_response_tokens
    generator = torch.Generator().manual_seed(config.seed)
    tokens_BS = torch.randint(3, vocabulary, (rows, prompt_tokens + length), generator=generator)
    response_BL = torch.ones(rows, length, dtype=torch.bool, device=device)
    rollout = Rollout(
        tokens_BS.to(device),
        torch.ones_like(tokens_BS).to(device),
        response_BL,
        torch.full((rows, length), -1.0, device=device),
        torch.ones(rows, dtype=torch.bool, device=device),
    )
    advantages_B = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0)
    groups_B = torch.arange(config.prompts_per_update).repeat_interleave(config.responses_per_prompt)
    weights_BL = torch.full((rows, length), 1.0 / (rows * length), device=device)
    return Batch(rollout, groups_B, {}, advantages_B.clamp(min=0), advantages_B.to(device), weights_BL, None)


class Plain:
    """torch.optim.AdamW as a method: the yardstick."""

    def __init__(self, parameters: list[nn.Parameter], foreach: bool):
        self._parameters = parameters
        self._optimizer = torch.optim.AdamW(parameters, lr=1e-6, foreach=foreach)
        self._foreach = foreach

    def propose(self) -> dict[str, float]:
        norm = nn.utils.clip_grad_norm_(self._parameters, 1.0, foreach=self._foreach)
        return {"gradient_norm": float(norm)}

    def apply(self, step_scale: float) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def memory(self) -> dict[str, list[Tensor]]:
        return {
            "gradients": [p.grad for p in self._parameters if p.grad is not None],
            "optimizer_state": [t for state in self._optimizer.state.values() for t in state.values()],
        }


def build(name: str, config: cfg.Config, model: Any) -> Any:
    """Return a contestant's method on a model, which it freezes and hooks as it needs."""
    targets = models.targets(config.model, model)
    if name.startswith("adamw"):
        model.requires_grad_("_all" in name)
        for module in targets.values():
            module.weight.requires_grad_(True)
        return Plain([p for p in model.parameters() if p.requires_grad], name.endswith("foreach"))
    if name.startswith("published"):
        assert isinstance(config.method, cfg.SketchMethod)
        layers = SketchedLayers(model, targets, config.method.rank, config.seed, share=False)
        return SketchOptimizer(layers, lr=1e-6)
    return methods.build(config.method, model, targets, config.seed)


class Entrant:
    """A contestant on its own copy of the weights."""

    def __init__(self, name: str, config: cfg.Config, work: Workload):
        self._config = config
        self._batch = work.batch
        self._policy = replace(work.policy, model=deepcopy(work.policy.model))
        if getattr(config.model, "gradient_checkpointing", False):
            models.recompute_layers(self._policy.model)
        self._method = build(name, config, self._policy.model)
        for group in getattr(self._method, "param_groups", []):
            group["lr"] = 1e-6

    @property
    def model(self) -> Any:
        return self._policy.model

    def update(self, phase: Callable[..., Any]) -> None:
        """Forward, backward, clip and step."""
        trainer.accumulate(self._config, self._policy, self._batch, None, phase)
        with phase("step"):
            self._method.propose()
        with phase("step"):  # another, so that the ledger is told of what the proposal made
            self._method.apply(1.0)

    def watched(self, ledger: Ledger) -> None:
        """Show a ledger what is alive."""
        model = self._policy.model
        ledger.watch(lambda: {"weights": [*model.parameters(), *model.buffers()]})
        ledger.watch(getattr(self._method, "memory", dict), after=("backward", "step"))


@contextmanager
def entered(name: str, config: cfg.Config, work: Workload) -> Iterator[Entrant]:
    """Yield a contestant, and let go of all that it held."""
    entrant = Entrant(name, config, work)
    try:
        yield entrant
    finally:
        vars(entrant).clear()
        gc.collect()


def configured(name: str, overrides: list[str]) -> cfg.Config:
    """Return a contestant's configuration: that of the command line, with its own method.

    Raises:
        ConfigError: the method cannot be had, or not with these values.
    """
    return cfg.from_dict(composition.compose([*overrides, *CONTESTANTS[name], "control=none"]))


def workload(config: cfg.Config, prompt_tokens: int) -> Workload:
    """Load the model once and make the batch."""
    task = load_task(config.task)
    plain: Any = {} if isinstance(config.model, cfg.CustomModel) else {"gradient_checkpointing": False}
    policy = models.load(replace(config.model, **plain), task, torch.device(config.device), config.seed)
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    return Workload(config, policy, synthetic_batch(config, vocabulary, prompt_tokens, policy.model.device))


def reason(error: Exception) -> str:
    """Return what kept a contestant from being measured, in a line."""
    if isinstance(error, cfg.ConfigError):
        return str(error)
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def untimed(name: str, component: str | None = None) -> Any:
    return nullcontext()
