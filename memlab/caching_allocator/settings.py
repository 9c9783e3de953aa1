"""A snapshot's settings: which model of the allocator has them, and what no model here has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memlab.caching_allocator.allocator import CachingAllocator
from memlab.caching_allocator.expandable_segments import ExpandableAllocator
from memlab.caching_allocator.max_split_size import MaxSplitAllocator
from memlab.caching_allocator.records import DeviceRecord
from memlab.caching_allocator.snapshot import Snapshot


def oversize_bytes(snapshot: Snapshot) -> int | None:
    """The snapshot's max_split_size in bytes; None without one."""
    found = snapshot.settings.get("max_split_size", -1)
    return found if type(found) is int and 0 < found < 2**62 else None


def model_for(snapshot: Snapshot, record: DeviceRecord) -> Callable[..., CachingAllocator]:
    """What makes a model with the snapshot's settings, called with `device=`."""
    if _is_expandable(snapshot, record):
        return partial(ExpandableAllocator, snapshot.capacity_bytes)
    oversize = oversize_bytes(snapshot)
    return CachingAllocator if oversize is None else partial(MaxSplitAllocator, oversize)


def _is_expandable(snapshot: Snapshot, record: DeviceRecord) -> bool:
    grown = any(event.action in ("segment_map", "segment_unmap") for event in record.events)
    return grown or snapshot.settings.get("expandable_segments") is True or any(s.expandable for s in record.segments)


def notes_on(snapshot: Snapshot, record: DeviceRecord) -> list[str]:
    """What of the settings no model has, in sentences: where other decisions are to be expected."""
    settings, notes = snapshot.settings, []
    divisions = settings.get("roundup_power2_divisions")
    if isinstance(divisions, dict) and any(number > 1 for number in divisions.values()):
        notes.append("recorded with roundup_power2_divisions, which the model does not have: other sizes are expected")
    if settings.get("garbage_collection_threshold", 0) not in (0, 0.0):
        notes.append("recorded with garbage_collection_threshold, which the model does not have")
    conf = str(settings.get("PYTORCH_ALLOC_CONF") or settings.get("PYTORCH_CUDA_ALLOC_CONF") or "")
    for name in ("large_segment_size_mb", "max_non_split_rounding_mb"):
        if name in conf:
            notes.append(f"recorded with {name}, for which the model has 20 MiB: other segments are expected")
    if _is_expandable(snapshot, record) and oversize_bytes(snapshot):
        notes.append("recorded with expandable segments and max_split_size; the model has the first alone")
    if any(event.pool for event in record.events):
        notes.append("private pools (CUDA graphs, MemPool) are replayed by a model each")
        notes.append("a full GPU in a graph's capture is not retried there, unlike in the model")
        notes.append("of a MemPool the model has neither no_split, nor use_on_oom, nor an allocator of its own")
    if _has_waiting_blocks(record):
        notes.append(
            "a freed block waited for another stream; the real allocator looks for the end of that before best fit, "
            "and on a full GPU only after it failed"
        )
    return notes


def _has_waiting_blocks(record: DeviceRecord) -> bool:
    """Whether a block was freed that another stream still used: then its free is completed later."""
    following = [*record.events[1:], None]
    return any(
        event.action == "free_requested" and (after is None or after[:2] != ("free_completed", event.address))
        for event, after in zip(record.events, following, strict=False)
    )
