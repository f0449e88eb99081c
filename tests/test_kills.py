"""Killed runs, completed by the same command, equal undisturbed ones; and the comparison that says so can fail."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from tests import kills
from tests.launching import fast
from tests.runfolders import write_rows, write_run


def test_three_kills_leave_what_an_undisturbed_run_leaves(warm_root, tmp_path):
    """In the middle of training, at its end, and twice in one run."""
    planned = [("dense-all", (0.8,)), ("reuse3-reference", (0.75, 0.85))]
    done = kills.trials(planned, tmp_path, warm_root, jobs=2)
    assert [trial.difference for trial in done] == ["", ""]
    assert [trial.arm for trial in done] == ["dense-all", "reuse3-reference"]
    assert sum(trial.kills for trial in done) >= 2, "a process that ended before its kill was not killed"


@pytest.mark.slow
def test_fifty_kills(warm_root, tmp_path):
    done = kills.trials(kills.plan(50, seed=0), tmp_path, warm_root, jobs=2)
    assert [trial.difference for trial in done if not trial.identical] == []
    assert sum(trial.kills for trial in done) >= 50 and {trial.arm for trial in done} == set(kills.ARMS)
    assert len({stage for trial in done for stage in trial.stages.split("+")}) >= 3


@pytest.mark.slow
def test_a_grid_killed_five_times_equals_one_that_was_not(warm_root, tmp_path):
    starts, wrong = kills.grid(5, seed=0, root=tmp_path, warm=warm_root)
    assert wrong == []
    assert [start.killed for start in starts] == [True] * 5 + [False]
    assert sum(start.finished for start in starts) == 27 and starts[-1].cut_off == "-"
    assert [start.skipped for start in starts] == sorted(start.skipped for start in starts)


# The plan


def test_a_plan_is_its_seed_s_and_gives_every_arm_its_share():
    plan = kills.plan(50, seed=0)
    assert plan == kills.plan(50, seed=0) != kills.plan(50, seed=1)
    assert plan[:3] == kills.plan(3, seed=0)
    arms = [arm for arm, _ in plan]
    assert all(arms.count(arm) in (8, 9) for arm in kills.ARMS)
    assert {len(shares) for arm, shares in plan if arm == "decay"} == {1, 2}
    assert sum(len(shares) == 2 for _, shares in plan) == 24
    shares = sorted(share for _, shares in plan for share in shares)
    assert 0 <= shares[0] < 0.1 and 0.9 < shares[-1] <= 1


# Killing


def sleeper(root: Path) -> subprocess.Popen[bytes]:
    """A process that has started another one, in a group of their own; the other's number is in ROOT/child."""
    code = (
        "import subprocess, sys, time, pathlib;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"pathlib.Path({str(root / 'child')!r}).write_text(str(child.pid) + '.'); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    while not (root / "child").exists() or not (root / "child").read_text().endswith("."):
        assert process.poll() is None
        time.sleep(0.01)
    return process


def test_a_kill_takes_the_whole_group_and_tells_whether_it_came_in_time(tmp_path):
    process = sleeper(tmp_path)
    child = Path("/proc") / (tmp_path / "child").read_text().rstrip(".") / "stat"
    assert kills.kill(process) and process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.exists() or child.read_text().split()[2] == "Z"
    ended = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    ended.wait()
    assert not kills.kill(ended)


def test_a_start_that_fails_is_told(tmp_path):
    assert "a start ended with code 1: error: updates must be" in kills.complete(["updates=0"], tmp_path)


# The comparison


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal run folders with everything that a finished run has, in roots of their own; times and events differ."""
    folders = []
    for second, name in enumerate(("ours", "theirs")):
        root = tmp_path / name
        folder = write_run(
            root,
            "decay",
            0,
            evals=[{"update": 0, "eval/accuracy": 0.5, "time/evaluation_seconds": second}],
            metrics=[{"update": u, "policy/loss": 0.1 * u, "time/update_seconds": u + second} for u in (1, 2, 3)],
            heartbeat=second,
        )
        write_rows(folder / "memory.jsonl", [{"update": u, "rollout_peak_bytes": 1000 + u} for u in (1, 2, 3)])
        write_rows(folder / "samples.jsonl", [{"update": 0, "prompt": "1,2=3?", "response": "1+2"}])
        (folder / "config.yaml").write_text(yaml.safe_dump({"seed": 0, "updates": 3, "root": str(root)}))
        (folder / ".lock").touch()
        (folder / "policy").mkdir()
        save_file({"weight": torch.arange(6.0).view(2, 3)}, folder / "policy" / "model.safetensors")
        (folder / "checkpoints").mkdir()
        save_checkpoint(folder, "0123456789abcdef" if second else "fedcba9876543210")
        folders.append(folder)
    write_rows(folders[0] / "events.jsonl", [{"time": 1.0, "update": 2, "kind": "resumed"}])
    return folders[0], folders[1]


def save_checkpoint(folder: Path, digest: str = "fedcba9876543210", update: int = 3, **changed: object) -> None:
    state = {"weight": torch.arange(6.0).view(2, 3), "rows": [1, 2.5, "a", None], "nan": float("nan"), "draw": 7}
    torch.save({"update": update, "state": state | changed}, folder / "checkpoints" / f"update-000003-{digest}.pt")


def differences(pair: tuple[Path, Path]) -> list[str]:
    return list(kills.differences(*pair))


def test_equal_folders_are_equal(pair):
    assert differences(pair) == []


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("metrics.jsonl", "0.2,", "0.20000000000000004,", "row 2 (update 2) ['policy/loss'] is 0.20000000000000004,"),
        ("metrics.jsonl", '0.2, "time', '0.2, "more": 1, "time', "row 2 (update 2) ['more'] is one too many"),
        ("metrics.jsonl", '"policy/loss": 0.1,', "", "row 1 (update 1) ['policy/loss'] is missing"),
        ("metrics.jsonl", '{"update": 3', '{"update": 4', "row 3 (update 4) ['update'] is 4, not 3"),
        ("memory.jsonl", "1003", "1004", "row 3 (update 3) ['rollout_peak_bytes'] is 1004, not 1003"),
        ("memory.jsonl", "1003", "1003.0", "row 3 (update 3) ['rollout_peak_bytes'] is a float, not a int"),
        ("evals.jsonl", "0.5", "null", "row 1 (update 0) ['eval/accuracy'] is a NoneType, not a float"),
        ("samples.jsonl", "1+2", "2+1", "row 1 (update 0) ['response'] is '2+1', not '1+2'"),
        ("config.yaml", "updates: 3", "updates: 4", "['updates'] is 4, not 3"),
        ("run.json", '"finished"', '"running"', "status is 'running', not 'finished'"),
        ("run.json", '"updates_done": 3', '"updates_done": 2', "updates_done is 2, not 3"),
        ("run.json", '"0123abcd"', '"0123abce"', "warm_start['hash'] is '0123abce', not '0123abcd'"),
        ("run.json", '{"schema', '"schema', "cannot be compared: JSONDecodeError"),
    ],
)
def test_a_changed_value_is_told(file, old, new, told, pair):
    edit(pair[0] / file, old, new)
    first, *_ = differences(pair)
    assert first.startswith(file) and told in first


def test_both_unfinished_is_no_success(pair):
    for folder in pair:
        edit(folder / "run.json", '"finished"', '"running"')
    assert differences(pair) == ["run.json: status is 'running', not finished"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda lines: lines[:-1], "row 3 (update 3) is missing"),
        (lambda lines: [lines[0], *lines[2:]], "row 2 (update 3) ['update'] is 3, not 2"),
        (lambda lines: [*lines, lines[-1]], "row 4 (update 3) is one too many"),
        (lambda lines: [*lines, b'{"update": 4'], "the last line is cut off"),
        (lambda lines: [lines[0], b'{"upda\n', *lines[2:]], "cannot be compared: JSONDecodeError"),
    ],
)
def test_a_missing_doubled_or_damaged_row_is_told(change, told, pair):
    path = pair[0] / "metrics.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    first, *_ = differences(pair)
    assert first.startswith("metrics.jsonl") and told in first


def test_a_changed_bit_of_the_policy_is_told(pair):
    path = pair[0] / "policy" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    size = len(content)
    assert differences(pair) == [f"policy/model.safetensors: byte {size - 1} of {size} differs"]
    path.write_bytes(content[:-4])
    assert differences(pair) == [f"policy/model.safetensors: byte {size - 4} of {size - 4} differs"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"weight": torch.arange(6.0).view(2, 3).nextafter(torch.tensor(9.0))}, "['weight'] has other bits"),
        ({"weight": torch.arange(6.0).view(3, 2)}, "['weight'] is torch.float32 (3, 2), not torch.float32 (2, 3)"),
        ({"weight": torch.arange(6.0).view(2, 3).double()}, "['weight'] is torch.float64 (2, 3), not torch.float32"),
        ({"weight": torch.tensor([[-0.0, 1, 2], [3, 4, 5]])}, "['weight'] has other bits"),
        ({"weight": [0.0, 1.0]}, "['weight'] is a list, not a Tensor"),
        ({"rows": [1, 2.5, "a"]}, "['rows'] has 3 entries, not 4"),
        ({"rows": [1, 2.5, "b", None]}, "['rows'][2] is 'b', not 'a'"),
        ({"draw": 8}, "['draw'] is 8, not 7"),
        ({"nan": 0.0}, "['nan'] is 0.0, not nan"),
        ({"more": 1}, "['more'] is one too many"),
    ],
)
def test_a_changed_checkpoint_is_told(changed, told, pair):
    save_checkpoint(pair[0], **changed)
    (found,) = differences(pair)
    assert found.startswith(f"checkpoints/update-000003.pt: ['state']{told}")


def test_tensors_without_dimensions_with_nan_and_transposed_are_compared_by_their_bits():
    for tensor in (torch.tensor(1), torch.tensor([float("nan")]), torch.arange(6).view(2, 3).T, torch.zeros(0)):
        assert list(kills.tree_differences(tensor, tensor.clone())) == []
    assert list(kills.tree_differences(torch.tensor(True), torch.tensor(False))) == [" has other bits"]


def test_a_checkpoint_too_many_too_few_or_twice_is_told(pair):
    (path,) = (pair[0] / "checkpoints").iterdir()
    twin = path.with_name("update-000003-0000000000000000.pt")
    shutil.copy(path, twin)
    assert differences(pair) == ["checkpoints/update-000003.pt is there 2 times, not 1"]
    twin.rename(path.with_name("update-000002-0000000000000000.pt"))
    assert differences(pair) == ["checkpoints/update-000002.pt is there 1 times, not 0"]
    shutil.rmtree(path.parent)
    assert differences(pair) == ["checkpoints/update-000003.pt is there 0 times, not 1"]


def test_a_missing_folder_differs_in_everything(pair):
    shutil.rmtree(pair[0])
    assert len(differences(pair)) == 8


@pytest.mark.parametrize("name", [".run.json.tmp", "policy/model.tmp", "checkpoints/.checkpoint.tmp", ".policy.tmp"])
def test_a_leftover_is_told(name, pair):
    (pair[0] / name).write_text("")
    assert f"{name} is left over" in differences(pair)
    (pair[1] / name).write_text("")
    assert differences(pair) == [f"{name} is left over"]


def test_a_leftover_folder_is_told(pair):
    (pair[0] / ".policy.tmp").mkdir()
    assert differences(pair) == [".policy.tmp is left over"]


# What a kill leaves


def test_a_cut_off_last_line_and_a_broken_temporary_file_are_readable_and_nothing_else(pair):
    folder, _ = pair
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"update": 4')
    (folder / ".run.json.tmp").write_text('{"sche')
    assert list(kills.unreadable(folder)) == [] == list(kills.unreadable(folder / "nowhere"))
    for name, content in (
        ("metrics.jsonl", b'{"update": 4\n{"update": 5}\n'),
        ("run.json", b""),
        ("config.yaml", b"{"),
        ("checkpoints/update-000004-0123456789abcdef.pt", b"PK"),
    ):
        (folder / name).write_bytes(content)
    told = [found.split()[3] for found in kills.unreadable(folder)]
    assert told == ["checkpoints/update-000004-0123456789abcdef.pt", "config.yaml", "metrics.jsonl", "run.json"]


def test_where_a_run_was_killed(tmp_path):
    folder = tmp_path / "run"

    def stage() -> str:
        return kills.place(folder, pid=7).stage

    def write_record(**fields: object) -> None:
        about = {"status": "running", "phase": "load", "updates_done": 1, "process": {"pid": 7}}
        (folder / "run.json").write_text(json.dumps(about | fields))

    assert kills.place(folder, pid=7) == kills.Place("start", "-", 0)
    (folder / "checkpoints").mkdir(parents=True)
    write_record()
    assert kills.place(folder, pid=7) == kills.Place("load", "load", 1)
    assert kills.place(folder, pid=8) == kills.Place("start", "load", 1)
    write_rows(folder / "evals.jsonl", [{"update": 0}])
    assert stage() == "update"
    write_rows(folder / "metrics.jsonl", [{"update": update} for update in range(1, kills.EVAL_EVERY + 1)])
    assert stage() == "evaluation"
    write_rows(folder / "evals.jsonl", [{"update": 0}, {"update": kills.EVAL_EVERY}])
    assert stage() == "update"
    (folder / "checkpoints" / ".checkpoint.tmp").touch()
    assert stage() == "write checkpoints"
    (folder / "checkpoints" / ".checkpoint.tmp").unlink()
    write_rows(folder / "metrics.jsonl", [{"update": kills.UPDATES}])
    write_rows(folder / "evals.jsonl", [{"update": 0}, {"update": kills.UPDATES}])
    assert stage() == "end"
    write_record(status="finished")
    assert stage() == "exit" and kills.place(folder, pid=8).stage == "start"


# The command


def test_the_command_refuses_a_root_that_has_runs(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "tests.kills", "--root", str(tmp_path)],
        cwd=kills.PROJECT,
        env=os.environ,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2 and "exists already" in ended.stderr


def test_the_table_counts(tmp_path):
    one = kills.Trial("dense", "0.100+0.200", 2, "start+update", "-+load", "0+0", "4", 9.0, True, "")
    two = kills.Trial(
        "decay", "0.999", 0, "ended", "-", "72", "-", 9.0, False, "run.json: status is 'failed', not finished"
    )
    lines = kills.table([one, two]).splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["dense", "1", "2", "1"],
        ["decay", "1", "0", "0"],
        ["all", "2", "2", "1"],
    ]
    assert lines[1].endswith("start 1, update 1 | 4") and lines[3].endswith("| - 4")
    kills.write_csv(tmp_path / "new" / "kills.csv", "python -m tests.kills", [vars(one), vars(two)])
    comment, header, *rows = (tmp_path / "new" / "kills.csv").read_text().splitlines()
    assert comment == "# python -m tests.kills" and header.startswith("arm,shares,kills,") and len(rows) == 2
    assert rows[1].endswith("\"run.json: status is 'failed', not finished\"")


def test_words_are_the_fast_preset_s():
    assert fast("updates=6")[0] in kills.grid_words()
    assert not [word for word in kills.train_words("dense") if word.startswith("method.rank")]
