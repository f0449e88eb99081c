"""Any generator of the package reasoning-gym (procedural problems in English), with its own scorer.

Neighbouring seeds of the library share nearly all problems: it draws problem i of a data set with
`Random(seed + i)`. So an item here is the only problem of a data set of its own, whose seed is a hash of the
item's place.

A response is hostile text to a scorer. Generators whose scorer evaluates the answer as code are refused.
Numbers that scorers take for a right answer (NaN) or cannot build in reasonable time (1e999999999) are
unparseable. Answers are capped in length and scorers in time.
"""

import dataclasses
import difflib
import math
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cached_property
from importlib import metadata
from typing import Any, Literal

from src.config import ConfigError
from src.randomness import hash_key
from src.tasks import CORRECT, TIMEOUT, UNPARSEABLE, WRONG, Item, Verdict

# The widest seeds that all generators take: some pass theirs on to numpy, which takes 32 bits.
_SEED_BITS = 32
# Draws for one place before a generator is called exhausted.
_MAX_DRAWS = 200
# A score this close to 1 is a right answer.
_TOLERANCE = 1e-9
# Scorers that call eval, or SymPy's parser, which calls it.
_EVALUATES_ANSWERS = {
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}
_FEW_NUMBERS = 6
# Generators whose scorer takes some answers for right whatever the problem is: "0" for any 0.x, or any text at all.
_TAKES_ANYTHING = {"coin_flip", "game_of_life_halting"}
# Generators that iterate over sets of strings: their problems or answers change with Python's hash seed.
_NEEDS_HASH_SEED = {
    "codeio",
    "isomorphic_strings",
    "knight_swap",
    "list_functions",
    "ransom_note",
    "word_ladder",
}

_NUMBER = re.compile(r"(?<![\w.])[+-]?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_ANSWER_IS = re.compile(r"answer\s*(?:is\b\s*:?|:)", re.IGNORECASE)
_DECORATION = " \t*`\"'$.:"
# NaN, which passes comparisons in some scorers, and exponents too large to build the number.
_TRAPS = re.compile(r"(?<![a-z])(?:nan|inf(?:inity)?)j?(?![a-z])|[\d._]e[+-]?[\d_,]{4,}", re.IGNORECASE)


def canonical(question: str) -> str:
    """Return the question with its numbers sorted: `3 * 8` and `8 * 3` must not stand on both sides of the split.

    Problems that only look alike (`3 - 8`, `8 - 3`) count as one too, which costs a few and leaks none. A question with
    many numbers (a board, a list to sort) is its own text.
    """
    numbers = re.findall(r"\d+", question)
    if len(numbers) > _FEW_NUMBERS:
        return question
    return re.sub(r"\d+", "#", question) + "|" + ",".join(sorted(numbers, key=lambda text: (len(text), text)))


class ReasoningGym:
    """A generator of reasoning-gym as a task.

    Args:
        generator: the library's name for it, e.g. `gcd`.
        settings: the generator's own settings, except for seed and size.
        instruction: added to every question on a line of its own; says how short an answer has to be.
        reward: `score` is the library's score in [0, 1], above 0 for some wrong answers; `correct` is 1 or 0.
        timeout_seconds: wall-clock limit of one scoring. It holds in the main thread, the only one in which
            signals are handled; in other threads scorers run without a limit.
        held_out: how many problems are held out; training never meets them.

    Raises:
        ConfigError: package missing, generator unknown or refused, or settings that do not fit it.
    """

    name = "reasoning_gym"
    version = 1
    chat = True

    def __init__(
        self,
        generator: str,
        settings: dict[str, Any],
        instruction: str,
        reward: Literal["score", "correct"],
        timeout_seconds: float,
        held_out: int,
    ):
        self.generator = generator
        self.settings = settings
        self.instruction = instruction
        self.reward = reward
        self.timeout_seconds = timeout_seconds
        self.held_out_count = held_out
        _library()
        self.package_version = metadata.version("reasoning-gym")  # its __version__ lags behind
        self._scorer = self._checked_dataset()

    def training_item(self, seed: int, update: int, index: int) -> Item:
        for attempt in range(_MAX_DRAWS):
            item = self._draw("data", seed, update, index, attempt)
            if item.key not in self._held_out:
                return item
        raise ConfigError(
            f"task.generator={self.generator} with task.settings={self.settings} has too few distinct "
            f"problems: none is left beside the task.held_out={self.held_out_count} held-out ones. Use a "
            "smaller task.held_out, or task.settings with more problems."
        )

    def held_out(self, count: int) -> list[Item]:
        if count > self.held_out_count:
            raise ConfigError(
                f"{count} held-out problems were asked for, and task.held_out={self.held_out_count} keeps "
                f"fewer out of training. Use task.held_out={count}."
            )
        return list(self._held_out.values())[:count]

    def demonstration(self, item: Item) -> str:
        right = item.answer["answer"]
        if not isinstance(right, str):
            raise ConfigError(
                f"task.generator={self.generator} has no written answers, so nothing can be demonstrated. "
                "Use another task.generator for supervised steps."
            )
        return right

    def verify(self, item: Item, response: str) -> Verdict:
        right = item.answer["answer"]
        right = right if isinstance(right, str) else None
        answer = extract(response, right)
        if answer is None or (answer != right and _TRAPS.search(answer)):
            return Verdict(UNPARSEABLE, 0.0)
        try:
            score = _limited(self.timeout_seconds, lambda: float(self._scorer.score_answer(answer, item.answer)))
        except _OutOfTime:
            return Verdict(TIMEOUT, 0.0, answer)
        except Exception:  # whatever a scorer stumbles over is in the text, not in our settings
            return Verdict(UNPARSEABLE, 0.0, answer)
        if score >= 1 - _TOLERANCE:
            return Verdict(CORRECT, 1.0, answer)
        shaped = self.reward == "score" and math.isfinite(score)
        return Verdict(WRONG, max(score, 0.0) if shaped else 0.0, answer)

    @cached_property
    def _held_out(self) -> dict[str, Item]:
        """The held-out items by key: the first distinct ones of a stream without the run's seed."""
        items: dict[str, Item] = {}
        for index in range(_MAX_DRAWS + 10 * self.held_out_count):
            item = self._draw("held-out", self.version, index)
            items.setdefault(item.key, item)
            if len(items) == self.held_out_count:
                return items
        raise ConfigError(
            f"task.held_out={self.held_out_count} problems were not found: task.generator={self.generator} "
            f"with task.settings={self.settings} gave {len(items)} distinct ones. Use "
            f"task.held_out={max(len(items) // 2, 1)}, which leaves as many for training, or task.settings "
            "with more problems."
        )

    def _draw(self, *place: int | str) -> Item:
        entry = self._dataset(hash_key(self.name, *place) & (2**_SEED_BITS - 1))[0]
        question = entry["question"].strip()
        return Item(f"{question}\n{self.instruction}" if self.instruction else question, canonical(question), entry)

    def _dataset(self, seed: int) -> Any:
        return _library().create_dataset(self.generator, seed=seed, size=1, **self.settings)

    def _checked_dataset(self) -> Any:
        """Return a data set of the generator, or say what is wrong with its name or settings."""
        generators = _library().factory.DATASETS
        typed = f"task.generator={self.generator}"
        if self.generator not in generators:
            near = difflib.get_close_matches(self.generator, generators, n=3, cutoff=0.4) or sorted(generators)
            raise ConfigError(
                f"{typed} is not in reasoning-gym {self.package_version}. The nearest names are {', '.join(near)}."
            )
        if self.generator == "composite":
            raise ConfigError(f"{typed} mixes other generators, and task.settings are those of one. Name that one.")
        if self.generator in _EVALUATES_ANSWERS:
            ours = ", or task=countdown" if self.generator == "countdown" else ""
            raise ConfigError(
                f"{typed} is refused: its scorer evaluates the model's answer as code. Use another generator{ours}."
            )
        if self.generator in _TAKES_ANYTHING:
            raise ConfigError(
                f"{typed} is refused: its scorer takes a constant answer for right. Use another generator."
            )
        if self.generator in _NEEDS_HASH_SEED and sys.flags.hash_randomization:
            raise ConfigError(
                f"{typed} makes other problems in every process, because it iterates over sets of texts. "
                "Type PYTHONHASHSEED=0 before the command."
            )
        fields = [field.name for field in dataclasses.fields(generators[self.generator][1])]
        names = [name for name in fields if name not in ("seed", "size")]
        for name in ("seed", "size"):
            if name in self.settings:
                raise ConfigError(
                    f"task.settings.{name} cannot be set: every item is a data set of its own. Leave it out."
                )
        try:
            dataset = self._dataset(seed=0)
            dataset[0]
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
            raise ConfigError(
                f"task.settings={self.settings} do not fit {typed}: {reason}. Its settings are {', '.join(names)}."
            ) from None
        return dataset


def extract(response: str, right: str | None) -> str | None:
    """Return the answer that a response gives, or None where it gives none or one too long to be meant.

    The answer stands in the last `<answer>...</answer>`, else after the last `answer is` or `answer:`, else
    anywhere. There it is the last number, where the right answer is a number; where that is one line, the
    first line after `answer is`, else the last one, without quotes, markdown and a full stop; and the whole
    text otherwise.

    Args:
        right: the right answer, which tells the kind and the length to look for, or None.
    """
    before, closed, _ = response.rpartition("</answer>")
    _, opened, tagged = before.rpartition("<answer>")
    ends = [match.end() for match in _ANSWER_IS.finditer(response)]
    text = tagged if closed and opened else response[ends[-1] :] if ends else response
    text = text.strip()
    if right is not None and _NUMBER.fullmatch(right):
        numbers = _NUMBER.findall(text)
        text = numbers[-1] if numbers else ""
        text = text if "," in right else text.replace(",", "")
    elif right is not None and len(right.strip().splitlines()) == 1:
        lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
        text = lines[0 if ends else -1]
        text = text.strip(_DECORATION) if right == right.strip(_DECORATION) else text
    longest = 1000 if right is None else 200 + 2 * len(right)
    return text if 0 < len(text) <= longest else None


class _OutOfTime(BaseException):
    """Not an Exception, so that `except Exception` in a scorer lets it through."""


def _limited(seconds: float, call: Callable[[], float]) -> float:
    """Return `call()`.

    Raises:
        _OutOfTime: it took longer than `seconds`, even where it swallowed the interruption. In the main
            thread only; others wait for as long as it takes.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    fired = False

    def interrupt(_signal: int, _frame: object) -> None:
        nonlocal fired
        fired = True
        raise _OutOfTime

    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        # The interval interrupts again what a bare `except` in a loop has swallowed.
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        try:
            result = call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Exception:
        if fired:
            raise _OutOfTime from None
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    if fired:
        raise _OutOfTime
    return result


def _library() -> Any:
    """Return the package, or say how to install it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a dependency's code warns when Python compiles it
            import reasoning_gym
    except ImportError:
        raise ConfigError(
            "task=reasoning_gym needs the package reasoning-gym. Type: pip install 'gradsketch[tasks]'"
        ) from None
    return reasoning_gym
