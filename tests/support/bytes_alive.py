"""Bytes of tensors that are alive at once, counted as torch makes and frees them; a process's own memory tells less."""

import gc
import warnings
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class BytesAlive(TorchDispatchMode):
    """Counts what is made inside, besides what is alive as it begins; `most` is the largest sum, `now` the one at the end.

    What is freed inside counts too, so that a tensor that takes the place of one before adds nothing.
    """

    def __init__(self):
        super().__init__()
        self._known, self.now = {}, 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what gc finds in torch
            self._add(each for each in gc.get_objects() if isinstance(each, torch.Tensor))
        self.before, self.most = self.now, self.now

    def _add(self, tensors):
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            if (
                local.is_meta
                or local.layout is not torch.strided
                or type(local) not in (torch.Tensor, torch.nn.Parameter)
            ):
                continue
            storage = local.untyped_storage()
            if storage._cdata not in self._known:
                self._known[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key):
        self.now -= self._known.pop(key, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self._add(each for each in tree_leaves(made) if isinstance(each, torch.Tensor))
        self.most = max(self.most, self.now)
        return made
