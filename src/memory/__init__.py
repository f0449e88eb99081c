"""Memory ledger: exact live and peak bytes by component, and the seconds, of each phase of an update.

The ledger follows tensor storages. A `TorchDispatchMode` looks at what every operator returns and charges each
storage once; a weak reference takes the charge back at the instant the storage is freed. Views and in-place operators
cost nothing, and a storage that an operator resizes is charged its new size. The ledger keeps no tensor alive, creates
none, and never touches an optimizer: it does not change what it measures. All charges are kept until the update ends,
so that a storage counts as what it turned out to be (a gradient, a moment, an activation) from its first byte on.

What the bytes leave out:

- Blind spot: workspace that an operator allocates and frees inside itself is never returned, so never seen.
  logsumexp, multinomial and SVD hold about their input once more, QR and fused attention some per cent;
  matrix products, softmax and optimizer steps nothing or a wrapped scalar (12 bytes).
- Under `torch.inference_mode` composite operators (linear, matmul, reshape) reach the ledger whole, so their
  intermediates join the blind spot. `torch.no_grad` does not have this gap.
- Tensors that no operator returned: those made before the ledger (hand them to `track`, or the first view of
  them is taken for an allocation), a generator's state (5 kB), and what `UntypedStorage.resize_` adds. Memory
  lent by NumPy is charged although it is NumPy's.
- Tensors without a storage (sparse, MKL-DNN), other threads' operators (autograd's excepted), and whatever is
  not a tensor: Python, libraries, the allocator's own overhead. The process that `top` shows is larger.

The price is 10 to 20 microseconds an operator, most of it torch's own way into a Python mode. So a run may measure some
of its updates only (`Ledger.measure`). On CUDA the caching allocator counts too, at no price: its peaks, reset at every
phase border, are the ones that count, and what the ledger does not explain of them is shown as a gap.
"""

from src.memory.ledger import Ledger, saved_for_backward
from src.memory.meters import MemoryCapExceeded, StorageMeter, capped, is_out_of_memory, wanted_bytes
from src.records import COMPONENTS

__all__ = [
    "COMPONENTS",
    "Ledger",
    "MemoryCapExceeded",
    "StorageMeter",
    "capped",
    "is_out_of_memory",
    "saved_for_backward",
    "wanted_bytes",
]
