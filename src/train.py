"""The door: command line -> configurations -> runs. See conf/train.yaml for the keys, README.md for the commands."""

import sys
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.exit("Run this as a module, from the project's folder: python -m src.train")

from src import commandline, composition, config
from src.stop import Stop, Stopped


def main() -> None:
    """Run what the command line asks for: one run, or with -m every combination, one after the other."""
    stop = Stop()

    def run(jobs: list[dict[str, Any]]) -> int:
        identified = composition.identify(jobs, arguments, study)
        from src import job  # torch comes with it: errors of the command line do without

        return job.run_all(identified, stop)

    try:
        with stop.listening():
            arguments, study = commandline.prepare(sys.argv[1:], composition.CONF)
            code = run(composition.compose_all(arguments, lambda values: run([values])))
        sys.exit(code)
    except config.ConfigError as error:
        sys.exit(f"error: {error}")
    except Stopped:
        print(f"stopped by {stop.reason}", file=sys.stderr)
        sys.exit(stop.code)
    except KeyboardInterrupt:
        print("ended at once; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
