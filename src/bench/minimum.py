"""The smallest cap on memory at which a contestant completes updates: a figure that needs no choice of statistic."""

from collections.abc import Callable
from typing import Any

import torch

from src.bench.contestants import Workload, configured, entered
from src.memory import Ledger, MemoryCapExceeded

PRESSURES = (1.0, 1.1, 1.5)  # times the smallest cap, at which step times are taken


def minimum(name: str, overrides: list[str], work: Workload, updates: int, tolerance: float) -> dict[str, Any]:
    """Return the smallest cap (bytes) at which a contestant completes updates, to a relative tolerance, by bisection.

    Beside it the seconds of an update at 1, 1.1 and 1.5 times the cap. Below the cap the phase of the failure and what
    was wanted are those of the last trial that failed.
    """
    config = configured(name, overrides)
    low = sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in work.policy.model.parameters()}.values()
    )
    row: dict[str, Any] = {"contestant": name, "updates": updates, "tolerance": tolerance, "trials": 0}

    def completes(cap: int) -> list[float] | None:
        """Return the seconds of the updates, None where the cap was passed."""
        row["trials"] += 1
        seconds = []
        phase = ["method_creation"]

        def told(ledger: Ledger) -> Callable[..., Any]:
            def enter(name: str, component: str | None = None) -> Any:
                phase[0] = name
                return ledger.phase(name, component)

            return enter

        try:
            with entered(name, config, work) as entrant, Ledger(torch.device(work.config.device), cap) as ledger:
                entrant.watched(ledger)
                for _ in range(updates):
                    entrant.update(told(ledger))
                    seconds.append(ledger.close_update()[1]["time/update_seconds"])
        except MemoryCapExceeded as error:
            row["below"] = {"phase": phase[0], "wanted_bytes": error.wanted_bytes, "update": len(seconds) + 1}
            return None
        return seconds

    high = 2 * low
    while completes(high) is None:
        low, high = high, 2 * high
    while high > low * (1 + tolerance) and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if completes(middle) is not None else (middle, high)
    row["cap_bytes"] = high
    row["seconds"] = {str(times): completes(int(high * times)) for times in PRESSURES}
    return row
