"""Countdown: reach a target with some of the given numbers, each used at most once, by + and -.

A prompt is `3,8,2=11?` and a right answer `3+8`, `8+3` or any other expression over numbers from the list whose value
is the target. As in the television game not every number has to be used, so the length of an answer is the policy's
choice. Held-out and training problems differ in their canonical form (sorted numbers, target).

The demonstrations come from somebody who is good at sums and often gives up, with a "?", where a difference is needed.
A policy that imitates them can do more than it shows, as a pre-trained model can: what it has to learn is to try.
"""

import ast
from collections import Counter
from dataclasses import dataclass

from src.randomness import hash_key, python_random
from src.tasks import CORRECT, UNPARSEABLE, WRONG, Item, Verdict

ALPHABET = "0123456789+-,=?"
GIVE_UP = "?"
# One problem in this many is held out. The share is wide enough for 256 problems from the smallest number range.
_HELD_OUT_EVERY = 4
# In vain, before the settings are blamed: a usual setting needs about ten for an item.
_MOST_DRAWS = 2_000
_CHARACTERS = frozenset("0123456789+-() ")


@dataclass(frozen=True)
class Problem:
    """Numbers in the prompt's order, the target, and the expression that the target was drawn with."""

    numbers: list[int]
    target: int
    expression: str


class Countdown:
    """The countdown task; see the module's docstring.

    Args:
        numbers: how many numbers a prompt lists.
        max_number: the numbers lie in 1..max_number.
        min_used: an answer must use at least this many of them (2 forbids echoing a listed target).
        max_answer_chars: longer answers are unparseable; bounds the verifier's work.
    """

    name = "countdown"
    alphabet = ALPHABET
    version = 1
    chat = False

    def __init__(
        self,
        numbers: int,
        max_number: int,
        min_used: int,
        max_used: int,
        extend: float,
        minus: float,
        give_up: float,
        max_answer_chars: int,
    ):
        self.numbers = numbers
        self.max_number = max_number
        self.min_used = min_used
        self.max_used = max_used
        self.extend = extend
        self.minus = minus
        self.give_up = give_up
        self.max_answer_chars = max_answer_chars

    def training_item(self, seed: int, update: int, index: int) -> Item:
        return self._draw(False, "data", seed, update, index)

    def held_out(self, count: int) -> list[Item]:
        items: dict[str, Item] = {}
        index = last_new = 0
        while index - last_new < _MOST_DRAWS:  # so many without a new one: there are no more, or hardly any
            item = self._draw(True, "held-out", self.version, index)
            if item.key not in items:
                items[item.key], last_new = item, index
            if len(items) == count:
                return list(items.values())
            index += 1
        raise ValueError(
            f"task.held_out={count} problems do not exist: countdown over {self.numbers} numbers up to "
            f"{self.max_number} has {len(items)} held-out problems. Use task.held_out={len(items)} or a larger "
            "task.max_number."
        )

    def demonstration(self, item: Item) -> str:
        problem: Problem = item.answer
        hard = "-" in problem.expression
        give_up = hard and python_random("demonstration", item.prompt).random() < self.give_up
        return GIVE_UP if give_up else problem.expression

    def verify(self, item: Item, response: str) -> Verdict:
        problem: Problem = item.answer
        answer = response.strip()
        used = self._evaluate(answer)
        if used is None:
            return Verdict(UNPARSEABLE, 0.0)
        value, operands = used
        allowed = Counter(problem.numbers)
        fits = not Counter(operands) - allowed and len(operands) >= self.min_used
        return Verdict(CORRECT, 1.0, answer) if fits and value == problem.target else Verdict(WRONG, 0.0, answer)

    def _draw(self, held_out: bool, *place: int | str) -> Item:
        """Return the first drawn problem that has a solution and lies on the wanted side of the split."""
        rng = python_random("countdown", *place)
        for _ in range(_MOST_DRAWS):
            numbers = [rng.randint(1, self.max_number) for _ in range(self.numbers)]
            count = self.min_used
            while count < self.max_used and rng.random() < self.extend:
                count += 1
            used = rng.sample(numbers, count)
            signs = [1] + [-1 if rng.random() < self.minus else 1 for _ in used[1:]]
            target = sum(sign * number for sign, number in zip(signs, used, strict=True))
            key = f"{','.join(map(str, sorted(numbers)))}={target}"
            in_held_out = hash_key("split", key) % _HELD_OUT_EVERY == 0
            expression = "".join(
                f"{'-' if sign < 0 else '+'}{number}" for sign, number in zip(signs, used, strict=True)
            )[1:]
            if target > 0 and in_held_out == held_out:
                return Item(f"{','.join(map(str, numbers))}={target}?", key, Problem(numbers, target, expression))
        raise ValueError(
            f"countdown over {self.numbers} numbers up to {self.max_number} has too few problems for a held-out part. "
            "Use a larger task.max_number."
        )

    def _evaluate(self, text: str) -> tuple[int, list[int]] | None:
        """Return (value, numbers used) of an expression in integers, +, - and parentheses, or None.

        The text is parsed to a syntax tree and walked over a whitelist; it is never evaluated.
        """
        if not text or len(text) > self.max_answer_chars or not _CHARACTERS.issuperset(text):
            return None
        try:
            tree = ast.parse(text, mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        operands: list[int] = []

        def value_of(node: ast.expr) -> int:
            match node:
                case ast.Constant(value=int(number)) if not isinstance(number, bool):
                    operands.append(number)
                    return number
                case ast.BinOp(left=left, op=ast.Add(), right=right):
                    return value_of(left) + value_of(right)
                case ast.BinOp(left=left, op=ast.Sub(), right=right):
                    return value_of(left) - value_of(right)
            raise ValueError

        try:
            return value_of(tree.body), operands
        except (ValueError, RecursionError):
            return None
