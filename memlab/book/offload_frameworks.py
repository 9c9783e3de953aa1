"""Other people's offloading inside a notebook: what it moves is counted.

PyTorch's `save_on_cpu` and FSDP2's `CPUOffloadPolicy` move tensors with `tensor.cpu()` and `tensor.to(device)`. Where
the model itself lies in main memory, both are calls that return their own tensor, and nothing can be learned from them;
on imagined hardware `tensor.to(device)` leaves what is on the card there, since its device has the host's name.
`counted_moves` makes them the copies that they are beside a GPU. DeepSpeed moves bytes into buffers that it keeps;
`zero_offload_bytes` reads those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memlab.memory_timeline import main_memory


@dataclass
class Moves:
    """How often tensors went from the card to the host and back, and how many bytes that were."""

    to_host: int = 0
    to_host_bytes: int = 0
    to_card: int = 0
    to_card_bytes: int = 0

    def count(self, nbytes: int, to_host: bool) -> None:
        """One more move."""
        if to_host:
            self.to_host, self.to_host_bytes = self.to_host + 1, self.to_host_bytes + nbytes
        else:
            self.to_card, self.to_card_bytes = self.to_card + 1, self.to_card_bytes + nbytes


@contextlib.contextmanager
def counted_moves() -> Iterator[Moves]:
    """Count what code moves between card and host; without a GPU, do what it would do beside one.

        with imagine("H100-80GB"), Meter(model) as meter, counted_moves() as moves:
            with torch.autograd.graph.save_on_cpu():
                loss = model(x, y)
            loss.backward()
        moves.to_host_bytes, meter.timeline.on("imagined H100-80GB").peak_bytes

    For tensors of device "cpu", real or imagined, main memory plays the card as well: `t.cpu()` makes a copy in the
    host's memory. So does `t.to(device)`, and for a tensor that lies in the host's memory it makes one on the card:
    with one device's name for two places, a move always goes to the other. On imagined hardware, what was made under
    `main_memory()` lies in the host's memory (a single number made there, such as fused attention's seed, stays).
    Between a real GPU and the CPU nothing is changed, only counted.

    `Tensor.to` and `Tensor.cpu` are replaced in the whole process meanwhile, so let nothing else move tensors. Copies
    into a tensor made beforehand (`copy_`) pass uncounted, and so does save_on_cpu(pin_memory=True) of real tensors.
    """
    moves, to, cpu = Moves(), Tensor.to, Tensor.cpu

    def moved(tensor: Tensor, move: Callable[[Tensor], Tensor], to_host: bool) -> Tensor:
        with main_memory() if to_host else contextlib.nullcontext():
            copy = move(tensor)
            copy = copy.clone() if copy is tensor else copy
        if to_host:
            storage = copy.untyped_storage()
            storage.in_main_memory = storage.was_on_card = True
        moves.count(copy.nbytes, to_host)
        return copy

    def counted_cpu(tensor: Tensor, *args, **kwargs) -> Tensor:
        if not _plain(tensor) or in_host(tensor):
            return cpu(tensor, *args, **kwargs)
        return moved(tensor, lambda tensor: cpu(tensor, *args, **kwargs), to_host=True)

    def counted_to(tensor: Tensor, *args, **kwargs) -> Tensor:
        device = kwargs.get("device", args[0] if args else None)
        number = not tensor.dim() and in_host(tensor) and not hasattr(tensor.untyped_storage(), "was_on_card")
        if not _plain(tensor) or number or not isinstance(device, (str, torch.device)):
            return to(tensor, *args, **kwargs)
        here, there = tensor.device.type, torch.device(device).type
        if here == there != "cpu":
            return to(tensor, *args, **kwargs)
        to_host = not in_host(tensor) if here == there else there == "cpu"
        return moved(tensor, lambda tensor: to(tensor, *args, **kwargs), to_host)

    with mock.patch.object(Tensor, "to", counted_to), mock.patch.object(Tensor, "cpu", counted_cpu):
        yield moves


def in_host(tensor: Tensor) -> bool:
    """Whether a tensor lies in the host's memory, for `counted_moves` and imagined hardware."""
    return hasattr(tensor.untyped_storage(), "in_main_memory")


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor's bytes are its own: a DTensor's are not, its local part is moved by itself."""
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def zero_offload_bytes(optimizer) -> dict[str, int]:
    """What DeepSpeed's ZeRO-Offload keeps between steps, in bytes, by what it is; the first entry is on the GPU.

    optimizer: what `deepspeed.initialize` returned second, of stages 1 and 2, after a step, before `engine.destroy()`.

    Buffers of a size that does not grow with the model are left out, and so are gradients of micro-batches, which are
    2 bytes a parameter more in the host's memory with gradient accumulation. Names are those of DeepSpeed 0.19.

    Raises ValueError for another optimizer, or without `offload_optimizer`.
    """
    if not getattr(optimizer, "cpu_offload", False):
        raise ValueError(
            "expected DeepSpeed's optimizer of stage 1 or 2 with offload_optimizer, found "
            f"{type(optimizer).__name__} without; add 'offload_optimizer': {{'device': 'cpu'}} to zero_optimization"
        )
    masters = optimizer.single_partition_of_fp32_groups
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    kept = {
        "weights, on the device": optimizer.bit16_groups_flat,
        "master weights": masters,
        "Adam's states": [state for state in states if state.dim()],  # a counter is none
        "gradients, in FP32": [master.grad for master in masters],
        "weights on their way back": optimizer.param_buffer_of_bit16_for_cpu_offload_groups,
    }
    return {name: sum(tensor.nbytes for tensor in tensors if tensor is not None) for name, tensors in kept.items()}
