"""pass@k against enumeration."""

from itertools import combinations

import pytest

from src.evaluation import pass_at_k


@pytest.mark.parametrize("num_samples", [1, 2, 4, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(num_samples):
    for num_correct in range(num_samples + 1):
        right = [index < num_correct for index in range(num_samples)]
        for k in range(1, num_samples + 1):
            subsets = list(combinations(right, k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_1_is_the_share_of_right_answers_and_pass_at_n_is_any():
    assert [pass_at_k(4, correct, 1) for correct in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [pass_at_k(4, correct, 4) for correct in range(5)] == [0.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("k", [0, 5, -1])
def test_a_k_outside_the_samples_is_an_error(k):
    with pytest.raises(ValueError, match=f"pass@{k} needs"):
        pass_at_k(4, 2, k)
