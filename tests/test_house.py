"""What is shipped, and what is written nowhere."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())


def git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=PROJECT, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the working tree, built from a copy without downloads."""
    pytest.importorskip("setuptools", minversion="77")
    import shutil

    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for part in ("src", "conf", "analysis"):
        shutil.copytree(PROJECT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / part, source / part)
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(out)],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_holds_every_module_and_every_yaml(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("src", "analysis"):
        for path in (PROJECT / folder).rglob("*.py"):
            assert path.relative_to(PROJECT).as_posix() in names
    for path in (PROJECT / "conf").rglob("*.yaml"):
        assert f"src/{path.relative_to(PROJECT).as_posix()}" in names
    tops = {found.split("/")[0] for found in names if ".dist-info" not in found}
    assert tops == {"src", "analysis"}
    assert any(found.endswith("LICENSE") for found in names)


def test_the_wheel_works_from_an_empty_folder(wheel, tmp_path):
    """The configuration is found inside the package, where there is no project around it."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    for words in (
        ["-m", "src.train", "+ablation=fixed", "--cfg", "job"],
        ["-c", "from src.composition import CONF; print(CONF)"],
    ):
        ended = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path / "empty",
            env=os.environ | {"PYTHONPATH": str(tmp_path / "site"), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
        assert "name: fixed" in ended.stdout or ended.stdout.strip() == str(tmp_path / "site" / "src" / "conf")
    assert list((tmp_path / "empty").iterdir()) == []


def test_packages_are_listed_one_by_one():
    """Discovery would take a folder called src for a src-layout."""
    folders = {
        ".".join(path.parent.relative_to(PROJECT).parts)
        for top in ("src", "analysis")
        for path in (PROJECT / top).rglob("*.py")
    }
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == folders | {"src.conf"}
    for package in folders - {"analysis.notebooks"}:
        assert (PROJECT.joinpath(*package.split(".")) / "__init__.py").exists(), f"{package} merges with any other"
    assert not (PROJECT / "conf" / "__init__.py").exists() and not (PROJECT / "sweeps" / "__init__.py").exists()


def test_the_console_script_is_the_door():
    assert PYPROJECT["project"]["scripts"] == {"gradsketch": "src.train:main"}
    assert PYPROJECT["tool"]["pytest"]["ini_options"]["filterwarnings"][0] == "error"


@pytest.mark.skipif(not (PROJECT / ".git").exists(), reason="needs the project's own checkout")
def test_no_file_names_a_machine():
    """Paths of one machine, addresses of package registries."""
    pattern = re.compile(r"/(home|root|work|Users)/\w|index-url|\bpypi\.\w+\.\w+|[\d]{1,3}(\.\d{1,3}){3}:\d+")
    allowed = re.compile(r"127\.0\.0\.1")
    found = []
    for file in git("ls-files", "--cached", "--others", "--exclude-standard"):
        path = PROJECT / file
        if path == Path(__file__) or path.suffix in (".png", ".pdf", ".svg") or not path.is_file():
            continue
        for line in path.read_text(errors="replace").splitlines():
            if pattern.search(line) and not allowed.search(line):
                found.append(f"{file}: {line.strip()[:100]}")
    assert found == []


def test_nothing_generated_is_kept():
    ignored = (PROJECT / ".gitignore").read_text().split()
    assert {"outputs/", "wandb/", "__pycache__/", "*.egg-info/"} <= set(ignored)


def test_ci_runs_the_readme_s_test_command():
    """The second of the README's two commands is what CI runs last."""
    blocks = re.findall(r"```\n(.+?)\n```", (PROJECT / "README.md").read_text(), re.DOTALL)
    (command,) = [block for block in blocks if "pytest" in block]
    assert (
        (PROJECT / ".ci" / "run").read_text().rstrip().endswith(command.replace("pip install", "pip install --quiet"))
    )


def test_statistics_rest_on_scipy_alone():
    """F65: the statistics packages of the field pin pandas and break with the newest one; we depend on none of them."""
    named = {re.split(r"[<>=\[; ]", entry)[0] for entry in PYPROJECT["project"]["dependencies"]}
    assert {"scipy", "pandas"} <= named and not {"rliable", "arch", "statsmodels", "pingouin"} & named
