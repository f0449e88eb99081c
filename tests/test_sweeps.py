"""The sweep files, through the real `wandb sweep` and `wandb agent` against a loopback fake of W&B."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fake_wandb import ENTITY, PROJECT, SWEEP, fake_wandb

ROOT = Path(__file__).parents[1]
SWEEPS = sorted((ROOT / "sweeps").glob("*.yaml"))
LAST_WORD = "${args_no_hyphens}"


# Two updates, and a warm start that stops at once.
QUICK = [
    "updates=2",
    "eval_every=1",
    "model.warm_start.accuracy=0.0",
    "model.warm_start.min_steps=0",
]


def quick_copy(path: Path, folder: Path, extra: list[str]) -> Path:
    """A sweep file whose command has a few more words before the parameters."""
    sweep = yaml.safe_load(path.read_text())
    at = sweep["command"].index(LAST_WORD)
    sweep["command"][at:at] = extra
    copy = folder / path.name
    copy.write_text(yaml.safe_dump(sweep, sort_keys=False))
    return copy


def trials(path: Path) -> list[dict[str, Any]]:
    """The grid of a sweep file, the last parameter fastest."""
    parameters = yaml.safe_load(path.read_text())["parameters"]
    values = [one["values"] if "values" in one else [one["value"]] for one in parameters.values()]
    return [dict(zip(parameters, point, strict=True)) for point in product(*values)]


def command_line(path: Path, trial: dict[str, Any]) -> list[str]:
    """What the agent would run: its macros filled in by the client's own function."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    macros = create_sweep_command_args({"args": {key: {"value": value} for key, value in trial.items()}})
    words: list[str] = []
    for word in yaml.safe_load(path.read_text())["command"]:
        macro = {"${env}": [], "${interpreter}": [sys.executable]}.get(word, macros.get(str(word)[2:-1]))
        words += [word] if macro is None or not str(word).startswith("${") else macro
    return words


def client_environment(home: Path) -> dict[str, str]:
    """The environment without W&B variables or accounts, `python` being this one, one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    own = {f"WANDB_{name}_DIR": str(home / name) for name in ("DATA", "CACHE", "CONFIG")}
    here = {"HOME": str(home), "NETRC": str(home / "netrc"), "WANDB_DIR": str(home), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return kept | own | here | {"PATH": path}


def wandb(*arguments: str, environment: dict[str, str]) -> str:
    """Runs the W&B command line from the project's folder; all it printed."""
    command = [sys.executable, "-m", "wandb", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_sweep_file(path: Path) -> None:
    """F47, F49: flat parameters, plain values, an explicit command without hyphens, a header of commands."""
    text = path.read_text()
    sweep = yaml.safe_load(text)
    assert text.startswith(f"# wandb sweep sweeps/{path.name} && wandb agent ")
    assert sweep["metric"] == {"name": "eval/accuracy", "goal": "maximize"}
    assert sweep["program"] == "src/train.py"
    assert sweep["command"][:4] == ["${env}", "${interpreter}", "-m", "src.train"]
    assert sweep["command"][-1] == LAST_WORD and "wandb.mode=online" in sweep["command"]
    assert isinstance(sweep["parameters"]["seed"]["values"], list)
    for name, one in sweep["parameters"].items():
        assert set(one) <= {"value", "values"}, f"{name} is nested or random"
        for value in one.get("values", [one.get("value")]):
            assert isinstance(value, str | int | float) and not set(str(value)) & set(" ,[]{}()=:\"'"), value
    points = [tuple(map(str, trial.values())) for trial in trials(path)]
    assert len(points) == len(set(points))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_trial_is_a_command_line_that_the_program_accepts(path: Path, tmp_path: Path) -> None:
    """F47: Hydra composes a config out of the words of every trial's command line."""
    from hydra import compose, initialize_config_dir

    lines = [command_line(path, trial) for trial in trials(path)]
    assert all(line[:3] == [sys.executable, "-m", "src.train"] for line in lines)
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        for line, trial in zip(lines, trials(path), strict=True):
            config = compose("train", overrides=[*line[3:], f"root={tmp_path}"])
            assert config.seed == trial["seed"] and config.wandb.mode == "online"
            if "control" in trial:
                assert config.control.name == trial["control"]


def test_control_sweep_through_the_agent(tmp_path: Path) -> None:
    """F47, F49: the agent runs two trials; each comes back finished, with sweep id, config and rows."""
    root = tmp_path / "outputs"
    chosen = [{"control": "none", "seed": 0}, {"control": "decay", "seed": 1}]
    assert all(trial in trials(ROOT / "sweeps" / "control.yaml") for trial in chosen)
    copy = quick_copy(ROOT / "sweeps" / "control.yaml", tmp_path, [*QUICK, f"root={root}"])
    with fake_wandb(chosen) as fake:
        environment = client_environment(tmp_path) | fake.environment
        said = wandb("sweep", str(copy), environment=environment)
        assert SWEEP in said
        wandb("agent", "--count", "2", f"{ENTITY}/{PROJECT}/{SWEEP}", environment=environment)
    assert {"UpsertSweep", "SweepWithRuns", "CreateAgent", "Heartbeat"} <= set(fake.asked)
    assert yaml.safe_load(fake.sweep_config)["parameters"] == yaml.safe_load(copy.read_text())["parameters"]
    assert list(fake.runs) == ["trial001", "trial002"]
    folders = {json.loads(path.read_text())["seed"]: path.parent for path in root.rglob("run.json")}
    assert sorted(folders) == [0, 1]
    for trial, run in zip(chosen, fake.runs.values(), strict=True):
        assert run.attributes["sweep"] == SWEEP and run.attributes["project"] == PROJECT
        assert run.exit_code == 0
        assert run.config["seed"] == trial["seed"] and run.config["updates"] == 2
        assert run.config["control"] == run.config["control.name"] == trial["control"]
        folder = folders[trial["seed"]]
        record = json.loads((folder / "run.json").read_text())
        assert record["status"] == "finished" and record["updates_done"] == 2
        arrived = [(row["update"], row["reward/mean"]) for row in run.history if "reward/mean" in row]
        kept = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert arrived == [(row["update"], row["reward/mean"]) for row in kept] and len(arrived) == 2
        evaluated = [row["update"] for row in run.history if "eval/accuracy" in row]
        assert evaluated == [json.loads(line)["update"] for line in (folder / "evals.jsonl").read_text().splitlines()]
        assert evaluated[-1] == 2
