"""Around the training loop: checks before anything is loaded, what is to be done with a folder, how a run ended."""

import gc
import shutil
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from src import cells, checkpoint, methods, models, provenance, rerun
from src.config import Config, ConfigError
from src.export import export_policy
from src.identity import Identity, with_content
from src.memory import Ledger, capped, is_out_of_memory, wanted_bytes
from src.monitor import Progress
from src.preflight import preflight
from src.runfolder import ROW_FILES, cut_back, failure, read_record, rows, to_json, write_atomically
from src.stop import Stop, Stopped
from src.tasks import load_task
from src.track import Run, open_run
from src.trainer import evaluation_due, measured, train
from src.warmstart import warm_up

Job = tuple[Config, Identity]
UNMEASURED = "not measured: random weights"  # the accuracy of a shape


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the run's status, or `skipped`, and the reason where it did not finish now.

    `before`: nothing was done, because it had ended so before.
    """

    status: str
    reason: str = ""
    before: bool = False


def run_all(jobs: Sequence[Job], stop: Stop) -> int:
    """Check all jobs, carry them out in order, say what became of each, and return the exit code.

    A stop, or with `on_failure=stop` a failure, leaves the rest for the next start of the same command.

    Raises:
        ConfigError: a job cannot work; none was started.
    """
    jobs = _distinct(jobs)
    dry = any(config.dry for config, _ in jobs)
    if dry:
        print(cells.table(cells.survey(jobs, planned=True)))
    preflight(jobs)
    if dry:
        return 0
    limits = [config.max_seconds for config, _ in jobs if config.max_seconds is not None]
    if limits:
        stop.after(min(limits))
    failed = False
    for number, (config, identity) in enumerate(jobs, 1):
        try:
            stop.check()
            outcome = run(config, identity, stop, f"{number}/{len(jobs)} " if len(jobs) > 1 else "")
        except Stopped:
            print(f"stopped by {stop.reason}", file=sys.stderr)
            break
        print(f"{outcome.status:14} {identity.folder}{'  ' if outcome.reason else ''}{outcome.reason}", flush=True)
        failed |= outcome.status == "failed"
        if config.rerun_from is not None:
            failed |= not _equals(Path(config.rerun_from), identity.folder, config)
        fails = outcome.status == "failed" and not outcome.before
        if outcome.status == "interrupted" or (fails and config.on_failure == "stop"):
            break
    if len(jobs) > 1:
        print(f"\n{cells.table(cells.survey(jobs))}")
    return stop.code or int(failed)


def _distinct(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs without those that are there twice.

    Raises:
        ConfigError: two jobs of one folder that are not the same.
    """
    by_folder: dict[Path, Job] = {}
    for config, identity in jobs:
        known, _ = by_folder.setdefault(identity.folder, (config, identity))
        if known != config:
            one, other = asdict(known), asdict(config)
            key = next(key for key in one if one[key] != other[key])
            raise ConfigError(
                f"{key}={one[key]} and {key}={other[key]} would be two runs in one folder, {identity.folder}, because "
                f"{key} is no part of what a run computes. Start one command for each, with another study=NAME."
            )
    return list(by_folder.values())


def _equals(original: Path, repeat: Path, config: Config) -> bool:
    """Say whether a repeated run has the original's numbers, and what may be the reason if not."""
    before, now = read_record(original) or {}, read_record(repeat) or {}
    if now.get("status") != "finished":
        print(f"{repeat} is not finished and was not compared with {original}")
        return False
    if not rows(original / "evals.jsonl") and not rows(original / "metrics.jsonl"):
        print(f"{original} has no rows to compare with")
        return False
    made_otherwise = provenance.differences(now, provenance.conditions(config.device, config.threads))
    if made_otherwise:
        print(f"{repeat} was made under other conditions ({', '.join(made_otherwise)}): rerun=true makes it again")
        return False
    whole = before.get("status") == "finished"
    difference = rerun.first_difference(original, repeat, whole)
    if difference is None:
        how_far = "" if whole else f", as far as that went (update {before.get('updates_done')})"
        print(f"{repeat} has the numbers of {original}{how_far}")
        return True
    changed = provenance.differences(before, now) + before.get("mixed", []) + now.get("mixed", [])
    print(f"{repeat} differs from {original}: {difference}")
    print(f"  under other conditions: {', '.join(changed)}" if changed else "  under the same conditions")
    return False


def run(config: Config, identity: Identity, stop: Stop, position: str = "") -> Outcome:
    """Carry one job out and return how it ended; a finished one is skipped unless `config.rerun`.

    `position` goes before its name in what is shown while it trains.

    An out-of-memory is an outcome like another; any other exception is recorded and becomes the outcome `failed`. A
    second signal is recorded and passes on. A run that another process is at is left to it: the folder is locked, and a
    lock ends with its process.
    """
    try:
        identity.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(identity.folder / ".lock", timeout=0):
            return _run_locked(config, identity, stop, position)
    except Timeout:
        record = read_record(identity.folder) or {}
        process = record.get("process") if record.get("status") == "running" else None
        who = f"process {process['pid']} on {process['host']}" if process else "another process"
        return Outcome("skipped", f"{who} is running it")
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        return Outcome("failed", f"the run folder: {type(error).__name__}: {error}")
    except Exception as error:  # of a user's own task, say, which was fine when the command began
        return Outcome("failed", f"in start: {type(error).__name__}: {error}")
    finally:
        gc.collect()  # a model is a knot of hooks: the next job must not find it in memory


def _run_locked(config: Config, identity: Identity, stop: Stop, position: str) -> Outcome:
    existing = read_record(identity.folder)
    if existing is not None and not config.rerun:
        if existing.get("status") == "finished":
            exported = existing.get("export", config.export)
            if (config.export, exported) in (("best", "last"), ("best", "none"), ("last", "none")):
                return _export_finished(config, identity, existing)
            return Outcome("skipped", "finished already; rerun=true repeats it", before=True)
        if existing.get("status") in ("failed", "out_of_memory") and not config.retry_failed:
            reason = f"{failure(existing)}; that was before, retry_failed=true tries again"
            return Outcome(existing["status"], reason, before=True)
    for group, source in _sources(config).items():
        if with_content(source) != identity.sources[group]:
            return Outcome("failed", f"{group}.source={source} was changed since the command began: start it again")
    record = _record(config, identity)
    resume_from, changed = _prepare_folder(config, identity, existing, record)
    machine = {key: record[key] for key in ("threads", "device")}
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True, warn_only=config.device == "cuda")
    progress = Progress(f"{position}{identity.label}-s{config.seed}", config.updates, record["updates_done"])
    tracked = None
    try:
        with open_run(identity.folder, record, asdict(config) | machine, config.wandb) as tracked:
            if tracked.accuracies:
                progress.evaluation({"eval/accuracy": tracked.accuracies[max(tracked.accuracies)]})
            if changed:
                tracked.log_event("conditions_changed", changed=changed)
                print(f"warning: {identity.folder} goes on under other conditions: {', '.join(changed)}")
            try:
                with capped(torch.device(config.device), config.memory.cap_bytes):
                    _load_and_train(config, tracked, progress, stop, resume_from)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                facts = _shortage(config, tracked, error)
                tracked.outcome("out_of_memory", error, facts)
                tracked.log_event("out_of_memory", message=str(error), **facts)
                return Outcome("out_of_memory", failure(read_record(identity.folder) or {}))
    except Stopped as stopped:
        done = (read_record(identity.folder) or {}).get("updates_done", 0)
        again = config.rerun or config.resume == "never" or not checkpoint.found(identity.folder / "checkpoints")
        then = "starts it again" if again else "goes on"
        return Outcome("interrupted", f"by {stopped} after update {done}; the same command {then}")
    except checkpoint.CheckpointError as error:
        assert resume_from is not None
        checkpoint.refuse(resume_from)
        print(f"{identity.study}/{identity.folder.name}: {resume_from.name} is not used, and renamed: {error}")
        return _run_locked(replace(config, retry_failed=True, rerun=False), identity, stop, position)
    except Exception as error:
        where = "in start" if tracked is None else f"in {tracked.phase}"
        first_line = str(error).splitlines()[0] if str(error) else ""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}, the traceback is in events.jsonl"
        return Outcome("failed", f"{where}: {type(error).__name__}: {first_line} ({place})")
    finally:
        progress.close()
    accuracy = tracked.accuracies.get(config.updates)
    return Outcome("finished", UNMEASURED if accuracy is None else f"held-out accuracy {accuracy:.3f}")


def _export_finished(config: Config, identity: Identity, record: dict[str, Any]) -> Outcome:
    """Export a finished run as it is asked for now; nothing else of it changes, whatever happens."""
    folder = identity.folder
    try:
        policy = models.load(config.model, load_task(config.task), torch.device("cpu"), config.seed)
        if config.method.name == "lora":  # whose adapters are among the weights
            methods.build(config.method, policy.model, models.targets(config.model, policy.model), config.seed)
        accuracies = {row["update"]: row["eval/accuracy"] for row in rows(folder / "evals.jsonl")}
        update = _put_weights(config, policy, folder / "checkpoints", record["id"], accuracies, None)
        export_policy(policy, folder / "policy", record, rows(folder / "evals.jsonl"), update)
        write_atomically(folder / "run.json", to_json(record | {"export": config.export}, indent=2))
    except Exception as error:
        reason = f"finished already, but export={config.export} is not possible: {error}"
        return Outcome("failed", reason, before=True)
    return Outcome("finished", f"before; exported now with export={config.export}, after update {update}")


def _put_weights(
    config: Config,
    policy: models.Policy,
    checkpoints: Path,
    run_id: str,
    accuracies: dict[int, float],
    current: int | None,
) -> int:
    """Put into a policy, which has those of update `current`, the weights that are to be exported; return their update.

    Raises:
        CheckpointError: no checkpoint is left to take them from.
    """
    while True:
        update: int | None = config.updates
        if config.export == "best":
            update = checkpoint.best_update(checkpoints, accuracies) or current
        if update is not None and update == current:
            return update
        path = next((path for at, path in checkpoint.found(checkpoints) if at == update), None)
        if update is None or path is None:
            raise checkpoint.CheckpointError("no checkpoint to take it from is left")
        try:
            policy.model.load_state_dict(checkpoint.load(path, run_id)["weights"])
            return update
        except checkpoint.CheckpointError as error:  # the next best, then
            checkpoint.refuse(path)
            print(f"{path} is not used, and renamed: {error}")


def _prepare_folder(
    config: Config,
    identity: Identity,
    existing: dict[str, Any] | None,
    record: dict[str, Any],
) -> tuple[Path | None, list[str]]:
    """Bring a folder to the state it had at the newest checkpoint that can be used, or to the beginning.

    Completes the record of what goes on: it keeps the conditions that the run began under. Returns the checkpoint, None
    for the beginning, and the conditions that are others now.
    """
    folder, name = identity.folder, f"{identity.study}/{identity.folder.name}"
    if existing is None or config.rerun or config.resume == "never":
        _clear(folder)
    state = None
    for _, path in checkpoint.found(folder / "checkpoints"):
        try:
            state = checkpoint.load(path, record["id"])  # let go at the end: as long as it is held, so is the file
            _check_rows(folder, state["update"], config)
            break
        except checkpoint.CheckpointError as error:
            state = None
            checkpoint.refuse(path)
            print(f"{name}: {path.name} is not used, and renamed: {error}")
    update = state["update"] if state else 0
    cut_back(folder, update if state else -1)
    provenance.keep_code(folder, _sources(config))
    if existing is not None:
        status = existing.get("status", "damaged")
        was = "killed" if status == "running" else status
        how = f"goes on after update {update}" if state else "starts again from its beginning"
        print(f"{name}: {'had' if was == 'failed' else 'was'} {was}, {how}")
    if state is None:
        shutil.rmtree(folder / "policy", ignore_errors=True)
        return None, []
    before = existing or {}
    changed = provenance.differences(before, record)
    record |= {key: before[key] for key in (*provenance.CONDITIONS, "start", "warm_start") if key in before}
    record["mixed"] = before.get("mixed", []) + changed
    record["updates_done"] = update
    last = before.get("checkpoint") or {}
    same = last.get("update") == update
    record["checkpoint"] = last if same else {"update": update, "bytes": path.stat().st_size}
    record["wandb_id"] = state["wandb_id"]
    return path, changed


def _clear(folder: Path) -> None:
    """Remove what a run left, its events apart. The record goes first: from then on it is no finished run's folder."""
    for name in ("run.json", *ROW_FILES):
        if name != "events.jsonl":
            (folder / name).unlink(missing_ok=True)
    checkpoint.clear(folder / "checkpoints")


def _check_rows(folder: Path, update: int, config: Config) -> None:
    """Refuse a checkpoint whose rows are not all there: what was written before it must be readable for good."""
    expected = {"metrics.jsonl": set(range(1, update + 1))}
    expected["memory.jsonl"] = {at for at in expected["metrics.jsonl"] if measured(config, at)}
    expected["evals.jsonl"] = {at for at in range(update) if evaluation_due(config, at)}
    for name, updates in expected.items():
        missing = updates - {row["update"] for row in rows(folder / name)}
        if missing:
            raise checkpoint.CheckpointError(f"{name} has no row of update {min(missing)}")


def _load_and_train(config: Config, tracked: Run, progress: Progress, stop: Stop, resume_from: Path | None) -> None:
    """Load task and model, make or fetch the warm start, train under the ledger, and export what came out."""
    tracked.phase = "load"
    device = torch.device(config.device)
    task = load_task(config.task)
    policy = models.load(config.model, task, device, config.seed)
    tracked.phase = "warm_start"
    facts = warm_up(policy, task, config, progress.say)
    if facts is not None:
        before = {"hash": None} | ((read_record(tracked.folder) or {}).get("warm_start") or facts)
        if before["hash"] != facts["hash"]:  # made anew, elsewhere perhaps; the policy goes on from its checkpoint
            tracked.log_event("conditions_changed", changed=[f"warm_start.hash: {before['hash']} -> {facts['hash']}"])
        tracked.update_record(warm_start=facts)
    tracked.update_record(parameters=sum(parameter.numel() for parameter in policy.model.parameters()))
    with Ledger(device, config.memory.cap_bytes) as ledger:
        tracked.update_record(memory_includes=list(ledger.includes))
        train(config, policy, task, tracked, ledger, progress, stop, resume_from)
    if config.export != "none":
        tracked.phase = "export"
        tracked.update_record(export=config.export)  # which also refuses where the folder was removed
        folder = tracked.folder
        update = _put_weights(config, policy, folder / "checkpoints", tracked.id, tracked.accuracies, config.updates)
        export_policy(policy, folder / "policy", read_record(folder) or {}, rows(folder / "evals.jsonl"), update)


# What the first update's phases do that later ones do not.
_FIRST = {"forward": "first_forward", "backward": "first_backward", "step": "optimizer_state_creation"}


def _shortage(config: Config, run: Run, error: BaseException) -> dict[str, Any]:
    """Return what is known of an out-of-memory: its phase, bytes wanted and alive, by component, and the cap."""
    components = getattr(error, "components", None)
    return {
        "phase": run.phase if run.updates_done else _FIRST.get(run.phase, run.phase),
        "wanted_bytes": wanted_bytes(error),
        "cap_bytes": config.memory.cap_bytes,
        "live_bytes": getattr(error, "live_bytes", None if components is None else sum(components.values())),
        "components": components,
    }


def _sources(config: Config) -> dict[str, str]:
    """Return the files of the user's own that a run is made of, by group."""
    parts = {"model": config.model, "task": config.task, "method": config.method}
    return {group: part.source for group, part in parts.items() if part.name == "custom"}


def _record(config: Config, identity: Identity) -> dict[str, Any]:
    """Return what run.json says of a run before it starts."""
    return {
        "schema_version": 1,
        "id": f"{identity.variant}-s{config.seed}",
        "study": identity.study,
        "label": identity.label,
        "variant": identity.variant,
        "seed": config.seed,
        "updates": config.updates,
        "updates_done": 0,
        "task": {"name": config.task.name, "version": load_task(config.task).version},
        "warm_start": None,
        "accuracy": None if models.measures_accuracy(config.model) else UNMEASURED,  # else it is in evals.jsonl
        "checkpoint": None,
        "export": "none",
        "mixed": [],
        "memory_includes": [],
    } | provenance.conditions(config.device, config.threads)
