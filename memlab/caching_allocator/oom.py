"""CUDA's out-of-memory message, word by word: whose bytes they are, at which level, and which remedy can help.

    CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.12 GiB is free.
    Including non-PyTorch memory, this process has 77.97 GiB memory in use. Of the allocated memory 73.40 GiB is
    allocated by PyTorch, and 4.02 GiB is reserved by PyTorch but unallocated. …

Three sums explain it. *Reserved* = allocated + unallocated, all that PyTorch took from the driver. What the process has
besides is the driver's own: the context, kernels, other libraries. And what is neither free nor this process's belongs
to somebody else. Then one comparison decides: where free and unallocated are at least what was asked for, the bytes are
there, but not in one piece, and the allocator's settings can help; with less, nothing but fewer bytes will do.

The bytes "tried to allocate" are those of a *segment*: 20 MiB for a tensor of 2. What is free has no room for it,
however small the tensor, which the message does not tell; so there compare the tensor with what is unallocated alone.
PyTorch emptied its cache before it gave up, so `torch.cuda.empty_cache()` after the error gives back nothing that would
have helped.

2.15 has a shorter message, too. With `throw_on_cudamalloc_oom:True` in PYTORCH_ALLOC_CONF, PyTorch itself rejects what
would take it over its limit: without asking the driver, without emptying its cache, and saying only what was asked for.

Source: c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.11 to 2.15; ROCm has "HIP" for "CUDA", Intel's GPUs "XPU" and fewer
figures. Each is rounded to two decimals of its unit, and the sums are no better.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from memlab.units import MiB, format_bytes, parse_bytes

SIZE = r"(\d[\d,]{0,20}(?:\.\d{1,4})? (?:bytes|B|KiB|MiB|GiB|TiB))"
START = r"out of memory\. (?:Tried to allocate|Allocation was preemptively (rejected))"
PHRASES = {
    "asked": rf"(?:Tried to allocate|Requested size:) {SIZE}\.?",
    "total": rf"has a total capaci?ty of {SIZE}",
    "free": rf"of which {SIZE} is free\.",
    "process": rf"this process has {SIZE} memory in use\.",
    "allowed": rf"{SIZE} allowed;",
    "allocated": rf"Of the allocated memory {SIZE} is allocated by PyTorch",
    "private": rf"with {SIZE} allocated in private pools",
    "unallocated": rf"{SIZE} is reserved by PyTorch but unallocated",
}
OTHERS = rf"Process \d+ has {SIZE} memory in use\."
REJECTED = (
    "the request itself, refused at once: with it PyTorch would reserve more than per_process_memory_fraction allows",
    "empty_cache(), which PyTorch did not do; then hold fewer bytes. Its line 'Preemptively rejecting allocation', on "
    "stderr, says what was reserved, and the limit",
)
ROUNDED = 0.005
"""Of the card: how far sums of rounded figures may be off."""
PAGE_BYTES = 2 * MiB
SHARED_SEGMENTS = {2 * MiB: 512, 20 * MiB: 1 * MiB + 512}
"""Segments that several requests share, each with the smallest block for which one is asked for."""


class OomRow(NamedTuple):
    """One figure: its words in the message ("" for a sum), its bytes, their level, what it means, what can be done."""

    words: str
    nbytes: int
    level: str
    meaning: str
    remedy: str


@dataclass(frozen=True)
class OomMessage:
    """The figures of an out-of-memory message, in bytes; None for those that it does not tell.

    asked: for a new segment; of a rejected request the tensor's own, and nothing else is told. process: all that this
    process holds, by the driver's count; others: other processes, the same. In a container the driver may list this
    process under the host's number, as if it were another: so is taken, as `process`, the one of at least what PyTorch
    reserved, where all together would not fit the card. allowed: the limit of `set_per_process_memory_fraction`.
    private: free in the pools of CUDA graphs and MemPools; a part of `allocated`. words: those of each figure.
    """

    asked: int
    total: int | None = None
    allocated: int | None = None
    unallocated: int | None = None
    free: int | None = None
    process: int | None = None
    allowed: int | None = None
    private: int | None = None
    others: int | None = None
    words: dict[str, str] = field(default_factory=dict)

    @property
    def rejected(self) -> bool:
        """Whether PyTorch refused at once, before it asked the driver or emptied its cache."""
        return self.total is None

    @property
    def reserved(self) -> int | None:
        """What PyTorch holds of the driver."""
        return None if self.rejected else self.allocated + self.unallocated

    @property
    def besides(self) -> int | None:
        """What this process holds besides: CUDA's context, kernels, other libraries."""
        return None if self.process is None else max(self.process - self.reserved, 0)

    @property
    def elsewhere(self) -> int | None:
        """What is neither free nor this process's; where that is not told, neither free nor PyTorch's."""
        if self.free is None:
            return None
        return max(self.total - self.free - (self.process or self.reserved), 0)

    @property
    def can_be_fragmented(self) -> bool:
        """Whether what is unallocated and what the card (or the limit) still gives may do together for the request.

        A segment of 2 MiB or 20 MiB is asked for on behalf of less, and what is left has no room for it: then what is
        unallocated must do alone. Any other is asked for on behalf of up to 2 MiB less.
        """
        if self.rejected:
            return False
        if self.shared:
            return self.unallocated >= SHARED_SEGMENTS[self.asked]
        left = max(self.allowed - self.reserved, 0) if self.over_its_limit else self.free or 0
        return min(left, self.asked) + self.unallocated >= self.asked - PAGE_BYTES and self.unallocated > 0

    @property
    def shared(self) -> bool:
        """Whether a segment was asked for on behalf of less: how large the request was, the message does not tell."""
        return self.asked in SHARED_SEGMENTS

    @property
    def over_its_limit(self) -> bool:
        """Whether the program's own limit refused, not the card."""
        return self.rejected or (self.allowed is not None and self.reserved + self.asked > self.allowed)


def read_oom(message: str | BaseException) -> OomMessage:
    """The figures of an out-of-memory error of CUDA's, ROCm's or Intel's, or of this chapter's models.

    message: the exception, or text that has its words in it, such as a log; of several the first is read.

    Raises ValueError for text without them, TypeError for what is neither.
    """
    if not isinstance(message, (str, BaseException)):
        raise TypeError(f"expected an error or its text, found {type(message).__name__}")
    text = " ".join(str(message).split())
    starts = list(re.finditer(START, text))
    if starts:
        text = text[starts[0].start() : starts[1].start() if starts[1:] else None]
    told = ("asked",) if starts and starts[0][1] else PHRASES
    found = {name: match for name in told if (match := re.search(PHRASES[name], text))}
    lacking = [name for name in ("asked", "total", "allocated", "unallocated") if name in told and name not in found]
    if starts and lacking and "already allocated" in text:
        raise ValueError(
            "expected the message of PyTorch 2.1 or newer, found an older one, '(GPU 0; … already allocated; …)': "
            "there, what is unallocated is 'reserved in total by PyTorch' less 'already allocated'"
        )
    if not starts or lacking:
        raise ValueError(
            "expected PyTorch's message with 'out of memory. Tried to allocate … GPU 0 has a total capacity of … "
            f"Of the allocated memory …', found {text[:60]!r}"
            + (f", which does not say what is {', '.join(lacking)}" if starts else "")
            + "; pass the whole text of torch.OutOfMemoryError"
        )
    figures = {name: _bytes(match[1]) for name, match in found.items()}
    total = figures.get("total", 0)
    if figures.get("process", 0) > total:
        del figures["process"], found["process"]  # where the driver does not know, it says 2**64
    words = {name: match[0] for name, match in found.items()}
    others = [(_bytes(one[1]), one[0]) for one in re.finditer(OTHERS, text)]
    others = [other for other in others if other[0] <= total]
    if "process" not in figures and (own := _own(others, figures)) is not None:
        figures["process"], words["process"] = others.pop(own)
    if others:
        figures["others"], words["others"] = sum(nbytes for nbytes, _ in others), " ".join(said for _, said in others)
    return OomMessage(**figures, words=words)


def _own(others: list[tuple[int, str]], figures: dict[str, int]) -> int | None:
    """Which of the processes that are listed as others is this one, under its number outside of its container."""
    reserved = figures.get("allocated", 0) + figures.get("unallocated", 0)
    together = sum(nbytes for nbytes, _ in others) + reserved + figures.get("free", 0)
    large = [i for i, (nbytes, _) in enumerate(others) if nbytes >= reserved - ROUNDED * figures.get("total", 0)]
    return large[0] if len(large) == 1 and together > (1 + ROUNDED) * figures.get("total", 0) else None


def _bytes(size: str) -> int:
    return parse_bytes(size.replace(",", "").replace("bytes", "B"))


def explain_oom(message: str | BaseException) -> list[OomRow]:
    """The message of an out-of-memory error as a table, in its order, with the sums that it leaves to the reader.

    Raises as `read_oom` does.

    >>> rows = explain_oom(
    ...     "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB "
    ...     "is free. Of the allocated memory 4.00 GiB is allocated by PyTorch, and 2.50 GiB is reserved by PyTorch "
    ...     "but unallocated."
    ... )
    >>> rows[-1].words, rows[-1].level
    ('2.50 GiB is reserved by PyTorch but unallocated', 'reserved, not allocated')
    >>> rows[-1].remedy.split(";")[0]
    'set PYTORCH_ALLOC_CONF=expandable_segments:True before the program starts'
    """
    oom = read_oom(message)
    if oom.rejected:
        return [OomRow(oom.words["asked"], oom.asked, "storages", *REJECTED)]
    rows = {
        "asked": ("reserved", _asked(oom), "ask for less at a time, or hold less by then; the rows below say which"),
        "total": ("driver", "the card", "a larger card, or several"),
        "free": ("driver", "no process has it, as the driver counts", _on_free(oom)),
        "process": ("driver", _process(oom), ""),
        "besides": ("driver", "that, less what PyTorch reserved: CUDA's context, kernels, other libraries", ""),
        "others": ("driver", "other processes on this card", "end them, or take another card; nvidia-smi lists them"),
        "elsewhere": ("driver", _elsewhere(oom), _on_elsewhere(oom)),
        "allowed": ("reserved", "the program's own limit for PyTorch's part", _on_allowed(oom)),
        "reserved": ("reserved", "what PyTorch took from the driver: the next rows together", ""),
        "allocated": (
            "allocated",
            "blocks in use, each counted whole: tensors, and their rounding",
            "hold fewer bytes",
        ),
        "private": ("allocated", "free, but for CUDA graphs and MemPools alone", "delete those that are not needed"),
        "unallocated": ("reserved, not allocated", _unallocated(oom), _on_unallocated(oom)),
    }
    if oom.process is None:
        del rows["besides"]
    if oom.others is not None:
        del rows["elsewhere"]
    return [
        OomRow(oom.words.get(name, ""), getattr(oom, name), level, meaning, remedy)
        for name, (level, meaning, remedy) in rows.items()
        if getattr(oom, name) is not None
    ]


def _asked(oom: OomMessage) -> str:
    if oom.asked == PAGE_BYTES:
        return "a segment of the small pool, for a request of up to 1 MiB"
    if oom.shared:
        return "a segment of the large pool, for a request of 1 to 10 MiB (or of 18 to 20)"
    return "a segment for this request, in whole pages of 2 MiB"


def _process(oom: OomMessage) -> str:
    if oom.words.get("process", "").startswith("Process"):
        return "most likely all that this process holds: in a container it has another number than for the driver"
    return "all that this process holds, PyTorch or not"


def _on_free(oom: OomMessage) -> str:
    if oom.free is None or oom.free < oom.asked:
        segment = " for a segment, however small the request" if oom.shared else ""
        return "" if oom.free is None else f"it is {format_bytes(oom.asked - oom.free, 2)} too little{segment}"
    return "enough: the limit refused, not the card" if oom.over_its_limit else "enough by now; run it again"


def _elsewhere(oom: OomMessage) -> str:
    if oom.process is None:
        return "neither free nor PyTorch's: CUDA's context and libraries, and other processes"
    return "neither free nor this process's: other processes, and the driver"


def _on_elsewhere(oom: OomMessage) -> str:
    short = oom.asked - (oom.free or 0)
    return "would do, if others hold it: nvidia-smi lists them" if (oom.elsewhere or 0) >= short > 0 else ""


def _on_allowed(oom: OomMessage) -> str:
    return "raise it: torch.cuda.set_per_process_memory_fraction" if oom.over_its_limit else "not what refused here"


def _unallocated(oom: OomMessage) -> str:
    if oom.can_be_fragmented and oom.shared:
        return "free in segments that are partly in use; if the request was no larger, in pieces: fragmentation"
    if oom.can_be_fragmented:
        return "free in segments that are partly in use; enough with what is free, but in pieces: fragmentation"
    if oom.shared:
        return "free in segments that are partly in use; too little for any request of this segment"
    return "free in segments that are partly in use; too little for this request, with all that is free"


def _on_unallocated(oom: OomMessage) -> str:
    useless = "empty_cache() is no help: PyTorch did that before it gave up"
    if oom.can_be_fragmented:
        condition, otherwise = ("if the request was no larger, ", ", else hold fewer bytes") if oom.shared else ("", "")
        setting = "set PYTORCH_ALLOC_CONF=expandable_segments:True before the program starts"
        return f"{condition}{setting}{otherwise}; {useless}"
    return f"no setting will do, only fewer bytes; {useless}"
