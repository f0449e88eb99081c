"""The run folder, which is the record, and its mirror in Weights & Biases.

Every line goes to the folder first and to W&B second, under the same keys. Whatever W&B does, training and
the folder go on without it. W&B is imported only when a run asks for it.

A kill takes what the client had not uploaded, up to 15 s of rows, and nobody tells which. So a row's step in W&B is
a function of its file and update: a start offers all rows of the folder, and the client drops those whose step the
continued W&B run has passed. They are the same rows, for a resumed run repeats them to the bit.
"""

import errno
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import yaml

from src.runfolder import ROW_FILES, append, place, rows, sync, to_json, write_atomically
from src.stop import Stopped

WANDB_MODES = ("offline", "online", "disabled", "shared")
STATUSES = ("running", "finished", "interrupted", "failed", "out_of_memory")
HEARTBEAT_SECONDS = 10.0
FINISH_SECONDS = 120.0  # how long the end of a run waits for an upload; WANDB_FINISH_TIMEOUT overrides it
TABLE_ROWS = 200  # of the latest samples in the W&B table; samples.jsonl has all
_ORDER = ("memory.jsonl", "metrics.jsonl", "samples.jsonl", "evals.jsonl")  # in which an update's rows are written
_STEPS_APART = 10_000  # of two rows in W&B; between them is room for events


class WandbConfig(Protocol):
    """What is read of the config group `wandb`."""

    @property
    def mode(self) -> str: ...
    @property
    def project(self) -> str: ...
    @property
    def entity(self) -> str | None: ...
    @property
    def tags(self) -> Sequence[str]: ...


def check_login(mode: str) -> None:
    """Refuses a W&B mode that cannot work, before anything is loaded; asks no server.

    Raises:
        ValueError: the mode is unknown, or needs an API key and none (or a malformed one) is configured.
    """
    if mode not in WANDB_MODES:
        raise ValueError(f"wandb.mode={mode} is not one of {', '.join(WANDB_MODES)}: type wandb.mode=offline.")
    if mode in ("offline", "disabled"):
        return
    import wandb

    # Without this, WANDB_MODE=offline in the environment would hide a key from the check.
    settings: dict[str, Any] = {"mode": mode, "silent": True}
    wandb.setup(wandb.Settings(**settings))
    remedy = "type `wandb login` first, or use wandb.mode=offline."
    try:
        found = wandb.login(prompt=False, verify=False)
    except wandb.Error as error:
        raise ValueError(f"wandb.mode={mode} needs a W&B API key, but {error} {remedy.capitalize()}") from error
    if not found:
        raise ValueError(f"wandb.mode={mode} needs a W&B API key and none is configured: {remedy}")


class Run:
    """An open run: what the trainer writes to. Made by `open_run`.

    `phase` is what the trainer is doing ("load", "rollout", "backward", ...); it tells where a failure was.
    `updates_done` is the last update of metrics.jsonl, `accuracies` are the held-out accuracies so far, by update.
    """

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        self.folder = folder
        self.id: str = record["id"]
        self.phase = "start"
        self.updates_done: int = record["updates_done"]
        self.accuracies: dict[int, float] = {
            row["update"]: row["eval/accuracy"]
            for row in rows(folder / "evals.jsonl")
            if isinstance(row.get("eval/accuracy"), int | float)
        }
        self._record = record
        self._handle = os.open(folder, os.O_RDONLY)  # as long as it is open, no other folder gets this one's number
        self._place = place(folder)
        self._writing = threading.RLock()
        self._closed = threading.Event()
        self._wandb: Any = None
        self._samples: deque[dict[str, Any]] = deque(maxlen=TABLE_ROWS)

    @property
    def wandb_id(self) -> str | None:
        """The online W&B run's, which a resumed run goes on with; None where there is none."""
        return self._record.get("wandb_id")

    def log_update(self, row: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl: `update` (from 1) and numbers. 0-d tensors, NumPy scalars are converted.

        In the folder, nan and the infinities become null, so that a line is strict JSON; W&B gets the number.

        Raises:
            TypeError: a value is not a number, or `update` is not an int; the message names the key.
        """
        row = _numbers(row)
        self._append("metrics.jsonl", row)
        self.updates_done = row["update"]
        self._mirror("metrics.jsonl", row)

    def log_memory(self, row: Mapping[str, Any]) -> None:
        """One row of memory.jsonl, as in `log_update` and before it: bytes by phase and component."""
        row = _numbers(row)
        self._append("memory.jsonl", row)
        self._mirror("memory.jsonl", row)

    def log_eval(self, row: Mapping[str, Any]) -> None:
        """One row of evals.jsonl, as in `log_update`, with `update` from 0 and eval/accuracy."""
        row = _numbers(row)
        self._append("evals.jsonl", row)
        self.accuracies[row["update"]] = row["eval/accuracy"]
        self._mirror("evals.jsonl", row)

    def log_event(self, kind: str, **fields: Any) -> None:
        """One row of events.jsonl: time, update (the last one logged, unless given), kind and plain fields.

        In W&B the keys get the prefix `event/`.
        """
        stamp = {"time": time.time(), "update": self.updates_done, "kind": kind}
        row = _plain(stamp | fields, "event")
        self._append("events.jsonl", row)
        self._mirror("events.jsonl", row)

    def log_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of samples.jsonl (update, prompt, response, ...); W&B gets a table of the latest ones."""
        plain_rows = [_plain(dict(row), "sample") for row in rows]
        for row in plain_rows:
            self._append("samples.jsonl", row)
        self._samples.extend(plain_rows)
        if plain_rows:
            self._mirror("samples.jsonl", plain_rows[-1])

    def update_record(self, **fields: Any) -> None:
        """Merges fields into run.json, atomically; where that fails, nothing is changed.

        `heartbeat` is the wall clock's, which may be put back; what waits for the next one goes by a clock that is not.
        """
        with self._writing:
            now = {"updates_done": self.updates_done, "phase": self.phase, "heartbeat": time.time()}
            record = self._record | _plain(fields, "record") | now
            self._check_place()
            write_atomically(self.folder / "run.json", to_json(record, indent=2))
            self._record = record

    def sync(self) -> None:
        """Makes the rows written so far outlast a loss of power."""
        self._check_place()
        for path in map(self.folder.joinpath, ROW_FILES):
            if path.is_file():
                sync(path)

    def outcome(self, status: str, error: BaseException | None = None, facts: Mapping[str, Any] | None = None) -> None:
        """Decides how the run ended, e.g. "out_of_memory"; leaving the block does not change it any more.

        `facts` are what else the record says of the error, in plain values.
        """
        if status not in STATUSES[1:]:
            raise ValueError(f"the outcome {status!r} of a run is not one of {', '.join(STATUSES[1:])}.")
        reason = None if error is None else {"type": type(error).__name__, "message": str(error)} | dict(facts or {})
        self.update_record(status=status, error=reason, end=time.time())

    def _start(self, config: dict[str, Any], wandb: WandbConfig) -> None:
        write_atomically(self.folder / "config.yaml", yaml.safe_dump(config, sort_keys=False).encode())
        self.update_record()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        if wandb.mode != "disabled":
            self._start_mirror(config, wandb)

    def _beat(self) -> None:
        """Says in run.json that the process lives and where it is, until the run is closed."""
        while not self._closed.wait(HEARTBEAT_SECONDS):
            with self._writing, suppress(OSError):  # the trainer's own next line meets it too
                if not self._closed.is_set():  # the folder may be another run's by then
                    self.update_record()

    def _start_mirror(self, config: dict[str, Any], wandb: WandbConfig) -> None:
        """Starts a W&B run, or goes on with the one that the record names, and offers it the rows of the folder."""
        self._wandb = self._guard(_start_wandb, self.folder, self._record, config, wandb)
        if self._wandb is None:
            return
        if wandb.mode == "online":
            self.update_record(wandb_id=self._wandb.id)
        self._samples.extend(rows(self.folder / "samples.jsonl"))
        written = [(name, row) for name in _ORDER if name != "samples.jsonl" for row in rows(self.folder / name)]
        written += [("samples.jsonl", row) for row in list(self._samples)[-1:]]  # one table: it holds all of these
        for name, row in sorted(written, key=lambda entry: _step(*entry)):
            self._mirror(name, row)

    def _end(self, status: str, error: BaseException | None = None) -> None:
        """Writes how the run ended, unless the trainer decided."""
        if self._record["status"] == "running":
            if status == "finished":
                self.phase = "done"
            self.outcome(status, error)
            if status == "interrupted":
                self.log_event("interrupted", phase=self.phase, reason=str(error) or type(error).__name__)
            if status == "failed":
                text = "".join(traceback.format_exception(error))
                self.log_event("failed", phase=self.phase, **self._record["error"], traceback=text)

    def _close(self) -> None:
        """Ends the heartbeat and finishes the W&B run."""
        with self._writing:
            self._closed.set()
        if self._wandb is not None:
            self._guard(_finish_wandb, self._wandb, self._record["status"])
            self._wandb = None
        os.close(self._handle)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        self._check_place()
        append(self.folder / name, row)

    def _check_place(self) -> None:
        """Refuse to write where the folder was removed; another process may have made it anew."""
        if place(self.folder) != self._place:
            raise FileNotFoundError(
                errno.ENOENT, "the run folder was removed while the run was at it", str(self.folder)
            )

    def _mirror(self, name: str, row: dict[str, Any]) -> None:
        if self._wandb is None:
            return
        match name:
            case "events.jsonl":
                self._guard(self._wandb.log, {key if key == "update" else f"event/{key}": row[key] for key in row})
            case "samples.jsonl":
                self._guard(_log_table, self._wandb, _step(name, row), list(self._samples))
            case _:
                self._guard(_log_row, self._wandb, _step(name, row), row)

    def _guard(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The one place that catches a W&B error: it is recorded, and W&B is off for the rest of the run."""
        try:
            return call(*arguments)
        except Exception as error:  # the client's errors share no base class: broken pipe, closed mailbox, ...
            self._wandb = None
            with suppress(OSError):  # the trainer's own next line meets it too
                self.log_event("tracker_error", type=type(error).__name__, message=str(error))
            with suppress(Exception):
                _teardown_wandb()
            return None


@contextmanager
def open_run(
    folder: Path,
    record: dict[str, Any],
    config: dict[str, Any],
    wandb: WandbConfig,
) -> Iterator[Run]:
    """Opens a run folder and its W&B run, and writes how the run ended.

    Leaving the block makes the status finished; interrupted after Stopped, KeyboardInterrupt or SystemExit;
    failed, with phase, error type and message, after any other exception; or what `Run.outcome` said. Exceptions
    pass on. The W&B run is finished in every case (exit code 1 unless the status is finished), so that the next
    run of the same process gets its own. Until then a thread keeps the record's heartbeat.

    Args:
        folder: The run folder, made if missing. Rows in it are kept; see `cut_back`.
        record: What run.json says; needs id, label, seed and study. With a `wandb_id` an online run continues that
            W&B run, from the rows that it has; an offline one, and one without, starts a W&B run that gets all rows.
        config: The resolved config in plain values.
        wandb: The config group `wandb`. Under a W&B agent, project, entity and id are the agent's.

    Raises:
        TypeError: the record or config holds something else than plain values, e.g. an OmegaConf object.
        ValueError: the config holds a missing value.
    """
    record = {"updates_done": 0, "start": time.time()} | _plain(record, "record")
    record |= {"status": "running", "error": None, "end": None}
    record |= {"process": {"pid": os.getpid(), "host": socket.gethostname()}}
    config = _plain(config, "config")
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, record)
    try:
        run._start(config, wandb)
        yield run
        run._end("finished")
    except (Stopped, KeyboardInterrupt, SystemExit) as stop:
        with suppress(OSError):
            run._end("interrupted", stop)
        raise
    except BaseException as error:
        with suppress(OSError):  # the folder may be what failed: then the error that is known already counts
            run._end("failed", error)
        raise
    finally:
        run._close()


def _set_aside_offline_runs(folder: Path) -> None:
    """Moves what earlier starts left for `wandb sync` to wandb/superseded: the new one will have all rows."""
    for earlier in sorted((folder / "wandb").glob("offline-run-*")):
        target = folder / "wandb" / "superseded" / earlier.name
        target.parent.mkdir(exist_ok=True)
        earlier.rename(target)


def _start_wandb(folder: Path, record: dict[str, Any], config: dict[str, Any], choice: WandbConfig) -> Any:
    """A W&B run that writes below the run folder and nothing to the console."""
    import wandb

    _set_aside_offline_runs(folder)
    settings = wandb.Settings(
        silent=True,
        console="off",
        finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT", FINISH_SECONDS)),
        finish_timeout_raises=True,
    )
    wandb.setup(settings)  # logging in, which comes before the run's own settings count, would print
    place: dict[str, Any] = {"mode": choice.mode}
    if "WANDB_SWEEP_ID" not in os.environ:  # else the agent decides
        place |= {"project": choice.project, "entity": choice.entity}
        place |= {"id": record["wandb_id"], "resume": "allow"} if record.get("wandb_id") else {}
    run = wandb.init(
        dir=str(folder),
        group=record["label"],
        name=f"{record['label']}-s{record['seed']}",
        job_type="train",
        tags=list(dict.fromkeys([*choice.tags, record["study"]])),
        config=config,
        reinit="create_new",
        settings=settings,
        **place,
    )
    # A sweep over a config group (control=fixed) puts the bare name where the group's values were.
    replaced = {
        f"{group}.{key}": value
        for group, values in config.items()
        if isinstance(values, dict) and not isinstance(run.config.get(group), Mapping)
        for key, value in values.items()
    }
    if replaced:
        run.config.update(replaced, allow_val_change=True)
    run.define_metric("update")
    run.define_metric("*", step_metric="update")
    return run


def _finish_wandb(run: Any, status: str) -> None:
    run.summary["status"] = status
    run.finish(exit_code=0 if status == "finished" else 1)


def _teardown_wandb() -> None:
    """Ends the client's service, so that the next run of this process starts a fresh one."""
    import wandb

    wandb.teardown(exit_code=1)


def _step(name: str, row: Mapping[str, Any]) -> int:
    """The step in W&B of a row of a file."""
    return int((row["update"] * len(_ORDER) + _ORDER.index(name)) * _STEPS_APART)


def _log_row(run: Any, step: int, row: dict[str, Any]) -> None:
    run.log(row, step=step, commit=True)


def _log_table(run: Any, step: int, rows: list[dict[str, Any]]) -> None:
    """A new table each time: the client logs a table once only."""
    import wandb

    columns: list[str | int] = list(dict.fromkeys(key for row in rows for key in row))
    data = [[row.get(str(column)) for column in columns] for row in rows]
    table = wandb.Table(columns=columns, data=data, allow_mixed_types=True)
    _log_row(run, step, {"update": rows[-1]["update"], "samples": table})


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """A flat row of Python numbers, in which `update` is an int."""
    numbers = {key: int(value) if isinstance(value, bool) else value for key, value in _plain(dict(row), "").items()}
    for key, value in numbers.items():
        if not isinstance(value, int | float):
            raise TypeError(f"{key} is logged as {value!r}, a {type(value).__name__}, where a number is needed.")
    if not isinstance(numbers.get("update"), int):
        raise TypeError(f"update is logged as {numbers.get('update')!r}, where every row needs an int.")
    return numbers


def _plain(value: Any, key: str) -> Any:
    """A copy in dict, list, str, int, float, bool, None; 0-d arrays become numbers, anything else is refused.

    Raises:
        TypeError: something is not plain; the message has its dotted key.
        ValueError: a string is OmegaConf's mark of a missing value.
    """
    if isinstance(value, dict):
        return {name: _plain(inner, f"{key}.{name}".lstrip(".")) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{key}[{index}]") for index, inner in enumerate(value)]
    if isinstance(value, str) and value == "???":
        raise ValueError(f"{key} is missing (???): give it a value.")
    if value is None or type(value) in (str, int, float, bool):
        return value
    # np.float64 is a float and would pass as one, but YAML cannot write it: so types, not isinstance, above.
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return item()
    raise TypeError(f"{key} is a {type(value).__name__}, where a plain value is needed: convert it first.")
