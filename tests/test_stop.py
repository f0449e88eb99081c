"""Stops: signals and the clock end a run after its update, with a checkpoint; a second signal ends it at once."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from src import checkpoint
from src.stop import CLOCK_CODE, Stop, Stopped
from tests.launching import PROJECT, Ended, fast, launch, record, rows, run_folders

# A task that fires once, when and how a file beside it says: `WHERE UPDATE SIGNALS`.
TASK = """
import os, pathlib, signal
from dataclasses import dataclass
from src.tasks import Item, Verdict

ORDER = pathlib.Path(__file__).with_name("order")

def fire(where, update):
    if ORDER.exists():
        place, at, *signals = ORDER.read_text().split()
        if place == where and int(at) == update:
            ORDER.unlink()
            for name in signals:
                os.kill(os.getpid(), getattr(signal, name))

@dataclass
class Letters:
    name: str = "letters"
    version: int = 1
    alphabet: str = "abcd"
    chat: bool = False

    def training_item(self, seed, update, index):
        letter = "abc"[(seed + update + index) % 3]
        prompt = letter + ("bc", "cb", "bd", "db", "cd", "dc", "bb", "cc")[index % 8]
        return Item(prompt, prompt, (letter, update))

    def held_out(self, count):
        return [Item(letter + "dd", letter + "dd", (letter, 0)) for letter in "abc"[:count]]

    def demonstration(self, item):
        return item.answer[0]

    def verify(self, item, response):
        letter, update = item.answer
        fire("update" if update else "evaluation", update)
        right = response == letter
        return Verdict("correct" if right else "wrong", float(right), response)

def make(settings):
    fire("load", 0)
    return Letters(**settings)
"""


@pytest.fixture
def letters(tmp_path: Path) -> list[str]:
    (tmp_path / "letters.py").write_text(TASK)
    words = fast(
        "task=custom",
        f"task.source={tmp_path / 'letters.py'}:make",
        "task.held_out=3",
        "model.warm_start=null",
        "updates=5",
        "eval_every=3",
        "wandb.mode=disabled",
        without="task.",
    )
    return [word for word in words if not word.startswith("model.warm_start.")]


def order(tmp_path: Path, text: str) -> None:
    (tmp_path / "order").write_text(text)


def start(tmp_path: Path, *words: str) -> Ended:
    return launch(f"root={tmp_path / 'outputs'}", *words)


def content(folder: Path) -> list[object]:
    policy = (folder / "policy" / "model.safetensors").read_bytes()
    return [*(rows(folder, name) for name in ("metrics", "memory", "evals", "samples")), policy]


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_a_signal_finishes_the_update_and_the_same_command_goes_on(name, code, letters, tmp_path):
    """The second of five updates ends, a checkpoint is there, and the end is the undisturbed run's."""
    assert start(tmp_path / "undisturbed", *letters).code == 0
    order(tmp_path, f"update 2 {name}")
    ended = start(tmp_path, *letters)
    (folder,) = run_folders(tmp_path / "outputs")
    assert ended.code == code and "Traceback" not in ended.err
    assert ended.outcomes == [f"interrupted    {folder}  by {name} after update 2; the same command goes on"]
    about = record(folder)
    assert (about["status"], about["updates_done"], about["error"]) == (
        "interrupted",
        2,
        {"type": "Stopped", "message": name},
    )
    assert [update for update, _ in checkpoint.found(folder / "checkpoints")] == [2] and len(rows(folder)) == 2
    assert not (folder / "policy").exists()
    again = start(tmp_path, *letters)
    assert again.code == 0 and "was interrupted, goes on after update 2" in again.out
    (undisturbed,) = run_folders(tmp_path / "undisturbed" / "outputs")
    assert content(folder) == content(undisturbed)


def test_a_second_signal_ends_at_once_and_nothing_is_lost(letters, tmp_path):
    assert start(tmp_path / "undisturbed", *letters).code == 0
    order(tmp_path, "update 5 SIGTERM SIGTERM")
    ended = start(tmp_path, *letters)
    (folder,) = run_folders(tmp_path / "outputs")
    assert ended.code == 143 and "Traceback" not in ended.err
    assert (record(folder)["status"], record(folder)["updates_done"]) == ("interrupted", 4)
    assert [update for update, _ in checkpoint.found(folder / "checkpoints")] == [3]  # before the evaluation
    again = start(tmp_path, *letters)
    assert again.code == 0 and "goes on after update 3" in again.out
    (undisturbed,) = run_folders(tmp_path / "undisturbed" / "outputs")
    assert content(folder) == content(undisturbed)


def test_a_signal_in_an_evaluation_ends_it_and_it_is_made_again(letters, tmp_path):
    assert start(tmp_path / "undisturbed", *letters).code == 0
    for signal_at, done in (("evaluation 0 SIGTERM", 0), ("evaluation 0 SIGINT", 0)):
        order(tmp_path, signal_at)
        ended = start(tmp_path, *letters)
        (folder,) = run_folders(tmp_path / "outputs")
        assert ended.code in (130, 143) and record(folder)["updates_done"] == done
        assert record(folder)["phase"] == "evaluation" and not (folder / "evals.jsonl").exists()
    again = start(tmp_path, *letters)
    assert again.code == 0, again.err
    (undisturbed,) = run_folders(tmp_path / "undisturbed" / "outputs")
    assert content(folder) == content(undisturbed)


def test_a_signal_while_loading_leaves_a_run_to_begin(letters, tmp_path):
    order(tmp_path, "load 0 SIGTERM")
    ended = start(tmp_path, *letters)  # the checks load the task before any run is begun
    assert ended.code == 143 and "Traceback" not in ended.err + ended.out
    assert start(tmp_path, *letters).code == 0


def test_a_signal_leaves_the_rest_of_a_multirun(letters, tmp_path):
    order(tmp_path, "update 2 SIGTERM")
    ended = start(tmp_path, *letters, "seed=0,1,2", "-m")
    assert ended.code == 143
    assert [line.split()[0] for line in ended.outcomes] == ["interrupted"]
    assert "0 finished, 0 running, 0 failed, 0 out of memory, 3 left" in ended.out
    assert len(run_folders(tmp_path / "outputs")) == 1
    again = start(tmp_path, *letters, "seed=0,1,2", "-m")
    assert again.code == 0 and [line.split()[0] for line in again.outcomes] == ["finished"] * 3


def test_the_clock_stops_as_a_signal_does(letters, tmp_path):
    many = [*(word for word in letters if not word.startswith("updates=")), "updates=100000", "eval_every=1000"]
    ended = start(tmp_path, *many, "max_seconds=3")
    (folder,) = run_folders(tmp_path / "outputs")
    done = record(folder)["updates_done"]
    assert ended.code == CLOCK_CODE and f"by max_seconds=3 after update {done}" in ended.out
    assert [update for update, _ in checkpoint.found(folder / "checkpoints")][0] == done == len(rows(folder)) > 0
    for thread in threading.enumerate():  # neither timer nor heartbeat is left
        if thread.name == "heartbeat" or isinstance(thread, threading.Timer):
            thread.join(5)
            assert not thread.is_alive()


def test_a_real_process_stops_on_a_signal_to_its_group(letters, tmp_path):
    """As Ctrl-C in a terminal, which also reaches the W&B client's process."""
    many = [*(word for word in letters if not word.startswith(("updates=", "wandb."))), "updates=100000"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    process = subprocess.Popen(
        [sys.executable, "-m", "src.train", f"root={tmp_path / 'outputs'}", *many],
        cwd=PROJECT,
        env=kept | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    end = time.monotonic() + 100
    while not list((tmp_path / "outputs").glob("*/*/metrics.jsonl")) and time.monotonic() < end:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err, err
    (folder,) = run_folders(tmp_path / "outputs")
    about = record(folder)
    assert about["status"] == "interrupted" and about["updates_done"] == len(rows(folder)) >= 1
    assert checkpoint.found(folder / "checkpoints")[0][0] == about["updates_done"]
    assert f"interrupted    {folder}  by SIGINT after update {about['updates_done']}" in out


def test_a_task_that_takes_the_signals_for_itself_does_not_keep_them(letters, tmp_path):
    taking = TASK + "\nsignal.signal(signal.SIGTERM, lambda *_: None)\n"
    (tmp_path / "letters.py").write_text(taking)
    order(tmp_path, "update 2 SIGTERM")
    ended = start(tmp_path, *letters)
    assert ended.code == 143 and "by SIGTERM after update 2" in ended.out


def test_deferred_and_at_once():
    stop = Stop()
    with stop.listening():
        with pytest.raises(Stopped, match="SIGTERM"), stop.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            reached = stop.reason
        assert reached == "SIGTERM" and stop.code == 143
        with pytest.raises(Stopped):
            stop.check()
        with pytest.raises(KeyboardInterrupt), stop.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    stop = Stop()
    with stop.listening(), pytest.raises(Stopped, match="SIGINT"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_the_clock_is_no_first_signal():
    """A scheduler's SIGTERM after max_seconds still lets the update end."""
    stop = Stop()
    with stop.listening():
        stop.after(0.05)
        with pytest.raises(Stopped, match="max_seconds=0.05"), stop.deferred():
            time.sleep(0.3)
            assert stop.reason == "max_seconds=0.05"
            os.kill(os.getpid(), signal.SIGTERM)
            reached = True
        assert reached and stop.code == CLOCK_CODE


def test_handlers_are_put_back_and_what_is_ignored_stays_ignored():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop().listening():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != handlers[signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, handlers[signal.SIGHUP])


def test_an_error_inside_goes_before_a_stop():
    stop = Stop()
    with stop.listening(), pytest.raises(ValueError), stop.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError
    assert json.dumps(stop.reason) == '"SIGTERM"'
