"""The door from the command to the run folders: the card, repeats, failures, interrupts, a user's own parts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.launching import PROJECT, by_seed, config, fast, launch, record, rows, run_folders

QUIET = "wandb.mode=disabled"
ROW_FILES = ("metrics", "evals", "samples", "memory")


def everything(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """All rows of a run, without what the clock says."""
    return {name: rows(folder, name) for name in ROW_FILES}


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """`python -m src.train WORDS` in a process of its own, in `folder`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "PYTHONPATH"))}
    own = {"HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "src.train", *words],
        cwd=folder,
        env=kept | own,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def clone(folder: Path) -> Path:
    """What a user has after a clone, as far as training goes."""
    for part in ("src", "conf"):
        shutil.copytree(PROJECT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "home").mkdir()
    return folder


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The card's command, with few updates, in a clean clone: its folder and what was printed."""
    folder = clone(tmp_path_factory.mktemp("clone"))
    process = start(folder, "+ablation=decay", "seed=0,1,2", "-m", *fast())
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return folder, out + err


def test_the_card_leaves_three_complete_run_folders(card):
    """F46, F58."""
    folder, printed = card
    runs = by_seed(folder / "outputs")
    assert sorted(runs) == [0, 1, 2] and {run.parent.name for run in runs.values()} == {"decay"}
    for seed, run in runs.items():
        about = record(run)
        assert run.name == f"{about['label']}-s{seed}-{about['variant']}" and about["label"].startswith("decay-")
        assert (about["status"], about["updates"], about["updates_done"]) == ("finished", 3, 3)
        assert about["schema_version"] == 1 and about["error"] is None and about["start"] < about["end"]
        assert about["task"] == {"name": "countdown", "version": 1} and about["threads"] == 1
        assert set(about["warm_start"]) >= {"hash", "accuracy", "entropy", "dead_group_share"}
        assert about["warm_start"]["accuracy"] >= 0.4 and about["memory_includes"]
        assert config(run)["seed"] == seed and config(run)["control"]["name"] == "decay"
        assert [row["update"] for row in rows(run)] == [1, 2, 3] == [row["update"] for row in rows(run, "memory")]
        assert [row["update"] for row in rows(run, "evals")] == [0, 2, 3]
        assert {row["update"] for row in rows(run, "samples")} == {0, 2, 3}
        assert set(rows(run, "samples")[0]) == {"update", "prompt", "response", "answer", "verdict", "reward"}
        last = rows(run, "evals")[-1]["eval/accuracy"]
        assert printed.count(f"finished       {run.relative_to(folder)}  held-out accuracy {last:.3f}\n") == 1
    assert len({record(run)["warm_start"]["hash"] for run in runs.values()}) == 1
    assert len({record(run)["variant"] for run in runs.values()}) == 1


def test_the_card_leaves_nothing_elsewhere_and_each_seed_its_own_offline_run(card):
    """F41."""
    folder, _ = card
    assert sorted(path.name for path in folder.iterdir()) == ["conf", "home", "outputs", "src"]
    assert not list((folder / "home").rglob("*.wandb"))
    outputs = folder / "outputs"
    assert sorted(path.name for path in outputs.iterdir()) == [".warmstart", "decay"]
    assert len(list((outputs / ".warmstart").glob("*.safetensors"))) == 1
    ids = set()
    for run in run_folders(outputs):
        (offline,) = run.glob("wandb/offline-run-*/*.wandb")
        ids.add(offline.stem)
    assert len(ids) == 3


def test_rows_are_small_and_add_up(card):
    """F37, F38, F02, F19: tokens are conserved, phases are disjoint, and what a diagnosis needs is there."""
    for run in run_folders(card[0] / "outputs"):
        for line in (run / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert len(row) <= 40
            seconds = {key: value for key, value in row.items() if key.startswith("time/")}
            assert min(seconds.values()) >= 0.0 and len(seconds) >= 7
            whole = seconds.pop("time/update_seconds")
            assert whole / 3 < sum(seconds.values()) <= whole
            assert row["rollout/response_tokens"] == pytest.approx(row["rollout/response_tokens_mean"] * 24)
            assert 24 <= row["rollout/response_tokens"] <= 24 * 5
            assert 24 * 6 <= row["rollout/prompt_tokens"] <= 24 * 7  # `3,4=7?`, `9,8=17?` and no padding
            shares = [row[f"verdict/{kind}_share"] for kind in ("correct", "wrong", "unparseable", "timeout")]
            assert sum(shares) == pytest.approx(1.0) and row["reward/mean"] == pytest.approx(shares[0])
            assert {"reward/std", "reward/dead_group_share", "rollout/truncated_share", "policy/entropy"} <= set(row)
            assert row["rollout/logprob_gap"] < 1e-5 and row["memory/peak_bytes"] > 0


def test_again_it_skips_what_is_finished_in_one_line_each(card):
    ended = launch("+ablation=decay", "seed=0,1,2", "-m", f"root={card[0] / 'outputs'}", *fast(QUIET))
    assert ended.code == 0 and ended.err == ""
    assert [line.split()[0] for line in ended.outcomes] == ["skipped"] * 3 and "rerun=true" in ended.outcomes[0]
    assert "3 runs in" in ended.out and "3 finished, 0 running, 0 failed, 0 out of memory, 0 left" in ended.out


def test_repeated_it_has_the_same_rows(card):
    """F58, F56: the same rows and the same bits in another process, whoever made the cache."""
    outputs = card[0] / "outputs"
    before = {seed: everything(run) for seed, run in by_seed(outputs).items()}
    ended = launch("+ablation=decay", "seed=0,1,2", "-m", "rerun=true", f"root={outputs}", *fast(QUIET))
    assert ended.code == 0, ended.err
    assert {seed: everything(run) for seed, run in by_seed(outputs).items()} == before
    assert before[0]["metrics"] != before[1]["metrics"]


def test_a_seed_of_a_multirun_equals_that_seed_alone(card, root):
    """F41, F59, M32; the warm start was made by another process and is the same to the bit."""
    ended = launch("ablation=decay", "seed=1", f"root={root}", *fast(QUIET))
    assert ended.code == 0, ended.err
    (alone,) = run_folders(root)
    among = by_seed(card[0] / "outputs")[1]
    assert everything(alone) == everything(among)
    assert record(alone)["warm_start"] == record(among)["warm_start"]
    assert alone.name == among.name


def test_the_order_of_arms_changes_nothing(root, tmp_path):
    """M32: peaks included."""
    shutil.copytree(root, tmp_path / "reversed")
    for order, place in (("none,fixed", root), ("fixed,none", tmp_path / "reversed")):
        ended = launch(f"control={order}", "-m", f"root={place}", *fast(QUIET))
        assert ended.code == 0, ended.err
    first, second = run_folders(root), run_folders(tmp_path / "reversed")
    assert [run.name for run in first] == [run.name for run in second] and len(first) == 2
    for one, other in zip(first, second, strict=True):
        assert everything(one) == everything(other)
    assert rows(first[0]) != rows(first[1])


def test_variants_of_a_seed_see_the_same_prompts(root):
    """Until the first update is made, nothing differs but what is done with it."""
    ended = launch("method=dense,sketch", "seed=3", "-m", f"root={root}", *fast(QUIET, without="method.rank"))
    assert ended.code == 0, ended.err
    first, second = (rows(run)[0] for run in run_folders(root))
    same = [key for key in first if key.startswith(("reward/", "rollout/", "verdict/"))]
    assert len(same) > 10 and {key: first[key] for key in same} == {key: second[key] for key in same}


VARIANTS = {
    "random-rewards": ["objective.random_rewards=true"],
    "two-updates-a-batch": ["objective.updates_per_batch=2"],
    "reference-kl": ["objective.reference_kl=0.1"],
    "sketch-sgd": ["method.direction=sgd", "method.refresh_every=never"],
    "dense": ["method=dense", "control=none"],
    "dense-all": ["method=dense", "control=fixed", "method.train_all=true", "method.direction=sgd"],
    "dr-grpo": ["objective.advantage=none", "objective.aggregation=fixed", "objective.dead_groups=filter"],
    "masked": ["objective.mask_truncated=true", "objective.aggregation=sequence", "evaluation.top_p=0.9"],
    "linear": ["control.schedule=linear", "control.horizon=2", "method.clip_norm=estimate"],
    "random-weights": ["model.warm_start=null"],
}


@pytest.mark.parametrize("words", VARIANTS.values(), ids=VARIANTS)
def test_variants_train(words, root):
    """F04, F05, F13: every number is finite, whatever is masked."""
    without = {"method=dense": "method.rank", "model.warm_start=null": "model.warm_start."}
    left_out = next((start for word, start in without.items() if word in words), "")
    ended = launch(f"root={root}", *fast(QUIET, *words, without=left_out))
    assert ended.code == 0, ended.err
    (run,) = run_folders(root)
    metrics = rows(run)
    assert all(isinstance(value, int | float) for row in metrics for value in row.values())
    if "objective.random_rewards=true" in words:
        assert metrics[0]["reward/mean"] != metrics[0]["verdict/correct_share"]
        assert 0.1 < sum(row["reward/mean"] for row in metrics) / 3 < 0.9
    if "objective.updates_per_batch=2" in words:
        assert [row["rollout/age_updates"] for row in metrics] == [0, 1, 0]
        assert metrics[0]["reward/mean"] == metrics[1]["reward/mean"]
    if "objective.reference_kl=0.1" in words:
        assert metrics[0]["policy/reference_kl"] == 0.0 < metrics[1]["policy/reference_kl"]
    if "control.schedule=linear" in words:
        budgets = [row["control/budget"] for row in metrics]
        assert budgets[1] == pytest.approx((budgets[0] + budgets[2]) / 2)
        assert budgets[::2] == pytest.approx([config(run)["control"][key] for key in ("budget", "budget_end")])


def test_microbatches_do_not_change_the_update(root):
    """F08, M01, F34: 24 responses at once, in two, in five uneven parts."""
    ended = launch("microbatch_responses=24,12,5", "-m", f"root={root}", *fast(QUIET, "microbatch_responses=24,12,5"))
    assert ended.code == 0, ended.err
    whole, *others = [
        rows(run) for run in sorted(run_folders(root), key=lambda run: config(run)["microbatch_responses"])
    ]
    assert any(row["method/sketch_norm"] > 0 for row in whole)
    for other in others:
        for one, two in zip(whole, other, strict=True):
            assert set(one) == set(two)
            for key in set(one) - {"memory/peak_bytes"}:
                assert one[key] == pytest.approx(two[key], rel=2e-4, abs=1e-6), key


TASK = '''
from dataclasses import dataclass
from src.tasks import Item, Verdict

@dataclass
class Letters:
    """Answer with the prompt's letter."""
    name: str = "letters"
    version: int = 7
    alphabet: str = "abcd"
    chat: bool = False
    trouble: str = ""

    def training_item(self, seed, update, index):
        letter = "abc"[(seed + update + index) % 3]
        prompt = letter + ("bc", "cb", "bd", "db", "cd", "dc", "bb", "cc")[index % 8]
        return Item(prompt, prompt, (letter, seed, update))

    def held_out(self, count):
        return [Item(letter + "dd", letter + "dd", (letter, None, 0)) for letter in "abc"[:count]]

    def demonstration(self, item):
        return item.answer[0]

    def verify(self, item, response):
        letter, seed, update = item.answer
        if self.trouble and seed in (1, 2) and update == 2:
            raise {"memory": MemoryError, "key": KeyboardInterrupt, "value": ValueError}[self.trouble](f"seed {seed}")
        right = response == letter
        return Verdict("correct" if right else "wrong", float(right), response)

def make(settings):
    return Letters(**settings)
'''


@pytest.fixture
def letters(tmp_path: Path) -> list[str]:
    """The words that choose a task of the user's own."""
    (tmp_path / "letters.py").write_text("from __future__ import annotations\n" + TASK)
    words = ["task=custom", f"task.source={tmp_path / 'letters.py'}:make", "task.held_out=3", "eval_every=1", QUIET]
    return [f"root={tmp_path / 'own'}", *fast(*words, without="task.")]


def without_warm_start(words: list[str]) -> list[str]:
    return [*(word for word in words if "warm_start" not in word), "model.warm_start=null"]


def test_a_task_of_the_user(letters, tmp_path):
    ended = launch(*letters)
    assert ended.code == 0, ended.err
    (run,) = run_folders(tmp_path / "own")
    assert record(run)["task"] == {"name": "custom", "version": 7}
    assert record(run)["warm_start"]["accuracy"] >= 0.4
    assert len(rows(run)) == 3 and rows(run, "evals")[0]["eval/prompts"] == 3


def test_a_changed_file_of_the_user_is_another_variant(letters, tmp_path):
    """An edited task must not be taken for the finished run of the old one, nor for its warm start."""
    assert launch(*letters).code == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "letters.py").write_text((tmp_path / "letters.py").read_text())
    moved = [word.replace(f"{tmp_path}/letters.py", f"{tmp_path}/elsewhere/letters.py") for word in letters]
    assert "skipped" in launch(*moved).out
    with (tmp_path / "letters.py").open("a") as file:
        file.write("\n# edited\n")
    assert launch(*letters).code == 0
    first, second = run_folders(tmp_path / "own")
    assert len(rows(first)) == len(rows(second)) == 3
    assert len(list((tmp_path / "own" / ".warmstart").glob("*.safetensors"))) == 2


def test_a_run_that_another_process_is_at_is_left_to_it(root):
    """F46: two starts of one cell do not write into one folder."""
    words = fast(f"root={root}", QUIET)
    assert launch(*words).code == 0
    (folder,) = run_folders(root)
    before = (folder / "run.json").read_text()
    with FileLock(folder / ".lock"):
        ended = launch(*words, "rerun=true")
    assert ended.code == 0 and "another process is running it" in ended.out
    assert (folder / "run.json").read_text() == before


@pytest.mark.parametrize("damage", ["truncated", "empty", "list"])
def test_a_run_with_a_damaged_record_is_taken_up_again(damage, root):
    """One damaged run.json must not stop a sweep: that run goes on from its checkpoint, and the others run."""
    words = fast(f"root={root}", QUIET, "updates=1")
    assert launch(*words).code == 0
    (folder,) = run_folders(root)
    (folder / "run.json").write_text({"truncated": '{"trunc', "empty": "", "list": "[]"}[damage])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"no": "update"}\n')
    ended = launch(*words, "seed=0,1", "-m")
    assert ended.code == 0 and "was damaged, goes on after update 1" in ended.out
    assert [len(rows(run)) for run in run_folders(root)] == [1, 1]


def test_a_file_in_place_of_the_run_folder_fails_that_run_alone(root):
    words = fast(f"root={root}", QUIET, "updates=1", "eval_every=1")
    assert launch(*words).code == 0
    (folder,) = run_folders(root)
    shutil.rmtree(folder)
    folder.write_text("in the way")
    ended = launch(*words, "seed=0,1", "-m")
    assert ended.code == 1 and "failed" in ended.out and "FileExistsError" in ended.out
    assert [record(run)["seed"] for run in run_folders(root)] == [1]


def test_failing_jobs_stop_no_other_and_are_all_told(letters, tmp_path):
    """F43, F44: two failures of three; status, phase and type are in the folder, the exit code is 1."""
    words = without_warm_start(letters)
    ended = launch(*words, "+task.settings.trouble=value", "seed=1,2,0", "-m")
    assert ended.code == 1 and "Traceback" not in ended.err
    table = ended.outcomes
    assert [line.split()[0] for line in table] == ["failed", "failed", "finished"]
    assert ended.out.count("in reward: ValueError: seed 1") == 2  # as it happens and in the table at the end
    assert [f"in reward: ValueError: seed {seed}" in line for seed, line in zip((1, 2), table, strict=False)] == [
        True
    ] * 2
    runs = by_seed(tmp_path / "own")
    assert {seed: record(run)["status"] for seed, run in runs.items()} == {0: "finished", 1: "failed", 2: "failed"}
    about = record(runs[1])
    assert (about["phase"], about["error"]) == ("reward", {"type": "ValueError", "message": "seed 1"})
    assert about["updates_done"] == 1 and about["end"] is not None
    started, event = rows(runs[1], "events")
    assert (started["kind"], event["kind"]) == ("started", "failed") and "in verify" in event["traceback"]


def test_after_a_failure_the_next_seed_has_its_own_tracked_run(letters, tmp_path):
    """F41: a crash must not leave its id to the next run."""
    words = [word for word in without_warm_start(letters) if word != QUIET]
    ended = launch(*words, "wandb.mode=offline", "+task.settings.trouble=value", "seed=1,0", "-m")
    assert ended.code == 1
    offline = {
        seed: [path.stem for path in run.glob("wandb/offline-run-*/*.wandb")]
        for seed, run in by_seed(tmp_path / "own").items()
    }
    assert len(offline[0]) == len(offline[1]) == 1 and offline[0] != offline[1]


def test_out_of_memory_is_an_outcome(letters, tmp_path):
    """F52: exit code 0, the sweep goes on."""
    ended = launch(*without_warm_start(letters), "+task.settings.trouble=memory", "seed=1,0", "-m")
    assert ended.code == 0, ended.err
    assert [line.split()[0] for line in ended.outcomes] == ["out_of_memory", "finished"]
    about = record(by_seed(tmp_path / "own")[1])
    assert (about["status"], about["phase"], about["error"]["type"]) == ("out_of_memory", "reward", "MemoryError")


def test_an_interrupt_from_the_keyboard_ends_the_sweep(letters, tmp_path):
    ended = launch(*without_warm_start(letters), "+task.settings.trouble=key", "seed=1,0", "-m")
    assert ended.code == 130 and "Traceback" not in ended.err
    (run,) = run_folders(tmp_path / "own")
    assert record(run)["status"] == "interrupted" and record(run)["updates_done"] == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_the_run_interrupted_and_it_starts_again(number, code, letters, tmp_path):
    words = ["updates=100000" if word.startswith("updates=") else word for word in without_warm_start(letters)]
    process = start(PROJECT, *words)
    metrics: list[Path] = []
    end = time.monotonic() + 100
    while not metrics and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
        metrics = list((tmp_path / "own").glob("*/*/metrics.jsonl"))
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in err, err
    (run,) = run_folders(tmp_path / "own")
    about = record(run)
    assert about["status"] == "interrupted" and about["updates_done"] == len(rows(run)) >= 1


MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM
import torch
from src.models import Policy, character_tokenizer

def make(settings):
    tokenizer = character_tokenizer("0123456789+-,=?")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=settings["width"], intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id))
    return Policy(model, tokenizer, (tokenizer.eos_token_id,))
"""

METHOD = """
import torch
from src.sketch.layer import Displacement, SketchedLayers

class SignDescent(torch.optim.Optimizer):
    def __init__(self, layers):
        self.layers, self.lefts = layers, {}
        super().__init__(list(layers.parameters.values()), {"lr": 0.0})

    def propose(self):
        rate = self.param_groups[0]["lr"]
        self.lefts = {name: -rate * p.grad.sign() for name, p in self.layers.parameters.items() if p.grad is not None}
        return {"signs": float(sum(left.numel() for left in self.lefts.values()))}

    def tangents(self):
        return self.layers.tangents({name: Displacement(left, None, 0.0) for name, left in self.lefts.items()})

    @torch.no_grad()
    def apply(self, step_scale):
        for name, left in self.lefts.items():
            self.layers.modules[name].weight += step_scale * left @ self.layers.projection(name)
        self.zero_grad()
        self.layers.draw += 1

def make(model, targets, seed, settings):
    return SignDescent(SketchedLayers(model, targets, settings["rank"], seed))
"""


def test_a_model_and_a_method_of_the_user(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "method.py").write_text(METHOD)
    words = [word for word in fast(QUIET) if not word.startswith(("model.", "method."))]
    ended = launch(
        f"root={tmp_path / 'own'}",
        *words,
        "model=custom",
        f"model.source={tmp_path / 'model.py'}:make",
        "+model.settings.width=16",
        "method=custom",
        f"method.source={tmp_path / 'method.py'}:make",
        "+method.settings.rank=3",
        "objective.random_rewards=true",
    )
    assert ended.code == 0, ended.err
    (run,) = run_folders(tmp_path / "own")
    about, metrics = record(run), rows(run)
    assert about["label"].startswith("custom-decay-custom-") and about["warm_start"] is None
    assert all(row["method/signs"] > 0 for row in metrics)
    assert any(row["control/realised_kl"] > 0 for row in metrics)
