"""What a person sees while a run trains: one live line on a terminal, plain lines elsewhere."""

import math
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TextIO

# Seconds between two plain lines where the output is no terminal.
_LINE_SECONDS = 10.0
# Of a label in the live line, so that the numbers fit behind it.
_LABEL_CHARS = 20


class Progress:
    """Shows a run's state.

    On a terminal one line with the time left is rewritten in place; elsewhere a line is printed at the first update,
    at the last one, and every ten seconds between. Accuracy is that of the last greedy evaluation.
    """

    def __init__(self, label: str, updates: int, done: int = 0, stream: TextIO | None = None):
        from tqdm import tqdm

        self._label = label
        self._updates = updates
        self._stream = stream = stream or sys.stderr
        self._first: float | None = None  # when the first update was over: what came before it says nothing of the rest
        self._seen = 0  # of the updates that this process made
        self._last_line = -math.inf
        self._accuracy = float("nan")
        self._latest: dict[str, float] = {}  # not every update has all numbers
        self._live = stream.isatty()
        # Its end has the seed.
        shown = label if len(label) <= _LABEL_CHARS else f"{label[: _LABEL_CHARS - 6]}..{label[-4:]}"
        bar_format = "{desc} {n}/{total}{postfix}"
        # The size by shutil: in a terminal that says 0 columns and lines (some containers) tqdm shows nothing.
        columns, lines = shutil.get_terminal_size((120, 24))
        self._bar = tqdm(
            total=updates,
            initial=done,
            desc=shown,
            file=stream,
            disable=not self._live,
            bar_format=bar_format,
            ncols=columns,
            nrows=lines,
        )

    def update(self, row: Mapping[str, float]) -> None:
        """Show an update's row of metrics."""
        now = time.monotonic()
        left = ""
        if self._first is None:
            self._first = now
        else:
            left = f", {(now - self._first) / self._seen * (self._updates - row['update']):.0f} s left"
        self._seen += 1
        self._latest |= row
        text = describe(self._latest, self._accuracy)
        self._bar.set_postfix_str(text + left, refresh=False)
        self._bar.update()
        if not self._live and (now - self._last_line >= _LINE_SECONDS or row["update"] == self._updates):
            self._last_line = now
            self.say(f"{int(row['update'])}/{self._updates} {text}{left}")

    def evaluation(self, row: Mapping[str, float]) -> None:
        """Remember an evaluation's accuracy for the lines to come."""
        self._accuracy = row["eval/accuracy"]

    def say(self, text: str) -> None:
        """Print a line of its own."""
        if self._live:
            self._bar.write(f"{self._label}: {text}", file=self._stream)
        else:
            print(f"{self._label}: {text}", file=self._stream, flush=True)

    def close(self) -> None:
        self._bar.close()


def describe(row: Mapping[str, float], accuracy: float) -> str:
    """Return an update's row in words: reward, accuracy, length, predicted divergence, step scale, peak memory."""
    words = [f"reward {row['reward/mean']:.2f}"]
    if accuracy == accuracy:  # some models' is not measured
        words.append(f"accuracy {accuracy:.3f}")
    words.append(f"{row['rollout/response_tokens_mean']:.1f} tokens")
    if "control/predicted_kl" in row:
        words.append(f"KL {row['control/predicted_kl']:.1e}")
    words.append(f"scale {row['control/step_scale']:.2f}")
    if "memory/peak_bytes" in row:
        words.append(f"peak {row['memory/peak_bytes'] / 2**20:.0f} MiB")
    return ", ".join(words)
