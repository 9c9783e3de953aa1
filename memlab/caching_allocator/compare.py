"""The model against the real allocator, decision by decision: a snapshot's questions put to `CachingAllocator`.

    comparison = compare(Snapshot.load("h100.json"))
    comparison.segments_equal, comparison.segments          decisions about segments: the same ones, of all
    comparison.addresses_equal, comparison.requests         requests served at the same address
    print(comparison)                                       and the first differences, in words

What is compared. Each request is a decision: a free block, or a new segment, and which. So is each time that segments
are given back (`empty_cache`, or a full GPU), and each refusal. The model is told nothing of the answers but two things
that are the GPU's to say, not the allocator's: at which address a new segment lies, and when the GPU is full.

One stream's blocks are of no use to another, nor are a private pool's, so each has a model of its own. What the
allocator held when the recording began must be known: nothing, or what the snapshot has as `before`.

Not here: expandable segments, the other settings of PYTORCH_ALLOC_CONF (a note says where one was on), and what waits
for another stream: a block counts as free from its `free_completed` on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, groupby, takewhile

from memlab.caching_allocator.allocator import CachingAllocator, OutOfMemory
from memlab.caching_allocator.blocks import FREE, IN_USE, Block, Pool, cut
from memlab.caching_allocator.device import Device
from memlab.caching_allocator.records import DeviceRecord, Event, Segment
from memlab.caching_allocator.snapshot import Snapshot
from memlab.units import format_bytes

MOST_DIFFERENCES = 20
NOWHERE = 2**60  # where segments lie that only the model asked for
USUAL = {"max_split_size": (-1, 2**63 - 1, 2**64 - 1), "garbage_collection_threshold": (0,)}
USUAL |= dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), ("",))


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

    def __str__(self) -> str:
        real, model = format_bytes(self.real_peak_bytes), format_bytes(self.model_peak_bytes)
        rows = [
            f"decisions   {self.decisions_equal:,} of {self.decisions:,} equal",
            f"segments    {self.segments_equal:,} of {self.segments:,} equal",
            f"addresses   {self.addresses_equal:,} of {self.requests:,} equal",
            f"reserved    {real} at the peak, the model {model}",
        ]
        return "\n".join([*rows, *self.notes, *map(str, self.differences)])


def compare(snapshot: Snapshot, allocator: Callable[..., CachingAllocator] = CachingAllocator) -> Comparison:
    """Put a snapshot's questions to the model, and hold each of its decisions against the recorded one.

    allocator: what makes a model, called with `device=`.

    Raises ValueError for a snapshot without events or with those of several GPUs, with expandable segments, or of which
    it is not known what was there when it began.
    """
    numbers = [n for n, record in enumerate(snapshot.devices) if record.events]
    if len(numbers) != 1:
        raise ValueError(f"expected events of one GPU, found those of {numbers or 'none'}; record one at a time")
    record = snapshot.devices[numbers[0]]
    _refuse_unknown_start(record)
    replay = _Replay(allocator, record)
    for name, value in snapshot.settings.items():
        rounds = isinstance(value, dict) and max(value.values(), default=0) > 1
        if rounds or value not in USUAL.get(name, (value,)):
            replay.comparison.notes.append(
                f"recorded with another {name} than PyTorch's default, which the model has: expect other decisions"
            )
    return replay.run()


def _refuse_unknown_start(record: DeviceRecord) -> None:
    """Raise ValueError unless what was there before, and the events, lead to what is there at the end."""
    before = record.before or ()
    if any(event.action in ("segment_map", "segment_unmap") for event in record.events) or any(
        segment.expandable for segment in (*before, *record.segments)
    ):
        raise ValueError(
            "expected a recording without expandable segments, which are not compared here; record one with "
            "PYTORCH_ALLOC_CONF=expandable_segments:False"
        )
    live, segments = Counter(_addresses_in_use(before)), Counter({(s.address, s.size): 1 for s in before})
    counts = {"alloc": (live, 1), "free_completed": (live, -1)}
    counts |= {"segment_alloc": (segments, 1), "segment_free": (segments, -1)}
    for number, event in enumerate(record.events):
        if event.action in counts:
            counted, change = counts[event.action]
            key = event.address if counted is live else (event.address, event.size)
            counted[key] += change
            if counted[key] not in (0, 1):
                raise ValueError(_unknown(f"event {number}, {event.action} at {event.address:#x}, of one from before"))
    if +live != Counter(_addresses_in_use(record.segments)) or +segments != Counter(
        {(s.address, s.size): 1 for s in record.segments}
    ):
        raise ValueError(_unknown("segments or blocks at its end that no event made"))


def _unknown(found: str) -> str:
    return (
        f"expected a recording from an empty allocator, or one that has what was there before, found {found}; record "
        "with record_snapshot, or from the program's start, with max_entries for all events"
    )


def _addresses_in_use(segments: tuple[Segment, ...]) -> list[int]:
    found = []
    for segment in segments:
        starts = accumulate((block.size for block in segment.blocks), initial=segment.address)
        found += [at for at, block in zip(starts, segment.blocks, strict=False) if block.state != "inactive"]
    return found


class _RecordedDevice(Device):
    """A GPU that gives the recorded one's address for a segment, and is full when that refused a request.

    next: the `segment_alloc` of the question at hand, if there is one.
    """

    def __init__(self):
        super().__init__()
        self.next: Event | None = None
        self.refuses = False
        self.peak_bytes, self._invented = 0, NOWHERE
        self.held: dict[int, int] = {}  # the models' segments: where each begins and ends

    def take(self, nbytes: int) -> int | None:
        """The recorded segment's address, or None where the recorded GPU was full."""
        if self.refuses:
            return None
        event, self.next = self.next, None
        if event is not None and event.size == nbytes and self._is_free(event.address, nbytes):
            address = event.address
        else:
            address = self._invented = self._invented + 2**44
        self.hold(address, nbytes)
        return address

    def hold(self, address: int, nbytes: int) -> None:
        """A model has this segment."""
        self.held[address] = address + nbytes
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def give_back(self, address: int, nbytes: int) -> None:
        """Take a segment back."""
        del self.held[address]
        self.used_bytes -= nbytes

    def reserve(self, nbytes: int) -> int:
        """Raises ValueError: no recorded addresses are without bytes."""
        raise ValueError("expected a model that takes whole segments, found one with expandable segments")

    def _is_free(self, address: int, nbytes: int) -> bool:
        """Whether no model that decided otherwise than the recorded allocator before still has these addresses."""
        return all(stop <= address or address + nbytes <= start for start, stop in self.held.items())


class _Replay:
    """The events in order, put to one model for each stream and pool."""

    def __init__(self, make: Callable[..., CachingAllocator], record: DeviceRecord):
        self.make, self.record = make, record
        self.device = _RecordedDevice()
        self.models: dict[tuple[int, int], CachingAllocator] = {}
        self.live: dict[int, tuple[CachingAllocator, Block]] = {}  # by the recorded address
        self.comparison = Comparison()

    def run(self) -> Comparison:
        for segment in self.record.before or ():
            self.hold(segment)
        reserved = self.device.used_bytes
        signs = {"segment_alloc": 1, "segment_free": -1}
        steps = (event.size * signs.get(event.action, 0) for event in self.record.events)
        self.comparison.real_peak_bytes = max(accumulate(steps, initial=reserved))
        waiting: list[Event] = []  # segment events since the last question
        for number, event in enumerate(self.record.events):
            if event.action in signs:
                waiting.append(event)
            elif event.action in ("alloc", "oom"):
                self.ask(number, event, self.emptied(number, waiting))
                waiting = []
            elif event.action == "free_completed":
                waiting = self.emptied(number, waiting)
                model, block = self.live.pop(event.address, (None, None))
                if block is not None:
                    model.free(block)
        self.emptied(len(self.record.events), waiting)
        self.comparison.model_peak_bytes = self.device.peak_bytes
        return self.comparison

    def model(self, stream: int, pool: int) -> CachingAllocator:
        if (stream, pool) not in self.models:
            self.models[stream, pool] = self.make(device=self.device)
        return self.models[stream, pool]

    def hold(self, segment: Segment) -> None:
        """Have the model of its stream and pool hold a segment from before, with its blocks."""
        model = self.model(segment.stream, segment.pool)
        pool: Pool = model._small if segment.kind == "small" else model._large
        block = model._segments[segment.address] = Block.at(segment.address, segment.size, pool)
        self.device.hold(segment.address, segment.size)
        model.reserved_bytes += segment.size
        for size, requested, state in segment.blocks:
            rest = cut(block, size) if size < block.size else None
            if state == "inactive":
                block.state = FREE
                pool.add(block)
            else:
                block.state, block.requested = IN_USE, requested
                model.requested_bytes += requested
                model.allocated_bytes += size
                self.live[block.address] = model, block
            block = rest

    def ask(self, number: int, event: Event, waiting: list[Event]) -> None:
        """Put a request to the model of its stream and pool; `waiting` is what the real allocator did for it."""
        device, refused = self.device, event.action == "oom"
        model = self.model(event.stream, event.pool)
        device.next, device.refuses = next(iter(waiting), None), refused
        block = self.served(model, event.size)
        device.next, device.refuses = None, False
        same = self.decide(number, event, waiting, refused, block is None)
        if refused:
            model.free(block)
            return
        self.comparison.requests += 1
        if block is None:
            return
        self.live[event.address] = model, block
        self.comparison.addresses_equal += block.address == event.address
        if same and block.address != event.address:
            self.differ(number, event, f"served it at {event.address:#x}", f"served it at {block.address:#x}")

    def served(self, model: CachingAllocator, nbytes: int) -> Block | None:
        try:
            return model.malloc(max(nbytes, 1))
        except OutOfMemory:
            return None

    def emptied(self, number: int, waiting: list[Event]) -> list[Event]:
        """Have the models give back what can be, where the real allocator did; the events that are left to explain.

        It does so when a program empties the cache, of one pool when that ends, and by itself when the GPU is full.
        All come to the same.
        """
        run = list(takewhile(lambda event: event.action == "segment_free", waiting))
        if run:
            for (_, pool), model in self.models.items():
                if any(event.pool == pool for event in run):
                    model.empty_cache()
            self.decide(number, None, run, False, False)
        return waiting[len(run) :]

    def decide(
        self, number: int, asked: Event | None, recorded: list[Event], refused: bool, model_refused: bool
    ) -> bool:
        model_did = []
        for model in self.models.values():
            model_did += [(action, address, size) for _, action, address, size in model.decisions]
            model.decisions.clear()
        real_did = [tuple(event[:3]) for event in recorded]
        real, model = Counter(real_did), Counter(model_did)
        same = real == model and refused == model_refused
        self.comparison.decisions += 1
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
    verbs = {"segment_alloc": "took", "segment_free": "gave back"}
    parts = []
    for action, group in groupby(did, key=lambda one: one[0]):
        one_by_one = [f"{format_bytes(size)} at {address:#x}" for _, address, size in group]
        more = f" and {len(one_by_one) - 3} more" if len(one_by_one) > 3 else ""
        parts.append(f"{verbs[action]} {', '.join(one_by_one[:3])}{more}")
    if refused:
        parts.append("refused")
    return ", then ".join(parts) or "needed no segment"
