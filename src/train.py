"""The door: command line -> configurations -> runs. See conf/train.yaml for the keys, README.md for the commands."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.exit("Run this as a module, from the project's folder: python -m src.train")

from src import commandline, config, identity

_HERE = Path(__file__).resolve().parent
CONF = next(folder for folder in (_HERE.parent / "conf", _HERE / "conf") if folder.is_dir())


def compose(overrides: list[str]) -> dict[str, Any]:
    """Return the composed configuration in plain values, as a command line would make it (one run)."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return _plain(hydra.compose("train", overrides))


def _plain(values: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(values, resolve=True)
    return plain


def identify(values: dict[str, Any], study: str | None) -> tuple[config.Config, identity.Identity]:
    """Return a composed configuration typed and checked, with its identity."""
    typed = config.from_dict(values)
    groups = [f"{group}={values[group]['name']}" for group in ("model", "task", "method", "control")]
    return typed, identity.identify(typed, compose(groups), study)


def main() -> None:
    """Run what the command line asks for: one run, or with -m every combination, one after the other."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores the second
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # as an exception: the run is recorded
    try:
        arguments, study = commandline.prepare(sys.argv[1:], CONF)
        sys.exit(_run_all(_compose_all(arguments, study), study))
    except config.ConfigError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted; the same command starts the run that was cut off again", file=sys.stderr)
        sys.exit(130)


def _compose_all(arguments: list[str], study: str | None) -> list[dict[str, Any]]:
    """Return every job as Hydra composes it, so that all are checked before the first one trains.

    Under a launcher other than Hydra's basic one, which starts jobs elsewhere, a job runs where it is composed.
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
        elif _run_all([_plain(values)], study):
            raise RuntimeError("the run failed; its folder tells why")

    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of ending the process
    sys.argv = [sys.argv[0], *arguments]
    try:
        job()
    except (HydraException, OmegaConfBaseException, OSError) as error:
        raise config.ConfigError(commandline.sentence(error)) from error
    return composed


def _run_all(composed: list[dict[str, Any]], study: str | None) -> int:
    """Check all jobs, then run them in order; return the exit code. One that fails does not stop the others."""
    jobs = [identify(values, study) for values in composed]
    from src import job  # torch comes with it: errors of the command line do without

    for typed, _ in jobs:
        job.preflight(typed)
    outcomes = [job.run(typed, who) for typed, who in jobs]
    for outcome in outcomes:
        print(f"{outcome.status:14} {outcome.identity.folder}{'  ' if outcome.reason else ''}{outcome.reason}")
    return int(any(outcome.status == "failed" for outcome in outcomes))


if __name__ == "__main__":
    main()
