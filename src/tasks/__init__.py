"""Verifiable tasks: prompts from stateless draws, typed verdicts, a version in every result.

A task is chosen in `load_task`. A user's own comes by `task.source=path.py:name`: a callable that takes the task's
settings (`src.config.CustomTask`) and returns an object with the members of `Task`.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

from src import config as cfg
from src.custom import load_source

CORRECT, WRONG, UNPARSEABLE, TIMEOUT = VERDICTS = ("correct", "wrong", "unparseable", "timeout")


@dataclass(frozen=True)
class Item:
    """A prompt and what its verifier needs. `key` is the canonical form: equal keys are the same problem."""

    prompt: str
    key: str
    answer: Any


@dataclass(frozen=True)
class Verdict:
    """What a verifier says of a response. `reward` is what training uses; accuracy counts `kind == "correct"`."""

    kind: str
    reward: float
    answer: str | None = None


class Task(Protocol):
    """Prompts and a verifier.

    `chat` says that prompts are messages for an instruction-tuned model, so that its chat template applies. A task that
    the tiny model is to learn also has `alphabet`, a text of all characters of its prompts and answers.
    """

    name: str
    version: int
    chat: bool

    def training_item(self, seed: int, update: int, index: int) -> Item:
        """Return the item of a place; never one whose key is held out."""
        ...

    def held_out(self, count: int) -> list[Item]:
        """Return `count` distinct items fixed by the task's version and settings, whatever the run's seed."""
        ...

    def demonstration(self, item: Item) -> str:
        """Return a correct response, for supervised warm starts."""
        ...

    def verify(self, item: Item, response: str) -> Verdict:
        """Return the verdict on a response; hostile text is data, it is never run."""
        ...


def count_verdicts(verdicts: list[Verdict]) -> dict[str, int]:
    """Return the number of verdicts of each kind, zeros included."""
    counts = Counter(verdict.kind for verdict in verdicts)
    return {kind: counts[kind] for kind in VERDICTS}


def load_task(config: cfg.Task) -> Task:
    """Return the task of a configuration."""
    match config:
        case cfg.CountdownTask():
            from src.tasks.countdown import Countdown

            return Countdown(
                config.numbers,
                config.max_number,
                config.min_used,
                config.max_used,
                config.extend,
                config.minus,
                config.give_up,
                config.max_answer_chars,
            )
        case cfg.ReasoningGymTask():
            from src.tasks.reasoning_gym import ReasoningGym

            return ReasoningGym(
                config.generator,
                config.settings,
                config.instruction,
                config.reward,
                config.timeout_seconds,
                config.held_out,
            )
        case cfg.CustomTask():
            make = load_source(config.source, "task.source")
            try:
                task: Task = make(config.settings)
            except Exception as error:
                raise cfg.ConfigError(
                    f"task.source={config.source} fails with {type(error).__name__}: {error}. Mend it, or type other "
                    "task.settings."
                ) from error
            members = ("name", "version", "chat", "training_item", "held_out", "demonstration", "verify")
            missing = [member for member in members if getattr(task, member, None) is None]
            if missing:
                raise cfg.ConfigError(
                    f"task.source={config.source}: the task lacks {', '.join(missing)} of what src.tasks.Task lists."
                )
            return task
