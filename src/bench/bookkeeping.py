"""What ledger, rows and probes take of a training run."""

import io
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from src import composition, models, trainer
from src import config as cfg
from src.bench.contestants import untimed
from src.memory import Ledger
from src.monitor import Progress
from src.stop import Stop
from src.tasks import load_task
from src.track import open_run
from src.warmstart import warm_up


def bookkeeping(overrides: list[str], rounds: int, updates: int) -> list[dict[str, Any]]:
    """Return the seconds of training runs, bare and with ledger, rows, record and heartbeat, in turns.

    Both are `trainer.train` from the same policy; bare writes and measures nothing. Beside the clock's seconds are the
    processor's, which other programs disturb less. The full runs also have the seconds of their probes, and of their
    updates.
    """
    config = cfg.from_dict(composition.compose(overrides))
    task = load_task(config.task)
    policy = models.load(config.model, task, torch.device(config.device), config.seed)
    warm_up(policy, task, config, print)
    evaluation = ["evaluation.samples=0", "evaluation.pass_k=[]", "task.held_out=8", "checkpoint.keep=0", "export=last"]
    length = [f"updates={updates}", f"eval_every={updates}", "wandb.mode=disabled"]
    config = cfg.from_dict(composition.compose([*overrides, *evaluation, *length]))
    rows: list[dict[str, Any]] = []
    for turn in range(-1, rounds):  # the first is not kept: it pays for what is made once in a process
        row: dict[str, Any] = {}
        for name in ("bare", "full") if turn % 2 == 0 else ("full", "bare"):
            own = replace(policy, model=deepcopy(policy.model))
            with tempfile.TemporaryDirectory() as folder:
                begin, begin_cpu = time.perf_counter(), time.process_time()
                if name == "bare":
                    silent: Any = Silent(Path(folder))
                    trainer.train(config, own, task, silent, silent, silent, Stop(), None)
                else:
                    record = {"id": "bench", "label": "bench", "study": "bench", "seed": config.seed}
                    with (
                        open_run(Path(folder), record, asdict(config), config.wandb) as run,
                        Ledger(torch.device(config.device)) as ledger,
                    ):
                        progress = Progress("bench", updates, stream=io.StringIO())
                        trainer.train(config, own, task, run, ledger, progress, Stop(), None)
                    written = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
                    row["probe_seconds"] = sum(line.get("time/probe_seconds", 0.0) for line in written)
                    row["update_seconds"] = sum(line["time/update_seconds"] for line in written)
                row[f"{name}_seconds"] = time.perf_counter() - begin
                row[f"{name}_cpu_seconds"] = time.process_time() - begin_cpu
        rows.append(row)
    return rows[1:]


class Silent:
    """A run, ledger and progress that do nothing."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.id = "bench"
        self.accuracies: dict[int, float] = {}
        self.wandb_id = None
        self.phase: Any = untimed

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "phase" or callable(value):  # the trainer says where it is: nobody asks
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    @contextmanager
    def apart(self) -> Iterator[dict[str, float]]:
        yield {"seconds": 0.0, "peak_bytes": 0}

    def close_update(self) -> tuple[dict[str, float], dict[str, float]]:
        return {}, {}
