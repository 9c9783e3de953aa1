"""Answers to the exercises of chapter 04: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import cell, variants


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


pages = variants(
    """
    def pages_given_back(segments):
        gone = 0
        for segment in segments:
            page = PAGE«2 * MiB if segment["segment_type"] == "small" else 20 * MiB»
            EACH«pass»
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    start = block["address"] - segment["address"]
                    first = FIRST«-(-start // page)»
                    last = LAST«(start + block["size"]) // page»
                    gone += GONE«max(0, last - first) * page»
        return END«gone»
    """
)


taken = variants(
    """
    def malloc(holes, nbytes):
        BEGIN«pass»
        for i, (start, stop) in enumerate(holes):
            if stop - start >= nbytes:
                left = LEFT«[(start + nbytes, stop)] if stop - start > nbytes else []»
                SHRINK«holes[i : i + 1] = left»
                return FOUND«start»
        NONE«return None»
    """
)


freed = variants(
    """
    def free(holes, address, nbytes):
        end = address + nbytes
        BEGIN«pass»
        if TWICE«any(start < end and address < stop for start, stop in holes)»:
            REFUSE«raise ValueError("freed twice")»
        joined = []
        for start, stop in ALL«sorted([*holes, (address, end)])»:
            if TOUCH«joined and joined[-1][1] == start»:
                start = joined.pop()[0]
            joined.append(HOLE«(start, stop)»)
        END«holes[:] = joined»
    """
)


loaded = variants(
    """
    def load(shapes, read):
        BEGIN«pass»
        weights = [EMPTY«torch.empty(shape, dtype=torch.half) for shape in shapes»]
        for n, weight in enumerate(weights):
            FILL«weight.copy_(read(n))»
        return END«weights»
    """
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


planned = variants(
    """
    def offsets(requests):
        BEGIN«pass»

        def placed(key):
            found = {}
            for i in sorted(range(len(requests)), key=lambda i: key(*requests[i])):
                start, stop, nbytes = requests[i]
                with_it = [j for j in found if requests[j][0] < stop and start < requests[j][1]]
                lowest = 0
                for offset, end in NEAR«sorted((found[j], found[j] + requests[j][2]) for j in with_it)»:
                    if offset - lowest >= nbytes:
                        break
                    lowest = HIGHER«max(lowest, end)»
                found[i] = EACH«lowest»
            return PLAN«[found[i] for i in range(len(requests))]»

        def height(plan):
            return max((offset + r[2] for offset, r in zip(plan, requests)), default=0)

        largest_first = placed(lambda start, stop, nbytes: (-nbytes, start))
        backwards = placed(lambda start, stop, nbytes: (-stop, -nbytes))
        return BEST«min(largest_first, backwards, key=height)»
    """
)


ROUNDING, RESTS, CACHED = 4_984, 7_137_792, 115_184_640

WRONG: dict[str, dict[str, str]] = {
    "reserved-answer": {
        "in MiB": reserved("-(-count // held) * segment // MiB"),
        "memory-hungry": reserved("len([0] * (20 * 2**30 // 8))"),
        "a segment each": reserved("count * segment"),
        "requested, in whole pages": reserved("-(-count * nbytes // (2 * MiB)) * 2 * MiB"),
        "a float": reserved("-(-count / held) * segment"),
        "a tensor": reserved("int(torch.tensor(-(-count // held) * segment))"),
        "no return": reserved("None"),
        "unsolved": "def reserved_bytes(nbytes, count):\n    raise NotImplementedError  # your answer",
        "blocks across segments": reserved("-(-count * block // segment) * segment"),
        "always 2 MiB": reserved("-(-count // max(1, 2 * MiB // block)) * 2 * MiB"),
        "the segment of what was requested": reserved(
            "-(-count // max(1, segment_bytes(nbytes) // block)) * segment_bytes(nbytes)"
        ),
    },
    "unexplained-answer": {
        "all is cached": parts(ROUNDING, RESTS, ROUNDING + RESTS + CACHED),
        "rests that are not rounded": parts(ROUNDING, ROUNDING + RESTS, CACHED),
        "whole segments only": parts(ROUNDING, RESTS, 92_274_688),
        "split segments only": parts(ROUNDING, RESTS, CACHED - 92_274_688),
        "twice": parts(2 * ROUNDING, RESTS, CACHED),
        "in MiB": parts(0.0048, 6.8, 109.8),
        "a float": parts(ROUNDING, RESTS, float(CACHED)),
        "a half": parts(ROUNDING, RESTS, 0),
    },
    "given-back-answer": {
        "in MiB": given('sum(s["total_size"] for s in segments if not s["active_size"]) // MiB'),
        "memory-hungry": given("len([0] * (20 * 2**30 // 8))"),
        "the largest segment": given('max((s["total_size"] for s in segments if not s["active_size"]), default=0)'),
        "a float": given('sum(s["total_size"] for s in segments if not s["active_size"]) / 1'),
        "empties the list": given(
            '(sum(s["total_size"] for s in segments if not s["active_size"]), segments.clear())[0]'
        ),
        "no return": given("None"),
        "unsolved": "def given_back(segments):\n    raise NotImplementedError  # your answer",
        "an endless loop": "def given_back(segments):\n    while True:\n        pass",
        "large segments only": given(
            'sum(s["total_size"] for s in segments if not s["active_size"] and s["segment_type"] == "large")'
        ),
    },
    "pages-answer": {
        "in MiB": pages(END="gone // MiB"),
        "memory-hungry": pages(EACH="hoard = [0] * (20 * 2**30 // 8)"),
        "pages that are touched": pages(FIRST="start // page", LAST='-(-(start + block["size"]) // page)'),
        "the first page skipped": pages(FIRST="start // page + 1"),
        "a float": pages(END="gone / 1"),
        "changes the snapshot": pages(GONE='max(0, last - first) * page; block["state"] = "unmapped"'),
        "no return": pages(END="None"),
        "unsolved": "def pages_given_back(segments):\n    raise NotImplementedError  # your answer",
        "as many pages as fit": pages(GONE='block["size"] // page * page'),
        "below zero": pages(GONE="(last - first) * page"),
        "pages of 20 MiB": pages(PAGE="20 * MiB"),
    },
    "malloc-answer": {
        "the high end": taken(LEFT="[(start, stop - nbytes)] if stop - start > nbytes else []", FOUND="stop - nbytes"),
        "memory-hungry": taken(BEGIN="hoard = [0] * (20 * 2**30 // 8)"),
        "an empty hole": taken(LEFT="[(start + nbytes, stop)]"),
        "a hole that stays": taken(SHRINK="pass"),
        "a small rest lost": taken(LEFT="[(start + nbytes, stop)] if stop - start > nbytes + 512 else []"),
        "the rest at the end of the list": taken(SHRINK="del holes[i]; holes.extend(left)"),
        "nothing": taken(FOUND="None"),
        "a float": taken(FOUND="float(start)"),
        "raises": taken(NONE='raise MemoryError("no hole is large enough")'),
        "minus one": taken(NONE="return -1"),
        "unsolved": taken(BEGIN="raise NotImplementedError  # your answer"),
    },
    "free-answer": {
        "not joined": freed(TOUCH="False"),
        "memory-hungry": freed(BEGIN="hoard = [0] * (20 * 2**30 // 8)"),
        "another error": freed(REFUSE="raise RuntimeError('freed twice')"),
        "at the end of the list": freed(ALL="[*holes, (address, end)]"),
        "all joined": freed(TOUCH="joined"),
        "the wrong stop": freed(HOLE="(start, max(stop, start + nbytes))"),
        "returned": freed(END="return joined"),
        "freed twice, unnoticed": freed(TWICE="False"),
        "floats": freed(HOLE="(float(start), float(stop))"),
        "dicts": freed(HOLE="{'start': start, 'stop': stop}", TOUCH="False"),
        "a hole of nothing": freed(BEGIN="holes.append((end, end)); holes.sort()"),
        "remembers": "seen = set()\n\n\n" + freed(TWICE="(address in seen) or seen.add(address)"),
        "unsolved": freed(BEGIN="raise NotImplementedError  # your answer"),
    },
    "load-answer": {
        "prepared, and then replaced": loaded(FILL="weights[n] = read(n).half()"),
        "memory-hungry": loaded(BEGIN="hoard = torch.ones(2**30)"),
        "from the end": in_order("reversed(range(len(shapes)))"),
        "in FP32": loaded(EMPTY="torch.empty(shape) for shape in shapes"),
        "not filled": loaded(FILL="read(n); weight.zero_()"),
        "read twice": loaded(FILL="read(n); weight.copy_(read(n))"),
        "keeps its shards": "kept = []\n\n\n" + loaded(FILL="kept.append(read(n)); weight.copy_(kept[-1])"),
        "flat": loaded(
            EMPTY="torch.empty(torch.Size(shape).numel(), dtype=torch.half) for shape in shapes",
            FILL="weight.copy_(read(n).flatten())",
        ),
        "a generator": loaded(END="(weight for weight in weights)"),
        "the last weight twice": loaded(END="[*weights, weight]"),
        "unsolved": loaded(BEGIN="raise NotImplementedError  # your answer"),
    },
    "offsets-answer": {
        "largest first, of equals as they are listed": planned(
            BEST="min(placed(lambda start, stop, nbytes: -nbytes), backwards, key=height)"
        ),
        "memory-hungry": planned(BEGIN="hoard = [0] * (20 * 2**30 // 8)"),
        "no sizes": planned(NEAR="sorted((found[j], found[j]) for j in with_it)"),
        "a byte between": planned(HIGHER="max(lowest, end + 1)"),
        "floats": planned(EACH="float(lowest)"),
        "a dict": planned(PLAN="found"),
        "sorts what it is given": planned(BEGIN="requests.sort(key=lambda r: -r[2])"),
        "unsolved": planned(BEGIN="raise NotImplementedError  # your answer"),
        "largest first only": planned(BEST="largest_first"),
        "backwards only": planned(BEST="backwards"),
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
        "by the remainder": pages(
            FIRST="start + -start % page", LAST='start + block["size"]', GONE="max(0, (last - first) // page * page)"
        ),
    },
    "malloc-answer": {
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
    },
    "load-answer": {
        "largest first": in_order("sorted(range(len(shapes)), key=lambda n: -torch.Size(shapes[n]).numel())"),
        "let go by hand": loaded(FILL="shard = read(n); weight.copy_(shard); del shard"),
    },
    "offsets-answer": {
        "several orders": planned(
            BEST="min((placed(key) for key in (lambda a, b, n: -n, lambda a, b, n: (-n, -b), lambda a, b, n: a)), "
            "key=height)"
        ),
        "largest first, of equals the last": planned(BEST="placed(lambda start, stop, nbytes: (-nbytes, -stop))"),
    },
}
