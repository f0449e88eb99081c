"""Every yaml, every key, and who a run is."""

import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from src import commandline, composition, config, identity
from src.config import ConfigError
from src.typed import known, nearest
from tests.launching import PROJECT

CONF = PROJECT / "conf"
YAMLS = sorted(CONF.rglob("*.yaml"))


def name(path: Path) -> str:
    return path.relative_to(CONF).as_posix()


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The default configuration in plain values."""
    return composition.compose([])


def who(*words: str) -> identity.Identity:
    arguments, study = commandline.prepare(list(words), composition.CONF)
    return composition.identify([composition.compose(arguments)], arguments, study)[0][1]


def changed(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of nested values in which the dotted key has another value."""
    first, _, rest = key.partition(".")
    return values | {first: changed(values[first], rest, value) if rest else value}


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


@pytest.mark.parametrize("path", YAMLS, ids=name)
def test_every_yaml_composes_and_converts(path):
    group, option = path.parent.name, path.stem
    if group == "conf":
        words = []
    elif group in ("ablation", "arm"):
        words = [f"+{group}={option}"]
    else:
        needed = {"hf": ["model.path=x"], "custom": [f"{group}.source=x.py:y"]}.get(option, [])
        words = [f"{group}={option}", *needed]
        if group == "method":  # packages' methods have no other
            words.append("control=none")
    values = composition.compose(words)
    typed = config.from_dict(values)
    assert asdict(typed) == values
    if group not in ("conf", "ablation", "arm"):
        assert values[group]["name"] == option


@pytest.mark.parametrize("path", YAMLS, ids=name)
def test_every_yaml_begins_with_its_command_and_explains_its_numbers(path):
    lines = [line for line in path.read_text().splitlines() if line != "# @package _global_"]
    assert re.match(r"# python -m src\.train", lines[0])
    if path.parent.name not in ("conf", "ablation", "arm"):
        assert f"{path.parent.name}={path.stem}" in lines[0] or "=" in lines[0]
    if path.parent.name in ("ablation", "arm"):
        return  # their numbers are the points of an axis
    keys = {key.rsplit(".", 1)[-1] for key in known(config.Config)}
    for line in lines[1:]:
        found = re.match(r"\s*(\w+):\s+-?[\d.]+(e-?\d+)?\s*(#.*)?$", line)
        if found:
            assert found[1] in keys and found[3], f"{name(path)}: {line.strip()!r} has no comment"


def test_values_live_in_yaml_and_types_in_code(plain):
    keys = known(config.Config)
    assert set(leaves(plain)) <= keys and "method.rank" in keys and "control.budget_end" in keys
    assert not any(value == "???" for value in leaves(plain).values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, "text", None, [], {}])
def test_every_error_names_its_key(plain, value):
    """Whatever value a number cannot have, at whichever key."""
    nothing_wrong = []
    for key, old in leaves(plain).items():
        if isinstance(old, bool) or not isinstance(old, int | float):
            continue
        try:
            config.from_dict(changed(plain, key, value))
        except ConfigError as error:
            assert key in str(error) and "\n" not in str(error) and str(error).endswith((".", "]."))
        else:
            nothing_wrong.append(key)
    assert nothing_wrong == []


def test_every_key_that_is_left_out_or_misspelt_is_named(plain):
    for key in leaves(plain):
        with pytest.raises(ConfigError, match=re.escape(key)):
            config.from_dict(changed(plain, key, "???"))
    with pytest.raises(ConfigError, match=r"method.rnak is not a key of method=sketch\. Did you mean method\.rank\?"):
        config.from_dict(plain | {"method": plain["method"] | {"rnak": 4}})
    with pytest.raises(ConfigError, match="updates has no value: type updates=VALUE"):
        config.from_dict({key: value for key, value in plain.items() if key != "updates"})


def test_nearest():
    keys = known(config.Config)
    for typed, meant in (("method.rnak", "method.rank"), ("sed", "seed"), ("rank", "method.rank")):
        assert nearest(typed, keys) == f" Did you mean {meant}?"
    assert nearest("xyzzy", keys) == ""


ROUTES = [
    (["+ablation=fixed"], ["control=fixed"]),
    (["+ablation=fixed"], ["ablation=fixed", "control=fixed"]),
    ([], ["control=decay"]),
    ([], ["method.rank=16", "seed=0", "control.schedule=cosine", "method.eps=1e-8"]),
    ([], ["+ablation=decay"]),
    (["+arm=dense"], ["method=dense", "control=none"]),
    (["method.rank=8", "+ablation=none"], ["control=none", "method.rank=8"]),
    (["method.learning_rate=0.001"], ["method.learning_rate=1e-3"]),
    (["method.weight_decay=1"], ["method.weight_decay=1.0"]),
]


@pytest.mark.parametrize(("one", "other"), ROUTES, ids=lambda words: " ".join(words) or "default")
def test_any_route_to_a_configuration_gives_one_identity(one, other):
    first, second = who(*one), who(*other)
    assert (first.label, first.variant) == (second.label, second.variant)


def test_labels_say_method_control_and_what_differs():
    expected = {
        "": "decay",
        "+ablation=none": "none",
        "method=dense control=none": "baseline",
        "method=dense control=fixed": "baseline-fixed",
        "method=dense control=none method.train_all=true": "baseline-train_all=true",
        "method.rank=8": "decay-rank=8",
        "method.refresh_every=never control=none": "none-refresh_every=never",
        "model.targets=[q_proj,v_proj]": "decay-targets=q_proj+v_proj",
        "model.warm_start=null": "decay-warm_start=null",
        "method.max_grad_norm=0.5 method.rank=4": "decay-max_grad_norm=0.5-rank=4",
    }
    assert {words: who(*words.split()).label for words in expected} == expected


def test_equal_ends_of_keys_are_told_apart():
    labels = {who(f"{key}=0.002").label for key in ("method.learning_rate", "model.warm_start.learning_rate")}
    assert labels == {"decay-method.learning_rate=0.002", "decay-model.warm_start.learning_rate=0.002"}


def test_machine_and_bookkeeping_are_no_part_of_a_variant_and_the_seed_only_of_the_folder(plain):
    """F59."""
    typed = config.from_dict(plain)
    base = identity.identify(typed, plain)
    changes: list[dict[str, Any]] = [
        {"threads": 2},
        {"device": "cuda"},
        {"root": "elsewhere"},
        {"study": "other"},
        {"rerun": True},
        {"rerun_from": "outputs/main/run"},
        {"dry": True},
        {"retry_failed": True},
        {"on_failure": "stop"},
        {"resume": "any"},
        {"max_seconds": 60.0},
        {"export": "none"},
        {"checkpoint": replace(typed.checkpoint, every=1, keep=0)},
        {"samples_logged": 0},
        {"wandb": replace(typed.wandb, mode="disabled", tags=["x"])},
    ]
    assert {key for change in changes for key in change} == set(identity.BOOKKEEPING)
    for change in changes:
        other = identity.identify(replace(typed, **change), plain)
        assert (other.label, other.variant) == (base.label, base.variant)
    seeded = identity.identify(replace(typed, seed=5), plain)
    assert (seeded.label, seeded.variant) == (base.label, base.variant) and seeded.folder != base.folder
    assert seeded.folder == Path("outputs") / "main" / f"decay-s5-{base.variant}"


def test_every_other_key_changes_variant_and_label(plain):
    """Each number and each switch, one at a time, to the first other value that is allowed."""
    base = identity.identify(config.from_dict(plain), plain)
    variants, tried = {base.variant}, 0
    for key, value in leaves(plain).items():
        if key.split(".")[0] in ("seed", *identity.BOOKKEEPING):
            continue
        if isinstance(value, bool):
            others: list[Any] = [not value]
        elif isinstance(value, int):
            others = [value + 1, value - 1, value * 2]
        elif isinstance(value, float):
            others = [value * 2 or 0.01, value / 2]
        else:
            continue
        found = next(filter(None, (allowed(changed(plain, key, other), plain) for other in others)), None)
        assert found is not None, key
        assert found.variant not in variants and found.label != base.label, key
        variants.add(found.variant)
        tried += 1
    assert tried > 40


def allowed(values: dict[str, Any], plain: dict[str, Any]) -> identity.Identity | None:
    try:
        return identity.identify(config.from_dict(values), plain)
    except ConfigError:
        return None


def test_study_is_the_ablation_s_name_unless_typed():
    assert who().study == "main"
    assert who("+ablation=fixed").study == "fixed"
    assert who("+ablation=fixed", "study=mine").study == "mine"


def test_folder_names_are_safe(plain):
    settings = {"a b": "c/d", "tab\t": "../..", "ü": "é" * 300}
    task = {"name": "custom", "source": "/some where/my file.py:make task", "settings": settings, "held_out": 4}
    typed = config.from_dict(plain | {"task": task})
    found = identity.identify(typed, plain | {"task": task | {"settings": {}}})
    assert re.fullmatch(r"[A-Za-z0-9=._+-]+", found.folder.name) and len(found.folder.name) < 120
    assert found.folder.parent == Path("outputs/main")
    task["settings"] = settings | {"ü": "é" * 299}
    other = identity.identify(config.from_dict(plain | {"task": task}), plain)
    assert other.label != found.label, "labels that are cut stay different"
    for study in ("a/b", "..", "", "a b", "x" * 81, ".hidden"):
        with pytest.raises(ConfigError, match="study="):
            config.from_dict(plain | {"study": study})


def test_the_offline_default_yields_to_the_environment(monkeypatch):
    """b4: offline without an account; the client's own variable is honoured."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert composition.compose([])["wandb"]["mode"] == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert composition.compose([])["wandb"]["mode"] == "disabled"
    assert yaml.safe_load((CONF / "train.yaml").read_text())["wandb"]["mode"] == "${oc.env:WANDB_MODE,offline}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["method.co_rank=9"], "method.co_rank=9 with method.reconstruction=one_sided"),
        (["method.reconstruction=two_sided"], "two_sided with model.gradient_checkpointing=false"),
        (
            ["method.reconstruction=two_sided", "model.gradient_checkpointing=true", "method.direction=adam"],
            "method.direction=adam with method.reconstruction=two_sided",
        ),
        (["method.decay_horizon=3", "method.warmup=5"], "method.decay_horizon=3 with method.warmup=5"),
        (["method.name=[sketch]"], "method.name must be one of"),
        (["updates=" + "9" * 400], "updates must be a whole number"),
    ],
)
def test_values_that_do_not_go_together(words, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        config.from_dict(composition.compose(words))
