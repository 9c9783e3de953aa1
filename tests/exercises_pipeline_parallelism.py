"""Answers to the exercises of chapter 15: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import ANYTHING, cell

COUNT, SAVED, SENT = 63, 805_306_368, 4_227_858_432
NEEDED, UNNEEDED, RANK_2 = 73_728, 8_192, 147_456
MENDED = "F0 >F0 F1 >F1 F2 <B0 >F2 F3 <B1 >F3 B0 <B2 B1 <B3 B2 B3"


def hand(count: object = COUNT, saved: object = SAVED, sent: object = SENT) -> str:
    """The three numbers of exercise 1."""
    return f"micro_batches, saved_bytes, sent_bytes = {count}, {saved}, {sent}"


def kinds(needed: object = NEEDED, unneeded: object = UNNEEDED, rank_2: object = RANK_2) -> str:
    """The three numbers of exercise 5."""
    return f"needed_bytes, unneeded_bytes, rank_2_bytes = {needed}, {unneeded}, {rank_2}"


def order(**changes: str) -> str:
    """order, right but for the changes."""
    terms = {
        "AHEAD": "min(stages - stage, micro_batches)",
        "FIRST": 'f"F{i}"',
        "BACK": "i",
        "NEXT": "ahead + i < micro_batches",
        "FORWARD": "ahead + i",
        "FOUND": '" ".join(turns)',
    }
    return cell(
        """
        def order(stage, stages, micro_batches):
            ahead = AHEAD
            turns = [FIRST for i in range(ahead)]
            for i in range(micro_batches):
                turns.append(f"B{BACK}")
                if NEXT:
                    turns.append(f"F{FORWARD}")
            return FOUND
        """,
        **terms | changes,
    )


def groups(**changes: str) -> str:
    """order_in_groups, right but for the changes."""
    terms = {
        "GROUPS": "range(0, micro_batches, most)",
        "END": "min(first + most, micro_batches)",
        "AHEAD": "min(first + stages - stage, end)",
        "NUMBER": "{ahead}",
        "FOUND": '" ".join(turns)',
    }
    return cell(
        """
        def order_in_groups(stage, stages, micro_batches, most):
            turns = []
            for first in GROUPS:
                end = END
                ahead = AHEAD
                turns += [f"F{i}" for i in range(first, ahead)]
                for i in range(first, end):
                    turns.append(f"B{i}")
                    if ahead < end:
                        turns.append(f"FNUMBER")
                        ahead += 1
            return FOUND
        """,
        **terms | changes,
    )


def line(text: str) -> str:
    """Exercise 3's answer."""
    return f"mended = {text!r}"


def forwards(value: str) -> str:
    """forwards that returns an expression of the right turns as well."""
    return cell(
        """
        def forwards(rank, ranks, chunks, micro_batches):
            right = [
                (chunk * ranks + rank, first + i)
                for first in range(0, micro_batches, ranks)
                for chunk in range(chunks)
                for i in range(ranks)
            ]
            return VALUE
        """,
        VALUE=value,
    )


def ahead(value: str) -> str:
    """ahead that returns an expression."""
    return f"def ahead(rank, ranks, chunks, micro_batches):\n    return {value}"


def again(*lines):
    """A stage that keeps only inputs, and in backward computes y from x once more, by these lines."""
    return cell(
        """
        class LeanStage:
            def __init__(self, module):
                self.module, self.kept = module, {}

            def forward(self, i, x):
                self.kept[i] = x
                with torch.no_grad():
                    return self.module(x)

            def backward(self, i, dy):
                x = self.kept.pop(i).requires_grad_()
                AGAIN
                y.backward(dy)
                return x.grad
        """,
        AGAIN=("\n" + " " * 8).join(lines),
    )


def lean(**changes: str) -> str:
    """LeanStage, right but for the changes."""
    terms = {
        "INPUT": "x.requires_grad_()",
        "OUTPUT": "self.module(x)",
        "KEPT": "x, get_gradient_edge(y)",
        "MORE": "pass",
        "SENT": "y.detach()",
        "TAKEN": "self.kept.pop(i)",
        "BACKWARD": "torch.autograd.backward([edge], [dy])",
        "LESS": "pass",
        "GRADIENT": "x.grad",
    }
    return cell(
        """
        class LeanStage:
            def __init__(self, module):
                self.module, self.kept = module, {}
                self.other = {}

            def forward(self, i, x):
                INPUT
                y = OUTPUT
                self.kept[i] = KEPT
                MORE
                return SENT

            def backward(self, i, dy):
                x, edge = TAKEN
                BACKWARD
                LESS
                return GRADIENT
        """,
        **terms | changes,
    )


def cut(**changes: str) -> str:
    """cuts by trying all, right but for the changes."""
    terms = {
        "FLIGHT": "min(stages - s, micro_batches)",
        "STATIC": "sum(static_bytes[begin:end])",
        "SAVED": "sum(saved_bytes[begin:end])",
        "LARGEST": "max",
        "BEST": "min",
        "FOUND": "found",
    }
    return cell(
        """
        from itertools import combinations


        def cuts(static_bytes, saved_bytes, stages, micro_batches):
            def fullest(pairs):
                return LARGEST(STATIC + FLIGHT * SAVED for s, (begin, end) in enumerate(pairs))

            layers = len(static_bytes)
            tried = ([0, *inner, layers] for inner in combinations(range(1, layers), stages - 1))
            found = BEST((list(zip(b, b[1:])) for b in tried), key=fullest)
            return FOUND
        """,
        **terms | changes,
    )


FOR_ALL = "[(c * ranks + rank, i) for c in range(chunks) for i in range(micro_batches)]"

WRONG: dict[str, dict[str, str]] = {
    "bubble-answer": {
        "nothing": hand(0, 0, 0),
        "of the computing time": hand(70),
        "one too few": hand(62),
        "one too many": hand(64),
        "p for p − 1": hand(72),
        "as many as stages": hand(8),
        "none below": hand(-7),
        "a float": hand(63.0),
        "a share": hand(0.1),
        "a text": hand('"63"'),
        "rank 0's": hand(saved=8 * 2**27),
        "rank 3's": hand(saved=5 * 2**27),
        "rank 1's": hand(saved=7 * 2**27),
        "from the other end": hand(saved=3 * 2**27),
        "GPipe's": hand(saved=63 * 2**27),
        "one micro-batch": hand(saved=2**27),
        "one block": hand(saved=SAVED // 4),
        "all blocks": hand(saved=8 * SAVED),
        "elements": hand(saved=SAVED // 2),
        "in FP32": hand(saved=2 * SAVED),
        "in MiB": hand(saved=768),
        "a float of bytes": hand(saved=float(SAVED)),
        "activations alone": hand(sent=SENT // 2),
        "what arrives as well": hand(sent=2 * SENT),
        "every block's": hand(sent=4 * SENT),
        "all ranks'": hand(sent=8 * SENT),
        "one micro-batch's": hand(sent=2**26),
        "one micro-batch's activations": hand(sent=2**25),
        "in GB": hand(sent=4),
        "in bits": hand(sent=8 * SENT),
        "texts": hand(63, '"768 MiB"', '"4 GiB"'),
        "equal to everything": ANYTHING + hand(*["Anything()"] * 3),
    },
    "order-answer": {
        "GPipe": order(AHEAD="micro_batches"),
        "one at a time": order(AHEAD="1"),
        "one too few": order(AHEAD="max(min(stages - stage, micro_batches) - 1, 1)"),
        "one too many": order(AHEAD="min(stages - stage + 1, micro_batches)"),
        "counted from the first": order(AHEAD="min(stage + 1, micro_batches)"),
        "as many on each": order(AHEAD="min(stages, micro_batches)"),
        "beyond the last": order(NEXT="True"),
        "the last ones forgotten": order(NEXT="ahead + i < micro_batches - 1"),
        "without limit of micro-batches": order(AHEAD="stages - stage"),
        "the last backward first": order(BACK="micro_batches - 1 - i"),
        "backwards from the last": order(BACK="(ahead - 1 - i if i < ahead else i)"),
        "counted from one": order(FIRST='f"F{i + 1}"'),
        "the same forward again": order(FORWARD="ahead"),
        "no backwards": order(BACK="0"),
        "in lower case": order(FOUND='" ".join(turns).lower()'),
        "with commas": order(FOUND='", ".join(turns)'),
        "without blanks": order(FOUND='"".join(turns)'),
        "other digits": order(FOUND='" ".join(turns).replace("0", "٠")'),
        "a list": order(FOUND="turns"),
        "a number": order(FOUND="len(turns)"),
        "half of it": order(FOUND='" ".join(turns[: len(turns) // 2])'),
        "empty": order(FOUND='""'),
        "forwards in the opposite order on one stage": order(FIRST='f"F{ahead - 1 - i if stage else i}"'),
        "no return": order(FOUND="None"),
        "an endless loop": order(AHEAD="1\n    while True: pass"),
        "memory-hungry": order(AHEAD="len(torch.ones(2**30))"),
        "a syntax error": "def order(stage:\n    return 0",
        "an empty cell": "",
        "unsolved": "def order(stage, stages, micro_batches):\n    raise NotImplementedError",
    },
    "groups-answer": {
        "1F1B": groups(GROUPS="range(1)", END="micro_batches"),
        "one at a time": groups(AHEAD="first + 1"),
        "a lower limit for each stage": order(AHEAD="min(stages - stage, micro_batches, most)").replace(
            "order(stage, stages, micro_batches)", "order_in_groups(stage, stages, micro_batches, most)"
        ),
        "groups of one": groups(GROUPS="range(micro_batches)", END="first + 1"),
        "groups of one more": groups(
            GROUPS="range(0, micro_batches, most + 1)", END="min(first + most + 1, micro_batches)"
        ),
        "GPipe in each group": groups(AHEAD="end"),
        "GPipe in groups of the stages": groups(
            GROUPS="range(0, micro_batches, stages)", END="min(first + stages, micro_batches)", AHEAD="end"
        ),
        "the first group alone": groups(GROUPS="range(1)"),
        "full groups alone": groups(GROUPS="range(0, micro_batches - most + 1, most)"),
        "the last group too large": groups(END="first + most"),
        "numbers from 0 in each group": groups(NUMBER="{ahead - first}"),
        "too few ahead": groups(AHEAD="min(stages - stage, end)"),
        "lists": groups(FOUND="turns"),
        "commas between": groups(FOUND='",".join(turns)'),
        "no return": groups(FOUND="None"),
        "an endless loop": groups(END="0\n        while True: pass"),
        "memory-hungry": groups(END="len(torch.ones(2**30))"),
        "a syntax error": "def order_in_groups(stage:\n    return 0",
        "an empty cell": "",
        "unsolved": "def order_in_groups(stage, stages, micro_batches, most):\n    raise NotImplementedError",
    },
    "mended-answer": {
        "nothing": line(""),
        "unchanged": "mended = rank_0",
        "rank 1's": "mended = rank_1",
        "both lines": "mended = rank_0, rank_1",
        "a schedule": "mended = schedule_of(rank_0, rank_1)",
        "all gradients early": line("F0 >F0 F1 <B0 >F1 F2 <B1 >F2 F3 <B2 >F3 <B3 B0 B1 B2 B3"),
        "three gradients": line("F0 >F0 F1 >F1 F2 <B0 >F2 F3 <B1 >F3 <B2 B0 B1 <B3 B2 B3"),
        "the first one early": line("F0 >F0 F1 >F1 F2 <B0 >F2 F3 >F3 B0 <B1 B1 <B2 B2 <B3 B3"),
        "all receives first": line("<B0 <B1 <B2 <B3 F0 >F0 F1 >F1 F2 >F2 F3 >F3 B0 B1 B2 B3"),
        "all sends last": line("F0 F1 F2 F3 >F0 >F1 >F2 >F3 <B0 B0 <B1 B1 <B2 B2 <B3 B3"),
        "1F1B": line("F0 >F0 F1 >F1 <B0 B0 F2 >F2 <B1 B1 F3 >F3 <B2 B2 <B3 B3"),
        "sent before it is made": line("F0 >F0 >F1 F1 <B0 F2 >F2 <B1 F3 >F3 B0 <B2 B1 <B3 B2 B3"),
        "used before it is there": line("F0 >F0 F1 >F1 F2 <B0 >F2 F3 >F3 B0 B1 <B1 <B2 B2 <B3 B3"),
        "a receive forgotten": line("F0 >F0 F1 >F1 F2 <B0 >F2 F3 <B1 >F3 B0 <B2 B1 B2 B3"),
        "a send twice": line("F0 >F0 F1 >F1 F2 <B0 >F2 F3 <B1 >F3 B0 <B2 >F3 B1 <B3 B2 B3"),
        "no sends": line("F0 F1 F2 F3 <B0 B0 <B1 B1 <B2 B2 <B3 B3"),
        "no messages": line("F0 F1 F2 F3 B0 B1 B2 B3"),
        "backwards reversed": line("F0 >F0 F1 >F1 F2 <B0 >F2 F3 <B1 >F3 B1 <B2 B0 <B3 B2 B3"),
        "a fifth micro-batch": line(f"{MENDED} B4"),
        "arrows the other way": line(MENDED.replace("<", ">")),
        "words": line("send F2 later"),
        "a list": line(MENDED) + ".split()",
        "a number": "mended = 3",
        "None": "mended = None",
    },
    "forwards-answer": {
        "one stage after the other": forwards(FOR_ALL),
        "a micro-batch through all": forwards(
            "[(c * ranks + rank, i) for i in range(micro_batches) for c in range(chunks)]"
        ),
        "neighbouring stages": forwards("[(stage // ranks + rank * chunks, i) for stage, i in right]"),
        "chunks, not stages": forwards("[(stage // ranks, i) for stage, i in right]"),
        "groups of chunks": forwards(
            "[(c * ranks + rank, f + i) for f in range(0, micro_batches, chunks) for c in range(chunks)"
            " for i in range(min(chunks, micro_batches - f))]"
        ),
        "the last group forgotten": forwards("right[: len(right) - ranks * chunks] or right[:1]"),
        "the first group alone": forwards("right[: ranks * chunks]"),
        "numbers from 0 in each group": forwards("[(stage, i % ranks) for stage, i in right]"),
        "stages from the last": forwards("right[::-1]"),
        "micro-batch and stage": forwards("[turn[::-1] for turn in right]"),
        "all ranks' stages": forwards("[(s, i) for s, i in right for s in range(ranks * chunks)]"),
        "rank 0's": forwards("[(stage - rank, i) for stage, i in right]"),
        "counted from 1": forwards("[(stage, i + 1) for stage, i in right]"),
        "words": forwards('[f"F{i}@{stage}" for stage, i in right]'),
        "a text": forwards('" ".join(f"F{i}" for _, i in right)'),
        "floats": forwards("[(float(stage), i) for stage, i in right]"),
        "twice": forwards("right + right"),
        "a generator": forwards("(turn for turn in right)"),
        "a number": forwards("len(right)"),
        "empty": forwards("[]"),
        "no return": forwards("None"),
        "an endless loop": forwards("[0 for _ in iter(int, 1)]"),
        "memory-hungry": forwards("torch.ones(2**30)"),
        "a syntax error": "def forwards(rank:\n    return 0",
        "an empty cell": "",
        "unsolved": "def forwards(rank, ranks, chunks, micro_batches):\n    raise NotImplementedError",
    },
    "ahead-answer": {
        "1F1B's": ahead("min(ranks - rank, micro_batches)"),
        "one for each rank behind": ahead("min((chunks - 1) * ranks + ranks - rank, chunks * micro_batches)"),
        "one too few": ahead("min((chunks - 1) * ranks + 2 * (ranks - 1 - rank), chunks * micro_batches)"),
        "one too many": ahead("min((chunks - 1) * ranks + 2 * (ranks - rank), chunks * micro_batches)"),
        "all stages filled": ahead("min(chunks * ranks + 2 * (ranks - 1 - rank), chunks * micro_batches)"),
        "without limit": ahead("(chunks - 1) * ranks + 1 + 2 * (ranks - 1 - rank)"),
        "from the other end": ahead("min((chunks - 1) * ranks + 1 + 2 * rank, chunks * micro_batches)"),
        "limited by micro-batches": ahead("min((chunks - 1) * ranks + 1 + 2 * (ranks - 1 - rank), micro_batches)"),
        "all": ahead("chunks * micro_batches"),
        "a group": ahead("chunks * ranks"),
        "two way for stages": ahead("min(2 * (ranks * chunks - 1 - rank) + 1, chunks * micro_batches)"),
        "a float": ahead("min((chunks - 1) * ranks + 1 + 2.0 * (ranks - 1 - rank), chunks * micro_batches)"),
        "a list": ahead("list(range(ranks))"),
        "a text": ahead('"11"'),
        "no return": ahead("None"),
        "an endless loop": ahead("[0 for _ in iter(int, 1)]"),
        "memory-hungry": ahead("len(torch.ones(2**30))"),
        "a syntax error": "def ahead(rank:\n    return 0",
        "an empty cell": "",
        "unsolved": "def ahead(rank, ranks, chunks, micro_batches):\n    raise NotImplementedError",
    },
    "needed-answer": {
        "nothing": kinds(0, 0, 0),
        "with the output": kinds(NEEDED + UNNEEDED),
        "without the input": kinds(NEEDED - UNNEEDED),
        "one hidden activation": kinds(NEEDED - 32_768),
        "hidden activations twice": kinds(NEEDED + 32_768),
        "four micro-batches": kinds(4 * NEEDED, 4 * UNNEEDED),
        "what rank 0 holds": kinds(327_680),
        "elements": kinds(NEEDED // 4, UNNEEDED // 4, RANK_2 // 4),
        "in FP64": kinds(2 * NEEDED, 2 * UNNEEDED, 2 * RANK_2),
        "with parameters": kinds(NEEDED + 132_352),
        "in KiB": kinds(72, 8, 144),
        "floats": kinds(float(NEEDED)),
        "input and output": kinds(unneeded=2 * UNNEEDED),
        "all in flight": kinds(unneeded=4 * UNNEEDED),
        "a hidden one": kinds(unneeded=32_768),
        "none unneeded": kinds(unneeded=0),
        "rank 3's": kinds(rank_2=NEEDED),
        "rank 1's": kinds(rank_2=3 * NEEDED),
        "rank 0's": kinds(rank_2=4 * NEEDED),
        "GPipe's": kinds(rank_2=8 * NEEDED),
        "as it is": kinds(rank_2=2 * (NEEDED + UNNEEDED)),
        "texts": kinds('"72 KiB"'),
        "equal to everything": ANYTHING + kinds(*["Anything()"] * 3),
    },
    "lean-answer": {
        "as given": "LeanStage = Stage",
        "the output kept": lean(MORE="self.other[i] = y"),
        "the output kept, detached": lean(KEPT="x, y", BACKWARD="edge.backward(dy)", MORE="self.other[i] = y.detach()"),
        "an edge and the output": lean(MORE="self.other[i] = y.detach()", LESS="self.other.pop(i)"),
        "what was sent is kept": lean(SENT="self.other.setdefault(i, y.detach())"),
        "a copy of the input kept": lean(MORE="self.other[i] = x.detach().clone()", LESS="self.other.pop(i)"),
        "a copy of the output": lean(MORE="self.other[i] = y.detach().clone()", LESS="self.other.pop(i)"),
        "never let go": lean(TAKEN="self.kept[i]"),
        "inputs never let go": lean(LESS="self.other[i] = x"),
        "gradients never let go": lean(LESS="self.other[i] = dy"),
        "gradients never let go, for good": "held = []\n" + lean(LESS="held.append(x.grad)"),
        "what is sent has the graph": lean(SENT="y"),
        "computed again": again("y = self.module(x)"),
        "computed again, layer by layer": again("y = x", "for layer in self.module:", "    y = layer(y)"),
        "the last one alone": lean(TAKEN="self.kept.popitem()[1]"),
        "the first one first": lean(TAKEN="self.kept.pop(next(iter(self.kept)))"),
        "no gradient of the input": lean(INPUT="pass"),
        "the gradient of the output": lean(GRADIENT="dy"),
        "the parameters' gradients alone": lean(GRADIENT="None"),
        "the input's gradient alone": lean(BACKWARD="(g,) = torch.autograd.grad([edge], [x], [dy])", GRADIENT="g"),
        "ones for gradients": lean(BACKWARD="torch.autograd.backward([edge], [torch.ones_like(dy)])"),
        "gradients set to zero": lean(LESS="self.module.zero_grad()"),
        "gradients counted twice": lean(
            BACKWARD="torch.autograd.backward([edge], [dy], retain_graph=True)\n"
            "        torch.autograd.backward([edge], [dy])",
            GRADIENT="x.grad / 2",
        ),
        "the module in forward twice": lean(OUTPUT="self.module(x) * 0 + self.module(x)"),
        "in one precision": lean(SENT="y.detach().float()"),
        "another output": lean(SENT="y.detach() + 1"),
        "a list": lean(SENT="[y.detach()]"),
        "no return": lean(SENT="None"),
        "leaves autograd switched off": lean(LESS="torch.set_grad_enabled(False)"),
        "memory-hungry": lean(MORE="torch.ones(2**30)"),
        "an endless loop": lean(BACKWARD="while True: pass"),
        "a function": "def LeanStage(module):\n    return module",
        "a module": "LeanStage = nn.Linear(2, 2)",
        "an object": "LeanStage = 3",
        "a syntax error": "class LeanStage(:\n    pass",
        "an empty cell": "",
        "without methods": "class LeanStage:\n    pass",
        "unsolved": "class LeanStage:\n    def __init__(self, module):\n        raise NotImplementedError",
    },
    "cuts-answer": {
        "equal layers": cell(
            """
            def cuts(static_bytes, saved_bytes, stages, micro_batches):
                layers = len(static_bytes)
                borders = [s * layers // stages for s in range(stages + 1)]
                return list(zip(borders, borders[1:]))
            """
        ),
        "static bytes alone": cut(SAVED="0"),
        "empties its argument": cut() + "\n\n\nfrugal = cuts\n\n\n"
        "def cuts(static_bytes, saved_bytes, stages, micro_batches):\n"
        "    found = frugal(static_bytes, saved_bytes, stages, micro_batches)\n"
        "    static_bytes.clear()\n    return found",
        "activations alone": cut(STATIC="0"),
        "one micro-batch": cut(FLIGHT="1"),
        "as many on each": cut(FLIGHT="min(stages, micro_batches)"),
        "GPipe's": cut(FLIGHT="micro_batches"),
        "without limit of micro-batches": cut(FLIGHT="(stages - s)"),
        "from the other end": cut(FLIGHT="min(s + 1, micro_batches)"),
        "one too few in flight": cut(FLIGHT="min(stages - s - 1, micro_batches)"),
        "static bytes in flight, too": cut(STATIC="min(stages - s, micro_batches) * sum(static_bytes[begin:end])"),
        "the sum": cut(LARGEST="sum"),
        "the emptiest": cut(LARGEST="min"),
        "the worst": cut(BEST="max"),
        "greedy": cell(
            """
            def cuts(static_bytes, saved_bytes, stages, micro_batches):
                layers, begin, found = len(static_bytes), 0, []
                for s in range(stages):
                    each = [a + min(stages - s, micro_batches) * b for a, b in zip(static_bytes, saved_bytes)]
                    end, due = begin + 1, sum(each[begin:]) / (stages - s)
                    while end < layers - (stages - s - 1) and sum(each[begin:end]) < due:
                        end += 1
                    end = layers if s == stages - 1 else end
                    found.append((begin, end))
                    begin = end
                return found
            """
        ),
        "ends that are included": cut(FOUND="[(begin, end - 1) for begin, end in found]"),
        "lengths": cut(FOUND="[(begin, end - begin) for begin, end in found]"),
        "borders": cut(FOUND="[begin for begin, _ in found]"),
        "in the opposite order": cut(FOUND="found[::-1]"),
        "one missing": cut(FOUND="found[:-1]"),
        "all on the first": cut(FOUND="[(0, layers)] + [(layers, layers)] * (stages - 1)"),
        "beyond the last": cut(FOUND="found[:-1] + [(found[-1][0], layers + 1)]"),
        "a layer left out": cut(FOUND="[(0, 1)] + [(2, 3)] * (stages - 1)"),
        "floats": cut(FOUND="[(float(begin), float(end)) for begin, end in found]"),
        "a number": cut(FOUND="fullest(found)"),
        "no return": cut(FOUND="None"),
        "an endless loop": cut(FOUND="[0 for _ in iter(int, 1)]"),
        "memory-hungry": cut(FOUND="torch.ones(2**30)"),
        "a syntax error": "def cuts(static_bytes:\n    return 0",
        "an empty cell": "",
        "unsolved": "def cuts(static_bytes, saved_bytes, stages, micro_batches):\n    raise NotImplementedError",
    },
}

CRASHES = {
    "memory-hungry",
    "no gradient of the input",
    "without methods",
    "a function",
    "a module",
}
"""Mistakes whose code raises by itself."""

RIGHT: dict[str, dict[str, str]] = {
    "bubble-answer": {
        "as they are": hand(),
        "by factors": hand("next(m for m in range(999) if 10 * 7 <= m + 7)", "6 * 4 * 2**25", "63 * 2**26"),
    },
    "order-answer": {
        "as it is": order(),
        "the library's": cell(
            """
            from memlab.pipeline_parallelism import one_forward_one_backward


            def order(stage, stages, micro_batches):
                actions = one_forward_one_backward(stages, micro_batches).actions[stage]
                computed = [a for a in actions if a.kind in ("forward", "backward")]
                return " ".join(f"{a.kind[0].upper()}{a.micro_batch}" for a in computed)
            """
        ),
        "on several lines": order(FOUND='"\\n".join(turns)'),
    },
    "groups-answer": {
        "as it is": groups(),
        "by a whole order": order().replace("def order", "def _group")
        + "\n\n\n"
        + cell(
            """
            def order_in_groups(stage, stages, micro_batches, most):
                found = []
                for first in range(0, micro_batches, most):
                    group = _group(stage, stages, min(most, micro_batches - first)).split()
                    found += [f"{turn[0]}{first + int(turn[1:])}" for turn in group]
                return " ".join(found)
            """
        ),
        "a backward as soon as there is one": cell(
            """
            def order_in_groups(stage, stages, micro_batches, most):
                turns, free, ended = [[] for _ in range(stages)], [0] * stages, {}
                for now in range(9 * stages * micro_batches):
                    for s in range(stages):
                        f, b = (sum(turn[0] == kind for turn in turns[s]) for kind in "FB")
                        back = ended.get((s + 1, f"B{b}") if s < stages - 1 else (s, f"F{b}"), now + 1) <= now
                        there = f < micro_batches and (s == 0 or ended.get((s - 1, f"F{f}"), now + 1) <= now)
                        if free[s] <= now and (back or there and f - b < min(most, stages - s)):
                            turns[s].append(f"B{b}" if back else f"F{f}")
                            free[s] = ended[s, turns[s][-1]] = now + 1 + back
                return " ".join(turns[stage])
            """
        ),
    },
    "mended-answer": {
        "as it is": line(MENDED),
        "sooner": line("F0 >F0 F1 >F1 <B0 F2 >F2 <B1 F3 >F3 B0 <B2 B1 <B3 B2 B3"),
        "side by side the other way": line("F0 >F0 F1 >F1 F2 >F2 <B0 F3 >F3 <B1 B0 <B2 B1 <B3 B2 B3"),
        "by its places": 'mended = rank_0.replace(" <B0", "").replace(" <B1", "")'
        '.replace(">F2", "<B0 >F2").replace(">F3", "<B1 >F3").replace("<B2 B2", "B2")'
        '.replace("B0 B1", "B0 <B2 B1").replace("<B3 B3", "B3").replace("B1 B2", "B1 <B3 B2")',
    },
    "forwards-answer": {
        "as it is": forwards("right"),
        "lists": forwards("[list(turn) for turn in right]"),
        "a tuple": forwards("tuple(right)"),
        "sorted": forwards(f"sorted({FOR_ALL}, key=lambda turn: (turn[1] // ranks, turn))"),
        "by remainders": forwards(
            "[(n // ranks % chunks * ranks + rank, n // (ranks * chunks) * ranks + n % ranks)"
            " for n in range(chunks * micro_batches)]"
        ),
    },
    "ahead-answer": {
        "as it is": ahead("min((chunks - 1) * ranks + 1 + 2 * (ranks - 1 - rank), chunks * micro_batches)"),
        "gathered": ahead("min((chunks + 1) * ranks - 2 * rank - 1, chunks * micro_batches)"),
    },
    "needed-answer": {
        "as they are": kinds(),
        "as the meter has them": cell(
            """
            unneeded_bytes = 4 * 32 * 64
            needed_bytes = held_bytes(Stage(nn.Sequential(*layers())), "F0 B0") - unneeded_bytes
            rank_2_bytes = 2 * needed_bytes
            """
        ),
    },
    "lean-answer": {
        "as it is": lean(),
        "a stage that changes two methods": cell(
            """
            class LeanStage(Stage):
                def forward(self, i, x):
                    sent = super().forward(i, x)
                    self.kept[i] = x, get_gradient_edge(self.kept[i][1])
                    return sent

                def backward(self, i, dy):
                    x, edge = self.kept.pop(i)
                    torch.autograd.backward(edge, dy)
                    return x.grad
            """
        ),
        "a node": lean(KEPT="x, torch.autograd.graph.GradientEdge(y.grad_fn, y.output_nr)"),
        "an input of its own": lean(INPUT="x = x.detach().requires_grad_()"),
        "the library's": cell(
            """
            from memlab.pipeline_parallelism.stage import StageRun


            class LeanStage:
                def __init__(self, module):
                    self.run = StageRun(module)

                def forward(self, i, x):
                    return self.run.forward(i, (x.requires_grad_(),))[0]

                def backward(self, i, dy):
                    return self.run.backward(i, [dy])[0]
            """
        ),
    },
    "cuts-answer": {
        "as it is": cut(),
        "one stage after the other": cell(
            """
            def cuts(static_bytes, saved_bytes, stages, micro_batches):
                layers = len(static_bytes)
                best = {0: (0, [])}
                for s in range(stages):
                    flight, reached = min(stages - s, micro_batches), {}
                    for begin, (most, pairs) in best.items():
                        for end in range(begin + 1, layers + 1):
                            held = sum(static_bytes[begin:end]) + flight * sum(saved_bytes[begin:end])
                            found = max(most, held), [*pairs, (begin, end)]
                            if end not in reached or found[0] < reached[end][0]:
                                reached[end] = found
                    best = reached
                return best[layers][1]
            """
        ),
        "lists": cut(FOUND="tuple(list(pair) for pair in found)"),
        "ranges": cut(FOUND="[range(begin, end) for begin, end in found]"),
    },
}
