"""Any Timeline in PyTorch's own snapshot format, so that PyTorch's tools show a step of a machine without a GPU.

    save_snapshot(meter.timeline, "step.pickle")
    python -m torch.cuda._memory_viz stats step.pickle               segments, and what is free in them
    python -m torch.cuda._memory_viz trace_plot step.pickle -o step.html
    pytorch.org/memory_viz                                           the same file, dragged into the page

A Timeline knows who asked for bytes and when; a snapshot also has addresses and segments. Those come from the model of
CUDA's caching allocator, to which the Timeline's requests are put. So the file says what the allocator *would* have
done, from an empty cache, with all that existed before the first op asked for first.

A frame in a snapshot has a name, a file and a line number. A Timeline keeps no paths, so a frame's name is the line
itself, and in the file's place stands the module. Around it stand what kind of storage it is, and in which phase it was
born: a flame graph adds bytes up by phase, kind, module, line and reason.

Source: the docstring of `torch.cuda.memory._snapshot`, PyTorch 2.11 to 2.15.
"""

from __future__ import annotations

import pickle
from pathlib import Path

from memlab.caching_allocator import CachingAllocator, ExpandableAllocator, MaxSplitAllocator, OutOfMemory
from memlab.caching_allocator.blocks import Block
from memlab.files import draft_of
from memlab.memory_timeline import Storage, Timeline


def as_snapshot(timeline: Timeline, allocator: CachingAllocator | None = None) -> dict:
    """What `torch.cuda.memory._snapshot()` would return for a timeline's device, had its requests gone to `allocator`.

    allocator: one that holds nothing yet; None: CachingAllocator(), with no limit. Where it is full, the history ends
    with the `oom`, and the segments are those of that moment, as in a dump made when a run died.

    Raises ValueError for an allocator that holds something, or has held something.
    """
    allocator = CachingAllocator() if allocator is None else allocator
    if allocator.reserved_bytes or allocator.decisions:
        raise ValueError(f"expected an allocator that has served nothing yet, found {allocator!r}; make one for this")
    history = _History(allocator)
    held: dict[int, tuple[Block, int, list[dict]]] = {}  # by the storage's id: its block, the bytes asked for, frames
    try:
        for event in timeline.everything():
            before = held.pop(event.storage, None)
            nbytes = (before[1] if before else 0) + event.delta
            if nbytes:
                frames = before[2] if before else _frames(timeline.storages[event.storage])
                held[event.storage] = history.malloc(nbytes, frames), nbytes, frames
            if before:
                history.free(*before)
    except OutOfMemory:
        pass
    return {
        "segments": history.segments(),
        "device_traces": [history.events],
        "allocator_settings": {
            "expandable_segments": isinstance(allocator, ExpandableAllocator),
            "max_split_size": allocator.max_split_bytes if isinstance(allocator, MaxSplitAllocator) else -1,
        },
        "external_annotations": [],
    }


def save_snapshot(timeline: Timeline, path: str | Path, allocator: CachingAllocator | None = None) -> None:
    """Write `as_snapshot(timeline, allocator)` as a pickle, the format of `torch.cuda.memory._dump_snapshot`.

    The file appears whole or not at all. PyTorch's tools *run* such a file (`pickle.load`), so give them your own only;
    `memlab.caching_allocator.read_snapshot` reads one from elsewhere.

    Raises ValueError as `as_snapshot` does, OSError where nothing can be written.
    """
    raw = pickle.dumps(as_snapshot(timeline, allocator), protocol=4)
    with draft_of(path) as draft:
        draft.write_bytes(raw)


class _History:
    """An allocator's events in PyTorch's words, and of each block in use whose it is."""

    def __init__(self, allocator: CachingAllocator):
        self.allocator, self.events = allocator, []
        self._frames: dict[int, list[dict]] = {}  # by a block's address
        self._told = 0  # of the allocator's decisions

    def malloc(self, nbytes: int, frames: list[dict]) -> Block:
        try:
            block = self.allocator.malloc(nbytes)
        except OutOfMemory:
            self._tell_decisions(frames)
            room = (self.allocator.capacity_bytes or 0) - self.allocator.reserved_bytes
            self.events.append(self._event("oom", None, nbytes, frames) | {"device_free": room})
            raise
        self._tell_decisions(frames)
        self._frames[block.address] = frames
        self.events.append(self._event("alloc", block.address, nbytes, frames))
        return block

    def free(self, block: Block, nbytes: int, frames: list[dict]) -> None:
        address = block.address
        del self._frames[address]
        self.allocator.free(block)
        self.events += [self._event(action, address, nbytes, frames) for action in ("free_requested", "free_completed")]
        self._tell_decisions(frames)

    def segments(self) -> list[dict]:
        """The allocator's segments, with the frames of each block in use."""
        found = self.allocator.segments()
        for segment in found:
            segment |= {"device": 0, "segment_pool_id": (0, 0), "frames": []}
            for block in segment["blocks"]:
                block["frames"] = self._frames.get(block["address"], []) if block["state"] != "inactive" else []
        return found

    def _tell_decisions(self, frames: list[dict]) -> None:
        for _, action, address, size in self.allocator.decisions[self._told :]:
            self.events.append(self._event(action, address, size, frames))
        self._told = len(self.allocator.decisions)

    def _event(self, action: str, address: int | None, nbytes: int, frames: list[dict]) -> dict:
        where = {} if address is None else {"addr": address}
        return {"action": action, **where, "size": nbytes, "stream": 0, "frames": frames}


def _frames(storage: Storage) -> list[dict]:
    """The innermost first, as in a stack trace: why it is kept, its line, what it is, its phase."""
    shape = "×".join(map(str, storage.shape)) or "scalar"
    rows = [
        (storage.reason, f"{shape} {storage.dtype}"),
        (
            str(storage.line) if storage.line.source else storage.op or "there before",
            storage.module or "outside any module",
        ),
        (storage.category, "category"),
        (storage.phase, "phase"),
    ]
    # PyTorch's tools cut a flame graph's line at each ";".
    return [{"name": name.replace(";", ","), "filename": file, "line": 0} for name, file in rows]
