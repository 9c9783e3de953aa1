"""What a second run of a function must find as the first did, besides its arguments.

Dropout draws from a stream of random numbers, autocast decides dtypes, a default device decides where tensors are made.
None of them is an argument, and by the time of backward all may have moved on. Autocast and the default device belong
to a thread, too, and backward may run in another. So the first run notes them, and each later one gets them back for
its time, and then leaves the streams of random numbers where it found them.

A stream of random numbers belongs to no thread: while one has it set, others draw from it, or set it themselves. So
of two recomputations at once, in backwards of different threads, neither need find the CPU's numbers as they were, and
the stream may end elsewhere.

A device's stream is noted if a tensor among the arguments lies there, or if it is the accelerator in use.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor

from memlab.memory_timeline.imagined.gpu_ops import imagining

CPU = torch.device("cpu")


class State:
    """Of random numbers, autocast and the default device; `restore` gives it back for a while."""

    def __init__(self, tensors: Iterable[Tensor], *, preserve_rng_state: bool):
        devices = devices_in_use(tensors)
        self.random = {device: random_state(device) for device in devices} if preserve_rng_state else {}
        kinds = {device.type for device in devices if torch.amp.is_autocast_available(device.type)}
        self.autocast = {kind: autocast_state(kind) for kind in kinds}
        self.default_device = torch.get_default_device()

    def restore(self, stack: ExitStack) -> None:
        """Set all as noted, until `stack` closes."""
        for device, state in self.random.items():
            stack.callback(set_random_state, device, random_state(device))
            set_random_state(device, state)
        for kind, (enabled, dtype, cache_enabled) in self.autocast.items():
            stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled))
        if self.default_device != torch.get_default_device():
            stack.enter_context(self.default_device)


def devices_in_use(tensors: Iterable[Tensor]) -> set[torch.device]:
    """The CPU, the tensors' devices, and the current accelerator if something ran there.

    Of imagined tensors the CPU alone, which is what they say they are on: beside them no accelerator runs anything.
    """
    if imagining():
        return {CPU}
    devices = {CPU} | {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and getattr(torch.get_device_module(accelerator), "_initialized", False):
        devices.add(torch.device(accelerator.type, torch.accelerator.current_device_index()))
    return devices


def random_state(device: torch.device) -> Tensor:
    """Where the device's stream of random numbers is."""
    return torch.get_rng_state() if device == CPU else torch.get_device_module(device).get_rng_state(device)


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Let the device's stream of random numbers go on from there."""
    if device == CPU:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def autocast_state(kind: str) -> tuple[bool, torch.dtype, bool]:
    """Whether autocast is on for this type of device, in which dtype, and whether it keeps the casts of weights."""
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
