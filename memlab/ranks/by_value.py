"""What goes to ranks and comes back: functions and classes by value, and all their lines still at home in a file.

cloudpickle may drop the name of the file that a function was written in (3.1.3 does). Then a traceback from a rank
quotes no line, and a meter there knows no line that made a byte. So the name travels beside the code.

PyTorch (2.13) writes the memory of FP8, uint16 and other younger dtypes in a way that it cannot read. So that travels
as the bytes it is.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle
import torch


class Pickler(cloudpickle.Pickler):
    """As cloudpickle's own, but code keeps the name of its file, and tensors of any dtype arrive."""

    def reducer_override(self, obj):
        """How `obj` is made again: for code as cloudpickle does it, and then with its file's name."""
        if isinstance(obj, torch.UntypedStorage):
            return _memory_of, (torch.empty(0, dtype=torch.uint8, device=obj.device).set_(obj),)
        if isinstance(obj, CodeType):
            make, arguments = self.dispatch_table[CodeType](obj)
            return _code_of_file, (make, arguments, obj.co_filename)
        return super().reducer_override(obj)


class _ToMainMemory(Pickler):
    def reducer_override(self, obj):
        """As ever, but a GPU's tensors arrive in main memory."""
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            moved = obj.detach().cpu()
            if isinstance(obj, torch.nn.Parameter):
                return torch.nn.Parameter, (moved, obj.requires_grad)
            return moved.requires_grad_(obj.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def dumps(obj: Any, *, in_main_memory: bool = False) -> bytes:
    """`obj` for `pickle.loads` in another process. Raises what pickle raises for what cannot travel.

    in_main_memory: a GPU's tensors go there.
    """
    content = io.BytesIO()
    (_ToMainMemory if in_main_memory else Pickler)(content).dump(obj)
    return content.getvalue()


def _code_of_file(make: Callable[..., CodeType], arguments: tuple, file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


def _memory_of(tensor: torch.Tensor) -> torch.TypedStorage:
    return tensor._typed_storage()  # what PyTorch makes such tensors of again
