"""What many tests ask: is a call refused in words that help, and is nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def refusals(table: dict[str, tuple[Callable, type[Exception], str]]) -> pytest.MarkDecorator:
    """parametrize over a table {what is wrong: (call, error, words)}, for a test that gives them to `refused`."""
    return pytest.mark.parametrize(("call", "error", "words"), list(table.values()), ids=list(table))


def refused(call: Callable, error: type[Exception], words: str) -> None:
    """The call raises this error, and its message has each of the words, which stand between `…`s, in their order."""
    with pytest.raises(error) as raised:
        call()
    message, start = str(raised.value), 0
    for part in words.split("…"):
        place = message.find(part, start)
        assert place >= 0, f"expected {part!r}, found {message!r}"
        start = place + len(part)


def _hooks(module: nn.Module) -> int:
    own = sum(len(value) for name, value in vars(module).items() if name.endswith("_hooks") and value)
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return own + sum(len(t._backward_hooks or ()) + len(t._post_accumulate_grad_hooks or ()) for t in tensors)


def traces(*models: nn.Module) -> dict[str, object]:
    """All that a technique could leave: hooks, threads, processes, modes, open files."""
    gc.collect()
    found: dict[str, object] = {
        "hooks": sum(_hooks(module) for model in models for module in model.modules()),
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("memlab")),
        "modes": len(_get_current_dispatch_mode_stack()),
        "saved tensors' hooks": torch._C._autograd._top_saved_tensors_default_hooks(False) is not None,
    }
    with contextlib.suppress(OSError):
        found["open files"] = len(os.listdir("/proc/self/fd"))
    with contextlib.suppress(OSError):
        children = Path("/proc/self/task").glob("*/children")
        found["processes"] = sorted(pid for file in children for pid in file.read_text().split())
    return found


@contextlib.contextmanager
def nothing_left_behind(*models: nn.Module) -> Iterator[None]:
    """After the block, whatever it raised, there are as many hooks, threads, processes, modes and files as before."""
    before = traces(*models)
    try:
        yield
    finally:
        assert traces(*models) == before
