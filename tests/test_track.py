"""The run folder and its W&B mirror, with the real client: offline, and online against a loopback fake."""

import gc
import inspect
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from src.runfolder import cut_back, read_record
from src.stop import Stopped
from src.track import TABLE_ROWS, Run, check_login, open_run
from tests.fake_wandb import API_KEY, ENTITY, PROJECT, FakeWandb, fake_wandb
from tests.launching import fast, launch, run_folders

CONFIG = {"seed": 0, "control": {"name": "fixed", "budget": 0.01}, "task": {"name": "copy", "levels": [1, 2]}}


def record(label: str = "fixed", seed: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "id": f"{label}-s{seed}-0123abcd",
        "study": "main",
        "label": label,
        "seed": seed,
        **fields,
    }


def choice(mode: str = "offline") -> SimpleNamespace:
    return SimpleNamespace(mode=mode, project=PROJECT, entity=None, tags=["quick"])


@pytest.fixture(autouse=True)
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A W&B client that knows no account, keeps its files below tmp_path, and starts anew in each test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(home / name))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the client never waits for its service's process
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()
        gc.collect()


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of one file, read strictly: bare nan is no JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    path = folder / f"{name}.jsonl"
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()] if path.exists() else []


def log_records(path: Path) -> list[Any]:
    """The records of a .wandb file: after 7 bytes, LevelDB log blocks of 32 KiB that hold protobufs."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, at, part, records = path.read_bytes(), 7, b"", []
    while at + 7 <= len(raw):  # what lies behind may still be in the writing
        if 32768 - at % 32768 < 7:  # a block's tail too short for a header is padding
            at += 32768 - at % 32768
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", raw, at)
        if at + 7 + length > len(raw):
            break
        part += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            records.append(Record.FromString(part))
            part = b""
    return records


def read_mirror(folder: Path) -> list[Any]:
    """All records of the one W&B run below a run folder; waits for its exit, which the client writes late."""
    (path,) = folder.glob("wandb/*run-*/*.wandb")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        records = log_records(path)
        if any(one.WhichOneof("record_type") == "exit" for one in records):
            return records
        time.sleep(0.02)
    raise AssertionError(f"{path} has no exit record")


def history(folder: Path) -> list[dict[str, Any]]:
    """The logged rows in a .wandb file, less the client's own keys."""
    found = []
    for one in read_mirror(folder):
        if one.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in one.history.item}
            found.append({key: value for key, value in items.items() if not key.startswith("_")})
    return found


def in_order(found: list[dict[str, Any]]) -> list[str]:
    """Rows as text, for comparing whatever the order of rows and keys."""
    return sorted(json.dumps(row, sort_keys=True) for row in found)


def as_floats(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: float(value) for key, value in row.items()} for row in found]


def mirror_id(folder: Path) -> str:
    return next(one.run.run_id for one in read_mirror(folder) if one.WhichOneof("record_type") == "run")


def exit_code(folder: Path) -> int:
    return next(one.exit.exit_code for one in read_mirror(folder) if one.WhichOneof("record_type") == "exit")


def log_three(run: Run) -> None:
    run.log_eval({"update": 0, "eval/accuracy": 0.25, "eval/prompts": 8})
    for update in (1, 2, 3):
        run.log_memory({"update": update, "memory/peak_bytes": 1 << 40})
        run.log_update({"update": update, "reward/mean": 0.1 * update, "control/binds": update % 2})
        run.log_eval({"update": update, "eval/accuracy": 0.25 + 0.1 * update, "eval/prompts": 8})


def test_importing_is_quick() -> None:
    code = "import sys, src.track; print([name for name in ('wandb', 'torch', 'hydra') if name in sys.modules])"
    root = Path(__file__).parents[1]
    assert subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True).strip() == "[]"


def test_offline_mirror_has_the_rows_of_the_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """F56, F50: metrics and evals of one update both arrive, with all digits; the config is nested."""
    folder = tmp_path / "main" / "fixed-s0"
    with open_run(folder, record(), CONFIG, choice()) as run:
        log_three(run)
    metrics, memory, evals = (rows(folder, name) for name in ("metrics", "memory", "evals"))
    assert (len(metrics), len(memory), len(evals)) == (3, 3, 4)
    assert in_order(history(folder)) == in_order(metrics + memory + evals)
    assert exit_code(folder) == 0
    run_record = next(one.run for one in read_mirror(folder) if one.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in run_record.config.update}
    assert {key: config[key] for key in CONFIG} == CONFIG
    assert (run_record.run_group, run_record.display_name, run_record.job_type) == (
        "fixed",
        "fixed-s0",
        "train",
    )
    assert list(run_record.tags) == ["quick", "main"]
    assert OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")) == CONFIG
    final = read_record(folder)
    assert final and final["status"] == "finished" and final["updates_done"] == 3 and final["error"] is None
    assert final["start"] <= final["heartbeat"] <= final["end"] + 1
    assert list(Path.cwd().iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_a_trained_run_is_mirrored_row_by_row(tmp_path: Path) -> None:
    """F56: in the order in which the trainer writes them, none is taken for one that W&B has."""
    words = fast(
        "wandb.mode=offline", "model.warm_start=null", f"root={tmp_path / 'root'}", without="model.warm_start."
    )
    ended = launch(*words)
    assert ended.code == 0, ended.err
    (folder,) = run_folders(tmp_path / "root")
    local = [row for name in ("metrics", "memory", "evals") for row in rows(folder, name)]
    mirrored = history(folder)
    tables = [row for row in mirrored if any(key.startswith("samples") for key in row)]
    events = [row for row in mirrored if "event/kind" in row]
    numbers = [row for row in mirrored if row not in tables + events]
    assert in_order(as_floats(numbers)) == in_order(as_floats(local))  # the client writes 0.0 as 0
    assert [row["update"] for row in tables] == [0, 2, 3] and [row["event/kind"] for row in events] == ["started"]


def test_step_metric_is_the_update(tmp_path: Path) -> None:
    """F55: curves are drawn over the update; a row that W&B has passed already is not there twice."""
    with open_run(tmp_path / "run", record(), CONFIG, choice()) as run:
        for update in (1, 2, 3, 2, 3, 4):
            run.log_update({"update": update, "reward/mean": 0.5})
    assert [row["update"] for row in history(tmp_path / "run")] == [1, 2, 3, 4]
    metrics = [one.metric for one in read_mirror(tmp_path / "run") if one.WhichOneof("record_type") == "metric"]
    defined = [(metric.name, metric.glob_name, metric.step_metric) for metric in metrics]
    assert ("update", "", "") in defined and ("", "*", "update") in defined


def test_crash_then_the_next_seed_has_its_own_run(tmp_path: Path) -> None:
    """F41, F43: a crashed run is marked failed, with phase and error; the next one does not log into it."""
    with (
        pytest.raises(ZeroDivisionError, match="nothing left"),
        open_run(tmp_path / "s0", record(), CONFIG, choice()) as run,
    ):
        run.log_update({"update": 1, "reward/mean": 0.5})
        run.phase = "backward"
        raise ZeroDivisionError("nothing left")
    with open_run(tmp_path / "s1", record(seed=1), CONFIG, choice()) as run:
        run.log_update({"update": 1, "reward/mean": 0.75})
    crashed, finished = read_record(tmp_path / "s0"), read_record(tmp_path / "s1")
    assert crashed and finished
    assert (crashed["status"], crashed["phase"], crashed["updates_done"]) == ("failed", "backward", 1)
    assert crashed["error"] == {"type": "ZeroDivisionError", "message": "nothing left"}
    (event,) = rows(tmp_path / "s0", "events")
    assert event["kind"] == "failed" and "raise ZeroDivisionError" in event["traceback"]
    assert finished["status"] == "finished"
    assert mirror_id(tmp_path / "s0") != mirror_id(tmp_path / "s1")
    assert (exit_code(tmp_path / "s0"), exit_code(tmp_path / "s1")) == (1, 0)
    assert [row["reward/mean"] for row in history(tmp_path / "s1")] == [0.75]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, Stopped])
def test_interrupted(tmp_path: Path, stop: type[BaseException]) -> None:
    with pytest.raises(stop), open_run(tmp_path / "run", record(), CONFIG, choice()) as run:
        run.phase = "rollout"
        raise stop
    final = read_record(tmp_path / "run")
    assert final and (final["status"], final["phase"]) == ("interrupted", "rollout")
    assert exit_code(tmp_path / "run") == 1


@pytest.mark.parametrize("raises", [False, True])
def test_outcome_said_by_the_trainer_stays(tmp_path: Path, raises: bool) -> None:
    """F52: out of memory is an outcome, whether or not the exception leaves the block."""
    error = MemoryError("no 3 GiB")
    try:
        with open_run(tmp_path, record(), CONFIG, choice("disabled")) as run:
            run.phase = "optimizer"
            run.outcome("out_of_memory", error=error)
            if raises:
                raise error
    except MemoryError:
        assert raises
    final = read_record(tmp_path)
    assert final and (final["status"], final["phase"]) == ("out_of_memory", "optimizer")
    assert final["error"] == {"type": "MemoryError", "message": "no 3 GiB"}
    assert not (tmp_path / "wandb").exists()
    with (
        pytest.raises(ValueError, match="'exploded'"),
        open_run(tmp_path, record(), CONFIG, choice("disabled")) as run,
    ):
        run.outcome("exploded")


def test_numbers(tmp_path: Path) -> None:
    """Tensors, NumPy scalars and bools become numbers; nan is null in the folder and a number in W&B."""
    with open_run(tmp_path / "run", record(), CONFIG, choice()) as run:
        run.log_update({"update": np.int64(1), "a/b": torch.tensor(0.5), "c/d": np.float64(0.25), "e/f": True})
        run.log_update({"update": 2, "a/b": math.nan, "c/d": math.inf, "e/f": torch.tensor(-math.inf)})
        for value in ("0.5", None, [0.5], torch.zeros(2), object()):
            with pytest.raises(TypeError, match="reward/mean"):
                run.log_update({"update": 3, "reward/mean": value})
        with pytest.raises(TypeError, match="update"):
            run.log_update({"reward/mean": 0.5})
    assert rows(tmp_path / "run", "metrics") == [
        {"update": 1, "a/b": 0.5, "c/d": 0.25, "e/f": 1},
        {"update": 2, "a/b": None, "c/d": None, "e/f": None},
    ]
    mirrored = {key: str(value) for key, value in history(tmp_path / "run")[1].items()}
    assert mirrored == {"update": "2", "a/b": "nan", "c/d": "inf", "e/f": "-inf"}


@pytest.mark.parametrize(
    "value",
    [OmegaConf.create({"x": 1}), OmegaConf.create([1]), Path("x"), torch.ones(1), {1, 2}, signal.SIGINT],
)
def test_config_must_be_plain(tmp_path: Path, value: Any) -> None:
    """F50: a nested OmegaConf object, or any other object, would be stored as its string."""
    with (
        pytest.raises(TypeError, match=r"config\.task\.levels"),
        open_run(tmp_path / "run", record(), {"task": {"levels": value}}, choice("disabled")),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_missing_config_value_is_refused(tmp_path: Path) -> None:
    """F50."""
    with (
        pytest.raises(ValueError, match=r"config\.task\.name is missing"),
        open_run(tmp_path / "run", record(), {"task": {"name": "???"}}, choice("disabled")),
    ):
        pass


def test_samples_table_is_capped_and_logged_again(tmp_path: Path) -> None:
    """The folder keeps every sample, the latest W&B table the last 200; verdicts may be of several types."""
    folder = tmp_path / "run"
    with open_run(folder, record(), CONFIG, choice()) as run:
        for update in range(3):
            verdicts = [None, "wrong", True] * 30
            run.log_samples([{"update": update, "prompt": "1+1=", "verdict": verdict} for verdict in verdicts])
        run.log_samples([])
    assert len(rows(folder, "samples")) == 270
    assert rows(folder, "events") == []
    logged = history(folder)
    assert [row["update"] for row in logged] == [0, 1, 2]
    tables = [json.loads(path.read_text()) for path in folder.glob("wandb/*run-*/files/media/table/*.json")]
    assert sorted(len(table["data"]) for table in tables) == [90, 180, TABLE_ROWS]
    assert tables[0]["columns"] == ["update", "prompt", "verdict"]


def beating() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def wait_until(holds: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def heartbeat(folder: Path) -> float:
    return (read_record(folder) or {})["heartbeat"]


@pytest.fixture
def fast_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.track.HEARTBEAT_SECONDS", 0.05)


def test_heartbeat_is_rare(tmp_path: Path) -> None:
    with open_run(tmp_path, record(), CONFIG, choice("disabled")) as run:
        before = (tmp_path / "run.json").stat().st_mtime_ns
        for update in range(1, 100):
            run.log_update({"update": update, "reward/mean": 0.5})
        assert (tmp_path / "run.json").stat().st_mtime_ns == before


def test_heart_beats_while_the_trainer_is_busy_and_no_longer(tmp_path: Path, fast_beat: None) -> None:
    """A long phase writes no row; the record still says that the process lives, and where it is."""
    with open_run(tmp_path, record(), CONFIG, choice("disabled")) as run:
        run.log_update({"update": 7, "reward/mean": 0.5})
        run.phase = "rollout"
        seen = set()
        wait_until(lambda: seen.add(heartbeat(tmp_path)) or len(seen) > 3)
        alive = read_record(tmp_path)
        assert alive and (alive["status"], alive["phase"], alive["updates_done"]) == ("running", "rollout", 7)
        assert len(beating()) == 1
    wait_until(lambda: not beating())
    last = (tmp_path / "run.json").read_bytes()
    time.sleep(0.2)
    assert (tmp_path / "run.json").read_bytes() == last and b'"finished"' in last


def test_no_beat_follows_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be another process's by then; so a beat that waits for the end's own writing is dropped."""
    monkeypatch.setattr("src.track.HEARTBEAT_SECONDS", 1e-4)
    for number in range(20):
        with open_run(tmp_path / str(number), record(), CONFIG, choice("disabled")):
            pass
        (tmp_path / str(number) / "run.json").write_text("the next one's")
    wait_until(lambda: not beating())
    for number in range(20):
        assert (tmp_path / str(number) / "run.json").read_text() == "the next one's"


def test_heart_beats_on_after_what_it_could_not_write(tmp_path: Path, fast_beat: None) -> None:
    folder = tmp_path / "run"
    with open_run(folder, record(), CONFIG, choice("disabled")) as run:
        (folder / ".run.json.tmp").mkdir()  # also root cannot write there
        time.sleep(0.2)
        stuck = heartbeat(folder)
        with pytest.raises(IsADirectoryError):
            run.update_record(warm_start={"accuracy": 0.5})
        (folder / ".run.json.tmp").rmdir()
        wait_until(lambda: heartbeat(folder) > stuck)
        assert "warm_start" not in (read_record(folder) or {}) and len(beating()) == 1
    final = read_record(folder)
    assert final and final["status"] == "finished"


def test_record_stays_whole_while_two_threads_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.track.HEARTBEAT_SECONDS", 1e-4)
    found: list[dict[str, Any] | None] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            found.append(read_record(tmp_path))

    reader = threading.Thread(target=read, daemon=True)
    with open_run(tmp_path, record(), CONFIG, choice("disabled")) as run:
        reader.start()
        for update in range(1, 101):
            run.update_record(**{f"key{update}": "x" * update})
            run.log_update({"update": update, "reward/mean": 0.5})
    stop.set()
    reader.join()
    assert len(found) > 20 and all(one and one["id"] == run.id for one in found)
    done = [one["updates_done"] for one in found if one]
    assert done == sorted(done)
    final = read_record(tmp_path)
    assert final and all(final[f"key{update}"] == "x" * update for update in range(1, 101))
    assert not list(tmp_path.glob("*.tmp"))


def test_a_clock_that_is_put_back_breaks_nothing(
    tmp_path: Path, fast_beat: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are the wall clock's as it was; who waits goes by another clock."""
    real = time.time
    with open_run(tmp_path, record(), CONFIG, choice("disabled")) as run:
        start = heartbeat(tmp_path)
        monkeypatch.setattr(time, "time", lambda: real() - 3600)
        wait_until(lambda: heartbeat(tmp_path) < start - 3000)
        back = heartbeat(tmp_path)
        wait_until(lambda: heartbeat(tmp_path) > back)
        run.log_event("alarm", text="late")
        log_three(run)
    final = read_record(tmp_path)
    assert final and final["status"] == "finished" and final["end"] == pytest.approx(real() - 3600, abs=60)
    assert len(rows(tmp_path, "events")) == 1 and len(rows(tmp_path, "metrics")) == 3


def remake(folder: Path, number: int) -> None:
    """Make a folder anew, under the number of the removed one if the file system gives that out."""
    made = [folder.with_name(f"{folder.name}-{index}") for index in range(50)]
    for path in made:
        path.mkdir()
    next((path for path in made if path.stat().st_ino == number), made[0]).rename(folder)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_is_gone_gets_no_line(tmp_path: Path, replaced: bool, fast_beat: None) -> None:
    """Also if another process has made it anew: file systems give the new one the number of the old one."""
    folder = tmp_path / "run"
    with (
        pytest.raises(FileNotFoundError, match="the run folder was removed while the run was at it"),
        open_run(folder, record(), CONFIG, choice("disabled")) as run,
    ):
        run.log_update({"update": 1, "reward/mean": 0.5})
        number = folder.stat().st_ino
        shutil.rmtree(folder)
        if replaced:
            remake(folder, number)
        for write in (
            lambda: run.log_memory({"update": 2}),
            lambda: run.log_eval({"update": 2, "eval/accuracy": 0.5}),
            lambda: run.log_event("alarm"),
            lambda: run.log_samples([{"update": 2}]),
            lambda: run.update_record(warm_start=None),
            run.sync,
        ):
            with pytest.raises(FileNotFoundError, match="was removed"):
                write()
        assert run.updates_done == 1 and run.accuracies == {}
        time.sleep(0.1)
        run.log_update({"update": 2, "reward/mean": 0.5})
    assert folder.exists() == replaced and not (replaced and list(folder.iterdir()))


def test_the_end_of_a_run_whose_folder_is_gone_is_no_success(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match="was removed"),
        open_run(tmp_path / "run", record(), CONFIG, choice("disabled")),
    ):
        shutil.rmtree(tmp_path / "run")
    wait_until(lambda: not beating())


def test_an_error_is_told_also_where_its_record_cannot_be_written(tmp_path: Path) -> None:
    """A full disk refuses the row and then run.json; what is told is the first, and W&B gets its end."""
    folder = tmp_path / "run"
    with pytest.raises(ZeroDivisionError), open_run(folder, record(), CONFIG, choice()) as run:
        run.log_update({"update": 1, "reward/mean": 0.5})
        (folder / ".run.json.tmp").mkdir()
        raise ZeroDivisionError
    final = read_record(folder)
    assert final and final["status"] == "running"
    assert exit_code(folder) == 1
    with open_run(tmp_path / "next", record(seed=1), CONFIG, choice()) as run:
        run.log_update({"update": 1, "reward/mean": 0.5})
    assert mirror_id(tmp_path / "next") != mirror_id(folder)


def test_a_start_that_cannot_write_says_so(tmp_path: Path) -> None:
    """The record is the place to look; and no heart beats for a run that did not start."""
    (tmp_path / ".config.yaml.tmp").mkdir()
    with (
        pytest.raises(IsADirectoryError),
        open_run(tmp_path, record(), CONFIG, choice("disabled")),
    ):
        pass
    final = read_record(tmp_path)
    assert final and (final["status"], final["phase"]) == ("failed", "start")
    assert final["error"]["type"] == "IsADirectoryError"
    assert not beating()


def test_what_the_folder_has_counts(tmp_path: Path) -> None:
    """A row that could not be written is not done; accuracies come from the rows, damaged ones left out."""
    (tmp_path / "evals.jsonl").write_text(
        '{"update": 0, "eval/accuracy": 0.25}\n{"update": 2}\n{"update": 4, "eval/accuracy": null}\n'
    )
    with (
        pytest.raises(IsADirectoryError),
        open_run(tmp_path, record(updates_done=4), CONFIG, choice("disabled")) as run,
    ):
        assert run.accuracies == {0: 0.25} and run.updates_done == 4
        run.log_update({"update": 5, "reward/mean": 0.5})
        run.log_eval({"update": 5, "eval/accuracy": 0.5})
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").mkdir()
        run.log_update({"update": 6, "reward/mean": 0.5})
    final = read_record(tmp_path)
    assert final and (final["status"], final["updates_done"]) == ("failed", 5)
    assert run.accuracies == {0: 0.25, 5: 0.5}


def test_record_is_whole_at_every_instant(tmp_path: Path) -> None:
    """Killed at any moment, the folder has a whole run.json and row files torn in the last line at most."""
    code = f"""
from types import SimpleNamespace
from pathlib import Path
from src.track import open_run
record = {record()!r}
choice = SimpleNamespace(mode="disabled", project="p", entity=None, tags=[])
with open_run(Path({str(tmp_path)!r}) / "run", record, {CONFIG!r}, choice) as run:
    for update in range(1, 10**9):
        run.log_update({{"update": update, "reward/mean": 0.5}})
        run.log_event("alarm", text="x" * 1000)
        run.update_record(phase="rollout")
"""
    folder, root = tmp_path / "run", Path(__file__).parents[1]
    process = subprocess.Popen([sys.executable, "-c", code], cwd=root)
    deadline = time.monotonic() + 10
    done = 0
    while done < 50 and time.monotonic() < deadline:
        found = read_record(folder)
        assert found is None or found["id"] == record()["id"]  # half a file would be an empty record
        done = 0 if found is None else found["updates_done"]
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = read_record(folder)
    assert done >= 50 and found and found["status"] == "running"
    for name in ("metrics", "events"):
        *lines, last = (folder / f"{name}.jsonl").read_bytes().split(b"\n")
        assert [json.loads(line)["update"] for line in lines] == list(range(1, len(lines) + 1))
    assert last == b"" or not last.endswith(b"}")


def offline_runs(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


def log_updates(run, updates):
    """What the trainer writes, in its order."""
    for update in updates:
        run.log_memory({"update": update, "memory/peak_bytes": 1 << 40})
        run.log_update({"update": update, "reward/mean": 0.1 * update})
        if update % 2 == 0:
            run.log_samples([{"update": update, "prompt": f"{index}"} for index in range(3)])
            run.log_eval({"update": update, "eval/accuracy": 0.01 * update})


KEYS = {"memory/peak_bytes", "reward/mean", "eval/accuracy"}


def updates_of(found: list[dict[str, Any]], key: str) -> list[int]:
    return [row["update"] for row in found if key in row]


def test_resumed_offline_the_new_run_has_every_row_once(tmp_path: Path) -> None:
    """What is there for `wandb sync` is one run; the earlier parts are beside it, not lost."""
    folder = tmp_path / "run"
    with pytest.raises(Stopped), open_run(folder, record(), CONFIG, choice()) as run:
        log_updates(run, range(1, 7))
        raise Stopped("SIGTERM")
    (first,) = offline_runs(folder)
    for upto in (4, 6):
        cut_back(folder, upto)
        with open_run(folder, record(updates_done=upto), CONFIG, choice()) as run:
            run.log_event("resumed")
            log_updates(run, range(upto + 1, 9))
    (newest,) = offline_runs(folder)
    superseded = folder / "wandb" / "superseded"
    assert first.name != newest.name and first.name in {path.name for path in superseded.iterdir()}
    assert len(list(superseded.iterdir())) == 2
    local = [row for name in ("metrics", "memory", "evals") for row in rows(folder, name)]
    in_mirror = history(folder)
    assert in_order([row for row in in_mirror if KEYS & set(row)]) == in_order(local)
    assert [row["event/kind"] for row in in_mirror if "event/kind" in row] == ["resumed"]
    tables = [json.loads(path.read_text()) for path in newest.glob("files/media/table/*.json")]
    assert [row[0] for row in max(tables, key=lambda table: len(table["data"]))["data"]] == [
        update for update in (2, 4, 6, 8) for _ in range(3)
    ]
    assert not [row for row in rows(folder, "events") if row["kind"] == "tracker_error"]


def test_started_again_offline_the_former_run_is_set_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for accuracy in (0.25, 0.5):
        cut_back(folder, -1)
        with open_run(folder, record(), CONFIG, choice()) as run:
            run.log_eval({"update": 0, "eval/accuracy": accuracy})
    assert history(folder) == [{"update": 0, "eval/accuracy": 0.5}]
    assert len(offline_runs(folder)) == len(list((folder / "wandb" / "superseded").iterdir())) == 1


def test_a_run_that_cannot_be_set_aside_costs_the_mirror_only(tmp_path: Path) -> None:
    """F53."""
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    (tmp_path / "wandb" / "superseded").write_text("in the way")
    with open_run(tmp_path, record(), CONFIG, choice()) as run:
        log_three(run)
    final = read_record(tmp_path)
    assert final and final["status"] == "finished" and len(rows(tmp_path, "metrics")) == 3
    assert [(row["kind"], row["type"]) for row in rows(tmp_path, "events")] == [("tracker_error", "FileExistsError")]


def test_check_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    check_login("offline")
    check_login("disabled")
    with pytest.raises(ValueError, match=r"wandb\.mode=on is not one of .* type wandb\.mode=offline"):
        check_login("on")
    with pytest.raises(ValueError, match=r"wandb\.mode=online needs .* none is configured: type `wandb login`"):
        check_login("online")
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(ValueError, match=r"wandb\.mode=online needs .* 40\+ characters.* wandb\.mode=offline"):
        check_login("online")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    check_login("online")
    assert capfd.readouterr() == ("", "")


def test_check_login_reads_netrc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    Path(os.environ["NETRC"]).write_text(f"machine 127.0.0.1:9\n login user\n password {API_KEY}\n")
    Path(os.environ["NETRC"]).chmod(0o600)
    check_login("online")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandb]:
    with fake_wandb() as service:
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        yield service


def posted(fake: FakeWandb, run_id: str) -> list[dict[str, Any]]:
    """The rows that arrived for one run, less the client's own keys."""
    kept = [{key: value for key, value in row.items() if key[0] != "_"} for row in fake.runs[run_id].history]
    return [row for row in kept if row]


def test_online_rows_arrive(tmp_path: Path, fake: FakeWandb, capfd: pytest.CaptureFixture[str]) -> None:
    """F55, F56: a resumed run goes on in its own W&B run; no row is lost, nor one that is logged again."""
    check_login("online")
    with open_run(tmp_path, record(), CONFIG, choice("online")) as run:
        log_three(run)
        run.log_event("alarm", text="entropy")
    (run_id,) = fake.runs
    local = [row for name in ("metrics", "memory", "evals") for row in rows(tmp_path, name)]
    arrived = posted(fake, run_id)
    assert in_order(local) == in_order([row for row in arrived if "event/kind" not in row])
    assert [row["event/text"] for row in arrived if "event/kind" in row] == ["entropy"]
    assert fake.runs[run_id].exit_code == 0
    attributes = fake.runs[run_id].attributes
    assert (attributes["groupName"], attributes["displayName"], attributes["jobType"]) == (
        "fixed",
        "fixed-s0",
        "train",
    )
    assert {key: fake.runs[run_id].config[key] for key in CONFIG} == CONFIG

    with open_run(tmp_path / "again", record(), CONFIG, choice("online")) as run:
        run.log_update({"update": 1, "reward/mean": 0.5})
    assert len(fake.runs) == 2
    assert [row["kind"] for row in rows(tmp_path, "events")] == ["alarm"] and rows(tmp_path / "again", "events") == []
    assert capfd.readouterr() == ("", "")


def test_resumed_online_every_row_arrives_once(
    tmp_path: Path, fake: FakeWandb, capfd: pytest.CaptureFixture[str]
) -> None:
    """F55: stopped after update 6 was sent, gone on with after update 4; what W&B has is not sent again."""
    with pytest.raises(Stopped), open_run(tmp_path, record(), CONFIG, choice("online")) as run:
        log_updates(run, range(1, 7))
        raise Stopped("SIGTERM")
    (run_id,) = fake.runs
    assert (read_record(tmp_path) or {})["wandb_id"] == run.wandb_id == run_id
    cut_back(tmp_path, 4)
    with open_run(tmp_path, record(updates_done=4, wandb_id=run_id), CONFIG, choice("online")) as run:
        run.log_event("resumed")
        assert run.wandb_id == run_id
        log_updates(run, range(5, 9))
    assert list(fake.runs) == [run_id] and fake.runs[run_id].exit_code == 0
    arrived = posted(fake, run_id)
    local = [row for name in ("metrics", "memory", "evals") for row in rows(tmp_path, name)]
    assert in_order([row for row in arrived if KEYS & set(row)]) == in_order(local)
    assert updates_of(arrived, "reward/mean") == list(range(1, 9)) == updates_of(arrived, "memory/peak_bytes")
    assert updates_of(arrived, "eval/accuracy") == [2, 4, 6, 8]
    assert updates_of(arrived, "event/kind") == [6, 4]  # interrupted, resumed
    assert capfd.readouterr() == ("", "")


def test_what_a_kill_kept_from_wandb_arrives_when_the_run_goes_on(tmp_path: Path, fake: FakeWandb) -> None:
    """F55: the client uploads now and then, and is killed with its process."""
    code = f"""
import time
from pathlib import Path
from types import SimpleNamespace
from src.track import open_run
{inspect.getsource(log_updates)}
choice = SimpleNamespace(mode="online", project="p", entity=None, tags=[])
with open_run(Path({str(tmp_path / "run")!r}), {record()!r}, {CONFIG!r}, choice) as run:
    log_updates(run, range(1, 7))
    print("done", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "done\n"
        process.kill()
    (run_id,) = fake.runs
    before = len(posted(fake, run_id))
    assert before < 15, "all rows were uploaded before the kill: the test shows nothing"
    left = read_record(tmp_path / "run")
    assert left and left["status"] == "running"
    cut_back(tmp_path / "run", 4)
    about = record(updates_done=4, wandb_id=left["wandb_id"])
    with open_run(tmp_path / "run", about, CONFIG, choice("online")) as run:
        log_updates(run, range(5, 9))
    assert list(fake.runs) == [run_id]
    arrived = posted(fake, run_id)
    assert updates_of(arrived, "reward/mean") == list(range(1, 9)) == updates_of(arrived, "memory/peak_bytes")
    assert updates_of(arrived, "eval/accuracy") == [2, 4, 6, 8]


@pytest.mark.parametrize("between", ["disabled", "offline"])
def test_online_again_after_a_part_that_was_not(between: str, tmp_path: Path, fake: FakeWandb) -> None:
    """The rows of the part that W&B did not see arrive in the same W&B run, and nothing is left to be synced."""
    with open_run(tmp_path, record(), CONFIG, choice("online")) as run:
        log_updates(run, range(1, 5))
    (run_id,) = fake.runs
    for mode, updates in ((between, range(5, 7)), ("online", range(7, 9))):
        about = record(updates_done=updates.start - 1, wandb_id=(read_record(tmp_path) or {})["wandb_id"])
        with open_run(tmp_path, about, CONFIG, choice(mode)) as run:
            log_updates(run, updates)
    assert list(fake.runs) == [run_id]
    arrived = posted(fake, run_id)
    assert updates_of(arrived, "reward/mean") == list(range(1, 9))
    assert updates_of(arrived, "eval/accuracy") == [2, 4, 6, 8]
    assert offline_runs(tmp_path) == []


def test_a_wandb_run_that_is_gone_is_made_anew_with_every_row(tmp_path: Path, fake: FakeWandb) -> None:
    with open_run(tmp_path, record(), CONFIG, choice("online")) as run:
        log_updates(run, range(1, 5))
    (run_id,) = fake.runs
    fake.runs.clear()
    with open_run(tmp_path, record(updates_done=4, wandb_id=run_id), CONFIG, choice("online")) as run:
        log_updates(run, range(5, 7))
    (new,) = fake.runs
    assert updates_of(posted(fake, new), "reward/mean") == list(range(1, 7))


@pytest.mark.filterwarnings("ignore:unclosed file .*parameters.yaml:ResourceWarning")  # the client leaves it open
def test_under_an_agent_the_run_is_the_agents(
    tmp_path: Path, fake: FakeWandb, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """F49: the sweep's id, run id, project are honoured; a swept group name does not hide its values."""
    parameters = Path.cwd() / "parameters.yaml"
    parameters.write_text("wandb_version: 1\ncontrol:\n  value: fixed\ntask.name:\n  value: copy\nseed:\n  value: 0\n")
    environment = {"SWEEP_ID": "sweep001", "RUN_ID": "trial001", "PROJECT": PROJECT, "ENTITY": ENTITY}
    for name, value in (environment | {"SWEEP_PARAM_PATH": str(parameters)}).items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    elsewhere = SimpleNamespace(mode="online", project="elsewhere", entity="nobody", tags=[])
    (tmp_path / "metrics.jsonl").write_text('{"update": 1, "reward/mean": 0.25}\n')
    with open_run(tmp_path, record(updates_done=1, wandb_id="former00"), CONFIG, elsewhere) as run:
        run.log_update({"update": 2, "reward/mean": 0.5})
    assert list(fake.runs) == ["trial001"]
    run_seen = fake.runs["trial001"]
    assert run_seen.attributes["sweep"] == "sweep001"
    assert run_seen.attributes["project"] == PROJECT and run_seen.attributes["entity"] == ENTITY
    assert run_seen.config["control"] == "fixed" and run_seen.config["control.budget"] == 0.01
    assert run_seen.config["task"] == CONFIG["task"]
    assert [row["reward/mean"] for row in posted(fake, "trial001")] == [0.25, 0.5]
    assert rows(tmp_path, "events") == []
    assert capfd.readouterr() == ("", "")


def test_service_dying_in_mid_run_does_not_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F53: the server goes away; the rows stay in the folder, the end does not wait for ever."""
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "1")
    with fake_wandb() as service:
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        context = open_run(tmp_path, record(), CONFIG, choice("online"))
        run = context.__enter__()
        run.log_update({"update": 1, "reward/mean": 0.5})
    run.log_update({"update": 2, "reward/mean": 0.5})
    began = time.monotonic()
    context.__exit__(None, None, None)
    assert time.monotonic() - began < 10
    final = read_record(tmp_path)
    assert final and final["status"] == "finished"
    assert [row["update"] for row in rows(tmp_path, "metrics")] == [1, 2]
    assert [(row["kind"], row["type"]) for row in rows(tmp_path, "events")] == [("tracker_error", "TimeoutError")]


def test_client_process_dying_does_not_kill(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """F53: the client's own process crashes; one event, and the next run has its mirror again."""
    with open_run(tmp_path / "s0", record(), CONFIG, choice()) as run:
        run.log_update({"update": 1, "reward/mean": 0.5})
        listing = ["ps", "-o", "pid=,comm=", "--ppid", str(os.getpid())]
        children = subprocess.check_output(listing, text=True).splitlines()
        (core,) = [int(line.split()[0]) for line in children if "wandb-core" in line]
        os.kill(core, signal.SIGKILL)
        time.sleep(0.2)
        for update in (2, 3):
            run.log_update({"update": update, "reward/mean": 0.5})
    with open_run(tmp_path / "s1", record(seed=1), CONFIG, choice()) as run:
        run.log_update({"update": 1, "reward/mean": 0.75})
    final = read_record(tmp_path / "s0")
    assert final and final["status"] == "finished"
    assert [row["update"] for row in rows(tmp_path / "s0", "metrics")] == [1, 2, 3]
    assert [row["kind"] for row in rows(tmp_path / "s0", "events")] == ["tracker_error"]
    assert rows(tmp_path / "s1", "events") == []
    assert [row["reward/mean"] for row in history(tmp_path / "s1")] == [0.75]
    assert capfd.readouterr() == ("", "")


def test_failing_start_does_not_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F53: no server at all."""
    for name, value in {"BASE_URL": "http://127.0.0.1:9", "API_KEY": API_KEY, "INIT_TIMEOUT": "1"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    with open_run(tmp_path, record(), CONFIG, choice("online")) as run:
        run.log_update({"update": 1, "reward/mean": 0.5})
    final = read_record(tmp_path)
    assert final and final["status"] == "finished"
    assert len(rows(tmp_path, "metrics")) == 1
    assert [row["kind"] for row in rows(tmp_path, "events")] == ["tracker_error"]
