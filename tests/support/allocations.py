"""Counting what an op allocates."""

import torch


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Sizes in bytes of the results that do not share memory with an argument of their op."""

    def __enter__(self):
        self.sizes = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {storage.data_ptr() for storage in storages((args, kwargs))}
        self.sizes += [storage.nbytes() for storage in storages(result) if storage.data_ptr() not in given]
        return result

    def large(self, size):
        return sum(s >= size for s in self.sizes)


def storages(tree):
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]
