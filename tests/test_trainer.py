"""The pieces of an update, in this process: scoring, accumulation, the controlled step and what they report."""

import math
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from src import config as cfg
from src import methods, models, tasks
from src.control import decayed_budget
from src.models import Policy, character_tokenizer
from src.probe import ControlledStep, _spread, budget
from src.rollout import Rollout
from src.tasks import Item, Task, Verdict
from src.tasks.countdown import ALPHABET
from src.trainer import (
    Batch,
    accumulate,
    batch_metrics,
    draw,
    roll_out,
    score,
    token_logprobs,
    with_old_logprobs,
)
from tests.tinymodels import PROJECTIONS, composed, llama

# torch's forward mode loads decompositions that torch itself scripts.

SMALL = (
    "prompts_per_update=4",
    "responses_per_prompt=4",
    "microbatch_responses=16",
    "task.max_number=40",  # prompts of different lengths
    "method.learning_rate=1e-2",
    "objective.random_rewards=true",  # random weights solve nothing, and equal rewards teach nothing
)


def phase(name: str, component: str | None = None) -> Any:
    return nullcontext()


def setup(*overrides: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[cfg.Config, Policy, Task]:
    """Return a small configuration, a policy with random weights and the countdown task.

    Every projection is a target; sketches have rank 4.
    """
    method = () if "method=dense" in overrides or "method=custom" in overrides else ("method.rank=4",)
    config = composed(*SMALL, *method, *overrides)
    tokenizer = character_tokenizer(ALPHABET)
    policy = Policy(llama(dtype, vocab_size=len(tokenizer), **options), tokenizer, (tokenizer.eos_token_id,))
    return config, policy, tasks.load_task(config.task)


def build(config: cfg.Config, policy: Policy) -> Any:
    return methods.build(config.method, policy.model, models.targets(config.model, policy.model), config.seed)


def scored(config: cfg.Config, policy: Policy, task: Task, update: int = 1) -> Batch:
    items = draw(config, task, update)
    rollout = roll_out(config, policy, task, items, update)
    batch = score(config, policy, task, rollout, items, update)
    return with_old_logprobs(config, policy, batch) if config.objective.updates_per_batch > 1 else batch


def gradients(method: Any) -> list[Tensor]:
    """The accumulated gradients of a method's parameters (sketches, or the weights themselves)."""
    found = [parameter.grad for group in method.param_groups for parameter in group["params"]]
    return [grad.clone() for grad in found if grad is not None]


def assert_same(actual: list[Tensor], expected: list[Tensor], relative: float) -> None:
    assert len(actual) == len(expected) > 0
    for found, want in zip(actual, expected, strict=True):
        assert float((found - want).norm()) <= relative * float(want.norm())


def unpadded(model: Any, rollout: Rollout, row: int) -> Tensor:
    """Logits (length, V) of one row's response tokens from a pass over its real tokens alone."""
    real = rollout.attention_BS[row].bool()
    length = int(rollout.lengths_B[row])
    logits = model(input_ids=rollout.tokens_BS[row][real][None], use_cache=False).logits[0]
    return logits[-length - 1 : -1]


# --- rolling out and scoring ---


def test_rows_of_a_prompt_are_neighbours_and_share_a_group():
    """F20, F37: groups by index; each response is decoded and verified."""
    config, policy, task = setup()
    items = draw(config, task, 3)
    rollout = roll_out(config, policy, task, items, 3)
    batch = score(config, policy, task, rollout, items, 3)
    assert len(items) == 16 and batch.groups_B.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    for group in range(4):
        assert items[4 * group : 4 * group + 4] == [task.training_item(config.seed, 3, group)] * 4
    assert len({tuple(row) for row in rollout.tokens_BS.tolist()}) > 8  # the responses of a prompt differ
    responses = policy.decode(rollout)
    verdicts = [task.verify(item, response) for item, response in zip(items, responses, strict=True)]
    assert batch.verdicts == tasks.count_verdicts(verdicts) and sum(batch.verdicts.values()) == 16
    for row, (item, response) in enumerate(zip(items, responses, strict=True)):
        prompt = policy.encode(item, task.chat)
        real = rollout.tokens_BS[row][rollout.attention_BS[row].bool()].tolist()
        assert real[: len(prompt)] == prompt
        tokens = policy.tokenizer.convert_ids_to_tokens(real[len(prompt) :])
        assert "".join(tokens).removesuffix("<eos>") == response


class Sums:
    """A task of equal prompts whose reward is the response's length: nothing to learn, all to count."""

    name = "sums"
    version = 1
    chat = False

    def training_item(self, seed: int, update: int, index: int) -> Item:
        return Item("1+1=2?", "1+1", index)

    def held_out(self, count: int) -> list[Item]:
        return [Item(f"{index}+1=2?", str(index), index) for index in range(count)]

    def demonstration(self, item: Item) -> str:
        return "2"

    def verify(self, item: Item, response: str) -> Verdict:
        return Verdict(tasks.CORRECT if len(response) > 4 else tasks.WRONG, float(len(response) + 100 * item.answer))


def test_equal_prompts_stay_groups_of_their_own():
    """F20, F17: four prompts of one text; the rewards' offset of 100 a group leaves every advantage alone."""
    config, policy, _ = setup("objective.random_rewards=false", "objective.advantage=none")
    batch = scored(config, policy, Sums())
    lengths = torch.tensor([float(len(response)) for response in policy.decode(batch.rollout)])
    expected = lengths - lengths.view(4, 4).mean(1).repeat_interleave(4)
    torch.testing.assert_close(batch.rewards_B, lengths + 100.0 * batch.groups_B)
    torch.testing.assert_close(batch.advantages_B, expected, rtol=1e-5, atol=1e-4)


def test_arms_of_a_seed_see_the_same_prompts_and_noise():
    """F58, F59: the first update's rollout has the same bits for dense and sketch; another seed or update has not."""
    first = None
    for overrides in (("method=dense",), ("control=none",), ("method.refresh_every=never",)):
        config, policy, task = setup(*overrides)
        build(config, policy)  # hooks on the model change nothing
        items = draw(config, task, 1)
        rollout = roll_out(config, policy, task, items, 1)
        first = first or (rollout, items)
        assert torch.equal(rollout.tokens_BS, first[0].tokens_BS) and items == first[1]
        assert torch.equal(rollout.logprobs_BL, first[0].logprobs_BL)
    config, policy, task = setup()
    assert first is not None
    for changed, update in ((config, 2), (replace(config, seed=1), 1)):
        assert draw(changed, task, update) != first[1]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_training_logprobs_and_entropies_equal_an_unpadded_pass(temperature):
    """F10: at the sampling temperature, for prompts and responses of mixed lengths; they also equal the sampler's."""
    config, policy, task = setup(f"temperature={temperature}", dtype=torch.float64)
    rollout = roll_out(config, policy, task, draw(config, task, 1), 1)
    assert len(set(rollout.lengths_B.tolist())) > 1 and not rollout.attention_BS[:, 0].all()
    with torch.no_grad():
        logprobs, entropies = token_logprobs(policy, policy.states(rollout), rollout.response_tokens_BL, temperature)
        for row in range(16):
            length = int(rollout.lengths_B[row])
            logp = torch.log_softmax(unpadded(policy.model, rollout, row) / temperature, -1)
            tokens = rollout.tokens_BS[row, -rollout.response_BL.shape[1] :][:length]
            expected = logp.gather(-1, tokens[:, None])[:, 0]
            torch.testing.assert_close(logprobs[row, :length].double(), expected, rtol=0, atol=5e-6)
            entropy = torch.distributions.Categorical(logits=logp).entropy()
            torch.testing.assert_close(entropies[row, :length].double(), entropy, rtol=0, atol=5e-6)
    gap = torch.where(rollout.response_BL, logprobs - rollout.logprobs_BL, 0.0)
    assert float(gap.abs().max()) < 1e-5


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("method", ["sketch", "dense"])
@pytest.mark.parametrize("size", [16, 5])
def test_the_ratio_is_exactly_1_at_the_first_update_of_a_batch(temperature, method, size):
    """F10: with a clip of width 0 a single rounding error of a ratio would be counted; after a step many are."""
    config, policy, task = setup(
        f"method={method}",
        f"temperature={temperature}",
        f"microbatch_responses={size}",
        "objective.updates_per_batch=2",
        "objective.clip_low=0",
        "objective.clip_high=0",
    )
    batch = scored(config, policy, task)
    optimizer = build(config, policy)
    first = accumulate(config, policy, batch, None, phase)
    assert first["policy/clip_share"] == 0.0
    assert all(bool(gradient.any()) for gradient in gradients(optimizer))
    optimizer.propose()
    optimizer.apply(1.0)
    assert accumulate(config, policy, batch, None, phase)["policy/clip_share"] > 0.1


# --- accumulating ---


@pytest.mark.parametrize("method", ["sketch", "dense"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed"])
def test_microbatches_change_neither_gradients_nor_metrics(method, aggregation):
    """M01, M04, F08, F34: 1 x 16, 2 x 8, 4 x 4 and an uneven split; with clipping, reference KL and masked rows."""
    results = []
    for size in (16, 8, 4, 5):
        config, policy, task = setup(
            f"method={method}",
            f"microbatch_responses={size}",
            f"objective.aggregation={aggregation}",
            "objective.reference_kl=0.1",
            "objective.mask_truncated=true",
            "objective.dead_groups=filter",
            "objective.updates_per_batch=2",
            dtype=torch.float64,
        )
        batch = scored(config, policy, task)
        assert 0 < int((batch.weights_BL > 0).any(1).sum()) < 16
        reference = deepcopy(policy.model)
        with torch.no_grad():  # so that the reference KL is not 0 and some ratios clip
            for parameter in policy.model.parameters():
                parameter.mul_(1.05)
        optimizer = build(config, policy)
        row = accumulate(config, policy, batch, reference, phase)
        results.append((row, gradients(optimizer)))
    first_row, first_gradients = results[0]
    assert first_row["policy/clip_share"] > 0 and first_row["policy/reference_kl"] > 0
    for row, found in results[1:]:
        assert row == pytest.approx(first_row, rel=1e-6, abs=1e-7)  # float32 sums; the loss itself is about 0
        assert_same(found, first_gradients, 1e-6)


def test_padding_adds_nothing_to_a_gradient():
    """The sketch of the padded batch is the sum of the sketches of its rows, each alone and without padding."""
    config, policy, task = setup(dtype=torch.float64)
    batch = scored(config, policy, task)
    optimizer = build(config, policy)
    accumulate(config, policy, batch, None, phase)
    padded = gradients(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    for row in range(16):
        length = int(batch.rollout.lengths_B[row])
        logp = torch.log_softmax(unpadded(policy.model, batch.rollout, row), -1)
        tokens = batch.rollout.tokens_BS[row, -batch.rollout.response_BL.shape[1] :][:length]
        chosen = logp.gather(-1, tokens[:, None])[:, 0]
        (-(chosen * batch.weights_BL[row, :length]).sum() * batch.advantages_B[row]).backward()
    assert_same(gradients(optimizer), padded, 1e-5)  # the trainer's log-softmax is float32


def test_a_row_of_metrics_depends_on_its_window_alone():
    """F35: the same batch gives the same row whatever came before it; nothing piles up between calls."""
    config, policy, task = setup()
    build(config, policy)
    batch, other = scored(config, policy, task, 1), scored(config, policy, task, 2)
    alone = accumulate(config, policy, batch, None, phase) | batch_metrics(batch)
    between = accumulate(config, policy, other, None, phase) | batch_metrics(other)
    again = accumulate(config, policy, batch, None, phase) | batch_metrics(batch)
    assert again == alone != between


@pytest.mark.parametrize("method", ["sketch", "dense"])
def test_a_batch_that_teaches_nothing_leaves_the_weights_alone(method):
    """F05, F04: every response truncated and masked, or every group dead and filtered, with the reference KL on.

    The loss is a finite 0, the gradient is 0, nothing is predicted, and the weights keep their bits.
    """
    for overrides in (
        ("objective.mask_truncated=true", "max_response_tokens=1"),
        ("objective.dead_groups=filter", "objective.random_rewards=false"),
    ):
        config, policy, task = setup(f"method={method}", "objective.reference_kl=0.5", *overrides)
        policy = replace(policy, eos_ids=(-1,))  # no token ends a response
        batch = scored(config, policy, task)
        assert not batch.weights_BL.any()
        reference = deepcopy(policy.model)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.05)
        before = deepcopy(policy.model.state_dict())
        optimizer = build(config, policy)
        row = accumulate(config, policy, batch, reference, phase)
        assert row["policy/loss"] == row["policy/reference_kl"] == row["policy/clip_share"] == 0.0
        assert all(not bool(gradient.any()) for gradient in gradients(optimizer))
        optimizer.propose()
        step = ControlledStep(config, policy, optimizer, phase).make(batch, 1)
        assert step["control/proposed_kl"] == 0.0
        assert 0.0 <= step["control/realised_kl"] < 1e-9  # the probe's attention kernel rounds otherwise
        assert step["control/step_scale"] == 1.0 and step["control/binds"] == 0.0
        after = policy.model.state_dict()
        assert all(torch.equal(value, before[name]) for name, value in after.items())


# --- the controlled step ---


def step(config: cfg.Config, policy: Policy, task: Task, update: int = 1) -> tuple[dict[str, float], Batch, Any]:
    """Make one controlled step and return its row, the batch and the model as it was before."""
    batch = scored(config, policy, task)
    before = deepcopy(policy.model)
    optimizer = build(config, policy)
    accumulate(config, policy, batch, None, phase)
    optimizer.propose()
    return ControlledStep(config, policy, optimizer, phase).make(batch, update), batch, before


@pytest.mark.parametrize("method", ["sketch", "dense"])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_realised_divergence_is_the_mean_over_real_tokens(method, temperature):
    """Padded positions do not count: against passes over each probed row alone, before and after the step."""
    config, policy, task = setup(
        f"method={method}",
        f"temperature={temperature}",
        "control=fixed",
        "control.budget=1e-3",
        "control.probe_responses=5",
        "microbatch_responses=2",
        dtype=torch.float64,
    )
    row, batch, before = step(config, policy, task)
    divergences = []
    with torch.no_grad():
        for index in (0, 3, 6, 9, 12):  # five of sixteen, evenly
            old = unpadded(before, batch.rollout, index) / temperature
            new = unpadded(policy.model, batch.rollout, index) / temperature
            pair = (torch.distributions.Categorical(logits=logits) for logits in (old, new))
            divergences.append(torch.distributions.kl_divergence(*pair))
    realised = float(torch.cat(divergences).mean())
    assert len({len(part) for part in divergences}) > 1
    assert row["control/realised_kl"] == pytest.approx(realised, rel=1e-4)
    assert row["control/predicted_kl"] == pytest.approx(realised, rel=0.3)
    assert row["control/budget"] == 1e-3 and row["control/binds"] == 1.0


@pytest.mark.parametrize("method", ["sketch", "dense"])
def test_the_step_keeps_its_budget_and_the_scale_is_quadratic(method):
    """The smaller the budget, the nearer the realised to the predicted divergence; both at the scaled step."""
    errors = []
    for limit in (1e-3, 1e-7):
        config, policy, task = setup(
            f"method={method}",
            "control=fixed",
            f"control.budget={limit}",
            "method.weight_decay=0.1",
            dtype=torch.float64,
        )
        row, _, _ = step(config, policy, task)
        assert row["control/proposed_kl"] > limit and row["control/binds"] == 1.0
        assert row["control/predicted_kl"] == pytest.approx(limit, rel=1e-9)
        assert row["control/step_scale"] == pytest.approx(math.sqrt(limit / row["control/proposed_kl"]), rel=1e-9)
        errors.append(abs(row["control/realised_kl"] / limit - 1.0))
    assert errors[1] < 0.03 and errors[1] < errors[0]


def test_without_control_the_step_is_full_and_still_measured():
    config, policy, task = setup("control=none", "method.learning_rate=1e-4", dtype=torch.float64)
    row, _, before = step(config, policy, task)
    assert row["control/step_scale"] == 1.0 and row["control/binds"] == 0.0 and "control/budget" not in row
    assert row["control/predicted_kl"] == row["control/proposed_kl"] > 0
    assert row["control/realised_kl"] == pytest.approx(row["control/predicted_kl"], rel=0.05)
    reference, targets = dict(before.named_parameters()), models.targets(config.model, policy.model)
    trained = {f"{name}.weight" for name in targets}
    for name, parameter in policy.model.named_parameters():  # M11, M44: the weights move, and no others
        assert torch.equal(parameter, reference[name]) is (name not in trained), name


def test_a_loose_budget_does_not_bind_and_the_maximum_caps_the_scale():
    for maximum in (1.0, 2.0):
        config, policy, task = setup(
            "control=fixed", "control.budget=10", f"control.step_scale_max={maximum}", "method.learning_rate=1e-4"
        )
        row, _, _ = step(config, policy, task)
        assert row["control/step_scale"] == maximum and row["control/binds"] == 0.0
        assert row["control/predicted_kl"] == pytest.approx(maximum**2 * row["control/proposed_kl"])


def test_dropout_is_off_in_every_pass():
    """M41: loaded policies are in evaluation mode, so a step of size 0 has divergence exactly 0."""
    config, policy, task = setup()
    loaded = models.load(config.model, task, torch.device("cpu"), config.seed).model
    assert not any(module.training for module in loaded.modules())
    found = {}
    for training in (False, True):
        config, policy, task = setup("control=none", attention_dropout=0.5)
        batch = scored(config, policy, task)
        optimizer = build(config, policy)
        accumulate(config, policy, batch, None, phase)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.propose()
        policy.model.train(training)
        with torch.random.fork_rng():
            found[training] = ControlledStep(config, policy, optimizer, phase).make(batch, 1)
    assert found[False]["control/proposed_kl"] == 0.0
    assert found[False]["control/realised_kl"] < 1e-9  # the probe's attention kernel rounds otherwise
    assert found[True]["control/realised_kl"] > 1e-3  # the model has dropout to forget about


def test_a_gradient_that_is_not_finite_stops_before_the_step():
    config, policy, task = setup()
    batch = scored(config, policy, task)
    optimizer = build(config, policy)
    before = deepcopy(policy.model.state_dict())
    accumulate(config, policy, replace(batch, advantages_B=batch.advantages_B * math.nan), None, phase)
    with pytest.raises(FloatingPointError, match="not finite"):
        optimizer.propose()
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())


# --- numbers ---


def hand_made() -> Batch:
    """Four responses of lengths 1, 2, 3, 3 to two prompts of 2 and 3 tokens; the last is truncated."""
    lengths, width = torch.tensor([1, 2, 3, 3]), 3
    response = torch.arange(width) < lengths[:, None]
    prompt = torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]])
    rollout = Rollout(
        torch.ones(4, 6, dtype=torch.long),
        torch.cat([prompt, response.long()], 1),
        response,
        torch.zeros(4, 3),
        torch.tensor([True, True, True, False]),
    )
    kinds = [tasks.CORRECT, tasks.WRONG, tasks.WRONG, tasks.UNPARSEABLE]
    verdicts = tasks.count_verdicts([Verdict(kind, float(kind == tasks.CORRECT)) for kind in kinds])
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])
    return Batch(rollout, groups, verdicts, rewards, torch.zeros(4), torch.zeros(4, 3), None)


def test_batch_metrics_by_hand():
    """F37: 10 prompt and 9 response tokens make the 19 of the attention mask; F02: the share of dead groups."""
    batch = hand_made()
    row = batch_metrics(batch)
    expected = {
        "reward/mean": 0.25,
        "reward/std": 0.5,
        "reward/dead_group_share": 0.5,
        "rollout/response_tokens_mean": 2.25,
        "rollout/response_tokens_std": math.sqrt(2.75 / 3),
        "rollout/truncated_share": 0.25,
        "rollout/response_tokens": 9.0,
        "rollout/prompt_tokens": 10.0,
        "verdict/correct_share": 0.25,
        "verdict/wrong_share": 0.5,
        "verdict/unparseable_share": 0.25,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    assert int(batch.rollout.attention_BS.sum()) == 19
    shares = [value for key, value in row.items() if key.startswith("verdict/")]
    assert sum(shares) == pytest.approx(1.0)


@pytest.mark.parametrize(("size", "sizes"), [(1, [1, 1, 1, 1]), (3, [3, 1]), (4, [4]), (9, [4])])
def test_microbatches_cover_every_row_once(size, sizes):
    batch = hand_made()
    rows = [list(range(4))[part] for part in batch.microbatches(size)]
    assert [len(part) for part in rows] == sizes
    assert [row for part in rows for row in part] == [0, 1, 2, 3]


def test_the_budget_of_each_control():
    """The schedule starts at the first update, which has the number 1."""
    assert budget(composed("control=none").control, 7) is None
    assert [budget(composed("control=fixed", "control.budget=3e-4").control, update) for update in (1, 50)] == [
        3e-4
    ] * 2
    control = composed(
        "control=decay",
        "control.budget=2e-4",
        "control.budget_end=2e-5",
        "control.horizon=10",
        "control.schedule=linear",
    ).control
    assert budget(control, 1) == pytest.approx(2e-4)
    assert budget(control, 6) == pytest.approx(1.1e-4)
    assert budget(control, 11) == budget(control, 500) == pytest.approx(2e-5)
    assert budget(control, 4) == decayed_budget(2e-4, 2e-5, 10, "linear", 3)


@pytest.mark.parametrize(
    ("total", "count", "rows"),
    [(8, 8, [0, 1, 2, 3, 4, 5, 6, 7]), (8, 4, [0, 2, 4, 6]), (8, 3, [0, 2, 5]), (3, 64, [0, 1, 2]), (5, 1, [0])],
)
def test_the_probes_rows_are_spread_evenly(total, count, rows):
    assert _spread(total, count).tolist() == rows


def test_the_learning_rate_warms_up_and_decays_by_its_own_horizon():
    """M22: never 0 at an update; the horizon does not depend on the run's length."""
    method = composed("method.learning_rate=1e-3", "method.warmup=4", "method.decay_horizon=null").method
    rates = [methods.learning_rate(method, update) for update in (1, 2, 4, 5, 1000)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 1e-3, 1e-3, 1e-3])
    method = composed(
        "method.learning_rate=1e-3", "method.warmup=4", "method.decay_horizon=14", "method.decay_to=0.2", "updates=3"
    ).method
    rates = [methods.learning_rate(method, update) for update in (4, 9, 14, 15, 400)]
    assert rates == pytest.approx([1e-3, 6e-4, 2e-4, 2e-4, 2e-4])
    assert methods.learning_rate(composed("method.warmup=0").method, 1) == composed().method.learning_rate


def test_a_method_gets_the_configurations_values():
    """M23, M25: what is logged as the rate is in the optimizer's group, and no option is lost on the way."""
    config, policy, _ = setup(
        "method.learning_rate=3e-5",
        "method.weight_decay=0.02",
        "method.max_grad_norm=0.7",
        "method.clip_norm=estimate",
        "method.refresh_every=5",
        "method.beta2=0.8",
    )
    optimizer = build(config, policy)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["beta2"]) == (3e-5, 0.02, 0.8)
    assert (optimizer.max_grad_norm, optimizer.clip_norm, optimizer.refresh_every) == (0.7, "estimate", 5)
    assert len(optimizer.layers.modules) == 2 * len(PROJECTIONS) and optimizer.layers.rank == 4
    config, policy, _ = setup("method=dense", "method.beta1=0.7", "method.eps=1e-5", "method.max_grad_norm=null")
    optimizer = build(config, policy)
    (group,) = optimizer.param_groups
    assert group["betas"] == (0.7, config.method.beta2) and group["eps"] == 1e-5  # type: ignore[union-attr]
    assert optimizer.max_grad_norm is None


def test_response_logits_predict_each_response_token():
    """The logits at a position are those that the tokens before it give: a later token does not change them."""
    config, policy, task = setup(dtype=torch.float64)
    rollout = roll_out(config, policy, task, draw(config, task, 1), 1)
    with torch.no_grad():
        logits = policy.logits(policy.states(rollout))
        changed = rollout.tokens_BS.clone()
        changed[:, -1] = (changed[:, -1] + 1) % 18
        again = policy.logits(policy.states(replace(rollout, tokens_BS=changed)))
    assert logits.shape == (*rollout.response_BL.shape, 18)
    torch.testing.assert_close(again, logits, rtol=0, atol=1e-12)
