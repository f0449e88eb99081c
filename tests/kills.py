"""Kills runs at random instants, lets the same command finish them, and compares with runs that nobody disturbed.

    python -m tests.kills --count 50 --csv docs/results/kills.csv
    python -m tests.kills --grid --csv docs/results/kills_grid.csv

Black box: it knows the commands and the run folder (docs/design.md, section 5). A kill is a SIGKILL of the whole
process group. The exit code is 1 if a completed run differs from its undisturbed twin in more than what the clock says.
"""

import argparse
import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.launching import PROJECT, fast, run_folders

UPDATES = 48  # so that a third of a run's time is training; the rest is start-up
EVAL_EVERY = 4
CHECKPOINTS = ["checkpoint.every=2"]
QUIET = ["wandb.mode=disabled", "threads=1"]
ARMS = {
    "decay": [],
    "fixed-redraw3": ["control=fixed", "method.refresh_every=3"],
    "sgd-one-projection": ["method.direction=sgd", "method.refresh_every=never", "control=none"],
    "dense": ["method=dense", "control=none"],
    "dense-all": ["method=dense", "method.train_all=true", "control=fixed"],
    "reuse3-reference": ["objective.updates_per_batch=3", "objective.reference_kl=0.1"],
}
GRID = ["+ablation=grid", "seed=0"]
ROW_FILES = ("metrics.jsonl", "memory.jsonl", "evals.jsonl", "samples.jsonl")
SAME_IN_RECORD = ("status", "updates_done", "error", "warm_start")
# events.jsonl tells of the kills, the lock is empty: whether they are there is no difference.
_APART = (".lock", "events.jsonl")
_POLL_SECONDS = 0.005
_SECONDS = 300.0  # after which a start that should complete is given up


def train_words(arm: str) -> list[str]:
    without = "method.rank" if arm.startswith("dense") else ""
    length = [f"updates={UPDATES}", f"eval_every={EVAL_EVERY}"]
    return fast(*length, *CHECKPOINTS, *QUIET, *ARMS[arm], without=without)


def grid_words() -> list[str]:
    """27 runs: control x rank x redraw."""
    return [*GRID, *fast("updates=6", "eval_every=3", *CHECKPOINTS, *QUIET, without="method.rank")]


# Starting and killing


@dataclass(frozen=True)
class Twin:
    """What nobody disturbed: its root, and the seconds from the command to each update's row and to the end."""

    root: Path
    row_seconds: list[float]
    seconds: float


def new_root(root: Path, warm: Path) -> Path:
    """A root without runs that has the warm starts of another one."""
    shutil.copytree(warm / ".warmstart", root / ".warmstart")
    return root


def undisturbed(words: Sequence[str], root: Path) -> Twin:
    """Let a command's runs end below a root without runs.

    Raises:
        RuntimeError: the command fails.
    """
    row_seconds: list[float] = []
    begin = time.monotonic()
    with started(words, root) as process:
        while process.poll() is None:
            row_seconds += [time.monotonic() - begin] * (rows_done(root) - len(row_seconds))
            time.sleep(_POLL_SECONDS)
    if process.returncode:
        raise RuntimeError(f"undisturbed, {' '.join(words)} fails: {_last_line(root)}")
    return Twin(root, row_seconds, time.monotonic() - begin)


@contextmanager
def started(words: Sequence[str], root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m src.train WORDS` below a root, in a process group of its own, which does not outlive the block.

    What it prints is appended to ROOT/output.log.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    # A `git status` that is killed while it refreshes the index would leave its lock in the project's checkout.
    own = {"OMP_NUM_THREADS": "1", "GIT_OPTIONAL_LOCKS": "0"}
    with open(root / "output.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "src.train", f"root={root}", *words],
            cwd=PROJECT,
            env=kept | own,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> bool:
    """SIGKILL a started process and all that it started; tell whether it was alive."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def rows_done(root: Path) -> int:
    """How many updates the runs below a root have logged."""
    return sum(path.read_bytes().count(b"\n") for path in root.glob("[!.]*/*/metrics.jsonl"))


def killed_at(share: float, twin: Twin, words: Sequence[str], root: Path) -> int | None:
    """Start, kill where the undisturbed twin was after that share of its time; return the process's number.

    None where it ended before.

    Where the twin was: so long after so many rows, or after the command. Rows and not seconds, since a machine may
    be slower or faster now. Where these rows are there already, the seconds count from the command.
    """
    seconds = share * twin.seconds
    rows = bisect_right(twin.row_seconds, seconds)
    with started(words, root) as process:
        if rows_done(root) < rows:
            seconds -= twin.row_seconds[rows - 1]
            while rows_done(root) < rows and process.poll() is None:
                time.sleep(_POLL_SECONDS)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return process.pid if kill(process) else None
    return None


def complete(words: Sequence[str], root: Path) -> str:
    """Start and let it end; return what is wrong with how it ended, or nothing."""
    with started(words, root) as process:
        try:
            code = process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            return f"a start did not end in {_SECONDS:g} s"
    return f"a start ended with code {code}: {_last_line(root)}" if code else ""


def _last_line(root: Path) -> str:
    return ((root / "output.log").read_text().splitlines() or [""])[-1]


# What a folder says


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file without what the clock says; a line that is cut off is left out, a damaged one raises."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    rows = [json.loads(line) for line in whole.splitlines()]
    clock = re.compile("time/.*|.*byte_seconds")
    return [{key: value for key, value in row.items() if not clock.fullmatch(key)} for row in rows]


def read_record(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    return json.loads(path.read_text()) if path.exists() else {}


def resumed_from(folder: Path) -> list[int]:
    """The updates that starts of this run went on from."""
    return [row["update"] for row in read_rows(folder / "events.jsonl") if row["kind"] == "resumed"]


def unreadable(folder: Path) -> Iterator[str]:
    """What of a killed run's folder cannot be read; a row file's last line may be cut off, a temporary file broken."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name.startswith("."):
            continue
        try:
            match path.suffix:
                case ".json":
                    json.loads(path.read_text())
                case ".jsonl":
                    read_rows(path)
                case ".yaml":
                    yaml.safe_load(path.read_text())
                case ".pt":
                    torch.load(path, weights_only=True)
        except Exception as error:  # whatever a reader raises at a damaged file
            yield f"after a kill {path.relative_to(folder)} is unreadable: {type(error).__name__}: {error}"


@dataclass(frozen=True)
class Place:
    """Where a run was when it was killed: the others by run.json, which may be 10 s old, `stage` also by other files.

    `start` is before a process has written run.json, `exit` after it has written there that the run is finished.
    """

    stage: str
    phase: str
    updates_done: int


def place(folder: Path, pid: int) -> Place:
    """Where a run was when the process of that number was killed; its files must be readable."""
    record = read_record(folder)
    own = record.get("process", {}).get("pid") == pid
    stage = _stage(folder, record) if own else "start"
    return Place(stage, record.get("phase", "-"), record.get("updates_done", 0))


def _stage(folder: Path, record: dict[str, Any]) -> str:
    if record["status"] == "finished":
        return "exit"
    parts = {path.relative_to(folder).parts[0] for path in _leftovers(folder)}
    if writing := parts & {"checkpoints", "policy"}:
        return f"write {min(writing)}"
    evaluated = [row["update"] for row in read_rows(folder / "evals.jsonl")]
    if not evaluated:
        return "load"
    updates = max((row["update"] for row in read_rows(folder / "metrics.jsonl")), default=0)
    if updates == UPDATES == evaluated[-1]:
        return "end"
    return "evaluation" if updates % EVAL_EVERY == 0 and updates != evaluated[-1] else "update"


def _leftovers(folder: Path) -> list[Path]:
    """Temporary and hidden files of a run folder, its lock apart."""
    found = [path for path in sorted(folder.rglob("*")) if path.name.startswith(".") or path.name.endswith(".tmp")]
    return [path for path in found if path != folder / ".lock"]


# Comparing


def _variant(run: Path) -> str:
    return run.name.rpartition("-")[2]


def root_differences(root: Path, twin: Path) -> Iterator[str]:
    """In what the completed runs of a root are not those of their undisturbed twins; nothing if they are."""
    ours, theirs = ({run.relative_to(place): run for run in run_folders(place)} for place in (root, twin))
    if ours.keys() != theirs.keys():
        yield f"{len(ours)} runs, not the {len(theirs)} of the undisturbed command"
    for name in sorted(ours.keys() & theirs.keys()):
        yield from (f"{_variant(name)} {found}" for found in differences(ours[name], theirs[name]))


def differences(folder: Path, twin: Path) -> Iterator[str]:
    """In what a completed run's folder is not its twin's; rows first, which tell the most."""
    ours, theirs = _files(folder), _files(twin)
    twins = dict(theirs)
    for name, path in sorted(ours, key=lambda file: [*ROW_FILES, file[0]].index(file[0])):
        if name in twins:
            try:
                yield from (f"{name}: {found}" for found in _file_differences(path, twins[name]))
            except Exception as error:  # whatever a reader raises at a damaged file
                yield f"{name} cannot be compared: {type(error).__name__}: {error}"
    counts, expected = Counter(name for name, _ in ours), Counter(name for name, _ in theirs)
    for name in sorted(counts.keys() | expected.keys()):
        if counts[name] != expected[name]:
            yield f"{name} is there {counts[name]} times, not {expected[name]}"
    for path in _leftovers(folder):
        yield f"{path.relative_to(folder)} is left over"


def _files(folder: Path) -> list[tuple[str, Path]]:
    """(name, path) of a folder's files; a checkpoint's name without the digest, which equal contents may not share."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    named = [(path.relative_to(folder).as_posix(), path) for path in paths]
    return [(re.sub(r"-[0-9a-f]{16}\.pt$", ".pt", name), path) for name, path in named if name not in _APART]


def _file_differences(path: Path, twin: Path) -> Iterator[str]:
    if path.name in ROW_FILES:
        yield from _row_differences(path, twin)
    elif path.name == "run.json":
        ours, theirs = json.loads(path.read_text()), json.loads(twin.read_text())
        for key in SAME_IN_RECORD:
            yield from tree_differences(ours.get(key), theirs.get(key), key)
        if ours.get("status") != "finished":
            yield f"status is {ours.get('status')!r}, not finished"
    elif path.name == "config.yaml":
        ours, theirs = yaml.safe_load(path.read_text()), yaml.safe_load(twin.read_text())
        yield from tree_differences(ours | {"root": None}, theirs | {"root": None})
    elif path.suffix == ".pt":
        yield from tree_differences(torch.load(path, weights_only=True), torch.load(twin, weights_only=True))
    elif path.suffix == ".safetensors":
        ours, theirs = path.read_bytes(), twin.read_bytes()
        if ours != theirs:
            first = next(i for i, (one, other) in enumerate(zip_longest(ours, theirs)) if one != other)
            yield f"byte {first} of {len(ours)} differs"


def _row_differences(path: Path, twin: Path) -> Iterator[str]:
    if not path.read_bytes().endswith(b"\n"):
        yield "the last line is cut off"
    for number, (row, other) in enumerate(zip_longest(read_rows(path), read_rows(twin)), start=1):
        at = f"row {number} (update {(row or other)['update']})"
        if row is None or other is None:
            yield f"{at} is {'missing' if row is None else 'one too many'}"
        else:
            yield from (f"{at} {found}" for found in tree_differences(row, other))


def tree_differences(ours: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """In what nested dicts, lists, tensors and plain values differ: types, keys, lengths, dtypes, shapes, bits."""
    if type(ours) is not type(theirs):
        yield f"{at} is a {type(ours).__name__}, not a {type(theirs).__name__}"
    elif isinstance(ours, dict):
        for key in sorted(ours.keys() ^ theirs.keys(), key=repr):
            yield f"{at}[{key!r}] is {'missing' if key in theirs else 'one too many'}"
        for key in (key for key in ours if key in theirs):
            yield from tree_differences(ours[key], theirs[key], f"{at}[{key!r}]")
    elif isinstance(ours, list | tuple):
        if len(ours) != len(theirs):
            yield f"{at} has {len(ours)} entries, not {len(theirs)}"
        for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from tree_differences(one, other, f"{at}[{index}]")
    elif isinstance(ours, torch.Tensor):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            yield f"{at} is {ours.dtype} {tuple(ours.shape)}, not {theirs.dtype} {tuple(theirs.shape)}"
        elif not torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (ours, theirs))):
            yield f"{at} has other bits"
    elif repr(ours) != repr(theirs):  # exact for floats, and tells -0.0 from 0.0
        yield f"{at} is {ours!r}, not {theirs!r}"


# Trials of single runs


@dataclass(frozen=True)
class Trial:
    """What became of a run that was killed; one word a kill, joined by `+`."""

    arm: str
    shares: str  # of the undisturbed run's seconds
    kills: int  # that came before the process's end
    stages: str
    phases: str
    updates_done: str
    resumed_from: str
    seconds: float
    identical: bool
    difference: str


def plan(count: int, seed: int) -> list[tuple[str, tuple[float, ...]]]:
    """(arm, when to kill it as shares of a run's time) for each trial, the arms by turns; half are killed twice."""
    rng = random.Random(seed)
    arms = list(ARMS)
    return [
        (arms[index % len(arms)], tuple(rng.random() for _ in range(1 + index // len(arms) % 2)))
        for index in range(count)
    ]


def trial(arm: str, shares: Sequence[float], twin: Twin, root: Path) -> Trial:
    """Start an arm, kill it at each share of its twin's time, let the same command complete it, compare."""
    words, begin = train_words(arm), time.monotonic()
    (run,) = run_folders(twin.root)
    folder = new_root(root, twin.root) / run.relative_to(twin.root)
    places, wrong = [], []
    for share in shares:
        pid = killed_at(share, twin, words, root)
        if pid is None:
            places.append(Place("ended", "-", UPDATES))
            continue
        damage = list(unreadable(folder))
        wrong += damage
        places.append(Place("-", "-", 0) if damage else place(folder, pid))
    wrong += filter(None, [complete(words, root)])
    wrong += root_differences(root, twin.root)
    return Trial(
        arm,
        "+".join(f"{share:.3f}" for share in shares),
        sum(place.stage != "ended" for place in places),
        "+".join(place.stage for place in places),
        "+".join(place.phase for place in places),
        "+".join(str(place.updates_done) for place in places),
        "+".join(map(str, resumed_from(folder))) or "-",
        round(time.monotonic() - begin, 1),
        not wrong,
        wrong[0] if wrong else "",
    )


def trials(planned: list[tuple[str, tuple[float, ...]]], root: Path, warm: Path, jobs: int) -> list[Trial]:
    """Carry planned trials out below a root, `jobs` at a time; each is printed when it has ended."""
    arms = list(dict.fromkeys(arm for arm, _ in planned))

    def twin(arm: str) -> Twin:  # under the load of the trials, so that its seconds hold for them
        return undisturbed(train_words(arm), new_root(root / "undisturbed" / arm, warm))

    def carry_out(number: int, arm: str, shares: tuple[float, ...]) -> Trial:
        done = trial(arm, shares, twins[arm], root / f"trial-{number:03d}")
        print(f"{number:3d} {'identical' if done.identical else 'DIFFERS  '} {done.shares:11} {done.seconds:5.1f} s")
        print(f"    {arm}: {done.stages}, resumed from {done.resumed_from} {done.difference}", flush=True)
        return done

    with ThreadPoolExecutor(jobs) as pool:
        twins = dict(zip(arms, pool.map(twin, arms), strict=True))
        numbered = [(number, *entry) for number, entry in enumerate(planned, start=1)]
        return list(pool.map(lambda entry: carry_out(*entry), numbered))


def table(done: Sequence[Trial]) -> str:
    """A line an arm: trials, kills, where they came, what was resumed, identical or not."""
    lines = [f"{'arm':20} {'trials':>6} {'kills':>6} {'identical':>9}  kills by stage | resumed from"]
    for arm in [*dict.fromkeys(trial.arm for trial in done), "all"]:
        of_arm = [trial for trial in done if arm in (trial.arm, "all")]
        stages = Counter(chain.from_iterable(trial.stages.split("+") for trial in of_arm))
        resumed = Counter(chain.from_iterable(trial.resumed_from.split("+") for trial in of_arm))
        starts = " ".join(
            f"{update}x{times}" if times > 1 else update for update, times in sorted(resumed.items(), key=_number)
        )
        lines.append(
            f"{arm:20} {len(of_arm):6} {sum(trial.kills for trial in of_arm):6} "
            f"{sum(trial.identical for trial in of_arm):9}  "
            f"{', '.join(f'{stage} {times}' for stage, times in stages.most_common())} | {starts}"
        )
    return "\n".join(lines)


def _number(item: tuple[str, int]) -> int:
    return int(item[0]) if item[0].isdigit() else -1


# A grid, killed and completed


@dataclass(frozen=True)
class Start:
    """One start of the grid's command: how many runs it found finished and finished, which it resumed and left cut off.

    Runs are named by their variant, the resumed ones with the update that they went on from.
    """

    start: int
    seconds: float
    killed: bool
    skipped: int
    finished: int
    resumed: str
    cut_off: str


def grid(kills: int, seed: int, root: Path, warm: Path) -> tuple[list[Start], list[str]]:
    """Kill the grid that many times, complete it, and return its starts and the differences from an undisturbed one.

    The kills are spread over the whole grid: each start is killed further on than the one before.
    """
    words, own_root = grid_words(), new_root(root / "killed", warm)
    twin = undisturbed(words, new_root(root / "undisturbed", warm))
    rng = random.Random(seed)
    shares = sorted(rng.random() for _ in range(kills))
    starts: list[Start] = []
    wrong: list[str] = []
    for number, share in enumerate([*shares, None], start=1):
        finished, resumed, begin = _finished(own_root), _resumed(own_root), time.monotonic()
        if share is None:
            killed = False
            wrong += filter(None, [complete(words, own_root)])
        else:
            killed = killed_at(share, twin, words, own_root) is not None
            wrong += chain.from_iterable(map(unreadable, own_root.glob("[!.]*/*")))
        cut_off = {_variant(run) for run in run_folders(own_root)} - _finished(own_root)
        starts.append(
            Start(
                number,
                round(time.monotonic() - begin, 1),
                killed,
                len(finished),
                len(_finished(own_root) - finished),
                "+".join((_resumed(own_root) - resumed).elements()) or "-",
                "+".join(sorted(cut_off)) or "-",
            )
        )
    return starts, [*wrong, *root_differences(own_root, twin.root)]


def _finished(root: Path) -> set[str]:
    return {_variant(run) for run in run_folders(root) if read_record(run)["status"] == "finished"}


def _resumed(root: Path) -> Counter[str]:
    return Counter(f"{_variant(run)}@{update}" for run in run_folders(root) for update in resumed_from(run))


# The command


def write_csv(path: Path, command: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows of the same keys as a table, below the command that made them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        file.write(f"# {command}\n")
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=50, help="trials, the arms by turns (default 50)")
    parser.add_argument("--grid", action="store_true", help="kill a grid of 27 runs instead")
    parser.add_argument("--kills", type=int, default=5, help="of the grid (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of when the kills come (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time (default 1)")
    parser.add_argument("--csv", type=Path, help="file for the trials, or the grid's starts")
    parser.add_argument("--root", type=Path, help="new folder for the runs, which stay (default: a temporary one)")
    chosen = parser.parse_args()
    if chosen.root is not None and chosen.root.exists():
        parser.error(f"--root {chosen.root} exists already, and runs in it would be skipped: name a new folder.")
    with tempfile.TemporaryDirectory() as temporary:
        root = (chosen.root or Path(temporary)).absolute()
        (root / "warm").mkdir(parents=True)
        undisturbed([*fast("updates=1", "eval_every=1", *QUIET)], root / "warm")
        if chosen.grid:
            kind = f"--grid --kills {chosen.kills}"
            starts, wrong = grid(chosen.kills, chosen.seed, root, root / "warm")
            rows = [asdict(start) for start in starts]
            for row in rows:
                print(*(f"{key} {value}" for key, value in row.items()), sep=", ")
        else:
            kind = f"--count {chosen.count}"
            done = trials(plan(chosen.count, chosen.seed), root, root / "warm", chosen.jobs)
            rows, wrong = [asdict(trial) for trial in done], [trial.difference for trial in done if trial.difference]
            print(table(done))
    if chosen.csv is not None:
        write_csv(chosen.csv, f"python -m tests.kills {kind} --seed {chosen.seed}", rows)
    print("\n".join(wrong) or "identical")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
