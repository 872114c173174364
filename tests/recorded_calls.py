"A CUDA graph for tests without CUDA."

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WAITS = (  # operations whose result Python reads
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
)


class RecordedCalls(TorchDispatchMode):
    "What a CUDA graph does, without CUDA: calls with the tensors that they had, played in place."

    def __init__(
        self,
        work: Callable[[], None],  # reads and writes tensors that stay
    ):
        super().__init__()
        self.calls, self.replays = [], 0
        work()  # once as it is: what is set up at the first call is no part of a recording
        with self:
            work()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in WAITS:
            raise RuntimeError(f"{func} waits for the device, which a recording cannot")
        result = func(*args, **(kwargs or {}))
        held = (args, kwargs or {}, result)
        self.calls.append(
            (func, *tree_map(lambda x: x.detach() if torch.is_tensor(x) else x, held))
        )
        return result

    @torch.no_grad()
    def replay(self) -> None:
        "Compute the same calls again, each result where it was the first time."
        self.replays += 1
        for func, args, kwargs, before in self.calls:
            for old, new in zip(tree_leaves(before), tree_leaves(func(*args, **kwargs))):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
