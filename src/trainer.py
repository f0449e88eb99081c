"""One run, from rollout to record.

An update: roll out -> score -> accumulate gradients over microbatches -> propose a displacement -> predict its
divergence -> scale the step -> apply -> evaluate now and then. Everything random is a function of (seed, stream,
update, item), so the variants of a seed see the same prompts and the same noise.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from src import checkpoint, methods, models, tasks
from src import config as cfg
from src.evaluation import evaluate
from src.memory import Ledger
from src.models import Policy
from src.monitor import Progress
from src.objective import chosen_logprobs, dead_groups, group_advantages, policy_loss, token_weights
from src.probe import ControlledStep
from src.randomness import hash_key, python_random
from src.rollout import Rollout, generate
from src.stop import Stop
from src.tasks import Item, Task
from src.track import Run


@dataclass(frozen=True)
class Batch:
    """Scored responses. groups_B numbers the prompts: rows of one prompt share advantages."""

    rollout: Rollout
    groups_B: Tensor
    verdicts: dict[str, int]  # how many responses of each kind
    rewards_B: Tensor
    advantages_B: Tensor
    weights_BL: Tensor
    old_logprobs_BL: Tensor | None  # None while the policy is the one that sampled

    def microbatches(self, size: int) -> list[slice]:
        return [slice(start, start + size) for start in range(0, len(self.rewards_B), size)]

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values from which `from_state` makes the batch again."""
        return vars(self) | {"rollout": vars(self.rollout)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Batch":
        on_cpu = {name: state[name].cpu() for name in ("groups_B", "rewards_B")}
        return cls(**state | on_cpu | {"rollout": Rollout(**state["rollout"])})


def train(
    config: cfg.Config,
    policy: Policy,
    task: Task,
    run: Run,
    ledger: Ledger,
    progress: Progress,
    stop: Stop,
    resume_from: Path | None,
) -> None:
    """Train a policy and write its record, update by update, from the beginning or from a checkpoint.

    Raises:
        FloatingPointError: gradients or divergence are not finite; the update is not made.
        Stopped: a stop was asked for; the updates made are in a checkpoint.
    """
    model = policy.model
    run.phase = "load"
    ledger.watch(lambda: {"weights": [*model.parameters(), *model.buffers()]})
    reference = deepcopy(model).requires_grad_(False) if config.objective.reference_kl > 0 else None
    if reference is not None:
        ledger.watch(lambda: {"reference": [*reference.parameters(), *reference.buffers()]})
    run.phase = "method_creation"
    probed = as_probed(config, policy)
    method = methods.build(config.method, model, models.targets(config.model, model), config.seed)
    ledger.watch(getattr(method, "memory", dict), after=("backward", "step"))
    held_out = task.held_out(config.task.held_out)
    phase = _phases(run, ledger)
    step = ControlledStep(config, probed, method, phase)
    run.phase = "start" if resume_from is None else "resume"
    done, batch = (0, None) if resume_from is None else _restore(resume_from, run.id, model, method, step)
    ledger.close_update()  # what came before is no update's
    with phase("tracking"):
        run.log_event("started" if resume_from is None else "resumed")

    def evaluation(update: int) -> None:
        run.phase = "evaluation"
        with ledger.apart() as apart:
            row, answers = evaluate(policy, task, held_out, config.evaluation, config.max_response_tokens)
        row |= {"time/evaluation_seconds": apart["seconds"], "memory/evaluation_peak_bytes": apart["peak_bytes"]}
        with phase("tracking"):
            run.log_samples(answers.samples(update, config.samples_logged))
            run.log_eval({"update": update} | row)  # after its samples: with this row the evaluation is complete
        progress.evaluation(row)

    folder = run.folder / "checkpoints"

    def prune() -> None:
        if config.checkpoint.keep:  # else what an earlier start left is still what this one goes on from
            checkpoint.prune(folder, config.checkpoint.keep, run.accuracies, partial(checkpoint_due, config))

    def save(update: int) -> None:
        run.phase = "checkpoint"
        with ledger.apart() as apart:
            run.sync()  # no checkpoint may outlive the rows before it
            state = {"update": update, "weights": dict(model.state_dict()), "method": method.state_dict()}
            state |= {"batch": None if batch is None else batch.state(), "step": step.state(), "wandb_id": run.wandb_id}
            size = checkpoint.save(folder, run.id, state).stat().st_size
            prune()
        run.update_record(checkpoint={"update": update, "bytes": size, "seconds": apart["seconds"]})

    prune()  # a kill may have come between the last writing and this
    if evaluation_due(config, done) and done not in run.accuracies:
        evaluation(done)
    for update in range(done + 1, config.updates + 1):
        with stop.deferred():
            ledger.measure(measured(config, update))
            age = (update - 1) % config.objective.updates_per_batch
            if batch is None:
                batch = _sample(config, policy, task, update, phase, ledger)
            row = batch_metrics(batch)
            if config.objective.updates_per_batch > 1:
                row["rollout/age_updates"] = age

            rate = methods.learning_rate(config.method, update)
            for group in method.param_groups:
                group["lr"] = rate
            step.look(batch, update)
            row |= accumulate(config, policy, batch, reference, phase)
            with phase("step"):
                row |= {f"method/{key}": value for key, value in method.propose().items()}
            row |= step.make(batch, update)
            if age == config.objective.updates_per_batch - 1:
                batch = None

            memory, seconds = ledger.close_update()
            row |= {"method/learning_rate": rate} | seconds
            if memory:
                row["memory/peak_bytes"] = memory["memory/peak_bytes"]
            with phase("tracking"):  # its seconds are in the next update's row
                if memory:
                    run.log_memory({"update": update} | memory)
                run.log_update({"update": update} | row)
            progress.update({"update": update} | row)
            if config.checkpoint.keep and (checkpoint_due(config, update) or stop.reason is not None):
                save(update)
        if evaluation_due(config, update):
            evaluation(update)
    prune()  # the last evaluation may have been the best


def evaluation_due(config: cfg.Config, update: int) -> bool:
    """Tell whether an evaluation follows an update: at the beginning (0), every `eval_every`, and at the end.

    None does where accuracy says nothing.
    """
    due = update % config.eval_every == 0 or update == config.updates
    return due and models.measures_accuracy(config.model)


def measured(config: cfg.Config, update: int) -> bool:
    """Tell whether an update's bytes are followed: the first three, every `memory.every`-th, all if there is a cap."""
    return update <= 3 or update % config.memory.every == 0 or config.memory.cap_bytes is not None


def checkpoint_due(config: cfg.Config, update: int) -> bool:
    """Tell whether a checkpoint follows an update: every `checkpoint.every`, before each evaluation, and at the end."""
    return update % config.checkpoint.every == 0 or update == config.updates or evaluation_due(config, update)


def as_probed(config: cfg.Config, policy: Policy) -> Policy:
    """Return the policy as the probe is to take it: whole where its head is trained.

    The logits before a step can be had from its states after it only with the head that it had.
    """
    head = policy.model.get_output_embeddings() if policy.parted else None
    targets = models.targets(config.model, policy.model).values()
    trained = getattr(config.method, "train_all", isinstance(config.method, cfg.CustomMethod))
    return replace(policy, parted=False) if trained or any(module is head for module in targets) else policy


def _restore(
    path: Path, run_id: str, model: Any, method: methods.Method, step: ControlledStep
) -> tuple[int, Batch | None]:
    """Put weights, method and step back to a checkpoint's state; return its update and the batch in use there, if any.

    Raises:
        CheckpointError: the state is another model's, method's or version's.
    """
    state = checkpoint.load(path, run_id)
    kinds, saved = (
        {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
        for weights in (model.state_dict(), state["weights"])
    )
    if kinds != saved:
        raise checkpoint.CheckpointError("its weights are another model's")
    try:
        model.load_state_dict(state["weights"])
        checkpoint.restore_method(method, checkpoint.own(state["method"], model.device))
        step.load_state(state["step"])
        batch = state["batch"] and Batch.from_state(checkpoint.own(state["batch"], model.device))
    except (KeyError, TypeError, ValueError) as error:
        raise checkpoint.CheckpointError(f"its state does not fit ({type(error).__name__}: {error})") from error
    return state["update"], batch


def _sample(
    config: cfg.Config, policy: Policy, task: Task, update: int, phase: Callable[..., Any], ledger: Ledger
) -> Batch:
    """Return the scored batch that an update and the later ones of its age start from."""
    with phase("data"):
        items = draw(config, task, update)
    with phase("rollout"):
        rollout = roll_out(config, policy, task, items, update, partial(ledger.track, component="kv_cache"))
    with phase("reward"):
        batch = score(config, policy, task, rollout, items, update)
    if config.objective.updates_per_batch == 1:
        return batch
    with phase("forward", "logits"):
        return with_old_logprobs(config, policy, batch)


def _phases(run: Run, ledger: Ledger) -> Callable[..., Any]:
    """Return `ledger.phase` that also tells the run where it is, for the record of a failure."""

    def phase(name: str, component: str | None = None) -> Any:
        run.phase = name
        return ledger.phase(name, component)

    return phase


def draw(config: cfg.Config, task: Task, update: int) -> list[Item]:
    """Return the items of an update's prompts, each `responses_per_prompt` times."""
    prompts = [task.training_item(config.seed, update, index) for index in range(config.prompts_per_update)]
    return [item for item in prompts for _ in range(config.responses_per_prompt)]


def roll_out(
    config: cfg.Config,
    policy: Policy,
    task: Task,
    items: list[Item],
    update: int,
    seen: Callable[[list[Tensor]], None] | None = None,
) -> Rollout:
    """Sample a response to each of the update's items; `seen` gets the tensors of the KV cache at every token."""
    return generate(
        policy.model,
        [policy.encode(item, task.chat) for item in items],
        eos_ids=policy.eos_ids,
        pad_id=policy.pad_id,
        max_tokens=config.max_response_tokens,
        keys=[hash_key("rollout", config.seed, update, index) for index in range(len(items))],
        temperature=config.temperature,
        seen=seen,
    )


def score(config: cfg.Config, policy: Policy, task: Task, rollout: Rollout, items: list[Item], update: int) -> Batch:
    """Return the responses with verdicts, rewards, advantages and the weight of each token's loss."""
    objective = config.objective
    responses = policy.decode(rollout)
    verdicts = [task.verify(item, response) for item, response in zip(items, responses, strict=True)]
    rewards_B = torch.tensor([verdict.reward for verdict in verdicts])
    if objective.random_rewards:
        rng = python_random("random-rewards", config.seed, update)
        rewards_B = torch.tensor([float(rng.random() < 0.5) for _ in items])
    groups_B = torch.arange(config.prompts_per_update).repeat_interleave(config.responses_per_prompt)
    advantages_B = group_advantages(rewards_B, groups_B, objective.advantage)
    used_B = torch.ones(len(items), dtype=torch.bool)
    if objective.mask_truncated:
        used_B &= rollout.finished_B.cpu()
    if objective.dead_groups == "filter":
        used_B &= ~dead_groups(rewards_B, groups_B)[groups_B]
    device = rollout.tokens_BS.device
    weights_BL = token_weights(
        rollout.response_BL, used_B.to(device), objective.aggregation, config.max_response_tokens
    )
    counts = tasks.count_verdicts(verdicts)
    return Batch(rollout, groups_B, counts, rewards_B, advantages_B.to(device), weights_BL, None)


@torch.no_grad()
def with_old_logprobs(config: cfg.Config, policy: Policy, batch: Batch) -> Batch:
    """Return the batch with the log-probabilities of the policy that sampled it.

    They come from the code that trains, in the same microbatches, so that the first ratio is exactly 1.
    """
    parts = [
        all_logprobs(policy, batch.rollout.rows(rows), config.temperature)
        for rows in batch.microbatches(config.microbatch_responses)
    ]
    return replace(batch, old_logprobs_BL=torch.cat(parts))


def columns(policy: Policy, states_BLD: Tensor) -> list[slice]:
    """Return the slices of response positions whose logits are held at a time, of all rows together."""
    rows, length = states_BLD.shape[:2]
    step = max(1, policy.positions_at_a_time(states_BLD) // rows)
    return [slice(start, start + step) for start in range(0, length, step)]


def token_logprobs(policy: Policy, states_BLD: Tensor, tokens_BL: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities of the tokens, entropies), both (B, L), at the sampling temperature."""
    return chosen_logprobs(policy.logits(states_BLD), tokens_BL, temperature)


@torch.no_grad()
def all_logprobs(policy: Policy, rollout: Rollout, temperature: float) -> Tensor:
    """Return the log-probabilities of the response tokens, (B, L), by the chunks that `accumulate` uses."""
    states_BLD, tokens_BL = policy.states(rollout), rollout.response_tokens_BL
    parts = [
        token_logprobs(policy, states_BLD[:, at], tokens_BL[:, at], temperature)[0]
        for at in columns(policy, states_BLD)
    ]
    return torch.cat(parts, 1)


def accumulate(
    config: cfg.Config, policy: Policy, batch: Batch, reference: Any, phase: Callable[..., Any]
) -> dict[str, float]:
    """Accumulate the gradients of the batch's loss and return its metrics; the weights stay as they are.

    Each chunk of logits goes backward by itself as far as the states that it is made of, so that it is gone before the
    next one comes; the states' gradients then go on together.
    """
    objective = config.objective
    sums = {"loss": 0.0, "entropy": 0.0, "clipped": 0.0, "tokens": 0.0, "reference_kl": 0.0, "gap": 0.0}
    for rows in batch.microbatches(config.microbatch_responses):
        rollout, weights_BL = batch.rollout.rows(rows), batch.weights_BL[rows]
        reference_BL = None
        if reference is not None:
            with phase("reference", "logits"):
                reference_BL = all_logprobs(replace(policy, model=reference), rollout, config.temperature)
        with phase("forward", "activations"):
            states_BLD = policy.states(rollout)
            trained = states_BLD.requires_grad  # else the head alone is
            chunks = columns(policy, states_BLD)
            parts_BLD = [states_BLD[:, at].detach().requires_grad_(trained) for at in chunks]
        for at, part_BLD in zip(chunks, parts_BLD, strict=True):
            with phase("forward", "logits"):
                tokens_BL, mask_BL = rollout.response_tokens_BL[:, at], rollout.response_BL[:, at]
                logprobs_BL, entropies_BL = token_logprobs(policy, part_BLD, tokens_BL, config.temperature)
                old_BL = logprobs_BL.detach() if batch.old_logprobs_BL is None else batch.old_logprobs_BL[rows][:, at]
                loss, metrics = policy_loss(
                    logprobs_BL,
                    old_BL,
                    batch.advantages_B[rows],
                    weights_BL[:, at],
                    objective.clip_low,
                    objective.clip_high,
                    None if reference_BL is None else reference_BL[:, at],
                    objective.reference_kl,
                )
            with phase("backward", "logits"):
                loss.backward()
            sums["loss"] += float(loss.detach())
            sums["entropy"] += float(torch.where(mask_BL, entropies_BL, 0.0).sum())
            sums["gap"] += float(torch.where(mask_BL, (old_BL - rollout.logprobs_BL[:, at]).abs(), 0.0).sum())
            for key, value in metrics.items():
                sums[key] += value
            del logprobs_BL, loss  # with them the chunk's graph goes
        if trained:
            with phase("backward", "activations"):
                gradient_BLD = torch.cat([cast(Tensor, part_BLD.grad) for part_BLD in parts_BLD], 1)
                del parts_BLD, part_BLD
                states_BLD.backward(gradient_BLD)
    num_tokens = float(batch.rollout.response_BL.sum())
    return {
        "policy/loss": sums["loss"],  # about 0 on the policy that sampled: its gradient trains
        "policy/entropy": sums["entropy"] / num_tokens,
        "policy/clip_share": sums["clipped"] / max(sums["tokens"], 1.0),
        "policy/reference_kl": sums["reference_kl"] / max(sums["tokens"], 1.0),  # k3, mean over the loss's tokens
        # mean |difference| of the log-probabilities in training and at sampling: rounding, if nothing is wrong
        "rollout/logprob_gap": sums["gap"] / num_tokens,
    }


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Return the metrics of a batch of responses; shares and means are over all of them, used for the loss or not."""
    lengths_B, rewards_B = batch.rollout.lengths_B.double(), batch.rewards_B.double()
    prompt_tokens = batch.rollout.attention_BS.sum() - batch.rollout.response_BL.sum()
    return {
        "reward/mean": float(rewards_B.mean()),
        "reward/std": float(rewards_B.std(correction=min(1, len(rewards_B) - 1))),
        "reward/dead_group_share": float(dead_groups(batch.rewards_B, batch.groups_B).double().mean()),
        "rollout/response_tokens_mean": float(lengths_B.mean()),
        "rollout/response_tokens_std": float(lengths_B.std(correction=min(1, len(lengths_B) - 1))),
        "rollout/truncated_share": float((~batch.rollout.finished_B).double().mean()),
        "rollout/response_tokens": float(lengths_B.sum()),
        "rollout/prompt_tokens": float(prompt_tokens),
    } | {f"verdict/{kind}_share": count / len(rewards_B) for kind, count in batch.verdicts.items()}
