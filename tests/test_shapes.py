"""Published shapes: their parameters, and models of random weights."""

import pytest
import torch

from src import composition, config, models
from src.config import ConfigError
from src.rollout import Rollout
from src.shapes import SHAPES, Shape
from src.tasks import load_task

CPU = torch.device("cpu")
# A small one, of the class whose layers have biases.
SMALL = Shape("qwen2", SHAPES["qwen2.5-0.5b"].dimensions | {"hidden_size": 32, "intermediate_size": 48}, 0)
SMALL.dimensions.update(num_hidden_layers=2, num_attention_heads=4, vocab_size=90)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)


def load(*words: str, seed: int = 0) -> models.Policy:
    typed = config.from_dict(composition.compose(["model=shape", "model.shape=small", *words]))
    return models.load(typed.model, load_task(typed.task), CPU, seed)


@pytest.mark.parametrize("name", SHAPES)
def test_dimensions_give_the_published_parameters(name):
    typed = config.from_dict(composition.compose(["model=shape", f"model.shape={name}", "model.dtype=bfloat16"]))
    skeleton = models.skeleton(typed.model, load_task(typed.task).alphabet)
    assert sum(parameter.numel() for parameter in skeleton.parameters()) == SHAPES[name].parameters
    assert {(p.device.type, p.dtype) for p in skeleton.parameters()} == {("meta", torch.bfloat16)}
    targets = models.targets(typed.model, skeleton)
    assert len(targets) == 7 * SHAPES[name].dimensions["num_hidden_layers"]


def test_the_yaml_names_every_family():
    yaml = (composition.CONF / "model" / "shape.yaml").read_text()
    assert all(name.split("-")[0] in yaml for name in SHAPES)


def test_an_unknown_shape_and_a_task_of_words_are_refused():
    typed = config.from_dict(composition.compose(["model=shape", "model.shape=qwen2.5-7"]))
    with pytest.raises(ConfigError, match=r"model.shape=qwen2.5-7 is no shape that is known. Use one of .*qwen2.5-7b"):
        models.skeleton(typed.model, "0123")
    with pytest.raises(ConfigError, match="model=shape has a character tokenizer"):
        models.skeleton(typed.model, None)


def test_weights_are_random_a_function_of_the_seed_and_leave_the_generator_alone(small):
    state = torch.get_rng_state()
    first, again, other = load(), load(), load(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    weights = [dict(policy.model.named_parameters()) for policy in (first, again, other)]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name])
        if weight.dim() == 2:
            assert not torch.equal(weight, weights[2][name])
            assert weight.std().item() == pytest.approx(0.02, rel=0.15) and abs(weight.mean().item()) < 0.003
        else:
            assert torch.all(weight == (0.0 if name.endswith("bias") else 1.0))
    assert first.model.lm_head.weight is first.model.model.embed_tokens.weight
    assert not first.model.training and first.parted


def test_rotary_frequencies_are_those_of_a_model_that_is_built_with_weights(small):
    from transformers import AutoModelForCausalLM

    policy = load()
    built = AutoModelForCausalLM.from_config(policy.model.config)
    buffers = dict(policy.model.named_buffers())
    assert buffers and all(torch.equal(buffers[name], buffer) for name, buffer in built.named_buffers())


def test_the_precision_is_the_chosen_one(small):
    policy = load("model.dtype=bfloat16", "model.attention=eager")
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    assert policy.model.config._attn_implementation == "eager"


def test_ids_beyond_the_alphabet_are_no_answer(small):
    """Left out, as tokenizers leave unknown ids out, they would let `3<unused40>+8` pass for `3+8`."""
    policy = load()
    task = load_task(config.from_dict(composition.compose([])).task)
    assert len(policy.tokenizer) == 90
    item = task.training_item(0, 1, 0)
    ids = policy.encode(item, task.chat)
    right = policy.tokenizer(task.demonstration(item))["input_ids"]
    assert len(ids) == len(item.prompt)
    for extra in (40, 89):
        tokens = torch.tensor([[*ids, *right[:1], extra, *right[1:]]])
        response = torch.ones(1, len(right) + 1, dtype=torch.bool)
        logprobs = torch.zeros(response.shape)
        rollout = Rollout(tokens, torch.ones_like(tokens), response, logprobs, torch.tensor([False]))
        (text,) = policy.decode(rollout)
        assert f"<unused{extra}>" in text and task.verify(item, text).kind == "unparseable"


def test_accuracy_of_random_weights_is_not_measured():
    kinds = {
        word: config.from_dict(composition.compose([f"model={word}"])).model for word in ("shape", "tiny", "smollm2")
    }
    assert {word: models.measures_accuracy(kind) for word, kind in kinds.items()} == {
        "shape": False,
        "tiny": True,
        "smollm2": True,
    }
