"""Notebooks stay thin, are kept without outputs, and run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runfolders import write_ablation

REPO = Path(__file__).parent.parent
NOTEBOOKS = sorted((REPO / "analysis" / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS if path.name == "curves.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_thin_and_stripped(path):
    cells = json.loads(path.read_text())["cells"]
    assert 0 < len(cells) <= 10
    for cell in cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
        assert not any(line.startswith(("def ", "class ")) for line in cell["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs_in_its_folder_on_what_training_left(path, warm_root, tmp_path):
    """F56: a folder of the trainer's own, beside written ones with a killed and a failed run."""
    shutil.copytree(warm_root, tmp_path / "outputs")
    write_ablation(tmp_path / "outputs")
    environment = os.environ | {
        "GRADSKETCH_ROOT": str(tmp_path / "outputs"),
        "PYTHONPATH": str(REPO),
        "JUPYTER_PLATFORM_DIRS": "1",
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbmake", "-p", "no:cacheprovider", path.name],
        cwd=path.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout[-3000:] + ran.stderr[-1000:]
