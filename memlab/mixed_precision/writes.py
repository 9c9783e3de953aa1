"""Has anybody written to this tensor since? PyTorch counts every write to a tensor, as its version.

Not counted, and so not noticed: writes into `tensor.data` or its NumPy array, and what torch.distributed receives.
"""

from __future__ import annotations

from weakref import ref

from torch import Tensor


class Writes:
    """Tensors as they were when they were noted.

    Assigning to a tensor's `data` is no write to its memory: it gives the tensor other memory. So the memory is noted
    too, by a weak reference, since the address of memory that is gone is soon another's.
    """

    def __init__(self):
        self._noted: dict[int, tuple] = {}  # by id: the owner of this keeps the tensors alive

    def note(self, tensor: Tensor) -> None:
        """From now on this tensor is unchanged."""
        place = tensor._version, tensor.storage_offset(), tensor.stride()
        self._noted[id(tensor)] = place, ref(tensor.untyped_storage())

    def knows(self, tensor: Tensor) -> bool:
        """Whether this tensor was ever noted."""
        return id(tensor) in self._noted

    def unchanged(self, tensor: Tensor) -> bool:
        """Whether nobody has written to this tensor since it was noted; False if it never was."""
        place, memory = self._noted.get(id(tensor), (None, lambda: None))
        now = tensor._version, tensor.storage_offset(), tensor.stride()
        return place == now and memory() is tensor.untyped_storage()


def written_to(tensor: Tensor, found: str) -> RuntimeError:
    """What autograd raises, too, for a tensor that changed after it was saved. found: how that was noticed."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a "
        f"{tuple(tensor.shape)} of {tensor.dtype} was saved for backward and written to afterwards ({found}); use an "
        "op that is not in place, save a clone, and step the optimizer after backward"
    )
