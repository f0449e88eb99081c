"""Held-out evaluation: greedy accuracy and unbiased pass@k."""

import math
from dataclasses import dataclass

from src import config as cfg
from src.models import Policy
from src.randomness import hash_key
from src.rollout import generate
from src.tasks import CORRECT, Item, Task, Verdict, count_verdicts


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k), the unbiased estimate of P(one of k is right) (arXiv 2107.03374, eq. 1).

    Raises:
        ValueError: k above the number of samples.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, got {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


@dataclass(frozen=True)
class Answers:
    """Responses to a list of items, with their lengths in tokens and their verdicts."""

    items: list[Item]
    responses: list[str]
    lengths: list[int]
    verdicts: list[Verdict]
    mean_logprob: float  # of the responses' tokens, nats

    @property
    def accuracy(self) -> float:
        return sum(verdict.kind == CORRECT for verdict in self.verdicts) / len(self.verdicts)

    def samples(self, update: int, count: int) -> list[dict[str, object]]:
        """Return rows of samples.jsonl for the first `count` items."""
        rows = zip(self.items[:count], self.responses, self.verdicts, strict=False)
        return [
            {
                "update": update,
                "prompt": item.prompt,
                "response": response,
                "answer": verdict.answer,
                "verdict": verdict.kind,
                "reward": verdict.reward,
            }
            for item, response, verdict in rows
        ]


def answer(
    policy: Policy,
    task: Task,
    items: list[Item],
    *,
    max_tokens: int,
    batch: int,
    keys: list[int] | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Answers:
    """Let the policy answer every item once, `batch` at a time; greedily without keys (see `rollout.generate`)."""
    responses, lengths, verdicts, logprob = [], [], [], 0.0
    for start in range(0, len(items), batch):
        chunk = items[start : start + batch]
        rollout = generate(
            policy.model,
            [policy.encode(item, task.chat) for item in chunk],
            eos_ids=policy.eos_ids,
            pad_id=policy.pad_id,
            max_tokens=max_tokens,
            keys=None if keys is None else keys[start : start + batch],
            temperature=temperature,
            top_p=top_p,
        )
        texts = policy.decode(rollout)
        responses += texts
        logprob += float(rollout.logprobs_BL.double().sum())
        lengths += rollout.lengths_B.tolist()
        verdicts += [task.verify(item, text) for item, text in zip(chunk, texts, strict=True)]
    return Answers(items, responses, lengths, verdicts, logprob / sum(lengths))


def evaluate(
    policy: Policy, task: Task, items: list[Item], config: cfg.Evaluation, max_tokens: int
) -> tuple[dict[str, float], Answers]:
    """Return the evaluation's row and its greedy answers.

    The row: accuracy, mean and standard deviation of the greedy response length in tokens, verdict shares, and for each
    listed k `eval/pass_at_k` over `samples` responses a prompt at the evaluation's temperature and top_p. The sampling
    noise is a function of (item, sample) alone: the same for every seed, arm and update.
    """
    greedy = answer(policy, task, items, max_tokens=max_tokens, batch=config.batch)
    counts = count_verdicts(greedy.verdicts)
    row = {
        "eval/accuracy": greedy.accuracy,
        "eval/response_tokens": _mean(greedy.lengths),
        "eval/response_tokens_std": _std(greedy.lengths),
        "eval/prompts": len(items),
    } | {f"eval/{kind}_share": count / len(items) for kind, count in counts.items()}
    if config.samples:
        repeated = [item for item in items for _ in range(config.samples)]
        keys = [
            hash_key("evaluation", index, sample) for index in range(len(items)) for sample in range(config.samples)
        ]
        sampled = answer(
            policy,
            task,
            repeated,
            max_tokens=max_tokens,
            batch=config.batch,
            keys=keys,
            temperature=config.temperature,
            top_p=config.top_p,
        )
        right = [verdict.kind == CORRECT for verdict in sampled.verdicts]
        groups = [sum(right[start : start + config.samples]) for start in range(0, len(right), config.samples)]
        row["eval/sampled_accuracy"] = _mean(right)
        row["eval/sampled_response_tokens_std"] = _std(sampled.lengths)
        for k in config.pass_k:
            row[f"eval/pass_at_{k}"] = _mean([pass_at_k(config.samples, correct, k) for correct in groups])
    return row, greedy


def _mean(values: list[int] | list[float] | list[bool]) -> float:
    return math.fsum(values) / len(values)


def _std(values: list[int]) -> float:
    """Return the unbiased standard deviation, 0 for a single value."""
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))
