"""What the sketch optimizer needs inside the trainers of transformers and TRL."""

from typing import Any

from torch import nn

from src.sketch import SketchOptimizer


def attach(optimizer: SketchOptimizer, trainer: Any) -> None:
    """Add a callback to a Trainer whose optimizer this is, before all others.

        with sketching(model, ["q_proj", "v_proj"], rank=16, lr=args.learning_rate) as optimizer:
            trainer = Trainer(model, args, optimizers=(optimizer, None), ...)
            attach(optimizer, trainer)
            trainer.train()

    With `optimizers` a Trainer leaves learning_rate, weight_decay and optim of its arguments unused (others than the
    optimizer's are refused, as one of the two would not be meant). It clips and logs
    the gradients of `model.parameters()`, and here these have none. The callback puts what the last step reported into
    its logs, for the reporters (W&B, TensorBoard) too: `grad_norm` is ||S||_F before clipping, `sketch/estimate_norm`,
    `sketch/clip_scale` and `sketch/moved_share` follow. With several processes (torchrun, accelerate launch) it
    averages the sketches over them; every process holds the whole model.

    The callback raises, as training begins:
        ValueError: the Trainer would train something else or nothing, see `check`; or the checkpoint that it resumed
            from has no state of the optimizer.
    """
    from transformers import TrainerCallback

    class SketchCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            check(optimizer, args, kwargs["model"], kwargs["optimizer"])
            if state.global_step > 0 and optimizer.updates == 0:
                raise ValueError(
                    f"training goes on at step {state.global_step} and the sketch optimizer begins: the checkpoint has "
                    "no optimizer.pt (save_only_model=True), and projections that were used would be used again. Load "
                    "its model and begin a run with another seed: sketching(..., seed=1)."
                )
            optimizer.zero_grad()  # a try that ran out of memory left a part (auto_find_batch_size)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.world_size > 1:
                optimizer.average()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer.zero_grad()  # of a step that a gradient scaler skipped; the Trainer clears the model's only

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "grad_norm" in logs and optimizer.metrics:
                metrics = dict(optimizer.metrics)
                found = {"grad_norm": metrics.pop("sketch_norm")}
                found |= {f"sketch/{key}": value for key, value in metrics.items()}
                logs |= found
                state.log_history[-1] |= found

    # Reporters stand before what Trainer.add_callback adds, and would log what it has not corrected yet.
    trainer.callback_handler.callbacks.insert(0, SketchCallback())


def check(optimizer: SketchOptimizer, args: Any, model: nn.Module, used: Any) -> None:
    """Refuse what a Trainer cannot train by sketches.

    Args:
        args: transformers.TrainingArguments.
        model: the model that the Trainer trains.
        used: the optimizer that it steps, maybe inside accelerate's.

    Raises:
        ValueError: see `attach`.
    """
    while used is not optimizer and hasattr(used, "optimizer"):
        used = used.optimizer
    if used is not optimizer:
        raise ValueError(
            f"the Trainer steps {type(used).__name__}, not the sketch optimizer: nothing would be trained. Pass "
            "optimizers=(optimizer, None) to the Trainer."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"the Trainer copies the model to {args.n_gpu} devices in one process (DataParallel), and a copy has no "
            "sketch. Start one process a device with torchrun, or use one device (CUDA_VISIBLE_DEVICES=0)."
        )
    if args.world_size > 1 and args.fp16:
        raise ValueError("fp16 with several processes: each would skip steps of its own. Use bf16=True.")
    modules = dict(model.named_modules())
    for name, module in optimizer.layers.modules.items():
        if name not in modules or modules[name] is not module:
            raise ValueError(f"{name} of the Trainer's model is not the layer that was sketched. Sketch that model.")
        if module.weight.device != optimizer.layers.parameters[name].device:
            raise ValueError(
                f"{name} was sketched on {optimizer.layers.parameters[name].device} and the Trainer moved it to "
                f"{module.weight.device}. Move the model there before sketching: model.to(args.device)."
            )
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if trainable:
        raise ValueError(
            f"{trainable[0]} and {len(trainable) - 1} more parameters of the model require gradients, which the sketch "
            "optimizer does not use. Call train() inside `with sketching(...)`, without other adapters."
        )
    for name, given, ours in (
        ("learning_rate", args.learning_rate, optimizer.defaults["lr"]),
        ("weight_decay", args.weight_decay, optimizer.defaults["weight_decay"]),
    ):
        if given != ours:
            raise ValueError(
                f"{name}={given} of the Trainer is not used, and the sketch optimizer has {ours}. Give both the same: "
                f"{'lr' if name == 'learning_rate' else name}=args.{name}."
            )
    own = 0.0 if optimizer.clip_norm == "none" else optimizer.max_grad_norm
    if args.max_grad_norm not in (0.0, own):
        raise ValueError(
            f"max_grad_norm={args.max_grad_norm} of the Trainer clips gradients that are not there, and the sketch "
            f"optimizer clips at {own}. Give both the same, or the Trainer max_grad_norm=0."
        )
