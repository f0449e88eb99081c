"""Starts the training door inside the tests' process, and reads what a run leaves."""

import io
import json
import os
import re
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from src import train

PROJECT = Path(__file__).parents[1]

# One layer, 32 wide, sums of at most two digits: a warm start in two seconds, an update in a tenth.
FAST = [
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.warm_start.accuracy=0.4",
    "model.warm_start.min_steps=0",
    "model.warm_start.max_steps=600",
    "model.warm_start.batch=64",
    "model.warm_start.check_every=20",
    "model.warm_start.learning_rate=1e-2",
    "task.numbers=2",
    "task.min_used=1",
    "task.max_used=2",
    "task.minus=0",
    "task.extend=0.5",
    "task.held_out=24",
    "updates=3",
    "eval_every=2",
    "prompts_per_update=6",
    "responses_per_prompt=4",
    "microbatch_responses=24",
    "max_response_tokens=5",
    "method.rank=4",
    "method.learning_rate=1e-3",
    "evaluation.samples=2",
    "evaluation.pass_k=[1,2]",
    "threads=1",
]


def fast(*words: str, without: str = "") -> list[str]:
    """FAST and more words, which win; words that start with `without` left out."""
    keys = {word.partition("=")[0].lstrip("+") for word in words}
    kept = [word for word in FAST if word.partition("=")[0] not in keys and not (without and word.startswith(without))]
    return [*kept, *words]


@dataclass(frozen=True)
class Ended:
    """How a launch ended."""

    code: int
    out: str
    err: str

    @property
    def outcomes(self) -> list[str]:
        """The line of each run that was carried out or skipped, without the table after them."""
        words = ("finished", "skipped", "failed", "out_of_memory", "interrupted")
        return [line for line in self.out.split("\n\n")[0].splitlines() if line.split(" ")[0] in words]


def launch(*words: str) -> Ended:
    """`python -m src.train WORDS` in this process, with the process's state put back afterwards."""
    import torch

    argv, handler, full_error = sys.argv, signal.getsignal(signal.SIGTERM), os.environ.get("HYDRA_FULL_ERROR")
    threads = torch.get_num_threads()
    out, err, code = io.StringIO(), io.StringIO(), None
    sys.argv = ["train", *words]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            train.main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, handler)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        os.environ.pop("HYDRA_FULL_ERROR", None)
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    if isinstance(code, str):  # what Python does with it
        return Ended(1, out.getvalue(), f"{err.getvalue()}{code}\n")
    assert isinstance(code, int)
    return Ended(code, out.getvalue(), err.getvalue())


def run_folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("*/*/run.json"))


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def config(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "config.yaml").read_text())


def rows(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    """The rows of a file, without what the clock says."""
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    clock = re.compile("time.*|.*byte_seconds")
    return [{key: value for key, value in json.loads(line).items() if not clock.fullmatch(key)} for line in lines]


def by_seed(root: Path) -> dict[int, Path]:
    """The run folders of a root in which each seed ran once."""
    folders = {record(folder)["seed"]: folder for folder in run_folders(root)}
    assert len(folders) == len(run_folders(root))
    return folders
