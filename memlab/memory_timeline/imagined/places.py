"""Two places for tensors of one device: on an imagined card, or in the host's main memory beside it.

Every imagined tensor says that its device is "cpu", so PyTorch would take any move between the two for none at all. A
storage in main memory carries a mark, and while a GPU is imagined, moves look at it:

- `.cuda()`, `.to("cuda")` bring a tensor to the card, and `.cpu()` brings it to main memory;
- `.to(device)`, with any name that imagined tensors give their device, brings back to the card what `.cpu()` took from
  there, unless under `main_memory()`. All else stays where it is: code that asks which device there is finds "cpu", and
  means the card. So torch's `save_on_cpu` does what it does beside a GPU.

What is made lies on the card, whatever device is asked for, unless it is made under `main_memory()`, or pinned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import save_on_cpu


def mode_of_card() -> FakeTensorMode | None:
    """What imagines a card in this thread; None where nothing is imagined, or a CPU is."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode if getattr(mode, "imagines", "cpu") != "cpu" else None


@contextlib.contextmanager
def main_memory() -> Iterator[None]:
    """What is made in this block lies in the host's main memory, beside an imagined card. Real tensors: no difference.

        with imagine("H100-80GB"):
            on_card = torch.empty(2**20)
            with main_memory():
                copy = on_card.clone()

    A timeline then has two devices, the card and "cpu" (`timeline.on("cpu")`), and a budget counts the card's bytes.
    A real tensor lies where its `device` says. Blocks may stand in one another.
    """
    with _place(beside_card=True):
        yield


@contextlib.contextmanager
def _place(beside_card: bool) -> Iterator[None]:
    mode = mode_of_card()
    if mode is None:
        yield
        return
    before, mode.beside_card = mode.beside_card, beside_card
    try:
        yield
    finally:
        mode.beside_card = before


def on_imagined_card(tensor: Tensor) -> bool:
    """Whether a tensor lies on a GPU that is imagined, and not in the main memory beside it."""
    imagined = isinstance(tensor, FakeTensor) and getattr(tensor.fake_mode, "imagines", "cpu") != "cpu"
    return imagined and not hasattr(tensor.untyped_storage(), "in_main_memory")


def in_main_memory(tensor: Tensor) -> bool:
    """Whether a tensor lies in the host's main memory: neither on a GPU nor on an imagined card."""
    return tensor.is_cpu and not on_imagined_card(tensor)


# ---- moves


def _to(to: Callable) -> Callable:
    def moved(tensor: Tensor, *args, **kwargs):
        asked = kwargs.get("device", args[0] if args else None)
        here = lambda value: torch.device("cpu") if _is_cuda(value) else value  # noqa: E731
        args, kwargs = [here(value) for value in args], {name: here(value) for name, value in kwargs.items()}
        if _is_one_place(tensor) and (_is_cuda(asked) or _comes_back(tensor, asked)):
            return _move(tensor, lambda: to(tensor, *args, **kwargs), to_host=False)
        return to(tensor, *args, **kwargs)

    return moved


def _comes_back(tensor: Tensor, asked) -> bool:
    named = isinstance(asked, (str, torch.device))
    return named and hasattr(tensor.untyped_storage(), "was_on_card") and not tensor.fake_mode.beside_card


def _move(tensor: Tensor, convert: Callable[[], Tensor], to_host: bool) -> Tensor:
    """What `convert` makes of a tensor, or a copy where that is none, in its other place; itself if it is there."""
    from_card = on_imagined_card(tensor)
    with _place(beside_card=to_host):
        result = convert()
        if result is tensor and to_host == from_card:
            result = tensor.clone()
    if to_host and from_card:
        result.untyped_storage().was_on_card = True
    return result


def _cpu(cpu: Callable) -> Callable:
    def moved(tensor: Tensor, *args, **kwargs):
        if _is_one_place(tensor):
            return _move(tensor, lambda: tensor, to_host=True)
        return cpu(tensor, *args, **kwargs)

    return moved


def _cuda(_: Callable) -> Callable:
    def moved(tensor: Tensor, *_args, **_options):
        return _move(tensor, lambda: tensor, to_host=False) if _is_one_place(tensor) else tensor

    return moved


def _is_one_place(tensor: Tensor) -> bool:
    """Whether a tensor is imagined, and has one storage: what is in a wrapper (DTensor), or sparse, stays."""
    return isinstance(tensor, FakeTensor) and tensor.layout is torch.strided


def _is_cuda(value) -> bool:
    """Whether an argument asks for a GPU: a device, or its name."""
    return getattr(value, "type", None) == "cuda" or (isinstance(value, str) and value.partition(":")[0] == "cuda")


MOVES = (
    (Tensor, "to", _to),
    (Tensor, "cpu", _cpu),
    (Tensor, "cuda", _cuda),
    # Pinned memory holds the same bytes, and a machine without a GPU has none.
    (save_on_cpu, "__init__", lambda init: lambda self, *_args, **_options: init(self)),
)
"""What an imagined GPU puts in place: whose attribute, its name, and what makes ours of what is there."""
