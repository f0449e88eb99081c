"""A root with the warm start of the fast preset, made once."""

import shutil
from pathlib import Path

import pytest

from tests.launching import fast, launch


@pytest.fixture(scope="session")
def warm_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one finished run of the fast preset: seed 0, decaying budget."""
    root = tmp_path_factory.mktemp("warm") / "outputs"
    ended = launch(*fast(f"root={root}", "wandb.mode=disabled"))
    assert ended.code == 0, ended.err
    return root


@pytest.fixture
def root(warm_root: Path, tmp_path: Path) -> Path:
    """A root without runs in which the fast preset's warm start is made already."""
    shutil.copytree(warm_root / ".warmstart", tmp_path / "outputs" / ".warmstart")
    return tmp_path / "outputs"
