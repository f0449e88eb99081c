"""What a person may type: ablations and their jobs, and one sentence for what cannot be meant."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from src import commandline, composition
from src.config import ConfigError
from tests.launching import PROJECT, launch, run_folders

ABLATIONS = sorted(path.stem for path in (PROJECT / "conf" / "ablation").glob("*.yaml"))


@pytest.fixture
def compose(tmp_path, monkeypatch):
    """The composed jobs of a command line."""

    def composed(*words: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", ["train"])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        arguments, study = commandline.prepare([f"root={tmp_path}", *words], composition.CONF)
        return composition.compose_all(arguments, lambda values: 0)

    return composed


def arms(jobs: list[dict]) -> Counter:
    return Counter((job["method"]["name"], job["control"]["name"]) for job in jobs)


def test_single_arm_ablations_are_one_job_each(compose):
    for name in ("none", "fixed", "decay"):
        for words in ([f"+ablation={name}"], [f"ablation={name}"], [f"++ablation={name}"]):
            (job,) = compose(*words, "seed=7")
            assert (job["control"]["name"], job["method"]["name"], job["seed"]) == (name, "sketch", 7)


def test_comparisons_have_their_arms_three_times(compose):
    assert arms(compose("+ablation=baseline")) == {("dense", "none"): 3, ("sketch", "none"): 3}
    study = compose("+ablation=study")
    assert arms(study) == {("dense", "none"): 3} | {("sketch", name): 3 for name in ("none", "fixed", "decay")}
    assert Counter(job["seed"] for job in study) == {0: 4, 1: 4, 2: 4}


def test_axes_have_their_values(compose):
    rank = compose("+ablation=rank")
    assert Counter(job["method"]["rank"] for job in rank) == {4: 3, 8: 3, 16: 3, 32: 3}
    assert {job["control"]["name"] for job in rank} == {"fixed"}
    refresh = compose("+ablation=refresh", "seed=5")
    assert [job["method"]["refresh_every"] for job in refresh] == [1, 10, 100, "never"]
    assert {job["seed"] for job in refresh} == {5}


def test_a_value_on_the_line_overrides_one_axis_of_the_grid(compose):
    jobs = compose("+ablation=grid", "seed=5", "method.rank=4")
    assert len({str(job) for job in jobs}) == len(jobs) == 9
    assert {(job["seed"], job["method"]["rank"]) for job in jobs} == {(5, 4)}
    assert Counter(job["control"]["name"] for job in jobs) == {"none": 3, "fixed": 3, "decay": 3}


def test_grid_has_81_points():
    params = yaml.safe_load((PROJECT / "conf" / "ablation" / "grid.yaml").read_text())["hydra"]["sweeper"]["params"]
    assert {key: len(value.split(",")) for key, value in params.items()} == dict.fromkeys(params, 3)
    assert set(params) == {"control", "method.rank", "method.refresh_every", "seed"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    {
        "none": 1,
        "fixed": 1,
        "decay": 1,
        "baseline": 6,
        "study": 12,
        "rank": 12,
        "refresh": 12,
        "grid": 81,
        "peers": 30,
        "peers_tuned": 50,
    }.items(),
)
def test_every_ablation_has_its_number_of_different_jobs(compose, name, count):
    jobs = compose(f"+ablation={name}")
    assert len({str(job) for job in jobs}) == len(jobs) == count


def test_a_sweep_over_ablations_multiplies_with_the_seeds(compose):
    jobs = compose("+ablation=decay,none", "seed=0,1", "-m")
    assert Counter((job["control"]["name"], job["seed"]) for job in jobs) == {
        (control, seed): 1 for control in ("decay", "none") for seed in (0, 1)
    }


def test_two_ablations_with_independent_axes_apply_together(compose):
    jobs = compose("+ablation=[rank,refresh]", "seed=0", "method.rank=4,8", "-m")
    assert len({(job["method"]["rank"], job["method"]["refresh_every"]) for job in jobs}) == len(jobs) == 8


def test_the_ablation_is_the_study_s_name():
    for words, study in (
        (["+ablation=decay"], "decay"),
        (["ablation=decay"], "decay"),
        (["+ablation=decay,none", "-m"], "decay+none"),
        ([], None),
    ):
        assert commandline.prepare(words, composition.CONF)[1] == study


def test_ablation_is_not_in_the_defaults_list():
    """The plus sign of `+ablation=` depends on it."""
    defaults = yaml.safe_load((PROJECT / "conf" / "train.yaml").read_text())["defaults"]
    assert not any("ablation" in str(entry) for entry in defaults)


def test_multirun_inside_a_sweep_is_refused(monkeypatch):
    """F41: an agent exports one id, which all runs of a multirun would share."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    for words in (["seed=0,1", "-m"], ["+ablation=study"]):
        with pytest.raises(ConfigError, match="multirun inside a W&B sweep"):
            commandline.prepare(words, composition.CONF)
    commandline.prepare(["+ablation=decay", "seed=0"], composition.CONF)


# words, and what the one sentence must contain
REFUSED = [
    ("method.rnak=4", "method.rnak is not a key", "Did you mean method.rank?"),
    ("+method.rnak=4", "method.rnak is not a key", "Did you mean method.rank?"),
    ("++method.rnak=4", "method.rnak is not a key", "Did you mean method.rank?"),
    ("sed=1", "sed is not a key", "Did you mean seed?"),
    ("+method.rank=4", "method.rank", "plus sign"),
    ("method.train_all=true", "method.train_all", "not a key"),
    ("+method.train_all=true", "method.train_all", "method=sketch"),
    ("method=dense method.rank=4", "method.rank", "not a key"),
    ("method.rank=0", "method.rank", "at least 1", "0"),
    ("method.rank=65", "method.rank", "64", "65"),
    ("method.rank=2.5", "method.rank", "whole number", "2.5"),
    ("method.refresh_every=0", "method.refresh_every", "at least 1", "'never'"),
    ("control.budget=-1e-4", "control.budget", "above 0", "-0.0001"),
    ("control.budget_end=1", "control.budget_end", "falls"),
    ("method.learning_rate=nan", "method.learning_rate", "number above 0", "nan"),
    ("method.learning_rate=inf", "method.learning_rate", "number above 0", "inf"),
    ("temperature=0", "temperature", "at least 0.01"),
    ("responses_per_prompt=1", "responses_per_prompt=1", "standard deviation", "objective.advantage=none"),
    ("responses_per_prompt=1 objective.advantage=none", "responses_per_prompt=1", "nothing is learned"),
    ("seed=abc", "seed", "whole number", "'abc'"),
    ("seed=-1", "seed", "at least 0", "-1"),
    ("seed=true", "seed", "whole number", "True"),
    ("seed=0,1", "seed=0,1", "-m"),
    ("updates=1e3", "updates", "whole number", "1000"),
    ("rerun=maybe", "rerun", "true or false", "'maybe'"),
    ("device=tpu", "device", "cpu, cuda", "'tpu'"),
    ("control=fixd", "control=fixd", "Did you mean control=fixed?"),
    ("+control=fixed", "control"),
    ("+ablation=decai", "decai", "Did you mean +ablation=decay?"),
    ("'+ablation=glob(*)'", "glob(*)", "There are baseline, decay"),
    ("+ablation=fixed control=none", "+ablation=fixed", "control=none", "contradicts"),
    ("+ablation=fixed control=none,fixed -m", "+ablation=fixed", "contradicts"),
    ("+ablation=study method=dense", "+ablation=study", "method=dense", "contradicts"),
    ("+ablation=rank control=decay", "+ablation=rank", "control=decay", "contradicts"),
    ("+ablation=decay +ablation=none", "2 times", "+ablation=[decay,none]"),
    ("+ablation=rank,refresh -m", "axes of rank would be lost"),
    ("+ablation=rank,rank -m", "axes of rank would be lost"),
    ("+ablation=decay,grid -m", "axes of grid would be lost"),
    ("+ablation=[decay,rank]", "decay has control=decay", "rank has control=fixed"),
    ("+ablation=[decay,study]", "control", "would be lost"),
    ("+ablation=[baseline,study]", "arm", "would be lost"),
    ("model.targets=[nope]", "'nope'", "matches no module", "down_proj, gate_proj", "q_proj"),
    ("model.targets=[self_attn]", "LlamaAttention", "no linear layer", "q_proj"),
    ("model.targets=[]", "model.targets", "nothing to train"),
    ("model.num_heads=3", "model.hidden_size=64", "model.num_heads=3"),
    ("model=hf task=reasoning_gym", "model.path has no value", "model.path=VALUE"),
    ("model=hf model.path=/nowhere", "model.path=/nowhere", "cannot be loaded"),
    ("task=custom", "task.source has no value"),
    ("task=custom task.source=missing.py:x", "task.source=missing.py:x", "existing file"),
    ("task=custom task.source=missing.py", "task.source", "PATH.py:NAME"),
    ("model=tiny task=reasoning_gym", "model=tiny", "task=countdown"),
    ("task.min_used=4", "task.min_used", "task.max_used"),
    ("task.numbers=2 task.max_used=2 task.held_out=9999", "task.held_out=9999", "do not exist"),
    ("evaluation.pass_k=[9]", "evaluation.pass_k=9", "evaluation.samples=9"),
    ("model.warm_start.max_steps=10", "model.warm_start.max_steps=10", "min_steps="),
    ("study=../elsewhere", "study=../elsewhere", "folder"),
    ("wandb.mode=onlin", "wandb.mode", "offline", "'onlin'"),
    ("hydra/launcher=nope", "launcher", "nope"),
    ("method.rank=16,0 -m", "method.rank", "at least 1"),
    ("method.rank=16,65 -m", "method.rank", "64"),
    ("method.learning_rate=1e-4,nan seed=0,1 -m", "method.learning_rate", "nan"),
]


@pytest.mark.parametrize("case", REFUSED, ids=[case[0] for case in REFUSED])
def test_refused_in_one_sentence_before_anything_is_made(case, tmp_path, monkeypatch):
    words, *needed = case
    monkeypatch.chdir(tmp_path)
    ended = launch(f"root={tmp_path / 'outputs'}", "updates=1", *[word.strip("'") for word in words.split()])
    assert ended.code == 1
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1
    assert len(ended.err) < 500 and "Traceback" not in ended.err
    assert [text for text in needed if text not in ended.err] == [], ended.err
    assert run_folders(tmp_path / "outputs") == [] and not (tmp_path / "outputs" / ".warmstart").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) in ([], ["outputs"])


def test_cuda_without_a_device_is_refused(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    ended = launch(f"root={tmp_path}", "device=cuda")
    assert ended.code == 1 and "device=cpu" in ended.err and ended.err.count("\n") == 1


@pytest.mark.parametrize("multirun", [[], ["seed=0,1", "-m"]], ids=["single", "multirun"])
def test_unwritable_root_is_refused(multirun, tmp_path):
    (tmp_path / "file").write_text("here first")
    for root in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/x")):
        ended = launch(f"root={root}", *multirun)
        assert ended.code == 1 and ended.err.count("\n") == 1, ended.err
        assert "cannot be written" in ended.err and "root=FOLDER" in ended.err


def test_a_broken_file_of_the_user_is_told_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text("import json\n\njson.nothing\n")
    ended = launch(f"root={tmp_path}", "task=custom", f"task.source={tmp_path / 'mine.py'}:make")
    assert ended.code == 1 and ended.err.count("\n") == 1
    assert "at line 3 with AttributeError" in ended.err
    (tmp_path / "mine.py").write_text("x = 1\n")
    assert "defines no 'make'" in launch("task=custom", f"task.source={tmp_path / 'mine.py'}:make").err


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    return subprocess.run(
        [sys.executable, *words], cwd=PROJECT, env=kept | environment, capture_output=True, text=True, timeout=120
    )


def test_wandb_online_without_a_key_is_refused(tmp_path):
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path / "config")}
    ended = command("-m", "src.train", "wandb.mode=online", f"root={tmp_path / 'outputs'}", **home)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: wandb.mode=online needs a W&B API key") and ended.stderr.count("\n") == 1
    assert "wandb login" in ended.stderr and run_folders(tmp_path / "outputs") == []


def test_started_as_a_file_it_tells_the_command():
    ended = command("src/train.py", "seed=1")
    assert ended.returncode == 1 and ended.stderr.strip().endswith("python -m src.train")
    assert ended.stderr.count("\n") == 1


def test_questions_about_the_configuration_are_answered_and_start_nothing(tmp_path):
    root = f"root={tmp_path / 'outputs'}"
    for words in (["--help"], ["--cfg", "job"], ["--cfg", "job", "--resolve"], ["--info", "defaults"]):
        ended = launch(*words) if words == ["--help"] else launch(root, *words)
        assert ended.code == 0 and ended.out.strip() and not ended.err, words
    assert "ablation" in launch("--help").out
    assert not (tmp_path / "outputs").exists()


def test_every_ablation_s_first_comment_is_a_command_that_is_accepted():
    for name in ABLATIONS:
        text = (PROJECT / "conf" / "ablation" / f"{name}.yaml").read_text()
        found = re.search(r"# python -m src\.train (.*?)(\s{2,}.*)?$", text, re.MULTILINE)
        assert found and f"+ablation={name}" in found[1]
        assert commandline.prepare(found[1].split(), composition.CONF)[1] == name


def test_a_path_with_equals_signs_needs_no_quotes():
    """A policy of one run as the model of another: run folders have their label in their name."""
    words, _ = commandline.prepare(["model=hf", "model.path=runs/rank=4-s0/policy", "root=a=b"], composition.CONF)
    values = composition.compose(words)
    assert values["model"]["path"] == "runs/rank=4-s0/policy" and values["root"] == "a=b"
    assert commandline.prepare(["model=hf", "model.path='x=1'"], composition.CONF)[0][1] == "model.path='x=1'"


@pytest.mark.parametrize(
    "word", ["model.gradient_checkpointing=false", "method.rank=8", "method.reconstruction=one_sided"]
)
def test_what_an_arm_chooses_cannot_be_chosen_beside_it(word):
    """The arms of reconstruction have as many floats; a rank for both would lose that."""
    with pytest.raises(ConfigError, match=f"arms that each choose their {word.split('=')[0]}"):
        commandline.prepare(["+ablation=reconstruction", word], composition.CONF)


def test_equal_values_are_no_contradiction():
    for words in (["+ablation=rank", "method.learning_rate=3e-4"], ["+ablation=reconstruction", "control=fixed"]):
        commandline.prepare(words, composition.CONF)
    with pytest.raises(ConfigError, match=r"means method.learning_rate=0.0003, which .*=4e-4"):
        commandline.prepare(["+ablation=rank", "method.learning_rate=4e-4"], composition.CONF)
    assert commandline.prepare(["+root=a=b"], composition.CONF)[0] == ["+root='a=b'"]


def test_a_result_that_can_be_written_is_neither_made_nor_changed_before_its_work(tmp_path):
    commandline.writable(tmp_path / "deep" / "new.json")
    assert list((tmp_path / "deep").iterdir()) == []
    (tmp_path / "old.json").write_text("old")
    commandline.writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "target.json")
    commandline.writable(link)
    assert link.is_symlink() and not (tmp_path / "target.json").exists()
    with pytest.raises(ConfigError, match="cannot be written"):
        commandline.writable(tmp_path / "old.json" / "below.json")
