"""Recorded snapshots: what a real GPU's allocator did, one JSON file a run, in chapters/results/snapshots."""

from __future__ import annotations

from pathlib import Path

from memlab.caching_allocator.snapshot import Snapshot


def recorded_snapshots(folder: str | Path = "results/snapshots") -> tuple[dict[str, Snapshot], list[Path]]:
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
