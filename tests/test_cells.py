"""What a multirun's table says of its runs, and where its estimates come from."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from src import composition, config, identity
from src.cells import STALE_SECONDS, STATES, Cell, survey, table
from src.config import Config
from src.identity import Identity
from tests.runfolders import write_run

Job = tuple[Config, Identity]
NOW = 1_000_000.0
HERE = socket.gethostname()
MIB = 2**20


@pytest.fixture(scope="module")
def composed() -> dict[str, dict[str, Any]]:
    """The composed configurations with each control, in plain values."""
    return {control: composition.compose([f"control={control}"]) for control in ("none", "fixed")}


@pytest.fixture
def job(composed, tmp_path) -> Callable[..., Job]:
    """Makes a job of 100 updates, evaluated every 40, from dotted keys."""

    def make(control: str = "none", study: str = "grid", **changes: Any) -> Job:
        values = composed[control] | {"root": str(tmp_path), "updates": 100, "eval_every": 40, "study": study}
        for dotted, value in changes.items():
            group, _, key = dotted.partition("__")
            values[group] = values[group] | {key: value} if key else value
        typed = config.from_dict(values)
        return typed, identity.identify(typed, composed[control])

    return make


@pytest.fixture(scope="module")
def ended_pid() -> int:
    """The pid of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def leave(
    job: Job,
    done: int = 100,
    seconds: float | Sequence[float] = 1.0,
    evaluation: float = 0.0,
    peak: int = 100 * MIB,
    **record: Any,
) -> Path:
    """The folder of a job after `done` updates: seconds of each (or of all alike), of each evaluation, peak bytes."""
    typed, who = job
    each = [seconds] * done if isinstance(seconds, int | float) else seconds
    metrics: list[Mapping[str, Any]] = [
        {"update": update, "time/update_seconds": each[update - 1], "memory/peak_bytes": peak - 100 + update}
        for update in range(1, done + 1)
    ]
    updates = sorted({0, *range(0, done + 1, typed.eval_every), *([done] if done == typed.updates else [])})
    evals = [{"update": update, "time/evaluation_seconds": evaluation} for update in updates]
    record = {"checkpoint": {"update": done}} | record
    folder = write_run(
        Path(typed.root), who.label, typed.seed, evals, metrics, study=who.study, variant=who.variant, **record
    )
    assert folder == who.folder
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(typed), sort_keys=False))
    return folder


def test_a_killed_run_goes_on_from_its_checkpoint(job):
    """What was done after it is done again."""
    this = job()
    leave(this, 37, status="running", heartbeat=0.0, checkpoint={"update": 25})
    assert (one(this).done, one(this).seconds) == (25, pytest.approx(75.0))
    other = job(seed=1)
    leave(other, 37, status="interrupted", checkpoint=None)
    assert one(other).done == 0


def one(job: Job) -> Cell:
    (cell,) = survey([job], NOW)
    return cell


def test_a_finished_run_is_measured(job):
    this = job()
    leave(this, seconds=0.5, evaluation=2.0, peak=300 * MIB)
    cell = one(this)
    assert (cell.identity, cell.seed, cell.updates, cell.state, cell.done) == (this[1], 0, 100, "finished", 100)
    assert cell.seconds == 0.5 * 100 + 2.0 * 4  # evaluations at 0, 40, 80, 100
    assert (cell.peak_bytes, cell.reason, cell.basis) == (300 * MIB, "", "")


@pytest.mark.parametrize("status", ["failed", "out_of_memory"])
def test_a_failure_says_where_and_why(job, status):
    this = job()
    error = {"type": "ValueError", "message": "no such thing\nand a second line"}
    leave(this, 7, status=status, phase="backward", error=error)
    cell = one(this)
    assert (cell.state, cell.done, cell.seconds, cell.basis) == (status, 7, 7.0, "")
    assert cell.reason == "in backward: ValueError: no such thing"
    (this[1].folder / "run.json").write_text(json.dumps({"status": status, "phase": "load", "error": None}))
    assert one(this).reason == "in load"
    error = {"type": "MemoryError", "message": ""}
    (this[1].folder / "run.json").write_text(json.dumps({"status": status, "phase": "load", "error": error}))
    assert one(this).reason == "in load: MemoryError"


@pytest.mark.parametrize(
    ("age", "host", "state", "reason"),
    [
        (4, HERE, "running", "in rollout, pid {pid} on {host}, heartbeat 4 s ago"),
        (STALE_SECONDS, "elsewhere", "running", "in rollout, pid {pid} on {host}, heartbeat 60 s ago"),
        (STALE_SECONDS + 1, "elsewhere", "left", "killed"),
        (STALE_SECONDS + 1, HERE, "left", "killed"),
        (-500, "elsewhere", "running", "in rollout, pid {pid} on {host}, heartbeat 0 s ago"),
    ],
    ids=["here", "elsewhere", "silent elsewhere", "silent here", "clock ahead"],
)
def test_a_run_that_calls_itself_running(job, age, host, state, reason):
    this = job()
    leave(this, 12, status="running", heartbeat=NOW - age, process={"pid": os.getpid(), "host": host})
    cell = one(this)
    assert (cell.state, cell.done, cell.reason) == (state, 12, reason.format(pid=os.getpid(), host=host))


def test_a_pid_counts_on_its_own_host_only(job, ended_pid):
    here, there, another_users = job(seed=1), job(seed=2), job(seed=3)
    for this, pid, host in ((here, ended_pid, HERE), (there, ended_pid, "elsewhere"), (another_users, 1, HERE)):
        leave(this, 12, status="running", heartbeat=NOW - 1, process={"pid": pid, "host": host})
    assert [cell.state for cell in survey([here, there, another_users], NOW)] == ["left", "running", "running"]


def test_without_a_process_the_heartbeat_decides(job):
    this = job()
    leave(this, 12, status="running", heartbeat=NOW - 5)
    assert (one(this).state, one(this).reason) == ("running", "in rollout, heartbeat 5 s ago")
    assert survey([this])[0].reason == "killed", "without `now` it is the clock's"
    record = json.loads((this[1].folder / "run.json").read_text()) | {"heartbeat": time.time() - 1}
    (this[1].folder / "run.json").write_text(json.dumps(record))
    assert survey([this])[0].state == "running"


def test_what_is_left(job):
    new, interrupted, damaged, odd = job(seed=1), job(seed=2), job(seed=3), job(seed=4)
    leave(interrupted, 2, status="interrupted")
    (leave(damaged, 2) / "run.json").write_text('{"status": "fin')
    leave(odd, 2, status="paused")
    found = [(cell.state, cell.done, cell.reason) for cell in survey([new, interrupted, damaged, odd], NOW)]
    assert found == [("left", 0, ""), ("left", 2, "interrupted"), ("left", 0, ""), ("left", 2, "")]
    assert {state for state, _, _ in found} <= set(STATES)


def test_with_nothing_to_go_by_there_is_no_estimate(job):
    cell = one(job())
    assert (cell.seconds, cell.peak_bytes, cell.basis) == (None, None, "")


def test_an_estimate_is_the_median_over_the_nearest_finished_runs(job):
    for seed, (seconds, peak) in enumerate([(1.0, 10), (2.0, 20), (6.0, 60)], start=1):
        leave(job(seed=seed), seconds=seconds, evaluation=25.0, peak=peak * MIB)  # 4 evaluations: 1 s an update
    leave(job(method__rank=7), seconds=50.0)
    leave(job(control="fixed"), seconds=60.0)
    cell = one(job())
    assert (cell.state, cell.seconds, cell.peak_bytes) == ("left", 300.0, 20 * MIB)
    assert cell.basis == "3 finished runs of this variant"


def test_seconds_scale_with_the_updates_that_are_left(job):
    leave(job(updates=50), 50, seconds=2.0, evaluation=25.0)  # at 0, 40, 50
    interrupted = job()
    leave(interrupted, 2, seconds=9.0, peak=77 * MIB, status="interrupted")
    cell = one(interrupted)
    assert cell.seconds == (50 * 2.0 + 3 * 25.0) / 50 * 98
    assert cell.peak_bytes == 77 * MIB - 98, "two rows measure memory, not time"
    assert cell.basis == "1 finished run that differs in updates"


def test_the_seed_counts_less_than_any_other_key(job):
    leave(job(seed=3, method__rank=7), seconds=5.0)
    leave(job(seed=0, method__rank=7), seconds=4.0)
    assert one(job()).seconds == 400.0
    assert one(job()).basis == "1 finished run that differs in method.rank"
    leave(job(seed=8), seconds=3.0)
    assert one(job()).seconds == 300.0


def test_the_basis_names_what_differs(job):
    leave(job(method__rank=7))
    leave(job(method__refresh_every=7))
    assert one(job()).basis == "2 finished runs that differ in method.rank, method.refresh_every"
    cell = one(job(control="fixed", method__rank=7))
    assert cell.basis == "1 finished run that differs in control.name", "the budget comes with the control"


def test_bookkeeping_is_no_difference(job):
    leave(job(study="other", threads=7, samples_logged=3, checkpoint__every=9))
    assert one(job()).basis == "1 finished run of this variant"


def test_runs_of_another_model_task_or_device_say_nothing(job):
    leave(job(model__hidden_size=32))
    leave(job(task__max_number=123))
    this, who = job(study="cuda")
    leave((replace(this, device="cuda"), who))
    cell = one(job())
    assert (cell.seconds, cell.basis) == (None, "")


def test_only_finished_and_readable_runs_count(job):
    leave(job(seed=1), 90, seconds=9.0, status="failed")
    leave(job(study="hidden", seed=2), seconds=9.0).parent.rename(Path(job()[0].root) / ".hidden")
    hidden = leave(job(seed=3), seconds=9.0)
    hidden.rename(hidden.with_name(".old"))
    (leave(job(seed=4), seconds=9.0) / "config.yaml").write_text("a: [")
    (leave(job(seed=5), seconds=9.0) / "config.yaml").write_text("just words")
    (leave(job(seed=10), seconds=9.0) / "config.yaml").write_text("day: 2026-99-99")
    (leave(job(seed=6), seconds=9.0) / "config.yaml").unlink()
    (leave(job(seed=7), seconds=9.0) / "metrics.jsonl").unlink()
    (leave(job(seed=8), seconds=9.0) / "config.yaml").write_bytes(b"\xff\xfe\xff")
    blocked = leave(job(seed=9), seconds=9.0) / "run.json"
    blocked.unlink()
    blocked.mkdir()
    assert one(job()).basis == ""
    assert one(job(seed=9)).state == "left"
    leave(job(method__rank=7), seconds=3.0)
    cell = one(job())
    assert (cell.seconds, cell.basis) == (300.0, "1 finished run that differs in method.rank")


def test_three_updates_of_its_own_tell_more_than_other_runs(job):
    leave(job(seed=1), seconds=9.0)
    this = job()
    leave(this, 3, seconds=[8.0, 1.0, 2.0], evaluation=10.0, status="interrupted")
    cell = one(this)
    assert cell.seconds == 97 * 2.0 + 3 * 10.0  # the median update; evaluations at 40, 80, 100
    assert (cell.peak_bytes, cell.basis) == (100 * MIB - 97, "its own 3 updates")


@pytest.mark.parametrize(
    ("updates", "done", "evaluations"), [(100, 39, 3), (100, 40, 2), (100, 85, 1), (80, 79, 1), (120, 41, 2)]
)
def test_evaluations_that_are_left(job, updates, done, evaluations):
    this = job(updates=updates)
    leave(this, done, seconds=0.0, evaluation=1.0, status="interrupted")
    assert one(this).seconds == evaluations


def test_a_run_that_starts_again_evaluates_at_update_0_too(job):
    this = job()
    (leave(this, 5, seconds=0.0, evaluation=1.0) / "run.json").write_text("damaged")
    assert (one(this).done, one(this).seconds) == (0, 4.0)


def test_a_running_run_is_estimated_too(job):
    this = job()
    leave(this, 60, seconds=2.0, status="running", heartbeat=NOW)
    assert (one(this).seconds, one(this).basis) == (80.0, "its own 60 updates")


def test_rows_are_read_tolerantly(job):
    this = job()
    folder = leave(this, 3, seconds=2.0)
    more = ['{"update": 4, "time/update_seconds": null, "memory/peak_bytes": null}', '{"update": 5}', "null", "", "[1]"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join([*more, '{"update": 6, "time/update_seco']))
    with (folder / "evals.jsonl").open("ab") as file:
        file.write(b'\xff\x00\n{"update": 3, "time/evaluation_seconds": 0.25}\n')
    assert (one(this).seconds, one(this).peak_bytes) == (6.25, 100 * MIB - 97)


def test_many_runs_are_surveyed_at_once(job):
    cells = [job(seed=seed, method__rank=rank) for seed in range(3) for rank in range(1, 28)]
    for rank in range(1, 21):
        for seed in range(10, 15):
            leave(job(seed=seed, method__rank=rank))
    start = time.perf_counter()
    found = survey(cells, NOW)
    assert time.perf_counter() - start < 3
    assert len([cell for cell in found if cell.basis == "5 finished runs of this variant"]) == 60


def cell(state: str, label: str = "fixed", root: str = "outputs", **fields: Any) -> Cell:
    who = Identity(label, "1a2b3c4d", "grid", Path(root) / "grid" / f"{label}-s0-1a2b3c4d")
    about: dict[str, Any] = {"done": 0, "reason": "", "seconds": None, "peak_bytes": None, "basis": ""}
    return Cell(**{"identity": who, "seed": 0, "updates": 150, "state": state} | about | fields)


def test_the_table_as_a_whole():
    cells = [
        cell("finished", done=150, seconds=41.2, peak_bytes=round(56.34 * MIB)),
        cell("running", "r=4", done=37, seconds=62, peak_bytes=2000 * MIB, basis="x", reason="pid 1 on a"),
        cell("failed", "decay", done=3, seconds=0.42, peak_bytes=MIB, reason="in step: ValueError: no"),
        cell("left", "x" * 40, seconds=200, peak_bytes=round(56.3 * MIB), basis="2 finished runs of this variant"),
        cell("left", "none", reason="killed"),
    ]
    assert table(cells).splitlines() == [
        "state     updates         time       peak  run                     reason",
        "finished  150/150         41 s   56.3 MiB  grid/fixed-s0-1a2b3c4d",
        "running    37/150   ~1 min 2 s   ~2.0 GiB  grid/r=4-s0-1a2b3c4d    pid 1 on a",
        "failed      3/150        0.4 s    1.0 MiB  grid/decay-s0-1a2b3c4d  in step: ValueError: no",
        f"left        0/150  ~3 min 20 s  ~56.3 MiB  grid/{'x' * 40}-s0-1a2b3c4d",
        "left        0/150            -          -  grid/none-s0-1a2b3c4d   killed",
        "~ is an estimate: of time, what is still to do",
        "5 runs in outputs: 1 finished, 1 running, 1 failed, 0 out of memory, 2 left",
        "to do: about 4 min 22 s of training one after the other, warm starts apart "
        "(estimated from finished runs; 1 run has nothing to go by)",
        "retry_failed=true takes up failed and out-of-memory runs",
    ]


def test_a_table_without_estimates_and_failures_is_short():
    assert table([cell("finished", done=150, seconds=41, peak_bytes=MIB)]).splitlines() == [
        "state     updates  time     peak  run",
        "finished  150/150  41 s  1.0 MiB  grid/fixed-s0-1a2b3c4d",
        "1 run in outputs: 1 finished, 0 running, 0 failed, 0 out of memory, 0 left",
    ]


def test_what_is_left_names_its_sources():
    own, others, nothing = "its own 9 updates", "1 finished run that differs in method.rank", ""

    def left(*bases: str) -> str:
        cells = [cell("left", seconds=600 if basis else None, basis=basis) for basis in bases]
        (line,) = [line for line in table(cells).splitlines() if line.startswith("to do: ")]
        return line

    assert left(own).endswith(
        "about 10 min of training one after the other, warm starts apart (estimated from own updates)"
    )
    assert left(own, others).endswith(
        "about 20 min of training one after the other, warm starts apart (estimated from finished runs and own updates)"
    )
    assert left(others, nothing, nothing).endswith("(estimated from finished runs; 2 runs have nothing to go by)")
    assert left(nothing) == "to do: no finished run of this model, task and device to estimate the time from"


def test_what_runs_is_still_to_do():
    """Whoever does it: the time is that until all is done."""
    text = table([cell("running", seconds=600, basis="its own 9 updates"), cell("left", seconds=60, basis="x")])
    assert "to do: about 11 min of training" in text


def test_out_of_memory_alone_is_hinted_at_too():
    assert table([cell("out_of_memory")]).splitlines()[-2:] == [
        "1 run in outputs: 0 finished, 0 running, 0 failed, 1 out of memory, 0 left",
        "retry_failed=true takes up failed and out-of-memory runs",
    ]


def test_of_more_than_forty_runs_the_finished_ones_are_counted():
    cells = [cell("finished", f"n{number}") for number in range(39)] + [cell("left", "one more")]
    assert len(table(cells).splitlines()) == 1 + 40 + 2
    lines = table([*cells, cell("left", "another")]).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["state", "left", "left"]
    assert lines[3] == "39 finished runs not listed, for there are more than 40"
    assert lines[4].startswith("41 runs in outputs: 39 finished, ")
    finished = [cell("finished") for _ in range(41)]
    assert table(finished).splitlines() == [
        "41 finished runs not listed, for there are more than 40",
        "41 runs in outputs: 41 finished, 0 running, 0 failed, 0 out of memory, 0 left",
    ]


def test_folders_are_whole_where_roots_differ():
    lines = table([cell("left", root="b"), cell("left", root="a")]).splitlines()
    assert lines[1].split()[-1] == "b/grid/fixed-s0-1a2b3c4d" and lines[2].split()[-1] == "a/grid/fixed-s0-1a2b3c4d"
    assert lines[3].startswith("2 runs in a, b: ")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0.0 s"),
        (0.42, "0.4 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (599.4, "9 min 59 s"),
        (599.6, "10 min"),
        (1630, "27 min"),
        (3590, "1 h"),
        (7490, "2 h 5 min"),
        (360_000, "100 h"),
    ],
)
def test_times_in_words(seconds, words):
    row = table([cell("finished", seconds=seconds, peak_bytes=0)]).splitlines()[1]
    assert row.partition("0/150")[2].partition("0.0 MiB")[0].strip() == words


@pytest.mark.parametrize(
    ("size", "words"), [(56.34, "56.3 MiB"), (1023.9, "1023.9 MiB"), (1023.96, "1.0 GiB"), (1229, "1.2 GiB")]
)
def test_sizes_in_words(size, words):
    assert f"  {words}  grid/" in table([cell("finished", peak_bytes=round(size * MIB))])
