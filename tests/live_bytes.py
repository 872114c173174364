"Bytes that are alive, counted as storages are born and die."

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as wraps
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    "Inside `with`: bytes of the storages that are born and still alive, `now` and at the `peak`."

    def __init__(self, *known):
        super().__init__()
        self.now = self.peak = 0
        self.alive = {x.untyped_storage().data_ptr() for x in known}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and not (x.is_meta or wraps(x)):
                self.follow(x.untyped_storage())
        return result

    def follow(self, storage):
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self.alive or size == 0:
            return
        self.alive.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, address, size)

    def forget(self, address, size):
        self.alive.discard(address)
        self.now -= size
