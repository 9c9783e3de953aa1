"""Stand-ins for a GPU's streams and events: copies happen when somebody waits for them, and not before."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Late(TorchDispatchMode):
    """A side stream that is as late as it may be. What it was asked to wait for and to copy is in `log`."""

    def __init__(self, device=None):
        super().__init__()
        self.device, self.waiting, self.log = device, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.waiting.append(args[:2])
            self.log.append("copy")
            return args[0]
        return func(*args, **(kwargs or {}))

    def run(self, count: int) -> None:
        while count > 0 and self.waiting:
            target, source = self.waiting.pop(0)
            with torch.no_grad():
                target.copy_(source)
            count -= 1

    def synchronize(self):
        self.run(len(self.waiting))

    def wait_stream(self, other):
        self.log.append("wait")
        other.synchronize()

    def wait_event(self, event):
        self.log.append("wait")
        event.synchronize()

    def record_event(self):
        return LateEvent(self)


class LateEvent:
    """A point in a stream, which the stream reaches when somebody waits for it."""

    def __init__(self, stream=None):
        self.last = None
        if stream is not None:
            self.record(stream)

    def record(self, stream):
        self.stream, self.last = stream, stream.waiting[-1] if stream.waiting else None

    def synchronize(self):
        waiting = [id(pair) for pair in self.stream.waiting]
        if id(self.last) in waiting:
            self.stream.run(waiting.index(id(self.last)) + 1)


class Now:
    """The stream on which the device computes: it is never behind."""

    waiting = ()

    def synchronize(self):
        pass

    def wait_stream(self, other):
        other.synchronize()

    def wait_event(self, event):
        event.synchronize()

    def record_event(self):
        return LateEvent(self)


def late_streams(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """Put the stand-ins in torch.cuda's place. Returns the list of the side streams that are made."""
    streams, running = [], [Now()]

    def make(device=None):
        streams.append(Late(device))
        return streams[-1]

    @contextlib.contextmanager
    def within(stream):
        running.append(stream)
        try:
            with stream:
                yield
        finally:
            running.pop()

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: running[-1])
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    return streams
