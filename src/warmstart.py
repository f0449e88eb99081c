"""The warm start: supervised steps on demonstrations, made once for a model and a task and then shared.

It stands for the pre-trained checkpoint that a user would bring: one for all seeds and arms. The cache is keyed by what
goes into it, and a lock lets concurrent starts wait for the first instead of repeating it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from src import checkpoint
from src import config as cfg
from src.evaluation import answer
from src.identity import with_content
from src.models import Policy
from src.objective import dead_groups
from src.randomness import hash_key
from src.rollout import pad_left
from src.tasks import Item, Task

# Updates of the training stream that no run reaches: warm starts see other draws of the same problems.
_SEED = -1
# The probe of sampling behaviour: groups of responses to held-out prompts.
_PROBE_PROMPTS = 64
_PROBE_RESPONSES = 8
_RECIPE = 1


def warm_up(policy: Policy, task: Task, config: cfg.Config, report: Callable[[str], None]) -> dict[str, Any] | None:
    """Give a policy the warm start that a run's configuration asks for; return its facts, or None."""
    if not isinstance(config.model, cfg.TinyModel) or config.model.warm_start is None:
        return None
    folder = Path(config.root) / ".warmstart"
    return warm_start(policy, task, config.model, config.task, config.max_response_tokens, folder, report)


def warm_start(
    policy: Policy,
    task: Task,
    model_config: cfg.TinyModel,
    task_config: cfg.Task,
    max_tokens: int,
    folder: Path,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Load the warm start of a model and task into the policy, making it first if it is not in the cache.

    Args:
        folder: where warm starts are kept; a file's name is the hash of what determines it.
        report: called with a line now and then while it is made.

    Returns:
        What run.json says: hash of the weights, held-out greedy accuracy, mean token entropy (nats) and share of dead
        groups of sampled responses, supervised steps.

    Raises:
        ConfigError: the accuracy was not reached within the allowed steps.
    """
    assert model_config.warm_start is not None
    ways = ("targets", "attention", "gradient_checkpointing")  # they make no other policy
    shape = {name: value for name, value in asdict(model_config).items() if name not in ways}
    problems = asdict(task_config)
    if isinstance(task_config, cfg.CustomTask):
        problems["source"] = with_content(task_config.source)
    content = {"recipe": _RECIPE, "model": shape, "task": problems, "version": task.version, "max_tokens": max_tokens}
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    weights, record = folder / f"{key}.safetensors", folder / f"{key}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{key}.lock"):
        if not _is_whole(weights, record):
            held_out, steps = task.held_out(task_config.held_out), folder / f"{key}.steps"
            facts = _make(policy, task, held_out, model_config.warm_start, max_tokens, steps, report)
            _write(weights, lambda path: save_file(_state(policy.model), path))
            facts = {"hash": _digest(weights)} | facts
            _write(record, lambda path: path.write_text(json.dumps(facts)))
            shutil.rmtree(steps, ignore_errors=True)
    # Also by who made it: one way in, so that the first run equals the later ones.
    policy.model.load_state_dict(load_file(weights))
    facts = json.loads(record.read_text())
    assert isinstance(facts, dict)
    return facts


def _is_whole(weights: Path, record: Path) -> bool:
    """Tell whether a warm start is there with the weights that its record, which is written last, names."""
    try:
        return bool(json.loads(record.read_text())["hash"] == _digest(weights))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}


def _write(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_suffix(".tmp")
    write(temporary)
    os.replace(temporary, path)


def _make(
    policy: Policy,
    task: Task,
    held_out: list[Item],
    config: cfg.WarmStart,
    max_tokens: int,
    steps: Path,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Train until the held-out accuracy is reached; AdamW, all parameters, linear warm-up over 50 steps.

    At every check the state goes to the folder `steps`, from which the next start goes on where this one is cut off.
    """
    model = policy.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.01)
    accuracy, done = 0.0, 0
    for _, path in checkpoint.found(steps):
        with suppress(checkpoint.CheckpointError):
            state = checkpoint.load(path, steps.name)
            model.load_state_dict(state["weights"])
            checkpoint.restore_method(optimizer, checkpoint.own(state["method"], model.device))
            done = state["update"]
            report(f"warm start: goes on after step {done}")
            break
    for step in range(done + 1, config.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, step / 50)
        items = [task.training_item(_SEED, step, index) for index in range(config.batch)]
        demonstrations_loss(policy, task, items).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % config.check_every == 0:
            accuracy = answer(policy, task, held_out, max_tokens=max_tokens, batch=512).accuracy
            report(
                f"warm start: step {step} of at least {config.min_steps}, held-out accuracy {accuracy:.3f} of at least "
                f"{config.accuracy:g}"
            )
            if accuracy >= config.accuracy and step >= config.min_steps:
                entropy, dead_share = _sampling_facts(policy, task, held_out[:_PROBE_PROMPTS], max_tokens)
                return {
                    "accuracy": accuracy,
                    "entropy": entropy,
                    "dead_group_share": dead_share,
                    "steps": step,
                }
            if step == config.max_steps:
                break
            state = {"update": step, "weights": dict(model.state_dict()), "method": optimizer.state_dict()}
            checkpoint.save(steps, steps.name, state | {"batch": None, "wandb_id": None})
            checkpoint.prune(steps, 1, {})
    raise cfg.ConfigError(
        f"model.warm_start.accuracy={config.accuracy:g} was not reached within model.warm_start.max_steps="
        f"{config.max_steps} (held-out accuracy {accuracy:.3f}). Use more steps, a larger model or an easier task."
    )


def demonstrations_loss(policy: Policy, task: Task, items: list[Item]) -> torch.Tensor:
    """Return the mean cross-entropy of the demonstrations' tokens, the end of sequence included, 0-d."""
    prompts = [policy.encode(item, task.chat) for item in items]
    texts = [task.demonstration(item) for item in items]
    answers = [[*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.eos_ids[0]] for text in texts]
    device = policy.model.device
    tokens_BP, attention_BP = pad_left(prompts, policy.pad_id, device)
    width = max(map(len, answers))
    tokens_BL = torch.tensor([ids + [policy.pad_id] * (width - len(ids)) for ids in answers], device=device)
    real_BL = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in answers], device=device)
    attention_BS = torch.cat([attention_BP, real_BL], 1)
    logits_BLV = policy.model(
        input_ids=torch.cat([tokens_BP, tokens_BL], 1),
        attention_mask=attention_BS,
        position_ids=(attention_BS.cumsum(-1) - 1).clamp(min=0),
        logits_to_keep=width + 1,
        use_cache=False,
    ).logits[:, :-1]
    logprobs_BL = torch.log_softmax(logits_BLV.float(), -1).gather(-1, tokens_BL[..., None])[..., 0]
    return -torch.where(real_BL > 0, logprobs_BL, 0.0).sum() / real_BL.sum()


def _sampling_facts(policy: Policy, task: Task, items: list[Item], max_tokens: int) -> tuple[float, float]:
    """Return (mean token entropy in nats, share of dead groups) of responses sampled at temperature 1."""
    repeated = [item for item in items for _ in range(_PROBE_RESPONSES)]
    keys = [hash_key("warm-start", index) for index in range(len(repeated))]
    sampled = answer(policy, task, repeated, max_tokens=max_tokens, batch=512, keys=keys)
    rewards_B = torch.tensor([verdict.reward for verdict in sampled.verdicts])
    groups_B = torch.arange(len(items)).repeat_interleave(_PROBE_RESPONSES)
    # The mean surprise of sampled tokens is an unbiased estimate of the mean entropy.
    return -sampled.mean_logprob, float(dead_groups(rewards_B, groups_B).double().mean())
