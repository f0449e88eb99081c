"""Who may import whom (docs/design.md, section 2)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("src", "analysis") for path in (PROJECT / folder).rglob("*.py"))
MATHS = {"config", "methodconfig", "typed", "identity", "objective", "divergence", "control", "stats", "randomness"}
MATHS |= {"records"}
DOORS = {"train", "bench", "plan", "diagnose", "commandline", "composition"}
HEAVY = {"transformers", "tokenizers", "peft", "vllm", "trl", "ray", "wandb", "hydra", "omegaconf", "reasoning_gym"}
HEAVY |= {"galore_torch", "apollo_torch", "flora_opt", "bitsandbytes", "accelerate"}


def name(path: Path) -> str:
    return path.relative_to(PROJECT).as_posix()


def imports(path: Path, top_level_only: bool = False) -> Iterator[str]:
    """The dotted names that a file imports; `from a import b` gives a and a.b."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages(path: Path, top_level_only: bool = False) -> set[str]:
    return {dotted.split(".")[0] for dotted in imports(path, top_level_only)}


def parts_of_ours(path: Path) -> set[str]:
    """The modules of src that a file imports, by the first name after src."""
    return {dotted.split(".")[1] for dotted in imports(path) if dotted.startswith("src.")}


def test_there_are_sources():
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_arrows(path):
    module = path.relative_to(PROJECT).with_suffix("").parts
    used = packages(path)
    if "hydra" in used or "omegaconf" in used:
        assert module[0] == "src" and module[1] in DOORS
    if "wandb" in used:
        assert name(path) in ("src/track.py", "analysis/runs.py")
    assert not packages(path, top_level_only=True) & HEAVY, "heavy packages are imported where they are needed"
    if module[0] == "analysis":
        assert "torch" not in used
        assert parts_of_ours(path) <= {"stats", "records"}
    elif module[1] == "sketch":
        ours = {dotted for dotted in imports(path) if dotted.split(".")[0] in ("src", "analysis")}
        assert all(dotted.startswith("src.sketch") for dotted in ours)
        assert used <= {"torch", "src"} | set(sys.stdlib_module_names)
    elif module[1] in MATHS:
        assert parts_of_ours(path) <= MATHS | {"sketch"}
    elif module[1] not in DOORS:
        assert not parts_of_ours(path) & DOORS, "arrows point down"
    assert "analysis" not in used or module[0] == "analysis"
    assert "tests" not in used


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_no_file_is_long_and_no_name_says_nothing(path):
    assert len(path.read_text().splitlines()) <= 500
    assert not set(path.relative_to(PROJECT).with_suffix("").parts) & {"utils", "helpers", "common", "misc"}


def test_records_and_statistics_need_little():
    for module, allowed in (("records", {"src", "numpy"}), ("stats", {"numpy", "scipy"})):
        assert packages(PROJECT / "src" / f"{module}.py") <= allowed | set(sys.stdlib_module_names)


def test_the_door_is_short_and_defines_no_classes():
    """Objects of `__main__` cannot be loaded elsewhere."""
    text = (PROJECT / "src" / "train.py").read_text()
    assert len(text.splitlines()) <= 100
    assert not [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]


def test_the_command_line_is_checked_with_the_standard_library_and_yaml():
    for module in ("typed", "config", "methodconfig", "identity", "runfolder", "rerun", "commandline"):
        path = PROJECT / "src" / f"{module}.py"
        assert packages(path) <= {"src", "yaml"} | set(sys.stdlib_module_names)
        assert parts_of_ours(path) <= {"typed", "config", "methodconfig", "identity", "runfolder"}


def test_sketch_and_analysis_stand_alone():
    """What is loaded, not only what is written: a module that another one pulls in counts."""
    code = "import sys; {}; print(*sorted({{name.split('.')[0] for name in sys.modules}} & {}))"
    for statement, forbidden in (
        ("import src.sketch.optimizer", {"transformers", "hydra", "wandb", "pandas"}),
        ("import src.train", {"torch", "transformers", "wandb", "hydra"}),
        ("import analysis.curves", {"torch", "transformers", "hydra", "wandb"}),
        ("import analysis.memory, src.records, src.stats", {"torch", "transformers", "hydra", "wandb", "pandas"}),
    ):
        ended = subprocess.run(
            [sys.executable, "-c", code.format(statement, forbidden)], cwd=PROJECT, capture_output=True, text=True
        )
        assert ended.returncode == 0 and ended.stdout.strip() == "", (statement, ended.stdout, ended.stderr)
