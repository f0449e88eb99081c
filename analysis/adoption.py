"""How many lines of a script change when it trains by sketches: `python -m analysis.adoption docs/examples`."""

import argparse
import sys
from difflib import SequenceMatcher
from pathlib import Path


def code_lines(path: Path) -> list[str]:
    """Return a script's lines without leading and trailing white space; empty lines and comments do not count."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def changed_lines(before: Path, after: Path) -> int:
    """Return how many lines of code were added, removed or replaced; a line that is only indented anew is the same."""
    matcher = SequenceMatcher(None, code_lines(before), code_lines(after), autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in matcher.get_opcodes() if kind != "equal")


def pairs(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Return the pairs NAME_dense.py and NAME_sketch.py of a folder, by NAME.

    Raises:
        FileNotFoundError: there is none.
    """
    found = {}
    for before in sorted(folder.glob("*_dense.py")):
        name = before.name.removesuffix("_dense.py")
        after = folder / f"{name}_sketch.py"
        if after.exists():
            found[name] = (before, after)
    if not found:
        raise FileNotFoundError(f"{folder} has no pair NAME_dense.py and NAME_sketch.py")
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    try:
        found = pairs(parser.parse_args().folder)
    except FileNotFoundError as error:
        sys.exit(f"error: {error}")
    print("| pair | lines changed | lines in all |\n|---|---|---|")
    for name, (before, after) in found.items():
        print(f"| {name} | {changed_lines(before, after)} | {len(code_lines(after))} |")


if __name__ == "__main__":
    main()
