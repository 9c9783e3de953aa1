"""The model against the real allocator, decision by decision: a snapshot's questions put to `CachingAllocator`.

    comparison = compare(Snapshot.load("h100.json"))
    comparison.segments_equal, comparison.segments          decisions about segments: the same ones, of all
    comparison.addresses_equal, comparison.requests         requests served at the same address
    print(comparison)                                       and the first differences, in words

What is compared. Each request is a decision: a free block, or new segments, and which. So is each time that segments
are given back (`empty_cache`, or a full GPU), and each refusal. The model is told nothing of the answers but two things
that are the GPU's to say, not the allocator's: at which address a new segment lies, and when the GPU is full. The first
comes from the recorded `segment_alloc`, the second from what was given back before it.

One stream's blocks are of no use to another, nor are a private pool's, so each has a model of its own. Blocks from
before the recording come from `start`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, groupby, takewhile

from memlab.caching_allocator.allocator import CachingAllocator, OutOfMemory
from memlab.caching_allocator.blocks import UNMAPPED, chain
from memlab.caching_allocator.recorded_device import GIVES, TAKES, RecordedDevice
from memlab.caching_allocator.records import DeviceRecord, Event
from memlab.caching_allocator.settings import model_for, notes_on, oversize_bytes
from memlab.caching_allocator.snapshot import Snapshot
from memlab.caching_allocator.start import resume, segments_at_start
from memlab.units import format_bytes

MOST_DIFFERENCES = 20


@dataclass(frozen=True)
class Difference:
    """One decision that differs: at which event, what was asked, what the real allocator did, what the model."""

    event: int
    asked: str
    real: str
    model: str

    def __str__(self) -> str:
        return f"event {self.event}, {self.asked}: the GPU's allocator {self.real}; the model {self.model}"


@dataclass
class Comparison:
    """How many decisions were the same, and the first differences.

    decisions: requests, refusals, and times at which segments were given back. segments: each segment that either took
    or gave back. requests: those that were served, each at an address. Peaks are of reserved bytes.
    """

    decisions: int = 0
    decisions_equal: int = 0
    segments: int = 0
    segments_equal: int = 0
    requests: int = 0
    addresses_equal: int = 0
    real_peak_bytes: int = 0
    model_peak_bytes: int = 0
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def peaks_apart(self) -> float:
        """By which part the model's peak misses the real one."""
        return abs(self.model_peak_bytes - self.real_peak_bytes) / max(self.real_peak_bytes, 1)

    def __str__(self) -> str:
        real, model = format_bytes(self.real_peak_bytes), format_bytes(self.model_peak_bytes)
        rows = [
            f"decisions   {self.decisions_equal:,} of {self.decisions:,} equal",
            f"segments    {self.segments_equal:,} of {self.segments:,} equal",
            f"addresses   {self.addresses_equal:,} of {self.requests:,} equal",
            f"reserved    {real} at the peak, the model {model}",
        ]
        return "\n".join([*rows, *self.notes, *map(str, self.differences)])


def compare(
    snapshot: Snapshot, allocator: Callable[..., CachingAllocator] | None = None, *, device: int | None = None
) -> Comparison:
    """Put a snapshot's questions to the model, and hold each of its decisions against the recorded one.

    allocator: what makes a model, called with `device=`; None: the one for the snapshot's settings. device: which GPU;
    needed where several have a record.

    Raises ValueError for a snapshot without events, and one whose events do not lead to its segments.
    """
    numbers = [n for n, record in enumerate(snapshot.devices) if record.events]
    if device is None and len(numbers) == 1:
        device = numbers[0]
    if device not in numbers:
        raise ValueError(f"expected the number of a GPU with recorded events, one of {numbers}; found {device}")
    record = snapshot.devices[device]
    replay = _Replay(allocator or model_for(snapshot, record), record, oversize_bytes(snapshot))
    replay.comparison.notes += notes_on(snapshot, record)
    return replay.run()


class _Replay:
    """The events in order, put to one model for each stream and pool."""

    def __init__(self, make: Callable[..., CachingAllocator], record: DeviceRecord, oversize: int | None):
        self.make, self.record, self.oversize = make, record, oversize
        self.device = RecordedDevice()
        self.device.was_full = self.empty_others
        self.models: dict[tuple[int, int], CachingAllocator] = {}
        self.asking = 0, 0
        self.live: dict[int, tuple[CachingAllocator, object]] = {}  # by the recorded address
        self.comparison = Comparison()

    def run(self) -> Comparison:
        self.start()
        waiting: list[Event] = []  # segment events since the last question
        for number, event in enumerate(self.record.events):
            if event.action in TAKES or event.action in GIVES:
                waiting.append(event)
            elif event.action in ("alloc", "oom"):
                self.ask(number, event, self.emptied(number, waiting, then_asked=True))
                waiting = []
            elif event.action == "free_completed":
                waiting = self.emptied(number, waiting)
                model, block = self.live.pop(event.address, (None, None))
                if block is not None:
                    model.free(block)
        self.emptied(len(self.record.events), waiting)
        self.comparison.model_peak_bytes = self.device.peak_bytes
        return self.comparison

    def start(self) -> None:
        segments = segments_at_start(self.record, self.oversize)
        held = self.device.used_bytes = self.device.peak_bytes = sum(segment.size for segment in segments)
        steps = (event.size * ((event.action in TAKES) - (event.action in GIVES)) for event in self.record.events)
        self.comparison.real_peak_bytes = max(accumulate(steps, initial=held))
        later: dict[tuple[int, int], list[Event]] = {}
        for event in self.record.events:
            if event.action in ("segment_map", "segment_unmap"):
                later.setdefault((event.stream, event.pool), []).append(event)
        for key in sorted({(segment.stream, segment.pool) for segment in segments}):
            mine = [segment for segment in segments if (segment.stream, segment.pool) == key]
            model = self.model(*key)
            live = resume(model, mine, later.get(key, ()))
            self.live |= {address: (model, block) for address, block in live.items()}
            self.hold(key, model)

    def hold(self, key: tuple[int, int], model: CachingAllocator) -> None:
        """Tell the GPU which addresses a model that resumed has, those that it may still map included."""
        for address, first in model._segments.items():
            blocks = chain(first)
            mine = (*key, first.pool.name) if any(block.state is UNMAPPED for block in blocks) else None
            self.device.held[address] = blocks[-1].address + blocks[-1].size, mine

    def model(self, stream: int, pool: int) -> CachingAllocator:
        if (stream, pool) not in self.models:
            self.models[stream, pool] = self.make(device=self.device)
        return self.models[stream, pool]

    def ask(self, number: int, event: Event, waiting: list[Event]) -> None:
        """Put a request to the model of its stream and pool; `waiting` is what the real allocator did for it."""
        device, refused = self.device, event.action == "oom"
        self.asking = event.stream, event.pool
        model = self.model(*self.asking)
        device.script, device.refuses = deque(waiting), refused
        block = self.served(model, event.size)
        device.script, device.refuses = deque(), False
        same = self.decide(number, event, waiting, refused, block is None)
        if refused:
            model.free(block)
            return
        self.comparison.requests += 1
        if block is None:
            block = self.served(model, event.size)  # the GPU is not full any more
            self.new_decisions()
            if block is None:
                return
        self.live[event.address] = model, block
        self.comparison.addresses_equal += block.address == event.address
        if same and block.address != event.address:
            self.differ(number, event, f"served it at {event.address:#x}", f"served it at {block.address:#x}")

    def served(self, model: CachingAllocator, nbytes: int):
        try:
            return model.malloc(max(nbytes, 1))
        except OutOfMemory:
            return None

    def emptied(self, number: int, waiting: list[Event], *, then_asked: bool = False) -> list[Event]:
        """Have the models give back what can be, where the real allocator did; the events that are left to explain.

        It does so when a program empties the cache, of one pool when that ends, and by itself when the GPU is full.
        All come to the same, unless oversize blocks go first: then the model, which meets the full GPU in `ask`, has to
        find out which.
        """
        run = list(takewhile(lambda event: event.action in GIVES, waiting))
        if not run or (then_asked and self.oversize and {event.address for event in run} != self.could_give_back()):
            return waiting
        for key, model in self.models.items():
            if any(event.pool == key[1] for event in run):
                model.empty_cache()
        self.decide(number, None, run, False, False)
        return waiting[len(run) :]

    def could_give_back(self) -> set[int]:
        segments = [segment for (_, pool), model in self.models.items() if not pool for segment in model.segments()]
        return {segment["address"] for segment in segments if not segment["active_size"]}

    def empty_others(self) -> None:
        """On a full GPU every stream's cache is emptied, but for oversize blocks, which are looked for in one alone."""
        run = list(takewhile(lambda event: event.action in GIVES, self.device.script))
        for key, model in self.models.items():
            own = any((event.stream, event.pool) == key for event in run)
            if key != self.asking and (own or (key[1] == 0 and not self.oversize)):
                model.empty_cache()

    def new_decisions(self) -> list[tuple[str, int, int]]:
        """What the models' logs have since this was last asked."""
        found = []
        for model in self.models.values():
            found += [(action, address, size) for _, action, address, size in model.decisions]
            model.decisions.clear()
        return found

    def decide(self, number: int, asked: Event | None, recorded: list[Event], refused: bool, model_refused: bool):
        model_did = self.new_decisions()
        self.comparison.decisions += 1
        if not recorded and not model_did and refused == model_refused:
            self.comparison.decisions_equal += 1
            return True
        real_did = [tuple(event[:3]) for event in recorded]
        real, model = Counter(real_did), Counter(model_did)
        same = real == model and refused == model_refused
        self.comparison.decisions_equal += same
        self.comparison.segments += sum((real | model).values())
        self.comparison.segments_equal += sum((real & model).values())
        if not same:
            self.differ(number, asked, _told(real_did, refused), _told(model_did, model_refused))
        return same

    def differ(self, number: int, asked: Event | None, real: str, model: str) -> None:
        if len(self.comparison.differences) < MOST_DIFFERENCES:
            question = "the cache was emptied" if asked is None else f"a request of {format_bytes(asked.size)}"
            self.comparison.differences.append(Difference(number, question, real, model))


def _told(did: list[tuple[str, int, int]], refused: bool) -> str:
    verbs = {"segment_alloc": "took", "segment_map": "mapped", "segment_free": "gave back", "segment_unmap": "unmapped"}
    parts = []
    for action, group in groupby(did, key=lambda one: one[0]):
        one_by_one = [f"{format_bytes(size)} at {address:#x}" for _, address, size in group]
        more = f" and {len(one_by_one) - 3} more" if len(one_by_one) > 3 else ""
        parts.append(f"{verbs[action]} {', '.join(one_by_one[:3])}{more}")
    if refused:
        parts.append("refused")
    return ", then ".join(parts) or "needed no segment"
