"""Published numbers of memory, and this project's predictions beside them.

The two are different statistics of different programs, a mean over time and a peak; see `NOTES`. Nothing is fitted.
"""

from typing import NamedTuple

from src import composition, models
from src import config as cfg
from src.plan.prediction import Plan, predict
from src.plan.report import highest, table
from src.sketch.layer import select_targets

_GIB = 2**30


class Published(NamedTuple):
    """Mean training memory in GiB a GPU, as printed; None: it ran out of memory."""

    model: str
    shape: str  # ours, of `src.shapes`
    dense: float | None
    sketch: float


# arXiv 2610.06647: dense Adam and the sketch of rank 256, on 4 FSDP2 trainer ranks.
PUBLISHED = (
    Published("Qwen2.5-Math-1.5B", "qwen2.5-1.5b", 9.18, 7.18),
    Published("Qwen2.5-Math-7B", "qwen2.5-7b", 31.82, 17.29),
    Published("a model of 27B", "gemma-3-27b", None, 51.54),
)
RANKS, RANK = 4, 256
# Not published, so assumed, and not fitted: one response in a microbatch.
PROMPT_TOKENS, RESPONSE_TOKENS = 256, 1792
ASSUMED = [
    "model=shape",
    "control=none",
    "control.probe_responses=2",
    "model.gradient_checkpointing=true",
    "prompts_per_update=2",
    "responses_per_prompt=2",
    "microbatch_responses=1",
    f"max_response_tokens={RESPONSE_TOKENS}",
]
METHODS = {
    "dense": ["method=dense"],
    "sketch": ["method=sketch", f"method.rank={RANK}", "method.preserve_norm=true"],
}

NOTES = f"""
Published: mean over time of training memory a GPU, 4 FSDP2 ranks, rank {RANK} (arXiv 2610.06647). Predicted: what one
of 4 ranks holds at the end of an update, and its peak without the rollout, which had GPUs of its own; by the formulas
of sharding in `python -m src.plan --help`. A mean would lie between the two if all else were equal. It is not:
- Unknown of theirs: responses in a microbatch, their lengths, whether layers are recomputed, what a GPU's memory counts
  (tensors in use, or all that the allocator holds), which matrices dense Adam trains. Assumed: one response of
  {PROMPT_TOKENS} + {RESPONSE_TOKENS} tokens, recomputed layers, tensors in use, the same matrices for both.
- Precision: both hold float32 weights and, for dense Adam, float32 gradients and moments. Theirs compute in bfloat16,
  so activations and gathered weights take half of ours. The frozen embeddings and head are float32 here.
- Projections: theirs are stored for every matrix in float32 and in bfloat16; ours for every width, and a sign for every
  column. The column "their A" is what theirs add by these shapes.
- 27B: the published model's dimensions are not those of gemma-3-27b, which stands for its class; its vocabulary of
  262208 is larger, and embeddings and head are one matrix. Out of memory: their GPUs have 80 GB.
- Workspace, the allocator's rounding and cache, and buffers of collectives are in theirs and not in ours.
""".strip()


def report() -> str:
    """Return the published numbers and the predictions, with what makes them differ."""
    rows = []
    for entry in PUBLISHED:
        for name, words in METHODS.items():
            config = cfg.from_dict(composition.compose([*ASSUMED, f"model.shape={entry.shape}", *words]))
            plan = predict(config, PROMPT_TOKENS)
            rows.append([entry.model, name, *numbers(entry, name, plan)])
    header = ["model", "method", "published mean", "predicted held", "predicted peak", "peak / mean", "their A"]
    return f"{table(header, rows)} (GiB)\n\n{NOTES}"


def numbers(entry: Published, method: str, plan: Plan) -> list[str]:
    """Return the cells of a row after its names."""
    mean: float | None = getattr(entry, method)
    phases = {name: split for name, split in plan.sharded(RANKS).items() if name != "rollout"}
    kept = ("master_weights", "optimizer_state", "projections")
    held = (phases["step"]["weights"] + sum(phases["step"][name] for name in kept)) / _GIB
    peak = highest(phases) / _GIB
    stored = "-"
    if method == "sketch":
        skeleton = models.skeleton(plan.config.model, "")
        widths = [module.in_features for module in select_targets(skeleton, plan.config.model.targets).values()]
        stored = f"{sum(widths) * RANK * (4 + 2) / _GIB:.2f}"
    ratio = "-" if mean is None else f"{peak / mean:.2f}"
    return ["out of memory" if mean is None else f"{mean:.2f}", f"{held:.2f}", f"{peak:.2f}", ratio, stored]
