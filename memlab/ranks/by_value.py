"""What goes to ranks and comes back: functions and classes by value, and all their lines still at home in a file.

cloudpickle may drop the name of the file that a function was written in (3.1.3 does). Then a traceback from a rank
quotes no line, and a meter there knows no line that made a byte. So the name travels beside the code.
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
    """As cloudpickle's own, but code keeps the name of its file."""

    def reducer_override(self, obj):
        """How `obj` is made again: for code as cloudpickle does it, and then with its file's name."""
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
