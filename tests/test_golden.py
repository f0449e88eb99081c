"""A change that should not alter numbers keeps them: recorded runs of the fast preset, update by update.

`python -m tests.test_golden` records them anew, after a change that should.
"""

import hashlib
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching import fast, launch, rows, run_folders

GOLDEN = Path(__file__).parent / "golden"
RUNS = {
    "sketch": ["method.rank=4", "method.weight_decay=0.1"],
    "dense": ["method=dense", "control=fixed"],
}
# Bytes are the ledger's business, and depend on the version of transformers.
_LEFT_OUT = "memory/"


def environment() -> dict[str, str]:
    """What the last bits of a float depend on (the fast preset runs on one thread): the libraries and the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    processor = [line for line in lines if line.startswith(("model name", "flags"))][:2]
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "processor": hashlib.sha256("\n".join(processor).encode()).hexdigest()[:16],
    }


def measure(name: str, root: Path) -> list[dict[str, Any]]:
    leave_out = "method.rank" if name == "dense" else ""
    ended = launch(*fast(*RUNS[name], f"root={root}", "wandb.mode=disabled", without=leave_out))
    assert ended.code == 0, ended.err
    (folder,) = run_folders(root)
    return [{key: value for key, value in row.items() if not key.startswith(_LEFT_OUT)} for row in rows(folder)]


@pytest.mark.parametrize("name", RUNS)
def test_numbers_are_the_recorded_ones(name: str, tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    measured = measure(name, tmp_path)
    if golden["environment"] == environment():
        assert measured == golden["rows"]
        return
    # Elsewhere the warm start ends with other last bits, and sooner or later another token is drawn.
    assert [row.keys() for row in measured] == [row.keys() for row in golden["rows"]]
    for key in ("reward/mean", "policy/entropy", "control/proposed_kl"):
        assert measured[0][key] == pytest.approx(golden["rows"][0][key], rel=0.5)


if __name__ == "__main__":
    for run in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            content = {"environment": environment(), "rows": measure(run, Path(folder))}
        (GOLDEN / f"{run}.json").write_text(json.dumps(content, indent=1) + "\n")
        print(f"{GOLDEN / run}.json", file=sys.stderr)
