"""The reasoning-gym task: stateless items, held-out problems that training never meets, hostile responses."""

import ast
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from src.config import ConfigError
from src.tasks import CORRECT, TIMEOUT, UNPARSEABLE, WRONG, Item
from src.tasks.reasoning_gym import _EVALUATES_ANSWERS, ReasoningGym, canonical, extract

pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")

HOSTILE = [
    "",
    " \n\t ",
    "9**9**9",
    "1e999999999",
    "1e9,999,999,999",
    "nan",
    "[NaN, NaN, NaN]",
    "-Infinity",
    "7" * 100_000,
    "x" * 100_000,
    "<answer>" * 12_500,
    "(" * 50_000 + ")" * 50_000,
    "answer is " * 10_000,
    "<answer></answer>",
    "\x00\ud800\u202e٣ 七 ½ 𝟟 🤷",
    "__import__('os').system('exit 1')",
    '{"a": ' * 20_000,
]


def make_task(generator: str = "gcd", **changed: Any) -> ReasoningGym:
    values: dict[str, Any] = {
        "settings": {},
        "instruction": "",
        "reward": "score",
        "timeout_seconds": 5.0,
        "held_out": 8,
    }
    return ReasoningGym(generator, **(values | changed))


def entry_of(answer: str) -> Item:
    return Item("?", "?", {"question": "?", "answer": answer, "metadata": {}})


GENERATORS: list[tuple[str, dict[str, Any]]] = [
    ("gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 40}),
    ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    ("count_bits", {"min_n": 1, "max_n": 300}),
    ("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    ("number_sorting", {"min_numbers": 3, "max_numbers": 3}),
    ("propositional_logic", {}),
]


@pytest.mark.parametrize(("generator", "settings"), GENERATORS)
def test_training_never_meets_a_held_out_problem(generator: str, settings: dict[str, Any]) -> None:
    task = make_task(generator, settings=settings, held_out=32)
    held_out = {item.key for item in task.held_out(32)}
    assert len(held_out) == 32
    training = [
        task.training_item(seed, update, index).key for seed in (0, 1) for update in range(10) for index in range(10)
    ]
    assert held_out & set(training) == set()
    assert len(set(training)) > 50  # neighbouring places do not share their problems


def test_items_are_functions_of_their_place() -> None:
    task, again = make_task(), make_task()
    assert task.training_item(3, 7, 1) == again.training_item(3, 7, 1)
    places = [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)]
    assert len({task.training_item(*place).key for place in places}) == len(places)
    assert task.held_out(8) == again.held_out(8)
    assert task.held_out(3) == task.held_out(8)[:3]


def test_items_are_the_same_in_every_process() -> None:
    code = (
        "from src.tasks.reasoning_gym import ReasoningGym;"
        "task = ReasoningGym('gcd', {}, '', 'score', 5.0, 2);"
        "print([item.key for item in task.held_out(2)] + [task.training_item(0, 1, 2).key])"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    task = make_task(held_out=2)
    assert ast.literal_eval(other.stdout) == [item.key for item in [*task.held_out(2), task.training_item(0, 1, 2)]]


def test_prompt_is_question_and_instruction() -> None:
    item = make_task(instruction="Answer with the number only.").held_out(1)[0]
    assert item.prompt == item.answer["question"] + "\nAnswer with the number only."
    assert make_task().held_out(1)[0].prompt == item.answer["question"]


@pytest.mark.parametrize(
    "generator",
    ["gcd", "chain_sum", "mini_sudoku", "rotate_matrix", "knights_knaves", "time_intervals", "maze"],
)
def test_demonstrations_are_correct(generator: str) -> None:
    task = make_task(generator)
    for item in task.held_out(8):
        verdict = task.verify(item, task.demonstration(item))
        assert (verdict.kind, verdict.reward) == (CORRECT, 1.0)


def test_a_generator_without_answers_has_no_demonstration() -> None:
    task = make_task("propositional_logic")
    with pytest.raises(ConfigError, match="no written answers"):
        task.demonstration(task.held_out(1)[0])


def test_rewards() -> None:
    """A wrong weekday is worth something to the library's scorer, nothing to the binary reward."""
    for reward, expected in (("score", 0.1), ("correct", 0.0)):
        task = make_task("calendar_arithmetic", reward=reward)
        item = entry_of("Monday")
        item.answer["metadata"]["task"] = "weekday_offset"
        assert (task.verify(item, "Monday.").kind, task.verify(item, "Monday.").reward) == (CORRECT, 1.0)
        wrong = task.verify(item, "Friday")
        assert (wrong.kind, wrong.reward) == (WRONG, expected)


@pytest.mark.parametrize(
    ("response", "right", "expected"),
    [
        ("7", "7", "7"),
        ("3 + 4 = 7.", "7", "7"),
        ("$\\boxed{1,234}$", "1234", "1234"),
        ("The answer is 7.\n\nIt is the sum.", "7", "7"),
        ("<answer> 5 </answer> or rather <answer>7</answer> (not 9)", "7", "7"),
        ("The result is negative: -7", "-7", "-7"),
        ("9-7", "7", "7"),
        ("seven", "7", None),
        ("", "7", None),
        ("The answer is:\n**Mary**.\nShe said so.", "Mary", "Mary"),
        ("Let me think.\n'Mary'", "Mary", "Mary"),
        ("1 2\n3 4\n", "1 2\n3 4", "1 2\n3 4"),
        ("(P or Q)", None, "(P or Q)"),
        ("a" * 205, "Mary", "a" * 205),
        ("a" * 300, "Mary", None),
    ],
)
def test_extract(response: str, right: str | None, expected: str | None) -> None:
    assert extract(response, right) == expected


@pytest.mark.parametrize(
    ("generator", "settings"),
    [
        ("gcd", {}),
        ("chain_sum", {}),
        ("number_sorting", {"min_numbers": 3, "max_numbers": 3}),
        ("complex_arithmetic", {}),
        ("prime_factorization", {}),
        ("boxnet", {}),
        ("propositional_logic", {}),
        ("game_of_life", {}),
    ],
)
def test_hostile_responses_are_data(generator: str, settings: dict[str, Any]) -> None:
    task = make_task(generator, settings=settings)
    item = task.held_out(1)[0]
    start = time.monotonic()
    for response in HOSTILE:
        verdict = task.verify(item, response)
        assert verdict.kind in (WRONG, UNPARSEABLE), response[:40]
        assert 0.0 <= verdict.reward < 1.0
    assert time.monotonic() - start < 5.0


def test_no_accepted_scorer_evaluates_answers() -> None:
    """The refused generators are those of the installed package whose scorers evaluate the answer."""
    calls = ("eval(answer", "parse_expr(answer", "exec(")
    from reasoning_gym.factory import DATASETS

    evaluating = {
        name
        for name, (dataset, _) in DATASETS.items()
        if any(call in inspect.getsource(dataset.score_answer) for call in calls)
    }
    assert evaluating == _EVALUATES_ANSWERS
    with pytest.raises(ConfigError, match="evaluates the model's answer as code. .*task=countdown"):
        make_task("countdown")


class _Swallowing:
    """A scorer that takes far too long and swallows every exception."""

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        for _ in range(3):
            try:  # noqa: SIM105
                time.sleep(30)
            except:  # noqa: E722
                pass
        return 1.0


class _Raising:
    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        raise KeyError(answer)


class _Deaf:
    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        time.sleep(0.2)
        return 1.0


def test_time_limit() -> None:
    task = make_task(timeout_seconds=0.05)
    task._scorer = _Swallowing()
    before = signal.getsignal(signal.SIGALRM)
    start = time.monotonic()
    verdict = task.verify(entry_of("7"), "7")
    assert (verdict.kind, verdict.reward, verdict.answer) == (TIMEOUT, 0.0, "7")
    assert time.monotonic() - start < 5.0
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_other_threads_score_without_a_limit() -> None:
    task = make_task(timeout_seconds=0.05)
    task._scorer = _Deaf()
    kinds: list[str] = []
    thread = threading.Thread(target=lambda: kinds.append(task.verify(entry_of("7"), "7").kind))
    thread.start()
    thread.join()
    assert kinds == [CORRECT]


def test_a_scorer_that_raises_makes_the_response_unparseable() -> None:
    task = make_task()
    task._scorer = _Raising()
    assert task.verify(entry_of("7"), "7").kind == UNPARSEABLE


@pytest.mark.parametrize(
    ("generator", "settings", "message"),
    [
        ("chain_sums", {}, "chain_sums is not in reasoning-gym .* nearest names are chain_sum"),
        ("composite", {}, "mixes other generators"),
        ("gcd", {"seed": 3}, "task.settings.seed cannot be set"),
        ("gcd", {"max_values": 3}, "max_values.*Its settings are .*max_value"),
        ("gcd", {"min_value": 9, "max_value": 3}, "do not fit task.generator=gcd: max_value"),
    ],
)
def test_wrong_configurations_are_one_sentence(generator: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_task(generator, settings=settings)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not sys.flags.hash_randomization, reason="PYTHONHASHSEED=0")
def test_a_generator_that_varies_with_the_hash_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="PYTHONHASHSEED=0"):
        make_task("word_ladder")


def test_too_few_problems() -> None:
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False}
    task = make_task("chain_sum", settings=settings, held_out=400)
    with pytest.raises(ConfigError, match=r"task.held_out=400 problems were not found: .* gave \d+ distinct"):
        task.held_out(1)
    settings = {"min_n": 1, "max_n": 4}
    task = make_task("count_bits", settings=settings, held_out=4)
    with pytest.raises(ConfigError, match="too few distinct problems: none is left"):
        task.training_item(0, 1, 0)
    with pytest.raises(ConfigError, match="Use task.held_out=5"):
        task.held_out(5)


def test_the_configured_defaults_make_a_task() -> None:
    import yaml

    values = yaml.safe_load((Path(__file__).parents[1] / "conf" / "task" / "reasoning_gym.yaml").read_text())
    assert values.pop("name") == ReasoningGym.name
    task = ReasoningGym(**values)
    keys = {item.key for item in task.held_out(task.held_out_count)}
    assert keys & {task.training_item(0, update, 0).key for update in range(100)} == set()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # Python's own way to make an import fail
    with pytest.raises(ConfigError, match=r"pip install 'gradsketch\[tasks\]'"):
        make_task()


def test_the_order_of_numbers_is_no_other_problem():
    """A mirrored product on the training side would give the held-out one away."""
    assert canonical("What is 3 * 18?") == canonical("What is 18 * 3?") != canonical("What is 3 + 18?")
    assert canonical("1 0 0\n0 1 0\n0 0 1") == "1 0 0\n0 1 0\n0 0 1"
    task = make_task(
        "products", settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, held_out=24
    )
    held = {item.key for item in task.held_out(24)}
    assert held & {task.training_item(0, update, 0).key for update in range(200)} == set()


@pytest.mark.parametrize("generator", ["coin_flip", "game_of_life_halting"])
def test_a_scorer_that_takes_a_constant_for_right_is_refused(generator):
    with pytest.raises(ConfigError, match="takes a constant answer for right"):
        make_task(generator).held_out(1)
