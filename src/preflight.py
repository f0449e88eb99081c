"""Checks of all jobs before any weights are read: what cannot work is refused in one sentence."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from src import checkpoint, methods, models
from src import config as cfg
from src.config import Config, ConfigError
from src.identity import Identity
from src.runfolder import read_record
from src.sketch.direction import check_transfer
from src.sketch.layer import check_rank, check_weights
from src.tasks import load_task
from src.track import check_login


def preflight(jobs: Sequence[tuple[Config, Identity]]) -> None:
    """Refuse what cannot work, before any weights are read; what several jobs have in common is checked once.

    Raises:
        ConfigError: in one sentence.
    """
    configs = [config for config, _ in jobs]
    for mode in {config.wandb.mode for config in configs}:
        try:
            check_login(mode)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if any(config.device == "cuda" for config in configs) and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but this machine has no CUDA device that torch can use. Use device=cpu.")
    for root in {config.root for config in configs}:
        _check_root(root)
    skeletons: dict[str, torch.nn.Module | None] = {}  # by what is built, in words: lists in it have no hash
    for config in {repr((config.model, config.task, config.method)): config for config in configs}.values():
        built = repr((config.model, config.task))
        if built not in skeletons:
            skeletons[built] = _check_task_and_model(config)
        skeleton = skeletons[built]
        methods.check_packages(config.method)
        if skeleton is not None:
            targets = models.targets(config.model, skeleton)
            if isinstance(config.method, cfg.SketchMethod):
                _check_sketch(config.method, skeleton, targets)
            elif isinstance(config.method, cfg.PackageMethod | cfg.LoraMethod):
                _check_peer(config.method, skeleton, targets)
    for config, identity in jobs:
        _check_place(config, identity)


def _check_root(name: str) -> None:
    root = Path(name)
    existing = next(parent for parent in (root.absolute(), *root.absolute().parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()  # permissions do not tell: a file system may refuse all the same
    except OSError as error:
        raise ConfigError(
            f"root={name} cannot be written: {existing} refuses it ({error.strerror}). Type root=FOLDER you may write "
            "to."
        ) from None


def _check_task_and_model(config: Config) -> torch.nn.Module | None:
    """Return the model's shapes, where they can be known before it is built."""
    task = load_task(config.task)
    try:
        task.held_out(config.task.held_out)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    skeleton = models.skeleton(config.model, getattr(task, "alphabet", None))
    if skeleton is not None:
        models.targets(config.model, skeleton)
    return skeleton


def _check_sketch(method: cfg.SketchMethod, skeleton: torch.nn.Module, targets: dict[str, torch.nn.Linear]) -> None:
    try:
        check_rank(targets, method.rank, methods.co_rank(method))
        check_weights(skeleton, targets)
        if method.direction == "adam" and method.moments == "transfer" and method.refresh_every != "never":
            widest = max(module.in_features for module in targets.values())
            check_transfer(method.beta1, method.refresh_every, method.rank, widest)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    width = min(module.in_features for module in targets.values())
    if method.rank == width:
        print(
            f"warning: method.rank={width} is the input width of some targets: a full-rank sketch saves nothing.",
            file=sys.stderr,
        )


def _check_peer(
    method: cfg.PackageMethod | cfg.LoraMethod, skeleton: torch.nn.Module, targets: dict[str, torch.nn.Linear]
) -> None:
    try:
        check_weights(skeleton, targets)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    rank = getattr(method, "rank", 1)
    name, side = min(((n, min(m.weight.shape)) for n, m in targets.items()), key=lambda pair: pair[1])
    if rank > side:
        raise ConfigError(
            f"method.rank={rank} is above the smaller side of {name}, {side}: no matrix has a higher rank. Use "
            f"method.rank={max(1, side // 4)}."
        )
    head = getattr(skeleton, "get_output_embeddings", lambda: None)()
    if getattr(method, "layerwise", False) and any(module is head for module in targets.values()):
        raise ConfigError(
            "model.targets: with method.layerwise=true the output layer would be updated once for each chunk of "
            "logits. Leave it out of model.targets, or use method.layerwise=false."
        )


def _check_place(config: Config, identity: Identity) -> None:
    """Refuse to go on with a run elsewhere than it began: the last bits depend on threads and device."""
    try:
        record = read_record(identity.folder) or {}
    except OSError:  # the run itself will meet it, and say so
        return
    over = {"finished"} if config.retry_failed else {"finished", "failed", "out_of_memory"}
    if record.get("status") in over or config.rerun or config.resume != "same":
        return
    if not checkpoint.found(identity.folder / "checkpoints"):
        return
    for key in ("threads", "device"):
        began, now = record.get(key), getattr(config, key)
        if began is not None and began != now:
            raise ConfigError(
                f"{key}={now}, but {identity.folder} was begun with {key}={began}, and would not end with the numbers "
                f"that it would have had. Type {key}={began}; or resume=any to go on all the same, or resume=never to "
                "start it again."
            )
