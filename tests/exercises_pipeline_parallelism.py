"""Answers to the exercises of chapter 15: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import cell, variants

COUNT, SAVED, SENT = 63, 805_306_368, 4_227_858_432
NEEDED, UNNEEDED, RANK_2 = 73_728, 8_192, 147_456
MENDED = "F0 >F0 F1 >F1 F2 <B0 >F2 F3 <B1 >F3 B0 <B2 B1 <B3 B2 B3"


def hand(count: object = COUNT, saved: object = SAVED, sent: object = SENT) -> str:
    """The three numbers of exercise 1."""
    return f"micro_batches, saved_bytes, sent_bytes = {count}, {saved}, {sent}"


def kinds(needed: object = NEEDED, unneeded: object = UNNEEDED, rank_2: object = RANK_2) -> str:
    """The three numbers of exercise 5."""
    return f"needed_bytes, unneeded_bytes, rank_2_bytes = {needed}, {unneeded}, {rank_2}"


order = variants(
    """
    def order(stage, stages, micro_batches):
        ahead = AHEAD«min(stages - stage, micro_batches)»
        turns = [f"F{i}" for i in range(ahead)]
        for i in range(micro_batches):
            turns.append(f"B{BACK«i»}")
            if NEXT«ahead + i < micro_batches»:
                turns.append(f"F{FORWARD«ahead + i»}")
        return FOUND«" ".join(turns)»
    """
)


groups = variants(
    """
    def order_in_groups(stage, stages, micro_batches, most):
        turns = []
        for first in GROUPS«range(0, micro_batches, most)»:
            end = END«min(first + most, micro_batches)»
            ahead = AHEAD«min(first + stages - stage, end)»
            turns += [f"F{i}" for i in range(first, ahead)]
            for i in range(first, end):
                turns.append(f"B{i}")
                if ahead < end:
                    turns.append(f"F{NUMBER«ahead»}")
                    ahead += 1
        return FOUND«" ".join(turns)»
    """
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


lean = variants(
    """
    class LeanStage:
        def __init__(self, module):
            self.module, self.kept = module, {}
            self.other = {}

        def forward(self, i, x):
            INPUT«x.requires_grad_()»
            y = self.module(x)
            self.kept[i] = KEPT«x, get_gradient_edge(y)»
            return SENT«y.detach()»

        def backward(self, i, dy):
            x, edge = TAKEN«self.kept.pop(i)»
            BACKWARD«torch.autograd.backward([edge], [dy])»
            LESS«pass»
            return GRADIENT«x.grad»
    """
)


cut = variants(
    """
    from itertools import combinations


    def cuts(static_bytes, saved_bytes, stages, micro_batches):
        def held(s, begin, end):
            in_flight = FLIGHT«min(stages - s, micro_batches)»
            return sum(static_bytes[begin:end]) + in_flight * SAVED«sum(saved_bytes[begin:end])»

        def fullest(pairs):
            return max(held(s, *pair) for s, pair in enumerate(pairs))

        layers = len(static_bytes)
        tried = ([0, *inner, layers] for inner in combinations(range(1, layers), stages - 1))
        found = min((list(zip(b, b[1:])) for b in tried), key=fullest)
        return FOUND«found»
    """
)


FOR_ALL = "[(c * ranks + rank, i) for c in range(chunks) for i in range(micro_batches)]"

WRONG: dict[str, dict[str, str]] = {
    "bubble-answer": {
        "in MiB": hand(saved=768),
        "nothing": hand(0, 0, 0),
        "of the computing time": hand(70),
        "one too few": hand(62),
        "p for p − 1": hand(72),
        "none below": hand(-7),
        "a float": hand(63.0),
        "a share": hand(0.1),
        "activations alone": hand(sent=SENT // 2),
        "texts": hand(63, '"768 MiB"', '"4 GiB"'),
    },
    "order-answer": {
        "backwards from the last": order(BACK="(ahead - 1 - i if i < ahead else i)"),
        "memory-hungry": order(AHEAD="len(torch.ones(2**30))"),
        "one too few": order(AHEAD="max(min(stages - stage, micro_batches) - 1, 1)"),
        "as many on each": order(AHEAD="min(stages, micro_batches)"),
        "beyond the last": order(NEXT="True"),
        "the last backward first": order(BACK="micro_batches - 1 - i"),
        "the same forward again": order(FORWARD="ahead"),
        "in lower case": order(FOUND='" ".join(turns).lower()'),
        "half of it": order(FOUND='" ".join(turns[: len(turns) // 2])'),
        "no return": order(FOUND="None"),
        "unsolved": "def order(stage, stages, micro_batches):\n    raise NotImplementedError",
        "without limit of micro-batches": order(AHEAD="stages - stage"),
    },
    "groups-answer": {
        "a lower limit for each stage": order(AHEAD="min(stages - stage, micro_batches, most)").replace(
            "order(stage, stages, micro_batches)", "order_in_groups(stage, stages, micro_batches, most)"
        ),
        "memory-hungry": groups(END="len(torch.ones(2**30))"),
        "GPipe in each group": groups(AHEAD="end"),
        "the first group alone": groups(GROUPS="range(1)"),
        "the last group too large": groups(END="first + most"),
        "numbers from 0 in each group": groups(NUMBER="ahead - first"),
        "too few ahead": groups(AHEAD="min(stages - stage, end)"),
        "commas between": groups(FOUND='",".join(turns)'),
        "no return": groups(FOUND="None"),
        "unsolved": "def order_in_groups(stage, stages, micro_batches, most):\n    raise NotImplementedError",
    },
    "mended-answer": {
        "1F1B": line("F0 >F0 F1 >F1 <B0 B0 F2 >F2 <B1 B1 F3 >F3 <B2 B2 <B3 B3"),
        "nothing": line(""),
        "rank 1's": "mended = rank_1",
        "both lines": "mended = rank_0, rank_1",
        "all gradients early": line("F0 >F0 F1 <B0 >F1 F2 <B1 >F2 F3 <B2 >F3 <B3 B0 B1 B2 B3"),
        "used before it is there": line("F0 >F0 F1 >F1 F2 <B0 >F2 F3 >F3 B0 B1 <B1 <B2 B2 <B3 B3"),
        "a receive forgotten": line("F0 >F0 F1 >F1 F2 <B0 >F2 F3 <B1 >F3 B0 <B2 B1 B2 B3"),
        "words": line("send F2 later"),
        "None": "mended = None",
    },
    "forwards-answer": {
        "a micro-batch through all": forwards(
            "[(c * ranks + rank, i) for i in range(micro_batches) for c in range(chunks)]"
        ),
        "memory-hungry": forwards("torch.ones(2**30)"),
        "one stage after the other": forwards(FOR_ALL),
        "chunks, not stages": forwards("[(stage // ranks, i) for stage, i in right]"),
        "the last group forgotten": forwards("right[: len(right) - ranks * chunks] or right[:1]"),
        "words": forwards('[f"F{i}@{stage}" for stage, i in right]'),
        "a text": forwards('" ".join(f"F{i}" for _, i in right)'),
        "unsolved": "def forwards(rank, ranks, chunks, micro_batches):\n    raise NotImplementedError",
        "rank 0's": forwards("[(stage - rank, i) for stage, i in right]"),
    },
    "ahead-answer": {
        "1F1B's": ahead("min(ranks - rank, micro_batches)"),
        "memory-hungry": ahead("len(torch.ones(2**30))"),
        "one for each rank behind": ahead("min((chunks - 1) * ranks + ranks - rank, chunks * micro_batches)"),
        "without limit": ahead("(chunks - 1) * ranks + 1 + 2 * (ranks - 1 - rank)"),
        "a float": ahead("min((chunks - 1) * ranks + 1 + 2.0 * (ranks - 1 - rank), chunks * micro_batches)"),
        "a list": ahead("list(range(ranks))"),
        "unsolved": "def ahead(rank, ranks, chunks, micro_batches):\n    raise NotImplementedError",
        "an endless loop": ahead("[0 for _ in iter(int, 1)]"),
        "limited by micro-batches": ahead("min((chunks - 1) * ranks + 1 + 2 * (ranks - 1 - rank), micro_batches)"),
    },
    "needed-answer": {
        "hidden activations twice": kinds(NEEDED + 32_768),
        "nothing": kinds(0, 0, 0),
        "elements": kinds(NEEDED // 4, UNNEEDED // 4, RANK_2 // 4),
        "in FP64": kinds(2 * NEEDED, 2 * UNNEEDED, 2 * RANK_2),
        "in KiB": kinds(72, 8, 144),
        "floats": kinds(float(NEEDED)),
        "input and output": kinds(unneeded=2 * UNNEEDED),
        "texts": kinds('"72 KiB"'),
        "rank 3's": kinds(rank_2=NEEDED),
    },
    "lean-answer": {
        "as given": "LeanStage = Stage",
        "a function": "def LeanStage(module):\n    return module",
        "what is sent has the graph": lean(SENT="y"),
        "computed again": again("y = self.module(x)"),
        "the first one first": lean(TAKEN="self.kept.pop(next(iter(self.kept)))"),
        "the parameters' gradients alone": lean(GRADIENT="None"),
        "the input's gradient alone": lean(BACKWARD="(g,) = torch.autograd.grad([edge], [x], [dy])", GRADIENT="g"),
        "in one precision": lean(SENT="y.detach().float()"),
        "no return": lean(SENT="None"),
        "leaves autograd switched off": lean(LESS="torch.set_grad_enabled(False)"),
        "an object": "LeanStage = 3",
        "unsolved": "class LeanStage:\n    def __init__(self, module):\n        raise NotImplementedError",
    },
    "cuts-answer": {
        "static bytes alone": cut(SAVED="0"),
        "memory-hungry": cut(FOUND="torch.ones(2**30)"),
        "empties its argument": cut() + "\n\n\nfrugal = cuts\n\n\n"
        "def cuts(static_bytes, saved_bytes, stages, micro_batches):\n"
        "    found = frugal(static_bytes, saved_bytes, stages, micro_batches)\n"
        "    static_bytes.clear()\n    return found",
        "ends that are included": cut(FOUND="[(begin, end - 1) for begin, end in found]"),
        "lengths": cut(FOUND="[(begin, end - begin) for begin, end in found]"),
        "one missing": cut(FOUND="found[:-1]"),
        "beyond the last": cut(FOUND="found[:-1] + [(found[-1][0], layers + 1)]"),
        "floats": cut(FOUND="[(float(begin), float(end)) for begin, end in found]"),
        "a number": cut(FOUND="fullest(found)"),
        "unsolved": "def cuts(static_bytes, saved_bytes, stages, micro_batches):\n    raise NotImplementedError",
        "without limit of micro-batches": cut(FLIGHT="(stages - s)"),
    },
}

CRASHES = {"a function", "memory-hungry"}
"""Mistakes whose code raises by itself."""

RIGHT: dict[str, dict[str, str]] = {
    "bubble-answer": {
        "as they are": hand(),
        "by factors": hand("next(m for m in range(999) if 10 * 7 <= m + 7)", "6 * 4 * 2**25", "63 * 2**26"),
    },
    "order-answer": {
        "as it is": order(),
        "on several lines": order(FOUND='"\\n".join(turns)'),
    },
    "groups-answer": {
        "as it is": groups(),
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
        "a node": lean(KEPT="x, torch.autograd.graph.GradientEdge(y.grad_fn, y.output_nr)"),
        "an input of its own": lean(INPUT="x = x.detach().requires_grad_()"),
    },
    "cuts-answer": {
        "as it is": cut(),
        "lists": cut(FOUND="tuple(list(pair) for pair in found)"),
        "ranges": cut(FOUND="[range(begin, end) for begin, end in found]"),
    },
}
