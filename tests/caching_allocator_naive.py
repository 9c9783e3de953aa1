"""An allocator written from the rules alone, as lists that are scanned from end to end: what the real pages must equal.

A segment is a base address and a list of cells [bytes, tag, requested], tag one of "used", "free" and "hole"; where a
cell lies follows from those before it. Nothing is kept sorted, linked or counted. A pool is a kind and a stream.
"""

import random

MiB = 2**20
FRAMES = [{"filename": "/home/someone/secret/train.py", "line": 3, "name": "step"}]


class Segment:
    def __init__(self, base, nbytes, pool, tag):
        self.base, self.pool, self.cells = base, pool, [[nbytes, tag, 0]]
        self.page = 2 * MiB if pool[0] == "small" else 20 * MiB

    def __len__(self):
        return sum(cell[0] for cell in self.cells)

    def placed(self):
        """(address, cell), in order."""
        at = self.base
        for cell in self.cells:
            yield at, cell
            at += cell[0]

    def cut(self, cell, nbytes, tag):
        """The first bytes of a cell get another tag."""
        i = next(i for i, other in enumerate(self.cells) if other is cell)
        rest = [cell[0] - nbytes, cell[1], 0]
        self.cells[i : i + 1] = [[nbytes, tag, 0]] + [rest] * (rest[0] > 0)
        return self.cells[i]

    def tidy(self):
        """Neighbours that are both free, or both holes, are one."""
        cells = []
        for cell in self.cells:
            if cells and cell[1] == cells[-1][1] != "used":
                cells[-1][0] += cell[0]
            else:
                cells.append(cell)
        self.cells = cells


class Naive:
    """rounding: what a tampered one does otherwise."""

    def __init__(self, capacity=None, max_split=None, expandable=False, rounding=512):
        self.capacity = float("inf") if capacity is None else capacity
        self.max_split = float("inf") if max_split is None else max_split
        self.expandable, self.segments = expandable, []
        self.rounding, self.log, self.calls, self.retries, self.ooms = rounding, [], 0, 0, 0

    # ---- what it holds

    def cells(self, tag, pool=None):
        """(address, cell, segment) of every cell with that tag, by address."""
        found = [
            (at, cell, segment)
            for segment in self.segments
            for at, cell in segment.placed()
            if cell[1] == tag and pool in (None, segment.pool, segment.pool[0])
        ]
        return sorted(found, key=lambda one: one[0])

    def total(self, *tags):
        return sum(cell[0] for tag in tags for _, cell, _ in self.cells(tag))

    def inactive_split_bytes(self):
        return sum(cell[0] for _, cell, segment in self.cells("free") if len(segment.cells) > 1)

    def runs(self):
        """The runs of mapped cells: [(pool, [(address, bytes, requested, tag), ...]), ...]"""
        runs = []
        for segment in sorted(self.segments, key=lambda segment: segment.base):
            before = "hole"
            for at, (nbytes, tag, requested) in segment.placed():
                if tag != "hole":
                    if before == "hole":
                        runs.append((segment.pool, []))
                    runs[-1][1].append((at, nbytes, requested, tag))
                before = tag
        return runs

    def picture(self):
        return [(pool[0], cells) for pool, cells in self.runs()]

    # ---- the rules

    def note(self, action, address, nbytes, segment):
        self.log.append((self.calls, action, address, nbytes))

    def malloc(self, nbytes, stream=0):
        if nbytes == 0:
            self.calls += 1
            return None
        size = (nbytes + self.rounding - 1) // self.rounding * self.rounding
        pool = "small" if size <= MiB else "large", stream
        found = self.cached(pool, size) or self.fresh(pool, size)
        if found is None:
            self.empty_cache()
            self.retries += 1
            found = self.fresh(pool, size)
        if found is None:
            self.ooms += 1
            raise MemoryError
        at, cell, segment = found
        rest = cell[0] - size
        if pool[0] == "small" or self.expandable:
            taken = size if rest >= 512 else cell[0]
        else:
            taken = size if rest > MiB and size < self.max_split else cell[0]
        segment.cut(cell, taken, "used")[2] = nbytes
        self.calls += 1
        return at

    def free(self, address):
        self.calls += 1
        if address is None:
            return
        ((cell, segment),) = [(cell, segment) for at, cell, segment in self.cells("used") if at == address]
        cell[1:] = "free", 0
        segment.tidy()

    def cached(self, pool, size):
        fits = sorted((cell[0], at) for at, cell, _ in self.cells("free", pool) if cell[0] >= size)
        if not fits:
            return None
        found = {at: (at, cell, segment) for at, cell, segment in self.cells("free", pool)}

        def grown(at):
            _, cell, segment = found[at]
            following = [c for a, c in segment.placed() if a == at + cell[0] and c[1] == "hole"]
            return cell[0] + sum(c[0] for c in following)

        chosen = fits[0]
        if self.expandable:
            for candidate in fits[1:]:
                if grown(candidate[1]) >= grown(chosen[1]):
                    break
                chosen = candidate
        if size < self.max_split <= chosen[0] or self.max_split <= size <= chosen[0] - 20 * MiB:
            return None
        return found[chosen[1]]

    def address_for(self, nbytes):
        """The lowest address from which a range of whole 2 MiB pages meets no segment."""
        taken = sorted(
            (segment.base, segment.base + -(-len(segment) // (2 * MiB)) * 2 * MiB) for segment in self.segments
        )
        at = 0x7F00_0000_0000
        for start, stop in taken:
            if start - at >= nbytes:
                break
            at = max(at, stop)
        return at

    def fresh(self, pool, size):
        if self.expandable:
            return self.grown(pool, size)
        nbytes = 2 * MiB if pool[0] == "small" else 20 * MiB
        if size >= 10 * MiB:
            nbytes = 10 * MiB
            while nbytes < size:
                nbytes += 2 * MiB
        if self.total("used", "free") + nbytes > self.capacity:
            return None
        segment = Segment(self.address_for(nbytes), nbytes, pool, "free")
        self.segments.append(segment)
        self.note("segment_alloc", segment.base, nbytes, segment)
        return segment.base, segment.cells[0], segment

    def give_back(self, at, segment):
        self.segments.remove(segment)
        self.note("segment_free", at, len(segment), segment)

    def empty_cache(self):
        for pool in ("large", "small"):
            for _, at in sorted((cell[0], at) for at, cell, _ in self.cells("free", pool)):
                ((cell, segment),) = [(cell, segment) for a, cell, segment in self.cells("free", pool) if a == at]
                if self.expandable:
                    self.shrink(at, cell, segment)
                elif len(segment.cells) == 1:
                    self.give_back(at, segment)

    # ---- expandable segments

    def grown(self, pool, size):
        for _, hole, segment in self.cells("hole", pool):
            i = next(i for i, cell in enumerate(segment.cells) if cell is hole)
            if i and segment.cells[i - 1][1] == "free":
                i -= 1
            start = sum(cell[0] for cell in segment.cells[:i])
            room = 0
            for cell in segment.cells[i:]:
                if cell[1] == "used":
                    break
                room += cell[0]
            if room >= size:
                return self.mapped(segment, segment.base + start, size)
        page = 2 * MiB if pool[0] == "small" else 20 * MiB
        nbytes = 16 * MiB * MiB if self.capacity == float("inf") else max(size, self.capacity + self.capacity // 8)
        nbytes = (nbytes + page - 1) // page * page
        segment = Segment(self.address_for(nbytes), nbytes, pool, "hole")
        self.segments.append(segment)
        return self.mapped(segment, segment.base, size)

    def mapped(self, segment, start, size):
        """Map from `start` on until a free cell of that size begins there."""
        while True:
            here = dict(segment.placed())
            at, have = start, 0
            if here[start][1] == "free":
                have = here[start][0]
                at += have
            if have >= size:
                return start, here[start], segment
            pages = -(-min(size - have, here[at][0]) // segment.page)
            if self.total("used", "free") + pages * segment.page > self.capacity:
                return None
            segment.cut(here[at], pages * segment.page, "free")
            segment.tidy()
            self.note("segment_map", at, pages * segment.page, segment)

    def shrink(self, at, cell, segment):
        inside = [
            page
            for page in range(segment.base, at + cell[0], segment.page)
            if at <= page and page + segment.page <= at + cell[0]
        ]
        if not inside:
            return
        before, middle = inside[0] - at, len(inside) * segment.page
        after = cell[0] - before - middle
        i = next(i for i, other in enumerate(segment.cells) if other is cell)
        pieces = [[before, "free", 0], [middle, "hole", 0], [after, "free", 0]]
        segment.cells[i : i + 1] = [piece for piece in pieces if piece[0]]
        segment.tidy()
        self.note("segment_unmap", inside[0], middle, segment)
        if [tag for _, tag, _ in segment.cells] == ["hole"]:
            self.segments.remove(segment)


class NaiveGPU(Naive):
    """The same with PyTorch's snapshot of it. Its segments lie anywhere: where is no decision of an allocator's."""

    def __init__(self, capacity=None, seed=0, **knobs):
        super().__init__(capacity, **knobs)
        self.trace, self.random = [], random.Random(seed)

    def record(self, action, address, size, stream):
        row = {"frames": FRAMES} if self.random.random() < 0.5 else {}
        row |= {"action": action, "device_free" if action == "oom" else "addr": address, "size": size}
        self.trace.append(row | {"stream": stream, "time_us": len(self.trace), "compile_context": "N/A"})

    def note(self, action, address, nbytes, segment):
        self.record(action, address, nbytes, segment.pool[1])

    def address_for(self, nbytes):
        while not self.expandable:
            address = 2**46 + self.random.randrange(2**14) * 2 * MiB
            if all(s.base + len(s) <= address or address + nbytes <= s.base for s in self.segments):
                return address
        return super().address_for(nbytes)

    def malloc(self, nbytes, stream=0):
        try:
            address = super().malloc(nbytes, stream)
        except MemoryError:
            self.record("oom", self.capacity - self.total("used", "free"), nbytes, stream)
            return None
        self.record("alloc", address, nbytes, stream)
        return address

    def free(self, address):
        ((cell, segment),) = [(cell, segment) for at, cell, segment in self.cells("used") if at == address]
        for action in ("free_requested", "free_completed"):
            self.record(action, address, cell[2], segment.pool[1])
        super().free(address)

    def dump(self):
        rows = []
        for (kind, stream), cells in self.runs():
            in_use = sum(nbytes for _, nbytes, _, tag in cells if tag == "used")
            rows.append(
                {"device": 0, "address": cells[0][0], "total_size": sum(nbytes for _, nbytes, _, _ in cells)}
                | {"allocated_size": in_use, "active_size": in_use, "requested_size": sum(cell[2] for cell in cells)}
                | {"stream": stream, "segment_type": kind, "segment_pool_id": (0, 0), "is_expandable": self.expandable}
                | {"frames": FRAMES, "blocks": [block_row(*cell[:3], cell[3] == "used") for cell in cells]}
            )
        most = -1 if self.max_split == float("inf") else self.max_split
        return whole_dump(rows, self.trace, max_split_size=most, expandable_segments=self.expandable)


def block_row(address, size, requested, in_use):
    state = "active_allocated" if in_use else "inactive"
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": FRAMES}


def whole_dump(segments, trace, **more):
    known = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0}
    known |= {"expandable_segments": False, "roundup_power2_divisions": {"1": 0, "2": 0}}
    dump = {"segments": segments, "device_traces": [trace, []], "allocator_settings": known | more}
    return dump | {"external_annotations": []}
