"""Faults of the file system under a run, from the command to the folder: what is told, what is left, what goes on.

A task of the user's own stands for whoever does it: in the middle of an update it does what a script says.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launching import PROJECT, by_seed, fast, launch, record, rows, run_folders

TASK = '''
from __future__ import annotations
from dataclasses import dataclass
from pathlib import Path
from src.tasks import Item, Verdict

@dataclass
class Letters:
    """Answer in letters of an even sum; while seed 1 is at update 3, do what the script says."""
    script: str
    name: str = "letters"
    version: int = 1
    alphabet: str = "abcd"
    chat: bool = False

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
        script = Path(self.script)
        if (seed, update) == (1, 3) and script.exists():
            exec(script.read_text(), {})
        right = sum(map(ord, response)) % 2 == 0  # as an untrained policy is right now and then
        return Verdict("correct" if right else "wrong", float(right), response)

def make(settings):
    return Letters(**settings)
'''
HEADER = "import os, shutil, subprocess, time\nfrom pathlib import Path\n"


class Place:
    """A root, and the script that the task runs there."""

    def __init__(self, folder: Path, task: Path) -> None:
        self.root, self.script = folder / "outputs", task / "script.py"
        words = ["updates=4", "eval_every=2", "checkpoint.every=1", "task.held_out=3", "wandb.mode=disabled"]
        words += ["task=custom", f"task.source={task / 'letters.py'}:make", f"+task.settings.script={self.script}"]
        words += ["model.warm_start=null", "prompts_per_update=2", "evaluation.samples=0", "evaluation.pass_k=[]"]
        kept = [word for word in fast(without="task.") if not word.startswith("model.warm_start.")]
        keys = {word.partition("=")[0] for word in words}
        self.words = [*(word for word in kept if word.partition("=")[0] not in keys), *words, f"root={self.root}"]

    def fault(self, code: str) -> None:
        """What happens at update 3 of seed 1, once; `folder` is its run folder."""
        where = f"(folder,) = Path({str(self.root)!r}).glob('*/*-s1-*')\n"
        self.script.write_text(f"{HEADER}Path({str(self.script)!r}).unlink()\n{where}{code}\n")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    (folder / "letters.py").write_text(TASK)
    return folder


@pytest.fixture(scope="module")
def undisturbed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The run folders of three seeds to which nothing happened."""
    place = Place(tmp_path_factory.mktemp("undisturbed"), task)
    ended = launch(*place.words, "seed=0,1,2", "-m")
    assert ended.code == 0, ended.err
    runs = by_seed(place.root)
    for run in runs.values():
        assert any(row["control/realised_kl"] > 0 for row in rows(run)), "nothing was learned"
    return runs


@pytest.fixture
def place(task: Path, tmp_path: Path) -> Iterator[Place]:
    yield Place(tmp_path, task)
    (task / "script.py").unlink(missing_ok=True)


def everything(folder: Path) -> dict[str, Any]:
    """What a run leaves, without what the clock says; every line is strict JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    for path in folder.glob("*.jsonl"):
        assert [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    names = ("metrics", "memory", "evals", "samples")
    weights = (folder / "policy" / "model.safetensors").read_bytes()
    return {name: rows(folder, name) for name in names} | {"policy": weights, "status": record(folder)["status"]}


def leftovers(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.endswith(".tmp")]


def the_folder(place: Place) -> Path:
    (folder,) = place.root.glob("*/*-s1-*")
    return folder


def test_a_removed_run_folder_fails_its_run_alone(place: Place, undisturbed: dict[int, Path]) -> None:
    """Nothing is made anew where somebody removed it; the other runs are what they are alone."""
    place.fault("shutil.rmtree(folder)")
    ended = launch(*place.words, "seed=1,0,2", "-m")
    assert ended.code == 1 and "Traceback" not in ended.err + ended.out
    first = ended.out.splitlines()[0]
    assert first.startswith("failed ") and "the run folder was removed while the run was at it" in first
    runs = by_seed(place.root)
    assert sorted(runs) == [0, 2] and not list(place.root.glob("*/*-s1-*"))
    for seed, run in runs.items():
        assert everything(run) == everything(undisturbed[seed])
    again = launch(*place.words, "seed=1")
    assert again.code == 0, again.err
    assert everything(the_folder(place)) == everything(undisturbed[1])


def test_a_folder_that_another_process_made_anew_is_the_others(place: Place) -> None:
    place.fault(
        "shutil.rmtree(folder); folder.mkdir(); (folder / 'checkpoints').mkdir();"
        "(folder / 'run.json').write_text('{}'); (folder / 'metrics.jsonl').write_text('')"
    )
    ended = launch(*place.words, "seed=1")
    assert ended.code == 1 and "the run folder was removed while the run was at it" in ended.out
    folder = the_folder(place)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "metrics.jsonl", "run.json"]
    assert (folder / "run.json").read_text() == "{}" and (folder / "metrics.jsonl").read_text() == ""
    assert list((folder / "checkpoints").iterdir()) == []


# What is in the way (made at update 3), how it is taken away, what is told, and the update that the run goes on after.
OBSTACLES = {
    "rows-full-disk": (
        "(folder / 'metrics.jsonl').rename(folder / 'aside'); (folder / 'metrics.jsonl').symlink_to('/dev/full')",
        lambda folder: (folder / "aside").replace(folder / "metrics.jsonl"),
        r"in tracking: OSError: \[Errno 28\] No space left on device: '.*metrics\.jsonl'",
        2,
    ),
    "rows-folder": (
        "(folder / 'memory.jsonl').rename(folder / 'aside'); (folder / 'memory.jsonl').mkdir()",
        lambda folder: ((folder / "memory.jsonl").rmdir(), (folder / "aside").replace(folder / "memory.jsonl")),
        r"in tracking: IsADirectoryError: .*memory\.jsonl'",
        2,
    ),
    "rows-lost": (
        "(folder / 'metrics.jsonl').unlink(); (folder / 'metrics.jsonl').mkdir()",
        lambda folder: (folder / "metrics.jsonl").rmdir(),
        r"in tracking: IsADirectoryError: .*metrics\.jsonl'",
        None,
    ),
    "checkpoints-file": (
        "(folder / 'checkpoints').rename(folder / 'aside'); (folder / 'checkpoints').write_text('in the way')",
        lambda folder: ((folder / "checkpoints").unlink(), (folder / "aside").rename(folder / "checkpoints")),
        r"in checkpoint: FileExistsError: .*the checkpoint after update 3 cannot be written to .*\(File exists\)",
        2,
    ),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_after_an_obstacle_is_gone_a_retry_ends_as_if_nothing_had_been(
    name: str, place: Place, undisturbed: dict[int, Path]
) -> None:
    fault, remove, told, after = OBSTACLES[name]
    place.fault(fault)
    ended = launch(*place.words, "seed=1")
    assert ended.code == 1 and "Traceback" not in ended.err + ended.out
    assert len(ended.out.splitlines()) == 1 and re.search(told, ended.out), ended.out
    folder = the_folder(place)
    about = record(folder)
    assert about["status"] == "failed" and re.search(told, f"in {about['phase']}: {_type_and_message(about)}")
    assert leftovers(folder) == [] and about["end"] is not None
    if name in ("rows-full-disk", "rows-folder"):  # a retry that comes too early does no harm
        early = launch(*place.words, "seed=1", "retry_failed=true")
        assert early.code == 1 and "a folder or a device is where the file of rows should be" in early.out
    remove(folder)
    ended = launch(*place.words, "seed=1", "retry_failed=true")
    assert ended.code == 0, ended.out + ended.err
    assert ("starts again from its beginning" if after is None else f"goes on after update {after}") in ended.out
    assert everything(folder) == everything(undisturbed[1])


def _type_and_message(about: dict[str, Any]) -> str:
    return f"{about['error']['type']}: {about['error']['message']}"


def test_a_file_in_place_of_the_policy_is_replaced(place: Place, undisturbed: dict[int, Path]) -> None:
    place.fault("(folder / 'policy').write_text('in the way')")
    ended = launch(*place.words, "seed=1")
    assert ended.code == 0, ended.out
    assert everything(the_folder(place)) == everything(undisturbed[1])


@pytest.mark.parametrize("how", ["folder", "immutable"])
def test_a_record_that_cannot_be_replaced(how: str, place: Place, undisturbed: dict[int, Path]) -> None:
    """It keeps its old content; what is told names it, and the run goes on where it was when it can be written."""
    if how == "folder":
        place.fault("(folder / 'run.json').unlink(); (folder / 'run.json').mkdir()")
    else:
        place.script.write_text("")
        if subprocess.run(["chattr", "+i", place.script], capture_output=True).returncode:
            pytest.skip("this file system, or this user, cannot make a file immutable")
        subprocess.run(["chattr", "-i", place.script], check=True)
        place.fault("subprocess.run(['chattr', '+i', folder / 'run.json'], check=True)")
    ended = launch(*place.words, "seed=1")
    folder = the_folder(place)
    if how == "folder":
        (folder / "run.json").rmdir()
    else:
        subprocess.run(["chattr", "-i", folder / "run.json"], check=True)
        assert record(folder)["status"] == "running"
    assert ended.code == 1 and "Traceback" not in ended.err + ended.out
    assert re.search(r"^failed .*in checkpoint: (IsADirectory|Permission)Error: .*run\.json", ended.out), ended.out
    assert leftovers(folder) == []
    ended = launch(*place.words, "seed=1")
    assert ended.code == 0, ended.out
    assert everything(folder) == everything(undisturbed[1])


IN_A_NAMESPACE = """
import json, subprocess, sys
from pathlib import Path
from tests.launching import launch
mount, words = Path(sys.argv[1]), sys.argv[2:]
told = []

def start(*more):
    ended = launch(*words, *more)
    told.append([ended.code, ended.out, ended.err])

subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=20m", "none", str(mount)], check=True)
start("seed=1")
subprocess.run(["mount", "-o", "remount,rw", str(mount)], check=True)
start("seed=1")
(folder,) = (mount / "outputs").glob("*/*-s1-*")
subprocess.run(["umount", str(folder)], check=True)
start("seed=1")
(mount / "ballast").unlink()
start("seed=1", "retry_failed=true")
for path in (mount / "outputs").rglob("*"):
    if path.is_file() and path.name != ".lock":
        to = mount.parent / "copy" / path.relative_to(mount)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(path.read_bytes())
print(json.dumps(told))
"""
READ_ONLY_THEN_FULL = """
mount = folder.parents[2]
if (mount / 'was-read-only').exists():
    Path(SCRIPT).unlink()
    with open(mount / 'ballast', 'wb', buffering=0) as file:
        try:
            while True:
                file.write(b'x' * 4096)
        except OSError:
            file.truncate(file.tell() - 5 * 4096)  # enough for rows and records
else:
    (mount / 'was-read-only').touch()
    subprocess.run(['mount', '--bind', folder, folder], check=True)
    subprocess.run(['mount', '-o', 'remount,bind,ro', folder], check=True)
"""


def test_a_file_system_that_is_read_only_and_one_that_is_full(
    place: Place, tmp_path: Path, undisturbed: dict[int, Path]
) -> None:
    """A real one: read-only before the start, then in mid-run, then full; then it has space, and the run ends well."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this system gives users no mounts of their own (unshare -rm)")
    mount = tmp_path / "mount"
    mount.mkdir()
    place.root = mount / "outputs"
    where = f"(folder,) = Path({str(place.root)!r}).glob('*/*-s1-*')\nSCRIPT = {str(place.script)!r}\n"
    place.script.write_text(HEADER + where + READ_ONLY_THEN_FULL)
    words = [*(word for word in place.words if not word.startswith("root=")), f"root={place.root}"]
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", IN_A_NAMESPACE, mount, *words],
        cwd=PROJECT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    refused, read_only, full, well = json.loads(done.stdout.splitlines()[-1])
    assert refused[0] == 1 and refused[1] == "" and refused[2].count("\n") == 1
    assert re.match(r"error: root=.* cannot be written: .* refuses it \(Read-only file system\)", refused[2])
    assert read_only[0] == 1 and re.search(r"failed .*in tracking: OSError: .* Read-only file system", read_only[1])
    assert "was killed, goes on after update 2" in full[1]
    assert full[0] == 1 and re.search(r"failed .*in checkpoint: OSError: .* \(No space left on device\)", full[1])
    assert well[0] == 0 and "goes on after update 2" in well[1], well
    assert "Traceback" not in "".join(out + err for _, out, err in (refused, read_only, full, well))
    (folder,) = run_folders(tmp_path / "copy" / "outputs")
    assert everything(folder) == everything(undisturbed[1]) and leftovers(folder) == []


def test_of_two_processes_one_does_it_and_a_killed_one_blocks_nobody(
    place: Place, tmp_path: Path, undisturbed: dict[int, Path]
) -> None:
    """The others say who is at it and end well; a SIGKILL leaves a lock file and no lock."""
    place.fault("Path(folder / 'waiting').touch(); time.sleep(120)")
    command = [sys.executable, "-m", "src.train", *place.words, "seed=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, cwd=PROJECT, env=environment, **streams) for _ in range(2)]
    try:
        end = time.monotonic() + 100
        while time.monotonic() < end and (
            all(process.poll() is None for process in both) or not list(place.root.glob("*/*/waiting"))
        ):
            time.sleep(0.05)
        (loser,) = [process for process in both if process.poll() is not None]
        (winner,) = [process for process in both if process is not loser]
        out, err = loser.communicate()
        assert (loser.returncode, err) == (0, ""), out + err
        assert re.fullmatch(rf"skipped .*  (another process|process {winner.pid} on \S+) is running it\n", out)
        folder = the_folder(place)
        third = launch(*place.words, "seed=1")
        assert third.code == 0 and third.err == "" and third.out.count("\n") == 1
        assert f"  process {winner.pid} on {socket.gethostname()} is running it\n" in third.out
        assert record(folder)["process"]["pid"] == winner.pid and [row["update"] for row in rows(folder)] == [1, 2]
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert (folder / ".lock").exists() and record(folder)["status"] == "running"
    ended = launch(*place.words, "seed=1")
    assert ended.code == 0 and "was killed, goes on after update 2" in ended.out
    assert everything(folder) == everything(undisturbed[1])
    assert record(folder)["process"]["pid"] == os.getpid()
