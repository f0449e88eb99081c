"""Countdown: its verifier against hostile text, its split, its demonstrations."""

import pytest

from src import composition, config
from src.tasks import CORRECT, UNPARSEABLE, WRONG, Item, load_task
from src.tasks.countdown import GIVE_UP, Countdown, Problem


def countdown(*words: str) -> Countdown:
    task = load_task(config.from_dict(composition.compose(list(words))).task)
    assert isinstance(task, Countdown)
    return task


@pytest.fixture(scope="module")
def task() -> Countdown:
    return countdown()


ITEM = Item("3,8,2,5=9?", "2,3,5,8=9", Problem([3, 8, 2, 5], 9, "3+8-2"))


@pytest.mark.parametrize("answer", ["3+8-2", "8-2+3", "8+(3-2)", "(3)+8-2", " 3 + 8 - 2\n", "((8-2)+3)"])
def test_right_answers(task, answer):
    assert task.verify(ITEM, answer).kind == CORRECT and task.verify(ITEM, answer).reward == 1.0


@pytest.mark.parametrize("answer", ["3+8", "2+2+5", "9", "4+5", "3+3+3", "0+3+8-2", "3+8-2+5-5", "10-1"])
def test_wrong_answers(task, answer):
    """Numbers twice, numbers that are not there, the echoed target, another value."""
    assert task.verify(ITEM, answer).kind == WRONG and task.verify(ITEM, answer).reward == 0.0


HOSTILE = {
    "power": "9**9**9",
    "import": "__import__('os').system('true')",
    "call": "print(3)+8-2",
    "huge": "9" * 5000,
    "huge-sum": "9" * 31 + "+" + "9" * 31,
    "nested": "(" * 5000 + "3+8-2" + ")" * 5000,
    "unicode-digits": "3+8-２",
    "minus-sign": "3+8−2",
    "underscore": "3+8-2_",
    "hexadecimal": "0x3+8-2",
    "float": "3.0+8-2",
    "bool": "True+8",
    "lambda": "(lambda:9)()",
    "comment": "3+8-2#",
    "comparison": "3+8-2==9",
    "leading-zero": "03+8-2",
    "negative": "-2+3+8",
    "null": "3+8-2\0",
    "empty": "",
    "give-up": GIVE_UP,
    "two-lines": "3+8\n-2",
    "large": "3+8-2+" * 20_000,
    "surrogate": "\ud800",
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("max_chars", [32, 1000])
def test_hostile_text_is_data(answer, max_chars):
    """No warning either, which all are errors here: `1if` has one in Python's own parser."""
    verdict = countdown(f"task.max_answer_chars={max_chars}").verify(ITEM, answer)
    assert verdict.kind in (UNPARSEABLE, WRONG) and verdict.reward == 0.0
    if "+" not in answer or not set(answer) <= set("0123456789+-"):
        assert verdict.kind == UNPARSEABLE or answer.isdigit()


def test_deep_nesting_within_the_length_cap_is_unparseable():
    long = countdown("task.max_answer_chars=1000")
    for answer in ("(" * 490 + "3" + ")" * 490, "1+" * 499 + "1", "9" * 1000):
        assert long.verify(ITEM, answer).reward == 0.0


def test_min_used_counts_numbers(task):
    one = Item("9,8,2,5=9?", "2,5,8,9=9", Problem([9, 8, 2, 5], 9, "9"))
    assert task.verify(one, "9").kind == WRONG
    assert countdown("task.min_used=1").verify(one, "9").kind == CORRECT


def test_a_number_may_be_used_as_often_as_it_is_listed(task):
    twice = Item("4,4,1,2=8?", "1,2,4,4=8", Problem([4, 4, 1, 2], 8, "4+4"))
    assert task.verify(twice, "4+4").kind == CORRECT
    assert task.verify(twice, "4+2+2").kind == WRONG


def test_held_out_is_fixed_distinct_and_disjoint_from_training(task):
    held_out = task.held_out(512)
    keys = {item.key for item in held_out}
    assert len(keys) == 512 >= 256
    assert countdown().held_out(512) == held_out and task.held_out(256) == held_out[:256]
    drawn = {
        task.training_item(seed, update, index).key for seed in (0, 1) for update in range(50) for index in range(200)
    }
    assert len(drawn) > 1000 and not keys & drawn


def test_the_key_is_the_canonical_form(task):
    for item in task.held_out(50):
        numbers, target = item.prompt.rstrip("?").split("=")
        assert item.key == f"{','.join(sorted(numbers.split(',')))}={target}"
        assert item.answer.numbers == [int(number) for number in numbers.split(",")] and int(target) > 0


def test_training_items_depend_on_seed_update_and_index_alone(task):
    """F59, F61."""
    places = [(seed, update, index) for seed in (0, 1) for update in (1, 2) for index in range(20)]
    items = {place: task.training_item(*place) for place in places}
    other = countdown()
    assert {place: other.training_item(*place) for place in reversed(places)} == items
    assert len({item.prompt for item in items.values()}) > 60
    assert [items[0, 1, i] for i in range(20)] != [items[1, 1, i] for i in range(20)]


def test_demonstrations_are_right_or_give_up():
    shares = {}
    for give_up in (0.0, 0.8):
        task = countdown(f"task.give_up={give_up}")
        items = [task.training_item(0, 1, index) for index in range(1000)]
        shown = [task.demonstration(item) for item in items]
        assert shown == [task.demonstration(item) for item in items]
        given_up = [text == GIVE_UP for text in shown]
        assert all(
            up or task.verify(item, text).kind == CORRECT for up, item, text in zip(given_up, items, shown, strict=True)
        )
        hard = ["-" in item.answer.expression for item in items]
        assert not any(up and not difficult for up, difficult in zip(given_up, hard, strict=True))
        shares[give_up] = sum(given_up) / sum(hard)
    assert shares[0.0] == 0.0 and shares[0.8] == pytest.approx(0.8, abs=0.06)


def test_prompts_and_demonstrations_are_in_the_alphabet(task):
    for index in range(200):
        item = task.training_item(3, 1, index)
        assert set(item.prompt + task.demonstration(item)) <= set(task.alphabet)


def test_settings_without_enough_problems_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match=r"task.held_out=100 problems do not exist.*Use task.held_out=\d+ or"):
        countdown("task.numbers=2", "task.max_number=5", "task.max_used=2").held_out(100)
    with pytest.raises(ValueError, match="too few problems"):
        only = countdown("task.numbers=2", "task.max_number=2", "task.max_used=2", "task.minus=1")
        only.held_out(1)
        only.training_item(0, 1, 0)
