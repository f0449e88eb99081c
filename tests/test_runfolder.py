"""The files of a run folder, whatever was done to them: torn, doubled, overwritten with zeros, not text at all."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from src.runfolder import ROW_FILES, append, cut_back, failure, place, read_record, rows, to_json, write_atomically
from src.stop import Stopped

# Lines that are no row, whatever made them: a kill, a loss of power, an editor, another program.
NO_ROWS = {
    "empty": b"\n",
    "blank": b"   \n",
    "zeros": b"\0\0\0\0\0\0\n",
    "zeros-inside": b'{"update": \x002}\n',
    "not-utf-8": b'{"update": 2, "text": "\xff\xfe"}\n',
    "torn-start": b'ate": 2}\n',
    "torn-end": b'{"update": 2, "rew\n',
    "two-glued": b'{"update": 2}{"update": 3}\n',
    "list": b"[2]\n",
    "number": b"2\n",
    "null": b"null\n",
    "no-update": b'{"reward/mean": 0.5}\n',
    "float": b'{"update": 2.0}\n',
    "bool": b'{"update": true}\n',
    "string": b'{"update": "2"}\n',
    "update-null": b'{"update": null}\n',
    "nan": b'{"update": NaN}\n',
    "brackets": b"[" * 200_000 + b"\n",
    "braces": b'{"update":' * 100_000 + b"\n",
    "long-number": b'{"update": ' + b"9" * 10_000 + b"}\n",
    "utf-16": '{"update": 2}\n'.encode("utf-16") + b"\n",
    "huge": b"x" * 10_000_000 + b"\n",
}


def line(update: int, **fields: Any) -> bytes:
    return to_json({"update": update} | fields) + b"\n"


def updates(path: Path) -> list[int]:
    return [row["update"] for row in rows(path)]


@pytest.mark.parametrize("damage", NO_ROWS)
def test_what_is_no_row_is_left_out_and_cut(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + NO_ROWS[damage] + line(2) + NO_ROWS[damage] + line(3))
    assert updates(path) == [1, 2, 3]
    cut_back(tmp_path, 2)
    assert path.read_bytes() == line(1) + line(2)


@pytest.mark.parametrize("damage", NO_ROWS)
def test_a_record_of_garbage_is_empty(damage: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(NO_ROWS[damage].removesuffix(b"\n"))
    record = read_record(tmp_path)
    assert record == {} or (record is not None and set(record) <= {"update", "reward/mean"})


def test_a_record_in_other_words(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None is read_record(tmp_path / "nowhere")
    (tmp_path / "file").write_text("in the way")
    assert read_record(tmp_path / "file") is None
    (tmp_path / "run.json").mkdir()
    assert read_record(tmp_path) == {}
    (tmp_path / "run.json").rmdir()
    for content, expected in (
        (b"", {}),
        (b'{"status": "finished"', {}),
        (b'{"label": "\xff"}', {}),
        (b'["finished"]', {}),
        (b'\xef\xbb\xbf{"seed": 1}', {"seed": 1}),
        ('{"label": "größer"}'.encode(), {"label": "größer"}),
    ):
        (tmp_path / "run.json").write_bytes(content)
        assert read_record(tmp_path) == expected


def test_a_byte_order_mark_hides_no_row(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\xef\xbb\xbf" + line(1) + line(2))
    assert updates(tmp_path / "metrics.jsonl") == [1, 2]


def test_carriage_returns_of_another_system_hide_no_row(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(line(1).replace(b"\n", b"\r\n") + line(2))
    assert updates(tmp_path / "metrics.jsonl") == [1, 2]


def test_a_row_without_its_end_is_none(tmp_path: Path) -> None:
    """It may be the head of a longer number: 1 of 12."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + b'{"update": 2}')
    assert updates(path) == [1]
    cut_back(tmp_path, 5)
    assert path.read_bytes() == line(1)


@pytest.mark.parametrize("obstacle", ["folder", "/dev/zero", "/dev/full", "fifo"])
def test_what_is_no_file_is_refused(obstacle: str, tmp_path: Path) -> None:
    """A device would be read for ever; and nothing may be taken for a run that lost its rows."""
    path = tmp_path / "memory.jsonl"
    match obstacle:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case _:
            path.symlink_to(obstacle)
    (tmp_path / "samples.jsonl").write_bytes(line(3))
    with pytest.raises(OSError, match="a folder or a device is where the file of rows should be"):
        rows(path)
    with pytest.raises(OSError, match=r"memory\.jsonl"):
        cut_back(tmp_path, 1)
    assert updates(tmp_path / "samples.jsonl") == [3]


def test_rows_elsewhere_are_rows(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(line(1))
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "evals.jsonl").symlink_to(tmp_path / "nowhere")
    assert updates(tmp_path / "metrics.jsonl") == [1] and rows(tmp_path / "evals.jsonl") == []


# Cutting back


def fill(folder: Path, last: int) -> None:
    """What an undisturbed run has after `last` updates, evaluated every second one."""
    folder.mkdir(exist_ok=True)
    numbers = range(1, last + 1)
    evaluated = range(0, last + 1, 2)
    for name, content in {
        "metrics.jsonl": [line(update, loss=0.1 * update) for update in numbers],
        "memory.jsonl": [line(update, peak_bytes=update) for update in numbers],
        "evals.jsonl": [line(update, accuracy=0.1 * update) for update in evaluated],
        "samples.jsonl": [line(update, prompt=f"{index}") for update in evaluated for index in range(3)],
        "events.jsonl": [line(0, kind="started"), line(last, kind="failed")],
    }.items():
        (folder / name).write_bytes(b"".join(content))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("update", range(-1, 8))
def test_cut_back_leaves_what_the_run_had_then(update: int, tmp_path: Path) -> None:
    fill(tmp_path / "run", 6)
    fill(tmp_path / "then", max(0, min(update, 6)))
    cut_back(tmp_path / "run", update)
    expected = content(tmp_path / "then") | {"events.jsonl": line(0, kind="started") + line(6, kind="failed")}
    if update < 0:
        expected |= {"evals.jsonl": b"", "samples.jsonl": b""}
    assert content(tmp_path / "run") == expected
    cut_back(tmp_path / "run", update)
    assert content(tmp_path / "run") == expected


def test_samples_of_an_evaluation_that_was_cut_off_go_with_it(tmp_path: Path) -> None:
    """They are written before its row: the evaluation is done again, and must not have them twice."""
    fill(tmp_path, 4)
    evals = (tmp_path / "evals.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "evals.jsonl").write_bytes(b"".join(evals[:-1]) + evals[-1][:-5])
    cut_back(tmp_path, 4)
    assert updates(tmp_path / "evals.jsonl") == [0, 2]
    assert updates(tmp_path / "samples.jsonl") == [0, 0, 0, 2, 2, 2]


def test_rows_there_twice_are_all_kept_or_all_cut(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(line(1) * 2 + line(3) + line(2) + line(3) + line(2))
    cut_back(tmp_path, 2)
    assert updates(tmp_path / "metrics.jsonl") == [1, 1, 2, 2]


def test_cut_back_of_nothing(tmp_path: Path) -> None:
    cut_back(tmp_path, 5)
    assert list(tmp_path.iterdir()) == []
    for name in ROW_FILES:
        (tmp_path / name).touch()
    cut_back(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(ROW_FILES)


def test_a_file_with_nothing_to_cut_is_not_written(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    cut_back(tmp_path, 4)
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_to_the_bytes(seed: int, tmp_path: Path) -> None:
    """Bytes flipped, removed, doubled, zeroed, cut: rows that stay whole stay, and what is left is read by anybody."""
    rng = random.Random(seed)
    fill(tmp_path, 6)
    for name in ROW_FILES:
        damaged = bytearray((tmp_path / name).read_bytes())
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(damaged) + 1)
            to = min(len(damaged), at + rng.randint(0, 40))
            damaged[at:to] = rng.choice(
                [
                    b"",
                    bytes(to - at),
                    rng.randbytes(to - at),
                    damaged[at:to] * 2,
                    b"\n",
                    b"\r",
                    b'"',
                    b"}\n{",
                    b"[" * 5000,
                ]
            )
        if rng.random() < 0.3:
            del damaged[rng.randrange(len(damaged) + 1) :]
        (tmp_path / name).write_bytes(damaged)
    (tmp_path / "run.json").write_bytes(rng.randbytes(200))
    before = {name: rows(tmp_path / name) for name in ROW_FILES}
    for name in ROW_FILES:
        whole = {line(update, loss=0.1 * update) for update in range(1, 7)}
        kept = [one for one in (tmp_path / name).read_bytes().split(b"\n") if one + b"\n" in whole]
        assert len(kept) <= len(before[name])
    cut_back(tmp_path, 3)
    for name in ROW_FILES:
        after = rows(tmp_path / name)
        assert len((tmp_path / name).read_bytes().splitlines()) == len(after)
        assert all(row in before[name] for row in after)
        if name in ("metrics.jsonl", "memory.jsonl", "evals.jsonl"):
            assert after == [row for row in before[name] if row["update"] <= 3]
    assert rows(tmp_path / "events.jsonl") == before["events.jsonl"]
    append(tmp_path / "metrics.jsonl", {"update": 4})
    assert updates(tmp_path / "metrics.jsonl")[-1] == 4
    assert read_record(tmp_path) in ({}, None) or isinstance(read_record(tmp_path), dict)


# Writing


def test_append_writes_strict_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, {"update": 1, "a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": "two\nlines \u2028 ü \ud800"})
    append(path, {"update": 2})
    first, second = path.read_bytes().splitlines()
    assert first.isascii() and second == b'{"update": 2}'
    assert rows(path)[0] == {"update": 1, "a": None, "b": [None, {"c": None}], "d": "two\nlines \u2028 ü \ud800"}


def test_a_disk_that_takes_a_part_of_a_row_keeps_none(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: it too takes a part."""
    code = f"""
import resource, signal
from pathlib import Path
from src.runfolder import append
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path({str(tmp_path / "metrics.jsonl")!r})
append(path, {{"update": 1}})
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for size in (200, 500):
    try:
        append(path, {{"update": 2, "text": "x" * size}})
    except OSError as error:
        print(error.strerror, error.filename == str(path))
append(path, {{"update": 3}})
"""
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=Path(__file__).parents[1], text=True)
    assert printed.splitlines() == ["No space left on device True"] * 2
    assert (tmp_path / "metrics.jsonl").read_bytes() == line(1) + line(3)


def test_a_device_without_space_refuses_the_row(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"):
        append(tmp_path / "metrics.jsonl", {"update": 1})


def test_what_cannot_be_replaced_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, a folder in the way, a stop in the middle: the old content, and no temporary file."""
    path = tmp_path / "run.json"
    write_atomically(path, b"old")
    (tmp_path / ".run.json.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*run\.json'"):
        write_atomically(path, b"new")
    assert content(tmp_path) == {"run.json": b"old"}

    def stopped(*_: object) -> None:
        raise Stopped("SIGTERM")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", stopped)
        with pytest.raises(Stopped):
            write_atomically(path, b"new")
    assert content(tmp_path) == {"run.json": b"old"}
    (tmp_path / ".run.json.tmp").write_bytes(b"what a kill left, longer than the new content")
    write_atomically(path, b"new")
    assert content(tmp_path) == {"run.json": b"new"}
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "folder", b"new")
    assert not (tmp_path / ".folder.tmp").exists()


def test_a_kill_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from src.runfolder import write_atomically
path = Path({str(tmp_path / "run.json")!r})
for number in range(10**9):
    write_atomically(path, b"%d " % number * 20_000)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1]) as process:
        end = time.monotonic() + 20
        while not (tmp_path / "run.json").exists() and time.monotonic() < end:
            time.sleep(0.005)
        for _ in range(200):
            words = (tmp_path / "run.json").read_bytes().split()
            assert len(words) == 20_000 and len(set(words)) == 1
        process.send_signal(signal.SIGKILL)
    words = (tmp_path / "run.json").read_bytes().split()
    assert len(words) == 20_000 and len(set(words)) == 1


def test_place_tells_a_folder_from_what_comes_after_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert place(folder) is None
    folder.mkdir()
    first = place(folder)
    (folder / "run.json").write_text("{}")
    assert place(folder) == first is not None
    folder.rename(tmp_path / "moved")
    assert place(folder) is None
    folder.mkdir()
    assert place(folder) != first == place(tmp_path / "moved")
    (tmp_path / "file").write_text("")
    assert place(tmp_path / "file" / "run") is None


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"phase": "load", "error": {"type": "ValueError", "message": "first\nsecond"}}, "in load: ValueError: first"),
        ({"phase": "load", "error": {"type": "ValueError", "message": ""}}, "in load: ValueError"),
        ({"phase": "load", "error": {"type": "ValueError", "message": None}}, "in load: ValueError"),
        ({"phase": "load", "error": {}}, "in load"),
        ({"phase": "load"}, "in load"),
        ({"phase": "load", "error": "text"}, "in load"),
        ({"phase": "load", "error": {"type": 3, "message": [1]}}, "in load: 3: [1]"),
    ],
)
def test_failure(record: dict[str, Any], told: str) -> None:
    assert failure(json.loads(json.dumps(record))) == told
