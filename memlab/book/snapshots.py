"""Recorded snapshots: what a real GPU's allocator did, one JSON file a program, in chapters/results/snapshots.

python -m memlab.book.snapshots chapters/results/snapshots      on a GPU: record the programs, and compare each
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from memlab.book.documents import file_name
from memlab.book.tables import Table
from memlab.book.workloads import GPT
from memlab.caching_allocator import Snapshot, compare, record_snapshot
from memlab.caching_allocator.records import DeviceRecord
from memlab.memory_timeline import Meter, imagine
from memlab.units import format_bytes

FOLDER = "results/snapshots"


def train(shapes: list[tuple[int, int]], evaluate: int = 0) -> None:
    """Training steps of a small GPT on batches of these (rows, tokens), on the GPU, from nothing; `evaluate`: a batch
    of so many rows after every second step, without gradients."""
    model = GPT(layers=4, width=256, heads=4, context=2048).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for number, (rows, tokens) in enumerate(shapes):
        model(*(torch.randint(256, (rows, tokens), device="cuda") for _ in "xy")).backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluate and number % 2:
            with torch.no_grad():
                model(*(torch.randint(256, (evaluate, tokens), device="cuda") for _ in "xy"))


PROGRAMS: dict[str, Callable[[], None]] = {
    "steps of one shape": lambda: train([(8, 512)] * 6),
    "longer and longer": lambda: train([(8, tokens) for tokens in range(100, 2000, 190)]),
    "training and evaluation": lambda: train([(8, 512)] * 8, evaluate=24),
}


def recorded_snapshots(folder: str | Path = FOLDER) -> tuple[dict[str, Snapshot], list[Path]]:
    """The snapshots in a folder, by the names of their files, and the files there that cannot be read.

    Empty where none is recorded yet, and where there is no such folder.
    """
    snapshots, damaged = {}, []
    for path in sorted(Path(folder).glob("*.json")):
        try:
            snapshots[path.stem] = Snapshot.load(path)
        except (ValueError, OSError):
            damaged.append(path)
    return snapshots, damaged


COLUMNS = (
    *("program", "storages, imagined", "kept by libraries", "scratch", "requested", "reserved", "the model's"),
    *("segment decisions equal", "recorded on"),
)


def recorded_decisions(folder: str | Path = FOLDER) -> Table:
    """For each recorded snapshot: what came to the bytes that the GPU reserved at the peak, and what the model takes.

    Storages are those of the same program, imagined here on the card that was recorded. What libraries keep is still
    there when the program is gone. The rest of what was requested at the peak is scratch of the kernel that ran then.
    Then how many of the GPU's segment decisions the model takes, too.
    """
    snapshots, damaged = recorded_snapshots(folder)
    rows = []
    for name, snapshot in snapshots.items():
        try:
            found = compare(snapshot)
        except ValueError as error:
            rows.append((name, *"––––––", f"cannot be compared: {error}", "–"))
            continue
        requested, kept = requested_bytes(snapshot.devices[0])
        storages = imagined_bytes(name, snapshot)
        parts = [storages, kept, None if storages is None else requested - kept - storages, requested]
        sizes = ["–" if part is None else format_bytes(part, 2) for part in parts]
        peaks = (format_bytes(nbytes, 2) for nbytes in (found.real_peak_bytes, found.model_peak_bytes))
        equal = f"{found.segments_equal:,} of {found.segments:,}"
        rows.append((name, *sizes, *peaks, equal, f"{snapshot.device}, torch {snapshot.torch}"))
    rows += [(path.name, *"––––––", "damaged: record it anew", "–") for path in damaged]
    return Table(COLUMNS, rows or [("no program", *"––––––", "not recorded yet", "–")])


def requested_bytes(record: DeviceRecord) -> tuple[int, int]:
    """What was requested of a GPU's allocator at most, and still at the recording's end; with what was there before."""
    blocks = (block for segment in record.before or () for block in segment.blocks)
    held = most = sum(block.requested for block in blocks if block.state != "inactive")
    for event in record.events:
        held += {"alloc": event.size, "free_completed": -event.size}.get(event.action, 0)
        most = max(most, held)
    return most, held


def imagined_bytes(name: str, snapshot: Snapshot) -> int | None:
    """What the storages of a recorded program's tensors hold at the peak, on the same card, imagined.

    None for a program or a card that is not known here.
    """
    from memlab.book.hierarchy import named  # which draws, too

    programs = [title for title in PROGRAMS if name.endswith("_" + title.replace(" ", "_"))]
    card = named(snapshot.device, snapshot.capacity_bytes) if snapshot.capacity_bytes else None
    if not programs or card is None:
        return None
    with imagine(card), Meter() as meter:
        PROGRAMS[programs[0]]()
    return meter.timeline.on(f"imagined {card}").peak_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Record every program on the GPU at hand, each from an empty cache, and print how the model compares.

    A program that fails is named, and the next one is recorded. Returns 1 then, and 2 without a GPU, where no folder is
    made.
    """
    parser = argparse.ArgumentParser(prog="python -m memlab.book.snapshots", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(FOLDER), help=f"{FOLDER} without")
    folder = parser.parse_args(arguments).folder
    if not torch.cuda.is_available():
        print("expected a CUDA GPU, whose allocator has a history to record; found none", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    card, failed = Path(file_name(torch.cuda.get_device_name())).stem, False
    for name, program in PROGRAMS.items():
        torch.cuda.empty_cache()
        try:
            record_snapshot(program).save(folder / f"{card}_{name.replace(' ', '_')}.json")
        except Exception as error:  # whatever it was, the others go on
            print(f"{name}: not recorded: {type(error).__name__}: {error}", file=sys.stderr)
            failed = True
    print(recorded_decisions(folder))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
