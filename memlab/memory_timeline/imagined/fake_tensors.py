"""What PyTorch's fake tensors cannot do by themselves, and real ones can: put in place while hardware is imagined."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Module, Parameter
from torch.nn import functional as F
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import optimizer as optim
from torch.utils import _foreach_utils as foreach

from memlab.memory_timeline.imagined.gpu_ops import imagining, replaced
from memlab.memory_timeline.imagined.places import in_main_memory, main_memory

MASKS, PACKING = "transformers.masking_utils", "find_packed_sequence_indices"


@contextlib.contextmanager
def usable_fake_tensors() -> Iterator[None]:
    """In the block fake tensors are copied by deepcopy, converted by modules, and stepped by foreach optimizers."""
    with ExitStack() as stack:
        for supported in (optim._foreach_supported_types, foreach._foreach_supported_types):
            if FakeTensor not in supported:
                supported.append(FakeTensor)
                stack.callback(supported.remove, FakeTensor)
        stack.enter_context(replaced(Module, "_apply", _apply))
        stack.enter_context(replaced(FakeTensor, "__deepcopy__", _deepcopy))
        stack.enter_context(replaced(F, "one_hot", _one_hot))
        stack.enter_context(replaced(LazyModuleMixin, "__init__", _lazy(LazyModuleMixin.__init__)))
        stack.enter_context(_unpacked())
        yield


def _deepcopy(tensor: FakeTensor, memo: dict) -> FakeTensor:
    """`copy.deepcopy` of a fake tensor, as of a real one: other bytes, and a gradient only where it is no Parameter."""
    if not tensor.is_leaf:
        raise RuntimeError("expected a tensor that no op made, as copy.deepcopy does of real ones; detach it first")
    if id(tensor) not in memo:
        with torch.no_grad(), main_memory() if in_main_memory(tensor) else contextlib.nullcontext():
            if isinstance(tensor, Parameter):
                memo[id(tensor)] = Parameter(tensor.clone(), tensor.requires_grad)
                return memo[id(tensor)]
            copied = _of_copied_storage(tensor, memo) if tensor.layout is torch.strided else tensor.clone()
        memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copied.grad = _deepcopy(tensor.grad, memo)
    return memo[id(tensor)]


def _of_copied_storage(tensor: FakeTensor, memo: dict) -> FakeTensor:
    """A view like this one into a copy of the whole storage behind it, of which all such views have the same."""
    storage = tensor.untyped_storage()
    if (key := ("storage", id(storage))) not in memo:  # beside the storage, for an id is used again
        memo[key] = torch.empty(storage.nbytes(), dtype=torch.uint8), storage
    copy = memo[key][0].untyped_storage()
    return tensor.new_empty(0).set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())


def _apply(module: Module, fn, recurse: bool = True) -> Module:
    """What `module.to(dtype)`, `.half()` and the like do to fake parameters, which PyTorch's own `_apply` refuses."""
    for each in module.modules() if recurse else [module]:
        for parameter in each._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    parameter.data = fn(parameter.data)
                    if parameter.grad is not None:
                        parameter.grad.data = fn(parameter.grad.data)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = fn(buffer)
    return module


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """For real tensors PyTorch writes ones among zeros; for fake ones it would compare each index with all classes."""
    if not isinstance(tensor, FakeTensor) or num_classes < 1 or tensor.dtype is not torch.long:
        return torch._C._nn.one_hot(tensor, num_classes)
    return torch.zeros(*tensor.shape, num_classes, dtype=torch.long).scatter_(-1, tensor.unsqueeze(-1), 1)


def _lazy(init):
    def __init__(self, *args, **kwargs):
        if imagining():
            raise NotImplementedError(
                f"expected layers that are told their sizes, found {type(self).__name__}, which learns them from its "
                "first batch and then changes what its parameters are, as fake tensors cannot; name the sizes"
            )
        init(self, *args, **kwargs)

    return __init__


@contextlib.contextmanager
def _unpacked():
    """Transformers asks a batch's values whether it is packed, and where there are none it assumes so: no is said."""
    masks = sys.modules.get(MASKS)
    if masks is not None and hasattr(masks, PACKING):
        with replaced(masks, PACKING, lambda position_ids: None):
            yield
    else:
        yield
        if masks is None and MASKS in sys.modules:
            warnings.warn(
                "Transformers was imported inside this block, too late for it to learn that its batch is not packed: "
                "its attention may have been masked, and not fused. Import it before `with imagine(...)`.",
                stacklevel=9,
            )
