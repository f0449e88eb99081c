"""Predictions held against what the training command measures."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from src import composition
from src import config as cfg
from src.plan.prediction import predict
from src.tasks import load_task

# Two updates, and nothing beside them that takes time.
_SHORT = [
    "updates=2",
    "eval_every=2",
    "evaluation.samples=0",
    "evaluation.pass_k=[]",
    "task.held_out=4",
    "checkpoint.keep=0",
    "wandb.mode=disabled",
    "threads=1",
]
_ALL = ["control.probe_every=1"]
_TINY = [*_ALL, "model=tiny", "model.warm_start=null", "prompts_per_update=8"]
_SHAPE = [*_ALL, "model=shape", "model.shape=smollm2-135m", "prompts_per_update=2", "responses_per_prompt=2"]
# Of each kind of choice that decides memory at least one. Random policies end responses early, tiny one token in 18, so
# that only with many responses one of them is as long as it may be.
CONFIGURATIONS = [
    [*_TINY],
    [*_TINY, "method.rank=64"],
    [*_TINY, "method=dense"],
    [*_TINY, "method=dense", "method.train_all=true"],
    [*_TINY, "method=dense", "method.direction=sgd"],
    [*_TINY, "microbatch_responses=16"],
    [*_TINY, "microbatch_responses=32", "method=dense"],
    [*_TINY, "model.gradient_checkpointing=true"],
    [*_TINY, "model.gradient_checkpointing=true", "method.reconstruction=two_sided"],
    [*_TINY, "method.direction=adam", "method.moments=transfer", "method.refresh_every=10", "method.rank=64"],
    [*_TINY, "method.projection=stiefel"],
    [*_TINY, "prompts_per_update=40", "max_response_tokens=20"],
    [*_TINY, "objective.reference_kl=0.1", "objective.updates_per_batch=2"],
    [*_SHAPE, "method.rank=64", "max_response_tokens=64", "model.gradient_checkpointing=true"],
    [*_SHAPE, "method=dense", "max_response_tokens=64", "microbatch_responses=1"],
    [*_SHAPE, "method=dense", "method.train_all=true", "max_response_tokens=16"],
    # The slowest by far where the processor has no bfloat16.
    [*_SHAPE, "model.dtype=bfloat16", "method.storage=stochastic", "microbatch_responses=2", "max_response_tokens=16"],
    [*_SHAPE, "model.dtype=bfloat16", "microbatch_responses=2", "max_response_tokens=16"],
]


def longest_prompt(config: cfg.Config, update: int) -> int | None:
    """Return the tokens of the longest prompt of an update, one a character; None for other tokenizers."""
    task = load_task(config.task)
    if not isinstance(config.model, cfg.TinyModel | cfg.ShapeModel) or not hasattr(task, "alphabet"):
        return None
    indices = range(config.prompts_per_update)
    return max(len(task.training_item(config.seed, update, index).prompt) for index in indices)


def check(configurations: list[list[str]]) -> Iterator[dict[str, Any]]:
    """Yield for each configuration and phase the bytes that were predicted and measured, in a run's second update.

    Raises:
        ConfigError: a run did not end well.
    """
    for words in configurations:
        config = cfg.from_dict(composition.compose(words))
        tokens = longest_prompt(config, 2)
        assert tokens is not None
        plan = predict(config, tokens)
        with tempfile.TemporaryDirectory() as root:
            command = [sys.executable, "-m", "src.train", *words, *_SHORT, f"root={root}"]
            ended = subprocess.run(command, capture_output=True, text=True)
            found = list(Path(root).rglob("memory.jsonl"))
            if ended.returncode or not found:
                raise cfg.ConfigError(f"{' '.join(command)} ended badly: {ended.stderr.strip()[-1000:]}")
            row = json.loads(found[0].read_text().splitlines()[1])
        predicted = {phase: sum(split.values()) for phase, split in plan.phases.items()}
        for phase, nbytes in {"update": plan.peak, **predicted}.items():
            key = "memory/peak_bytes" if phase == "update" else f"memory/{phase}_peak_bytes"
            if key not in row:  # of a batch that is used twice, the rollout; between phases
                continue
            yield {
                "configuration": " ".join(words),
                "prompt_tokens": tokens,
                "phase": phase,
                "predicted_bytes": nbytes,
                "measured_bytes": row[key],
                "deviation": nbytes / row[key] - 1,
            }
