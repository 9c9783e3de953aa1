"""Answers to the exercises of chapter 04: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import ANYTHING, cell


def reserved(value: str) -> str:
    """reserved_bytes that returns an expression of the block, its segment, and how many a segment holds."""
    return cell(
        """
        def reserved_bytes(nbytes, count):
            block = block_bytes(nbytes)
            segment = segment_bytes(block)
            held = segment // block
            return VALUE
        """,
        VALUE=value,
    )


def parts(rounding: object, rests: object, cached: object) -> str:
    """The three numbers of exercise 2."""
    return f"rounding_bytes, rest_bytes, cached_bytes = {rounding}, {rests}, {cached}"


def given(value: str) -> str:
    """given_back that returns an expression."""
    return f"def given_back(segments):\n    return {value}"


def pages(**changes: str) -> str:
    """pages_given_back, right but for the changes."""
    terms = {
        "PAGE": '2 * MiB if segment["segment_type"] == "small" else 20 * MiB',
        "EACH": "pass",
        "FREE": 'block["state"] == "inactive"',
        "START": 'block["address"] - segment["address"]',
        "FIRST": "-(-start // page)",
        "LAST": '(start + block["size"]) // page',
        "GONE": "max(0, last - first) * page",
        "END": "gone",
    }
    return cell(
        """
        def pages_given_back(segments):
            gone = 0
            for segment in segments:
                page = PAGE
                EACH
                for block in segment["blocks"]:
                    if FREE:
                        start = START
                        first = FIRST
                        last = LAST
                        gone += GONE
            return END
        """,
        **terms | changes,
    )


def taken(**changes: str) -> str:
    """malloc, right but for the changes."""
    terms = {
        "BEGIN": "pass",
        "ORDER": "enumerate(holes)",
        "FITS": "stop - start >= nbytes",
        "LEFT": "[(start + nbytes, stop)] if stop - start > nbytes else []",
        "SHRINK": "holes[i : i + 1] = left",
        "FOUND": "start",
        "NONE": "return None",
    }
    return cell(
        """
        def malloc(holes, nbytes):
            BEGIN
            for i, (start, stop) in ORDER:
                if FITS:
                    left = LEFT
                    SHRINK
                    return FOUND
            NONE
        """,
        **terms | changes,
    )


def freed(**changes: str) -> str:
    """free, right but for the changes."""
    terms = {
        "BEGIN": "pass",
        "TWICE": "any(start < end and address < stop for start, stop in holes)",
        "REFUSE": 'raise ValueError("freed twice")',
        "ALL": "sorted([*holes, (address, end)])",
        "TOUCH": "joined and joined[-1][1] == start",
        "JOIN": "start = joined.pop()[0]",
        "HOLE": "(start, stop)",
        "END": "holes[:] = joined",
    }
    return cell(
        """
        def free(holes, address, nbytes):
            end = address + nbytes
            BEGIN
            if TWICE:
                REFUSE
            joined = []
            for start, stop in ALL:
                if TOUCH:
                    JOIN
                joined.append(HOLE)
            END
        """,
        **terms | changes,
    )


def loaded(**changes: str) -> str:
    """load, right but for the changes."""
    terms = {
        "BEGIN": "pass",
        "EMPTY": "torch.empty(shape, dtype=torch.half) for shape in shapes",
        "FILL": "weight.copy_(read(n))",
        "END": "weights",
    }
    return cell(
        """
        def load(shapes, read):
            BEGIN
            weights = [EMPTY]
            for n, weight in enumerate(weights):
                FILL
            return END
        """,
        **terms | changes,
    )


def in_order(order: str, step: str = "weights[n] = read(n).half()") -> str:
    """load that makes each weight when its shard is there, in some order."""
    return cell(
        """
        def load(shapes, read):
            weights = [None] * len(shapes)
            for n in ORDER:
                STEP
            return weights
        """,
        ORDER=order,
        STEP=step,
    )


LARGEST_FIRST = "placed(lambda start, stop, nbytes: (-nbytes, start))"
BACKWARDS = "placed(lambda start, stop, nbytes: (-stop, -nbytes))"


def planned(**changes: str) -> str:
    """offsets, right but for the changes."""
    terms = {
        "BEGIN": "pass",
        "MEET": "requests[j][0] < stop and start < requests[j][1]",
        "NEAR": "sorted((found[j], found[j] + requests[j][2]) for j in with_it)",
        "ENOUGH": "offset - lowest >= nbytes",
        "HIGHER": "max(lowest, end)",
        "EACH": "lowest",
        "PLAN": "[found[i] for i in range(len(requests))]",
        "BEST": f"min({LARGEST_FIRST}, {BACKWARDS}, key=height)",
    }
    return cell(
        """
        def offsets(requests):
            BEGIN

            def placed(key):
                found = {}
                for i in sorted(range(len(requests)), key=lambda i: key(*requests[i])):
                    start, stop, nbytes = requests[i]
                    with_it = [j for j in found if MEET]
                    lowest = 0
                    for offset, end in NEAR:
                        if ENOUGH:
                            break
                        lowest = HIGHER
                    found[i] = EACH
                return PLAN

            def height(plan):
                return max((offset + r[2] for offset, r in zip(plan, requests)), default=0)

            return BEST
        """,
        **terms | changes,
    )


ROUNDING, RESTS, CACHED = 4_984, 7_137_792, 115_184_640

WRONG: dict[str, dict[str, str]] = {
    "reserved-answer": {
        "a segment each": reserved("count * segment"),
        "blocks across segments": reserved("-(-count * block // segment) * segment"),
        "allocated": reserved("count * block"),
        "requested": reserved("count * nbytes"),
        "requested, in whole pages": reserved("-(-count * nbytes // (2 * MiB)) * 2 * MiB"),
        "the last segment left out": reserved("count // held * segment"),
        "a segment too many": reserved("(count // held + 1) * segment"),
        "not rounded to blocks": reserved("-(-count // (segment // nbytes)) * segment"),
        "the segment of what was requested": reserved(
            "-(-count // max(1, segment_bytes(nbytes) // block)) * segment_bytes(nbytes)"
        ),
        "one segment": reserved("segment"),
        "the segment of all together": reserved("segment_bytes(block_bytes(count * nbytes))"),
        "always 2 MiB": reserved("-(-count // max(1, 2 * MiB // block)) * 2 * MiB"),
        "always 20 MiB": reserved("-(-count // max(1, 20 * MiB // block)) * 20 * MiB"),
        "at least one": reserved("max(1, -(-count // held)) * segment"),
        "in MiB": reserved("-(-count // held) * segment // MiB"),
        "twice": reserved("2 * -(-count // held) * segment"),
        "bits": reserved("8 * -(-count // held) * segment"),
        "the number of segments": reserved("-(-count // held)"),
        "a float": reserved("-(-count / held) * segment"),
        "a tensor": reserved("int(torch.tensor(-(-count // held) * segment))"),
        "hard-coded": reserved("80 * MiB"),
        "tried out in an endless loop": cell(
            """
            def reserved_bytes(nbytes, count):
                card = CachingAllocator()
                for _ in range(count):
                    card.malloc(nbytes)
                return card.reserved_bytes
            """
        ),
        "no return": reserved("None"),
        "equal to everything": ANYTHING + reserved("Anything(segment)"),
        "memory-hungry": reserved("len([0] * (20 * 2**30 // 8))"),
        "unsolved": "def reserved_bytes(nbytes, count):\n    raise NotImplementedError  # your answer",
    },
    "unexplained-answer": {
        "rounding and rests in one": parts(ROUNDING + RESTS, 0, CACHED),
        "rests that are not rounded": parts(ROUNDING, ROUNDING + RESTS, CACHED),
        "rests and free blocks in one": parts(ROUNDING, RESTS + CACHED, 0),
        "all is cached": parts(ROUNDING, RESTS, ROUNDING + RESTS + CACHED),
        "whole segments only": parts(ROUNDING, RESTS, 92_274_688),
        "split segments only": parts(ROUNDING, RESTS, CACHED - 92_274_688),
        "swapped": parts(RESTS, ROUNDING, CACHED),
        "512 for each block": cell(
            """
            blocks = [block for segment in segments for block in segment["blocks"]]
            used = [block for block in blocks if block["state"] != "inactive"]
            rounding_bytes = 512 * len(used)
            rest_bytes = card.allocated_bytes - card.requested_bytes - rounding_bytes
            cached_bytes = card.reserved_bytes - card.allocated_bytes
            """
        ),
        "free blocks are rests": cell(
            """
            blocks = [block for segment in segments for block in segment["blocks"]]
            rest_bytes = sum(block["size"] - block_bytes(block["requested_size"]) for block in blocks)
            rounding_bytes = sum(block_bytes(b["requested_size"]) - b["requested_size"] for b in blocks)
            cached_bytes = card.reserved_bytes - card.allocated_bytes
            """
        ),
        "the largest free block": parts(ROUNDING, RESTS, "card.largest_free_bytes"),
        "inactive split": parts(ROUNDING, RESTS, "card.inactive_split_bytes"),
        "one byte off": parts(ROUNDING, RESTS, CACHED + 1),
        "the next 512": parts(ROUNDING + 512, RESTS, CACHED),
        "twice": parts(2 * ROUNDING, RESTS, CACHED),
        "in MiB": parts(0.0048, 6.8, 109.8),
        "a float": parts(ROUNDING, RESTS, float(CACHED)),
        "texts": parts(ROUNDING, "'7,137,792'", CACHED),
        "negative": parts(-ROUNDING, RESTS, CACHED),
        "equal to everything": ANYTHING + parts("Anything(1)", "Anything(1)", "Anything(1)"),
        "a half": parts(ROUNDING, RESTS, 0),
        "unsolved": parts(0, 0, 0),
    },
    "given-back-answer": {
        "all free blocks": given(
            'sum(b["size"] for s in segments for b in s["blocks"] if b["state"] == "inactive")',
        ),
        "reserved less allocated": given('sum(s["total_size"] - s["allocated_size"] for s in segments)'),
        "all": given('sum(s["total_size"] for s in segments)'),
        "one block, free or not": given('sum(s["total_size"] for s in segments if len(s["blocks"]) == 1)'),
        "the last block is free": given(
            'sum(s["blocks"][-1]["size"] for s in segments if s["blocks"][-1]["state"] == "inactive")'
        ),
        "the largest free block": given(
            'max((b["size"] for s in segments for b in s["blocks"] if b["state"] == "inactive"), default=0)'
        ),
        "the largest segment": given('max((s["total_size"] for s in segments if not s["active_size"]), default=0)'),
        "large segments only": given(
            'sum(s["total_size"] for s in segments if not s["active_size"] and s["segment_type"] == "large")'
        ),
        "mostly free": given('sum(s["total_size"] for s in segments if s["active_size"] < s["total_size"] / 2)'),
        "what stays": given('sum(s["total_size"] for s in segments if s["active_size"])'),
        "in use": given('sum(s["active_size"] for s in segments)'),
        "the number of segments": given('sum(not s["active_size"] for s in segments)'),
        "in MiB": given('sum(s["total_size"] for s in segments if not s["active_size"]) // MiB'),
        "a float": given('sum(s["total_size"] for s in segments if not s["active_size"]) / 1'),
        "a list": given('[s["total_size"] for s in segments if not s["active_size"]]'),
        "bits": given('8 * sum(s["total_size"] for s in segments if not s["active_size"])'),
        "empties the list": given(
            '(sum(s["total_size"] for s in segments if not s["active_size"]), segments.clear())[0]'
        ),
        "hard-coded": given("150 * MiB"),
        "none": given("0"),
        "no return": given("None"),
        "equal to everything": ANYTHING + given("Anything(0)"),
        "memory-hungry": given("len([0] * (20 * 2**30 // 8))"),
        "an endless loop": "def given_back(segments):\n    while True:\n        pass",
        "unsolved": "def given_back(segments):\n    raise NotImplementedError  # your answer",
    },
    "pages-answer": {
        "as many pages as fit": pages(GONE='block["size"] // page * page'),
        "all free bytes": pages(GONE='block["size"]'),
        "whole segments": pages(FREE='segment["active_size"] == 0', GONE='block["size"]'),
        "below zero": pages(GONE="(last - first) * page"),
        "pages that are touched": pages(FIRST="start // page", LAST='-(-(start + block["size"]) // page)'),
        "the start rounded down": pages(FIRST="start // page"),
        "the end rounded up": pages(LAST='-(-(start + block["size"]) // page)'),
        "the first page skipped": pages(FIRST="start // page + 1"),
        "pages from address 0": pages(START='block["address"]'),
        "pages of 2 MiB": pages(PAGE="2 * MiB"),
        "pages of 20 MiB": pages(PAGE="20 * MiB"),
        "the pools swapped": pages(PAGE='20 * MiB if segment["segment_type"] == "small" else 2 * MiB'),
        "the largest block": pages(GONE="max(0, max(0, last - first) * page - gone)"),
        "the last segment": pages(EACH="gone = 0"),
        "in use as well": pages(FREE="True"),
        "in use": pages(FREE='block["state"] != "inactive"'),
        "the number of pages": pages(GONE="max(0, last - first)"),
        "in MiB": pages(END="gone // MiB"),
        "a float": pages(END="gone / 1"),
        "pages that add up": pages(GONE='block["size"]', END="gone // (20 * MiB) * 20 * MiB"),
        "changes the snapshot": pages(GONE='max(0, last - first) * page; block["state"] = "unmapped"'),
        "hard-coded": pages(END="100 * MiB"),
        "no return": pages(END="None"),
        "equal to everything": ANYTHING + pages(END="Anything(gone)"),
        "memory-hungry": pages(EACH="hoard = [0] * (20 * 2**30 // 8)"),
        "unsolved": "def pages_given_back(segments):\n    raise NotImplementedError  # your answer",
    },
    "malloc-answer": {
        "best fit": taken(ORDER="sorted(enumerate(holes), key=lambda hole: hole[1][1] - hole[1][0])"),
        "the largest": taken(ORDER="sorted(enumerate(holes), key=lambda hole: hole[1][0] - hole[1][1])"),
        "the last": taken(ORDER="reversed(list(enumerate(holes)))"),
        "an exact fit first": taken(
            ORDER="sorted(enumerate(holes), key=lambda hole: hole[1][1] - hole[1][0] != nbytes)"
        ),
        "the high end": taken(LEFT="[(start, stop - nbytes)] if stop - start > nbytes else []", FOUND="stop - nbytes"),
        "never fits exactly": taken(FITS="stop - start > nbytes"),
        "too large a request": taken(FITS="stop - start >= nbytes - 512"),
        "an empty hole": taken(LEFT="[(start + nbytes, stop)]"),
        "a hole that stays": taken(SHRINK="pass"),
        "the whole hole": taken(LEFT="[]"),
        "a small rest lost": taken(LEFT="[(start + nbytes, stop)] if stop - start > nbytes + 512 else []"),
        "a byte lost": taken(LEFT="[(start + nbytes + 1, stop)] if stop - start > nbytes + 1 else []"),
        "the rest at the end of the list": taken(SHRINK="del holes[i]; holes.extend(left)"),
        "another list": taken(SHRINK="holes = holes[:i] + left + holes[i + 1 :]"),
        "the index": taken(FOUND="i"),
        "the stop": taken(FOUND="stop"),
        "the pair": taken(FOUND="(start, start + nbytes)"),
        "nothing": taken(FOUND="None"),
        "a float": taken(FOUND="float(start)"),
        "raises": taken(NONE='raise MemoryError("no hole is large enough")'),
        "minus one": taken(NONE="return -1"),
        "zero": taken(NONE="return 0"),
        "the card grows": taken(NONE="return holes[-1][1] if holes else 0"),
        "hard-coded": "def malloc(holes, nbytes):\n    return 0",
        "sizes in place of stops": taken(
            LEFT="[(start + nbytes, stop - start - nbytes)] if stop - start > nbytes else []"
        ),
        "forgets the holes": taken(SHRINK="holes.clear()"),
        "equal to everything": ANYTHING + taken(FOUND="Anything(start)", NONE="return Anything(0)"),
        "memory-hungry": taken(BEGIN="hoard = [0] * (20 * 2**30 // 8)"),
        "a table of bytes": taken(BEGIN="table = bytearray(40 * 2**30)"),
        "an endless loop": taken(BEGIN="while holes:\n        holes.append(holes[0])\n        holes.pop()"),
        "unsolved": taken(BEGIN="raise NotImplementedError  # your answer"),
    },
    "free-answer": {
        "not joined": freed(TOUCH="False"),
        "joined with the one before only": freed(TOUCH="joined and joined[-1][1] == start == address"),
        "joined with the one after only": freed(TOUCH="joined and joined[-1][1] == start == end"),
        "at the end of the list": freed(ALL="[*holes, (address, end)]"),
        "joined across a gap": freed(TOUCH="joined and joined[-1][1] + 512 >= start"),
        "all joined": freed(TOUCH="joined"),
        "the one before dropped": freed(JOIN="joined.pop()"),
        "the wrong stop": freed(HOLE="(start, max(stop, start + nbytes))"),
        "sizes in place of stops": freed(ALL="sorted([*holes, (address, nbytes)])"),
        "another list": freed(END="holes = joined"),
        "returned": freed(END="return joined"),
        "nothing": freed(END="pass"),
        "the neighbours lost": freed(END="holes[:] = [h for h in joined if h[0] <= address < h[1]]"),
        "freed twice, unnoticed": freed(TWICE="False"),
        "only the same address noticed": freed(TWICE="any(start == address for start, _ in holes)"),
        "only the start noticed": freed(TWICE="any(start <= address < stop for start, stop in holes)"),
        "only what lies in one hole noticed": freed(
            TWICE="any(start <= address and end <= stop for start, stop in holes)"
        ),
        "touching is refused": freed(TWICE="any(start <= end and address <= stop for start, stop in holes)"),
        "changed before it refuses": freed(
            BEGIN="holes.append((address, end))",
            TWICE="any(start < end and address < stop for start, stop in holes[:-1])",
            ALL="sorted(holes)",
        ),
        "returns when freed twice": freed(REFUSE="return None"),
        "another error": freed(REFUSE="raise RuntimeError('freed twice')"),
        "floats": freed(HOLE="(float(start), float(stop))"),
        "dicts": freed(HOLE="{'start': start, 'stop': stop}", TOUCH="False"),
        "a hole of nothing": freed(BEGIN="holes.append((end, end)); holes.sort()"),
        "overlapping": freed(JOIN="start = joined[-1][0]"),
        "remembers": "seen = set()\n\n\n" + freed(TWICE="(address in seen) or seen.add(address)"),
        "equal to everything": ANYTHING + freed(HOLE="(Anything(start), Anything(0))", TOUCH="False"),
        "memory-hungry": freed(BEGIN="hoard = [0] * (20 * 2**30 // 8)"),
        "a table of bytes": freed(BEGIN="table = bytearray(40 * 2**30)"),
        "an endless loop": freed(
            TOUCH="joined and joined[-1][1] == start or start < 0",
            ALL="iter(lambda: (0, 0), 1)",
            HOLE="0",
            JOIN="pass",
            BEGIN="while end:\n        pass",
        ),
        "unsolved": freed(BEGIN="raise NotImplementedError  # your answer"),
    },
    "load-answer": {
        "one after the other": in_order(
            "range(len(shapes))", "shard = read(n)\n        weights[n] = shard.half()\n        del shard"
        ),
        "from the end": in_order("reversed(range(len(shapes)))"),
        "smallest first": in_order("sorted(range(len(shapes)), key=lambda n: torch.Size(shapes[n]).numel())"),
        "the cache emptied": in_order("range(len(shapes))", "weights[n] = read(n).half(); torch.cuda.empty_cache()"),
        "two shards": loaded(FILL="shard = read(n); weight.copy_(shard)"),
        "a half of the shard, too": loaded(FILL="weight.copy_(read(n).half())"),
        "all shards first": loaded(
            BEGIN="shards = [read(n) for n in range(len(shapes))]", FILL="weight.copy_(shards[n])"
        ),
        "prepared, and then replaced": loaded(FILL="weights[n] = read(n).half()"),
        "in FP32, converted at the end": loaded(
            EMPTY="torch.empty(shape) for shape in shapes", END="[weight.half() for weight in weights]"
        ),
        "in FP32": loaded(EMPTY="torch.empty(shape) for shape in shapes"),
        "in BF16": loaded(EMPTY="torch.empty(shape, dtype=torch.bfloat16) for shape in shapes"),
        "the shard's half as a view": in_order(
            "range(len(shapes))",
            "shard = read(n).flatten(); h = shard.half(); shard.view(torch.half)[: len(h)] = h; "
            "weights[n] = shard.view(torch.half)[: len(h)].view(shapes[n])",
        ),
        "not filled": loaded(FILL="read(n); weight.zero_()"),
        "the wrong shard": loaded(
            FILL="weight.flatten().copy_(read(0).flatten()[:1].expand(weight.numel())) if not n else read(n)"
        ),
        "in the order of reading": cell(
            """
            def load(shapes, read):
                order = sorted(range(len(shapes)), key=lambda n: -torch.Size(shapes[n]).numel())
                return [read(n).half() for n in order]
            """
        ),
        "read twice": loaded(FILL="read(n); weight.copy_(read(n))"),
        "the last one not read": loaded(FILL="weight.copy_(read(n)) if n + 1 < len(shapes) else weight.zero_()"),
        "keeps its shards": "kept = []\n\n\n" + loaded(FILL="kept.append(read(n)); weight.copy_(kept[-1])"),
        "keeps its last shard": loaded(FILL="load.shard = None; load.shard = read(n); weight.copy_(load.shard)"),
        "a common tensor, too large": cell(
            """
            def load(shapes, read):
                sizes = [torch.Size(shape).numel() for shape in shapes]
                flat = torch.empty(len(shapes), max(sizes), dtype=torch.half)
                weights = [row[:size].view(shape) for row, size, shape in zip(flat, sizes, shapes)]
                for n, weight in enumerate(weights):
                    weight.copy_(read(n))
                return weights
            """
        ),
        "all of the first shape": loaded(
            EMPTY="torch.empty(shapes[0], dtype=torch.half) for shape in shapes",
            FILL="weight.copy_(read(n).flatten()[:1])",
        ),
        "flat": loaded(
            EMPTY="torch.empty(torch.Size(shape).numel(), dtype=torch.half) for shape in shapes",
            FILL="weight.copy_(read(n).flatten())",
        ),
        "a generator": loaded(END="(weight for weight in weights)"),
        "a dict": loaded(END="dict(enumerate(weights))"),
        "no return": loaded(END="None"),
        "the last weight twice": loaded(END="[*weights, weight]"),
        "hard-coded": loaded(END="[torch.zeros(1000 + 900 * i, 1000, dtype=torch.half) for i in range(14)]"),
        "memory-hungry": loaded(BEGIN="hoard = torch.ones(2**30)"),
        "an endless loop": loaded(BEGIN="while shapes:\n        pass"),
        "unsolved": loaded(BEGIN="raise NotImplementedError  # your answer"),
    },
    "offsets-answer": {
        "side by side": cell(
            """
            def offsets(requests):
                found, end = [], 0
                for _, _, nbytes in requests:
                    found.append(end)
                    end += nbytes
                return found
            """
        ),
        "largest first only": planned(BEST=LARGEST_FIRST),
        "largest first, of equals as they are listed": planned(
            BEST=f"min(placed(lambda start, stop, nbytes: -nbytes), {BACKWARDS}, key=height)"
        ),
        "backwards only": planned(BEST=BACKWARDS),
        "as they come": planned(BEST="placed(lambda start, stop, nbytes: (start, -nbytes))"),
        "as they are listed": planned(BEST="placed(lambda start, stop, nbytes: 0)"),
        "longest first": planned(BEST="placed(lambda start, stop, nbytes: (start - stop, -nbytes))"),
        "smallest first": planned(BEST="placed(lambda start, stop, nbytes: (nbytes, start))"),
        "the higher plan": planned(BEST=f"max({LARGEST_FIRST}, {BACKWARDS}, key=height)"),
        "a hole too small": planned(ENOUGH="offset > lowest"),
        "a hole that must be larger": planned(
            ENOUGH="offset - lowest > nbytes", MEET="requests[j][0] < stop and start < requests[j][1]"
        ),
        "always on top": planned(ENOUGH="False"),
        "the last end": planned(HIGHER="end"),
        "in no order of offsets": planned(NEAR="[(found[j], found[j] + requests[j][2]) for j in with_it]"),
        "touching in time": planned(MEET="requests[j][0] <= stop and start <= requests[j][1]"),
        "only those that began before": planned(MEET="requests[j][0] <= start < requests[j][1]"),
        "no lifetimes": planned(MEET="True"),
        "no sizes": planned(NEAR="sorted((found[j], found[j]) for j in with_it)"),
        "all at 0": planned(EACH="0"),
        "in the order of placing": planned(PLAN="list(found.values())"),
        "a byte between": planned(HIGHER="max(lowest, end + 1)"),
        "a block between": planned(HIGHER="max(lowest, end + 512 * 64)"),
        "in blocks of 512": planned(PLAN="[found[i] // 512 for i in range(len(requests))]"),
        "negative": planned(PLAN="[-found[i] - requests[i][2] for i in range(len(requests))]"),
        "floats": planned(EACH="float(lowest)"),
        "a dict": planned(PLAN="found"),
        "sorts what it is given": planned(BEGIN="requests.sort(key=lambda r: -r[2])"),
        "the peak": planned(BEST=f"height({LARGEST_FIRST})"),
        "no return": planned(BEST="None"),
        "hard-coded": planned(BEST="[0] * 95"),
        "equal to everything": ANYTHING + planned(EACH="Anything(lowest)"),
        "memory-hungry": planned(BEGIN="hoard = [0] * (20 * 2**30 // 8)"),
        "an endless loop": planned(BEGIN="while True:\n        pass"),
        "unsolved": planned(BEGIN="raise NotImplementedError  # your answer"),
    },
}

CRASHES = {"another error"}
"""Mistakes that end with an error of Python's, torch's or the library's own, which is told; all others are told why."""

RIGHT: dict[str, dict[str, str]] = {
    "reserved-answer": {
        "divmod": cell(
            """
            def reserved_bytes(nbytes, count):
                block = block_bytes(nbytes)
                full, more = divmod(count, segment_bytes(block) // block)
                return (full + (more > 0)) * segment_bytes(block)
            """
        ),
        "one segment tried": cell(
            """
            def reserved_bytes(nbytes, count):
                card, held = CachingAllocator(), 0
                card.malloc(nbytes)
                segment = card.reserved_bytes
                while card.reserved_bytes == segment:
                    card.malloc(nbytes)
                    held += 1
                return (count + held - 1) // held * segment
            """
        ),
    },
    "unexplained-answer": {
        "numbers": parts(ROUNDING, RESTS, CACHED),
        "from the levels": cell(
            """
            cached_bytes = card.reserved_bytes - card.allocated_bytes
            used = [b for s in segments for b in s["blocks"] if b["state"] == "active_allocated"]
            rounding_bytes = sum(-b["requested_size"] % 512 for b in used)
            rest_bytes = card.allocated_bytes - card.requested_bytes - rounding_bytes
            """
        ),
    },
    "given-back-answer": {
        "nothing requested": given('sum(s["total_size"] for s in segments if s["requested_size"] == 0)'),
        "each block": given(
            'sum(s["total_size"] for s in segments if all(b["state"] == "inactive" for b in s["blocks"]))'
        ),
        "one block, free": given(
            'sum(s["total_size"] for s in segments if [b["state"] for b in s["blocks"]] == ["inactive"])'
        ),
    },
    "pages-answer": {
        "page by page": cell(
            """
            def pages_given_back(segments):
                gone = 0
                for segment in segments:
                    page = {"small": 2 * MiB, "large": 20 * MiB}[segment["segment_type"]]
                    for at in range(segment["address"], segment["address"] + segment["total_size"], page):
                        gone += page * any(
                            block["address"] <= at and at + page <= block["address"] + block["size"]
                            for block in segment["blocks"]
                            if block["state"] == "inactive"
                        )
                return gone
            """
        ),
        "by the remainder": pages(
            FIRST="start + -start % page", LAST='start + block["size"]', GONE="max(0, (last - first) // page * page)"
        ),
    },
    "malloc-answer": {
        "index by index": cell(
            """
            def malloc(holes, nbytes):
                found = next((i for i, hole in enumerate(holes) if hole[1] - hole[0] >= nbytes), None)
                if found is None:
                    return
                start, stop = holes.pop(found)
                if start + nbytes != stop:
                    holes.insert(found, (start + nbytes, stop))
                return start
            """
        ),
        "lists": taken(LEFT="[[start + nbytes, stop]] if stop - start > nbytes else []"),
    },
    "free-answer": {
        "neighbours looked up": cell(
            """
            def free(holes, address, nbytes):
                stop = address + nbytes
                for a, b in holes:
                    if a < stop and b > address:
                        raise ValueError(f"{address} is free already")
                for hole in list(holes):
                    if hole[1] == address or hole[0] == stop:
                        holes.remove(hole)
                        address, stop = min(address, hole[0]), max(stop, hole[1])
                holes.append((address, stop))
                holes.sort()
            """
        ),
        "by bisection": cell(
            """
            from bisect import bisect


            def free(holes, address, nbytes):
                start, stop = address, address + nbytes
                i = bisect(holes, (start, 0))
                if i < len(holes) and holes[i][0] < stop or i and holes[i - 1][1] > start:
                    raise ValueError("free it once")
                if i < len(holes) and holes[i][0] == stop:
                    stop = holes.pop(i)[1]
                if i and holes[i - 1][1] == start:
                    i -= 1
                    start = holes.pop(i)[0]
                holes.insert(i, (start, stop))
            """
        ),
    },
    "load-answer": {
        "largest first": in_order("sorted(range(len(shapes)), key=lambda n: -torch.Size(shapes[n]).numel())"),
        "one tensor for all": cell(
            """
            def load(shapes, read):
                sizes = [torch.Size(shape).numel() for shape in shapes]
                flat = torch.empty(sum(sizes), dtype=torch.half)
                weights = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes)]
                for n in range(len(shapes)):
                    weights[n][:] = read(n)
                return weights
            """
        ),
        "let go by hand": loaded(FILL="shard = read(n); weight.copy_(shard); del shard"),
    },
    "offsets-answer": {
        "several orders": planned(
            BEST="min((placed(key) for key in (lambda a, b, n: -n, lambda a, b, n: (-n, -b), lambda a, b, n: a)), "
            "key=height)"
        ),
        "largest first, of equals the last": planned(BEST="placed(lambda start, stop, nbytes: (-nbytes, -stop))"),
        "every gap tried": cell(
            """
            def offsets(requests):
                def pile(order):
                    found = [None] * len(requests)
                    for i in order:
                        a, b, n = requests[i]
                        there = [(o, *r) for o, r in zip(found, requests) if o is not None]
                        taken = [(o, o + m) for o, c, d, m in there if c < b and a < d]
                        gaps = sorted([0] + [end for _, end in taken])
                        found[i] = next(g for g in gaps if all(g + n <= o or end <= g for o, end in taken))
                    return found

                def top(plan):
                    return max((o + n for o, (_, _, n) in zip(plan, requests)), default=0)

                indices = range(len(requests))
                plans = [pile(sorted(indices, key=lambda i: (-requests[i][2], -requests[i][1])))]
                plans.append(pile(sorted(indices, key=lambda i: -requests[i][1])))
                return min(plans, key=top)
            """
        ),
    },
}
