"""The prediction: the components of memory in each phase of an update."""

import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from src import config as cfg
from src import methods, models, trainer
from src.memory import COMPONENTS, Ledger
from src.objective import token_weights
from src.plan.imitation import Imitation, LongRollout, convert, imitated, parted
from src.probe import ControlledStep
from src.rollout import Rollout, generate
from src.tasks import load_task

# Divided by the number of ranks where training is sharded.
_SHARDED = ("weights", "master_weights", "reference", "gradients", "optimizer_state")

NO_SHAPES = "model=custom has no shapes before it is built. Save the model and use model=hf."


@dataclass(frozen=True)
class Plan:
    """Predicted bytes: of each phase the components at its peak, which add up to it.

    `first_step` is the step that makes the optimizer's state; `phases` are those of an update after it.
    """

    config: cfg.Config
    phases: dict[str, dict[str, int]]
    first_step: dict[str, int]
    trained: int  # bytes of the model's parameters that get gradients
    largest_unit: int  # bytes of the weights that are gathered together
    largest_trained_unit: int  # of those that get gradients

    @property
    def phase(self) -> str:
        """The phase of the peak."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def split(self) -> dict[str, int]:
        """The components at the peak."""
        return self.phases[self.phase]

    @property
    def peak(self) -> int:
        return sum(self.split.values())

    def sharded(self, ranks: int) -> dict[str, dict[str, int]]:
        """Return the components of each phase on one of several ranks that share weights and state; see the module."""
        if ranks == 1:
            return self.phases
        sketched = not self.trained
        found = {}
        for phase, split in self.phases.items():
            part = dict(split)
            for name in COMPONENTS if phase == "step" and not sketched else _SHARDED:
                if not (sketched and name == "optimizer_state"):
                    part[name] = -(-split.get(name, 0) // ranks)
            if phase in ("rollout", "reference", "forward", "backward", "probe"):
                part["weights"] += self.largest_unit
            if phase == "backward":
                part["gradients"] += self.largest_trained_unit
            found[phase] = part
        return found

    def replicated(self, ranks: int) -> dict[str, dict[str, int]]:
        """Return the components of each phase on one of several ranks that each hold everything; see the module."""
        buckets = 0 if ranks == 1 else self.trained
        return {phase: split | {"communication": buckets} for phase, split in self.phases.items()}


def predict(config: cfg.Config, prompt_tokens: int) -> Plan:
    """Return what an update of the configuration will need, its prompts being `prompt_tokens` long.

    Raises:
        ConfigError: the model, task or method does not fit; a custom model has no shapes before it is built.
    """
    skeleton = models.skeleton(config.model, getattr(load_task(config.task), "alphabet", None))
    if skeleton is None:
        raise cfg.ConfigError(NO_SHAPES)
    with Imitation(), mock.patch.object(nn.Module, "_apply", convert), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # it is 0, which suits us
        model = imitated(skeleton).eval()
        models.keep_less(model, config.model)
        policy = models.Policy(model, None, (1,), parted(model))
        first, second = step_and_update(config, policy, prompt_tokens)
        owned = list(_units(model))
    names = {key.split("/")[1].removesuffix("_peak_bytes") for key in second if key.endswith("_peak_bytes")}
    phases = {name: _split(second, f"{name}_") for name in sorted(names)}
    whole = _split(second, "")
    if sum(whole.values()) > max(sum(split.values()) for split in phases.values()):
        phases["between"] = whole  # the peak lies in no phase
    return Plan(
        config,
        phases,
        _split(first, "step_"),
        sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad),
        max(sum(parameter.nbytes for parameter in unit) for unit in owned),
        max(sum(parameter.nbytes for parameter in unit if parameter.requires_grad) for unit in owned),
    )


def step_and_update(config: cfg.Config, policy: models.Policy, prompt_tokens: int) -> tuple[Any, Any]:
    """Return the ledger's memory rows of a step that makes the optimizer's state and of an update that finds it."""
    model, rows = policy.model, config.prompts_per_update * config.responses_per_prompt
    with Ledger(torch.device("meta")) as ledger:
        ledger.watch(lambda: {"weights": [*model.parameters(), *model.buffers()]})
        reference = deepcopy(model).requires_grad_(False) if config.objective.reference_kl > 0 else None
        if reference is not None:
            ledger.watch(lambda: {"reference": [*reference.parameters(), *reference.buffers()]})
        probed = trainer.as_probed(config, policy)
        try:
            method = methods.build(config.method, model, models.targets(config.model, model), config.seed)
        except ValueError as error:
            raise cfg.ConfigError(str(error)) from None
        ledger.watch(getattr(method, "memory", dict), after=("backward", "step"))
        count = min(config.control.probe_responses, rows)
        text = model.config.get_text_config()
        width = text.hidden_size if probed.parted else text.vocab_size

        def states(responses: int) -> list[Tensor]:
            """Make what is kept of probed responses from the prediction to the measurement after the step."""
            shape = responses, config.max_response_tokens
            kept = [torch.empty(*shape, width, dtype=model.dtype), torch.empty(shape, dtype=torch.float64)]
            ledger.track(kept, "probe")
            return kept

        batch, kept = _batch(config, _rollout(config, prompt_tokens)), states(count)
        ledger.close_update()

        splits = getattr(method, "splits", True)
        if splits:
            with ledger.phase("backward"):
                for parameter in (parameter for group in method.param_groups for parameter in group["params"]):
                    parameter.grad = torch.empty(parameter.shape, dtype=parameter.dtype)
        else:  # it steps in backward
            trainer.accumulate(config, policy, _head(batch, config.microbatch_responses), reference, ledger.phase)
        with ledger.phase("step"):
            method.propose()
        with ledger.phase("step"):  # another, so that the ledger is told of what the proposal made
            method.apply(1.0)
        del batch, kept
        first = ledger.close_update()[0]

        with ledger.phase("rollout"):
            generate(
                LongRollout(model, config.max_response_tokens),
                [[0] * prompt_tokens] * rows,
                eos_ids=policy.eos_ids,
                pad_id=0,
                max_tokens=min(2, config.max_response_tokens),
                keys=[0] * rows,
                temperature=config.temperature,
                seen=lambda tensors: ledger.track(tensors, "kv_cache"),
            )
            rollout = _rollout(config, prompt_tokens)
        with ledger.phase("reward"):
            batch = _batch(config, rollout)
        two = _head(batch, 2 * config.microbatch_responses)
        if config.objective.updates_per_batch > 1:
            with ledger.phase("forward", "logits"):
                two = trainer.with_old_logprobs(config, policy, two)
        left_out = count - min(count, config.microbatch_responses)
        kept = states(0 if splits else left_out)
        control = replace(config.control, probe_responses=count - left_out)
        step = ControlledStep(replace(config, control=control), probed, method, ledger.phase)
        step.look(batch, 1)
        trainer.accumulate(config, policy, two, reference, ledger.phase)
        with ledger.phase("step"):
            method.propose()
        if splits:
            kept = states(left_out)
        step.make(batch, 1)
        del kept
        return first, ledger.close_update()[0]


def _rollout(config: cfg.Config, prompt_tokens: int) -> Rollout:
    count, length = config.prompts_per_update * config.responses_per_prompt, config.max_response_tokens
    ids = torch.zeros(count, prompt_tokens + length, dtype=torch.long)
    response = torch.ones(count, length, dtype=torch.bool)
    finished = torch.ones(count, dtype=torch.bool)
    return Rollout(ids, torch.ones_like(ids), response, torch.zeros(count, length), finished)


def _head(batch: trainer.Batch, count: int) -> trainer.Batch:
    """Return a batch of the first responses; views of the whole one."""
    rows = slice(0, count)
    parts = {name: getattr(batch, name)[rows] for name in ("rewards_B", "advantages_B", "weights_BL")}
    return replace(batch, rollout=batch.rollout.rows(rows), **parts)


def _batch(config: cfg.Config, rollout: Rollout) -> trainer.Batch:
    rewards_B = torch.zeros(len(rollout.finished_B))
    groups_B = torch.arange(config.prompts_per_update).repeat_interleave(config.responses_per_prompt)
    used_B = torch.ones(len(rewards_B), dtype=torch.bool)
    weights_BL = token_weights(rollout.response_BL, used_B, config.objective.aggregation, config.max_response_tokens)
    return trainer.Batch(rollout, groups_B, {}, rewards_B, torch.zeros_like(rewards_B), weights_BL, None)


def _units(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each decoder layer, and those outside all layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    inside: set[int] = set()
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            unit = list(layer.parameters())
            inside |= {id(parameter) for parameter in unit}
            yield unit
    yield [parameter for parameter in model.parameters() if id(parameter) not in inside]


def _split(row: Mapping[str, Any], prefix: str) -> dict[str, int]:
    return {name: int(row.get(f"memory/{prefix}peak_{name}_bytes", 0)) for name in COMPONENTS}
