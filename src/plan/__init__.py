"""What an update will need of memory, by component and phase, before anything is loaded.

    python -m src.plan [--prompt-tokens 256] [--world-sizes 1,2,4,8] [--rank 16] [--csv FILE] [overrides]
    python -m src.plan --published
    python -m src.plan --check FILE.csv

Overrides are those of `python -m src.train` (model=shape model.shape=qwen2.5-7b method=sketch method.rank=256 ...).

The training code itself runs on tensors that have shapes and no memory (torch's fake tensors), under the ledger that a
training run is measured with. So prediction and measurement differ only where values decide: here every response is as
long as it may be, prompts are padded, and no gradient is NaN. A step makes the optimizer's state; an update follows. Of
its microbatches two are run, as the third finds what the second found, and of the probe's one. Operators are those of a
CPU; see docs/plan.md for what that leaves out.

Several processes (`--world-sizes`) are formulas over the components of each phase, each rank with the batch given:

- replicated: everything on every rank. DistributedDataParallel adds buckets as large as the gradients of the model's
  parameters, from its construction on; sketches are no parameters of the model and are averaged in place.
- sharded (ZeRO-3, FSDP): weights, master weights, reference, gradients and moments over N. Outside the step one unit is
  gathered in addition: the largest of the decoder layers and of what is outside them, and in backward its gradients
  too. The step of a dense method works on shards, so all of it is over N. Sketches, the state that is kept of them,
  projections, activations, logits and the probe are whole on every rank.
"""
