"""Published shapes of language models: the numbers of their config.json that decide shapes, and nothing else.

Source: the public config.json of each repository named beside it. Keys are transformers' own; what a shape does not
name is the default of its configuration class and takes no memory. `parameters` is the published total (safetensors'
count on the model's page; a tied head counts once): one wrong number and the dimensions would not give it.
"""

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """A configuration class of transformers by its `model_type`, its dimensions, and the parameters that they give."""

    model_type: str
    dimensions: dict[str, Any]
    parameters: int


def _shape(
    model_type: str,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    tied: bool,
    parameters: int,
    **more: Any,
) -> Shape:
    dimensions = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,  # positions take no memory; real ones differ
        "initializer_range": 0.02,
    }
    return Shape(model_type, dimensions | more, parameters)


SHAPES = {
    # HuggingFaceTB/SmolLM2-135M, -360M, -1.7B
    "smollm2-135m": _shape("llama", 576, 1536, 30, 9, 3, 49152, True, 134_515_008),
    "smollm2-360m": _shape("llama", 960, 2560, 32, 15, 5, 49152, True, 361_821_120),
    "smollm2-1.7b": _shape("llama", 2048, 8192, 24, 32, 32, 49152, True, 1_711_376_384),
    # meta-llama/Llama-3.2-1B, Llama-3.1-8B, Llama-3.1-70B
    "llama-3.2-1b": _shape("llama", 2048, 8192, 16, 32, 8, 128256, True, 1_235_814_400),
    "llama-3.1-8b": _shape("llama", 4096, 14336, 32, 32, 8, 128256, False, 8_030_261_248),
    "llama-3.1-70b": _shape("llama", 8192, 28672, 80, 64, 8, 128256, False, 70_553_706_496),
    # Qwen/Qwen2.5-0.5B and so on; Qwen2.5-Math-1.5B and -7B have the shapes of 1.5B and 7B
    "qwen2.5-0.5b": _shape("qwen2", 896, 4864, 24, 14, 2, 151936, True, 494_032_768),
    "qwen2.5-1.5b": _shape("qwen2", 1536, 8960, 28, 12, 2, 151936, True, 1_543_714_304),
    "qwen2.5-3b": _shape("qwen2", 2048, 11008, 36, 16, 2, 151936, True, 3_085_938_688),
    "qwen2.5-7b": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064, False, 7_615_616_512),
    "qwen2.5-14b": _shape("qwen2", 5120, 13824, 48, 40, 8, 152064, False, 14_770_033_664),
    "qwen2.5-32b": _shape("qwen2", 5120, 27648, 64, 40, 8, 152064, False, 32_763_876_352),
    "qwen2.5-72b": _shape("qwen2", 8192, 29568, 80, 64, 8, 152064, False, 72_706_203_648),
    # google/gemma-3-27b-it, its language model alone: 27,432,406,640 published parameters less 416,866,032 of the
    # vision tower and 6,194,304 of the projector between the two
    "gemma-3-27b": _shape(
        "gemma3_text",
        5376,
        21504,
        62,
        32,
        16,
        262208,
        True,
        27_009_346_304,
        head_dim=128,
        query_pre_attn_scalar=168,
        sliding_window=1024,
    ),
}
