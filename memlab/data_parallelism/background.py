"""An all-reduce of your own in a thread of its own, so that it runs beside backward.

torch.distributed's collectives have such a thread inside, and return at once. One that is made of sends does not. So
each buffer is handed to a thread, which works on one after another; whoever needs the sum waits for it.

Memory is made by the thread that runs the model: what another one allocates, no meter sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Background:
    """Calls `all_reduce(flat, group=group)` in a thread, with `scratch=…` too if it has such an argument.

    The thread starts with the first buffer, and ends with `close()` or with this object. On a GPU the call begins, on
    a stream of its own, when the computation has come to where it was asked for. Imagined tensors belong to one thread,
    and nothing takes time: they are summed at once.
    """

    def __init__(self, all_reduce: Callable[..., object], group):
        self.all_reduce, self.group = all_reduce, group
        self.scratch_bytes = 0  # of the largest piece, which may be larger in the next backward
        self.takes_scratch = "scratch" in inspect.signature(all_reduce).parameters
        self.scratch: dict[torch.device, Tensor] = {}
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memlab-all-reduce")

    def begin(self, flat: Tensor, piece: int) -> Callable[[], None]:
        """Begin to sum a buffer over ranks. Returns what waits for it, and raises what failed.

        flat: (n,). piece: how many elements of scratch it wants; there are scratch_bytes, for one buffer at a time.
        """
        device = flat.device
        extra = {}
        if self.takes_scratch:
            if device not in self.scratch:
                self.scratch[device] = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)
            extra["scratch"] = self.scratch[device][: piece * flat.itemsize].view(flat.dtype)
        if isinstance(flat, FakeTensor):
            self.all_reduce(flat, group=self.group, **extra)
            return lambda: None
        held = [(flat, extra)]  # the thread takes them out: so it holds nothing any more when the sum is waited for
        if device.type != "cuda":
            return self._thread.submit(self._run, held).result
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        here = torch.cuda.current_stream(device).record_event()
        future = self._thread.submit(self._run_on, self.streams[device], here, held)
        return lambda: torch.cuda.current_stream(device).wait_event(future.result())

    def rest(self) -> None:
        """Give the scratch back, when all is waited for."""
        self.scratch.clear()

    def close(self) -> None:
        """End the thread, after what it is doing."""
        self._thread.shutdown()

    def _run(self, held: list[tuple[Tensor, dict]]) -> None:
        flat, extra = held.pop()
        self.all_reduce(flat, group=self.group, **extra)

    def _run_on(self, stream: torch.cuda.Stream, here: torch.cuda.Event, held: list) -> torch.cuda.Event:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            stream.wait_event(here)
            self._run(held)
            return stream.record_event()
