"""What stays on the device: parameters and buffers, which are there anyway, and tensors that are more than bytes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import _global_forward_pre_hooks


class Owned:
    """A context that notes the storages of parameters and buffers, of each module whose forward begins, before it does.

    Known by their storages, also their views stay: a transposed weight, or one that needs no gradient.
    """

    def __enter__(self) -> Owned:
        self._storages: dict[int, weakref.ref] = {}
        self._walked: weakref.WeakSet[Module] = weakref.WeakSet()
        _global_forward_pre_hooks[f"memlab-owned-{id(self)}"] = self._note  # one name: torch.compile looks at it
        return self

    def __exit__(self, *_) -> None:
        del _global_forward_pre_hooks[f"memlab-owned-{id(self)}"]

    def _note(self, module: Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling() or module in self._walked:
            return
        for each in module.modules():
            self._walked.add(each)
            for tensor in (*each._parameters.values(), *each._buffers.values()):
                if type(tensor) in (Tensor, Parameter, FakeTensor) and tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    self._storages[storage._cdata] = weakref.ref(storage)

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether a module owns the tensor's bytes, or it is (a view of) a leaf that wants a gradient."""
        leaf = tensor if tensor._base is None else tensor._base
        storage = tensor.untyped_storage()
        reference = self._storages.get(storage._cdata)
        return (leaf.is_leaf and leaf.requires_grad) or (reference is not None and reference() is storage)


def is_bytes(tensor: Tensor) -> bool:
    """Whether a tensor is strided memory of a CPU or GPU and nothing more.

    So no sparse tensor, no subclass, none with a lazy sign or lazy zeros, none that torch.func wraps. A Parameter is
    more, too: somebody owns it. So is all of a function that is traced (torch.func.linearize) to be run again.
    """
    return (
        type(tensor) in (Tensor, FakeTensor)
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and tensor.device.type in ("cpu", "cuda")
        and not (
            tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested or tensor._is_zerotensor()
        )
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None
    )
