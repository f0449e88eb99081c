"""The warm start: made once, shared, the same for whoever loads it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from src import composition, config, models, warmstart
from src.tasks import load_task
from tests.launching import PROJECT, fast, launch, record, run_folders

CPU = torch.device("cpu")


def start(folder: Path, *words: str) -> tuple[dict, list[str], dict[str, torch.Tensor]]:
    """(facts, lines reported, weights) of a warm start with the cache in `folder`."""
    typed = config.from_dict(composition.compose(fast(*words)))
    task = load_task(typed.task)
    policy = models.load(typed.model, task, CPU, typed.seed)
    lines: list[str] = []
    assert isinstance(typed.model, config.TinyModel)
    facts = warmstart.warm_start(policy, task, typed.model, typed.task, typed.max_response_tokens, folder, lines.append)
    return facts, lines, policy.model.state_dict()


def test_one_for_all_seeds_and_arms_and_the_cached_one_is_the_fresh_one(warm_root, tmp_path):
    cached, silence, loaded = start(warm_root / ".warmstart", "seed=7", "method.rank=2", "control=none")
    fresh, lines, made = start(tmp_path)
    assert silence == [] and "held-out accuracy" in lines[-1]
    (run,) = run_folders(warm_root)
    assert cached == fresh == record(run)["warm_start"]
    assert all(torch.equal(loaded[name], made[name]) for name in made)
    assert 0.4 <= cached["accuracy"] <= 1.0 and cached["entropy"] > 0.0 and 0.0 <= cached["dead_group_share"] <= 1.0


def test_one_that_was_cut_off_goes_on_from_its_last_check(warm_root, tmp_path):
    """Else a machine that is taken away more often than a warm start takes would never get anywhere."""
    typed = config.from_dict(composition.compose(fast()))
    task = load_task(typed.task)
    policy = models.load(typed.model, task, CPU, typed.seed)

    def cut_off(line: str) -> None:
        if "step 60 " in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warmstart.warm_start(policy, task, typed.model, typed.task, typed.max_response_tokens, tmp_path, cut_off)
    facts, lines, made = start(tmp_path)
    assert lines[0] == "warm start: goes on after step 40" and "step 60 " in lines[1]
    cached, _, loaded = start(warm_root / ".warmstart")
    assert facts == cached and all(torch.equal(loaded[name], made[name]) for name in made)
    assert not list(tmp_path.glob("*.steps"))


def test_one_that_does_not_get_there_says_how_far_it_came_every_time(tmp_path):
    for _ in range(2):
        with pytest.raises(config.ConfigError, match=r"was not reached .* \(held-out accuracy 0\.[1-9]"):
            start(tmp_path, "model.warm_start.max_steps=80", "model.warm_start.accuracy=0.99")


def test_another_recipe_is_another_file(warm_root, tmp_path):
    shutil.copytree(warm_root / ".warmstart", tmp_path / "cache")
    one, _, _ = start(tmp_path / "cache")
    two, lines, _ = start(tmp_path / "cache", "model.warm_start.batch=48")
    assert lines and one["hash"] != two["hash"]
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 2


def test_what_trains_later_is_no_part_of_the_recipe(warm_root):
    for words in (["model.targets=[q_proj]"], ["model.attention=eager"], ["updates=9", "temperature=0.5"]):
        assert start(warm_root / ".warmstart", *words)[1] == []


def test_a_half_written_cache_is_made_again(warm_root, tmp_path):
    """Killed between the weights and the record, or while writing either: only the record counts, and it comes last."""
    shutil.copytree(warm_root / ".warmstart", tmp_path / "cache")
    (weights,) = (tmp_path / "cache").glob("*.safetensors")
    (about,) = (tmp_path / "cache").glob("*.json")
    before = json.loads(about.read_text())
    about.unlink()
    weights.write_bytes(weights.read_bytes()[:100])
    weights.with_suffix(".tmp").write_bytes(b"half")
    facts, lines, _ = start(tmp_path / "cache")
    assert lines and facts == before == json.loads(about.read_text())


def test_a_damaged_cache_is_made_again(warm_root, tmp_path):
    """Weights that are not those of the record, or no record that can be read: never trained from, never a failure."""
    for damage in ("other weights", "no weights", "unreadable record"):
        cache = tmp_path / damage
        shutil.copytree(warm_root / ".warmstart", cache)
        (weights,), (about,) = cache.glob("*.safetensors"), cache.glob("*.json")
        before = json.loads(about.read_text())
        match damage:
            case "other weights":
                weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
            case "no weights":
                weights.unlink()
            case _:
                about.write_text("{")
        facts, lines, _ = start(cache)
        assert lines and facts == before


def test_two_processes_make_it_once(tmp_path):
    words = [sys.executable, "-m", "src.train", f"root={tmp_path}", *fast("wandb.mode=disabled", "updates=1")]
    both = [
        subprocess.Popen(
            [*words, f"seed={seed}"], cwd=PROJECT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for seed in (0, 1)
    ]
    ended = [process.communicate(timeout=200) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    assert sum("warm start: step 20 " in err for _, err in ended) == 1
    assert len(list((tmp_path / ".warmstart").glob("*.safetensors"))) == 1
    runs = run_folders(tmp_path)
    assert len(runs) == 2 and record(runs[0])["warm_start"] == record(runs[1])["warm_start"]


def test_a_warm_start_with_recomputed_layers_is_the_same(tmp_path):
    """Made in a fresh folder: a cache of keys would grow twice in layers that run twice."""
    starts = []
    for again in ("false", "true"):
        ended = launch(*fast("updates=1", f"root={tmp_path / again}", f"model.gradient_checkpointing={again}"))
        assert ended.code == 0, ended.err
        (folder,) = run_folders(tmp_path / again)
        starts.append(record(folder)["warm_start"]["hash"])
    assert starts[0] == starts[1]
