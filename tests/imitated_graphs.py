"A CUDA graph's imitation on the CPU: operations with the tensors they had, played again in place."

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class ImitatedGraph(TorchDispatchMode):
    """Whatever Python decided while `work` ran is fixed, as in a CUDA graph; a replay computes the
    same operations on the same memory, whose numbers may be others by then."""

    def __init__(self, work):
        super().__init__()
        self.calls, self.replays = [], 0
        work()  # as for a real one
        with self:
            work()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in WAITS:
            raise RuntimeError(f"{func} reads a number, so the card would be waited for")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # a tensor that is written to must be held itself; its version and graph are not looked at
        held = tree_map(lambda x: x.detach() if torch.is_tensor(x) else x, (args, kwargs, result))
        self.calls.append((func, *held))
        return result

    def replay(self):
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, before in self.calls:
                now = func(*args, **kwargs)
                for old, new in zip(tree_flatten(before)[0], tree_flatten(now)[0]):
                    if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
