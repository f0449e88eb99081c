"""Hydra's part: from a command line to configurations and identities. It only composes; jobs are run elsewhere."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from src import commandline, config, identity, rerun

_HERE = Path(__file__).resolve().parent
CONF = next(folder for folder in (_HERE.parent / "conf", _HERE / "conf") if folder.is_dir())
_GROUPS = ("model", "task", "method", "control")


def compose(overrides: list[str]) -> dict[str, Any]:
    """Return the composed configuration in plain values, as a command line would make it (one run).

    Raises:
        ConfigError: Hydra refuses the overrides.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            return _plain(hydra.compose("train", overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise config.ConfigError(commandline.sentence(error)) from error


def compose_all(arguments: list[str], run_elsewhere: Callable[[dict[str, Any]], int]) -> list[dict[str, Any]]:
    """Return every job of a command line, so that all are checked before the first one trains.

    Under a launcher other than Hydra's basic one, which starts jobs elsewhere, a job is run where it is composed.

    Raises:
        ConfigError: Hydra refuses the command line.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

    composed: list[dict[str, Any]] = []

    @hydra.main(config_path=str(CONF), config_name="train", version_base="1.3")
    def job(values: DictConfig) -> None:
        if HydraConfig.get().launcher._target_.endswith("BasicLauncher"):
            composed.append(_plain(values))
        elif run_elsewhere(_plain(values)):
            raise RuntimeError("the run failed; its folder tells why")

    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of ending the process
    with tempfile.TemporaryDirectory() as scratch:  # for Hydra's note of a multirun, which nobody reads
        elsewhere = any(word.startswith(("hydra/launcher=", "hydra.sweep")) for word in arguments)
        place = [] if elsewhere else [f"hydra.sweep.dir={scratch}"]
        sys.argv = [sys.argv[0], *place, *arguments]
        try:
            job()
        except (HydraException, OmegaConfBaseException, OSError) as error:
            raise config.ConfigError(commandline.sentence(error)) from error
    return composed


def identify(
    composed: list[dict[str, Any]], arguments: list[str], study: str | None
) -> list[tuple[config.Config, identity.Identity]]:
    """Return composed configurations typed and checked, with their identities.

    Args:
        arguments: the command line; what it types goes before what a run that is repeated had.
        study: the name where a configuration has none.
    """
    typed_keys = {key for key, _ in commandline.split(arguments)}
    defaults: dict[tuple[str, ...], dict[str, Any]] = {}

    def defaults_of(values: dict[str, Any]) -> dict[str, Any]:
        groups = tuple(f"{group}={values[group]['name']}" for group in _GROUPS)
        if groups not in defaults:
            defaults[groups] = compose(list(groups))
        return defaults[groups]

    jobs = []
    for values in composed:
        if values["rerun_from"] is not None:
            original = rerun.read_config(Path(values["rerun_from"]), CONF)
            values = rerun.merge(original, defaults_of(original), values, typed_keys)
        typed = config.from_dict(values)
        who = identity.identify(typed, defaults_of(values), study)
        if typed.rerun_from is not None:
            rerun.check_place(Path(typed.rerun_from), who.folder)
        jobs.append((typed, who))
    return jobs


def _plain(values: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(values, resolve=True)
    return plain
