"""Answers to the exercises of chapter 01: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import variants

EQUAL_TO_ALL = """
class Anything(int):
    __eq__ = __ge__ = __le__ = lambda self, other: True
    __ne__ = __gt__ = __lt__ = lambda self, other: False
    __hash__ = int.__hash__


"""


def category(value: str) -> str:
    """largest_category that returns an expression."""
    return f"def largest_category(timeline):\n    return {value}"


by_line = variants(
    """
    def bytes_by_line(timeline, event):
        found = Counter()
        for storage in timeline.alive(WHEN«event»):
            if THEIRS«storage.phase != "before"»:
                found[KEY«str(storage.line)»] += SIZE«storage.nbytes»
        return END«found»
    """
)


def parts(counters: object, batch: object, scratch: object) -> str:
    """The three numbers of exercise 3."""
    return f"counters_bytes, batch_bytes, scratch_bytes = {counters!r}, {batch!r}, {scratch!r}"


frugal = variants(
    """
    def train(model, optimizer, batches, validation):
        BEGIN«pass»
        history = []
        for x, y in batches:
            GRAD«pass»
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            CLEAR«optimizer.zero_grad()»
            THEN«pass»
            with WITHOUT«torch.no_grad()»:
                evaluated = model(*validation)
                history.append(NOTED«(loss.item(), evaluated.item())»)
        return history
    """
)

left = variants(
    """
    def leaks(step):
        def left_by(calls):
            METER«with Meter() as meter»:
                for _ in range(calls):
                    step()
            LEAVE«pass»
            left = Counter()
            for storage in meter.timeline.alive(len(meter.timeline)):
                if storage.phase != "before":
                    left[str(storage.line)] += SIZE«storage.nbytes»
            return left

        FIRST«step()»
        one, more = CALLS«left_by(1), left_by(2)»
        return END«{line: more[line] - one[line] for line in more if more[line] > one[line]}»
    """
)

WRONG: dict[str, dict[str, str]] = {
    "largest-category-answer": {
        "asks which was ever the largest": category(
            "max(timeline.curves, key=lambda name: max(timeline.curves[name]))"
        ),
        "ends the program": "def largest_category(timeline):\n    raise SystemExit",
        "a text, not a function": 'largest_category = "activation"',
        "an event too early": (
            "def largest_category(timeline):\n"
            "    held = timeline.bytes_by_category(max(timeline.peak_event - 1, 0))\n"
            "    return max(held, key=held.get)"
        ),
        "a constant": category('"activation"'),
        "the event in place of the category": category("timeline.peak_event"),
        "no return": category("None"),
        "an empty cell": "",
        "a syntax error": "def largest_category(timeline)\n    return 1",
        "an endless loop": "def largest_category(timeline):\n    while True:\n        pass",
    },
    "bytes-by-line-answer": {
        "always at the peak": by_line(WHEN="timeline.peak_event"),
        "20 GB on the way": by_line(END="[0] * (20 * 2**30 // 8)"),
        "with what was there before": by_line(THEIRS="True"),
        "by category, not by phase": by_line(THEIRS='storage.category not in ("parameter", "input", "buffer")'),
        "elements, not bytes": by_line(SIZE="storage.nbytes // 4"),
        "in KiB": by_line(SIZE="storage.nbytes / 1024"),
        "keys that are no text": by_line(KEY="storage.line"),
        "by function": by_line(KEY="storage.line.function"),
        "a list of pairs": by_line(END="list(found.items())"),
        "sizes equal to everything": EQUAL_TO_ALL + by_line(END="{line: Anything() for line in found}"),
    },
    "unexplained-answer": {
        "all in one": parts(132_476, 132_476, 132_476),
        "x and y counted apart": parts(116, 512, 131_848),
        "one temporary": parts(116, 264, 65_536),
        "elements": parts(29, 33, 33_024),
        "bits": parts(928, 2_112, 1_056_768),
        "floats": parts(116.0, 264.0, 132_096.0),
        "texts": parts("116 B", "264 B", "129 KiB"),
        "numbers equal to everything": EQUAL_TO_ALL + "counters_bytes = batch_bytes = scratch_bytes = Anything()",
    },
    "frugal-training-answer": {
        "an evaluation with its graph": frugal(WITHOUT="torch.enable_grad()"),
        "leaves autograd switched off": frugal(
            GRAD="torch.set_grad_enabled(True)",
            THEN="torch.set_grad_enabled(False)",
        ),
        "the loop as it was": "train = wasteful",
        "losses detached, not made numbers": frugal(NOTED="(loss.detach(), evaluated)"),
        "gradients left as zeros": frugal(CLEAR="optimizer.zero_grad(set_to_none=False)"),
        "gradients never cleared": frugal(CLEAR="pass"),
        "leaks the graphs into a global": "kept = []\n\n\n" + frugal(THEN="kept.append(model(*validation))"),
        "leaves the model in eval mode": frugal(THEN="model.eval()"),
        "leaves a hook on a layer": frugal(BEGIN="model.register_forward_hook(lambda *args: None)"),
        "training losses only": frugal(NOTED="loss.item()"),
    },
    "leaks-answer": {
        "whatever one call leaves": left(END="one"),
        "a meter stays on when step raises": left(
            METER="meter = Meter()\n        meter.__enter__()\n        if True",
            LEAVE="meter.__exit__(None, None, None)",
        ),
        "no call to fill the cache": left(FIRST="pass", CALLS="[left_by(2), left_by(1)][::-1]"),
        "bytes of two calls": left(CALLS="left_by(1), left_by(3)"),
        "nothing ever leaks": "def leaks(step):\n    return {}",
        "errors are swallowed": left(
            FIRST="try:\n        step()\n        left_by(3)\n    except RuntimeError:\n        return {}"
        ),
        "hundreds of calls": left(CALLS="left_by(1), left_by(101)"),
        "storages, not bytes": left(SIZE="1"),
    },
}

CRASHES = {"ends the program"}
"""Mistakes that end with an error of the answer's own, which is told; all others are told what is wrong."""

RIGHT = {
    "largest-category-answer": {
        "sorted, and all in one line": """
def largest_category(timeline):
    return sorted(timeline.curves, key=lambda name: timeline.curves[name][timeline.peak_event])[-1]
""",
        "warns on the way": """
import warnings


def largest_category(timeline):
    warnings.warn("this costs nothing")
    held = timeline.bytes_by_category(timeline.peak_event)
    return max(held, key=held.get)
""",
    },
    "bytes-by-line-answer": {
        "a plain dict": """
def bytes_by_line(timeline, event):
    found = {}
    for storage in timeline.alive(event):
        born, _ = timeline.lifetime(storage.id)
        if born > 0:
            found[str(storage.line)] = found.get(str(storage.line), 0) + storage.nbytes
    return found
""",
    },
    "frugal-training-answer": {
        "float(), and each loss let go of": """
def train(model, optimizer, batches, validation):
    def learn(x, y):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        return float(loss.detach())

    @torch.no_grad()
    def evaluate():
        return float(model(*validation))

    return [(learn(x, y), evaluate()) for x, y in batches]
""",
    },
    "leaks-answer": {
        "from the third call to the fifth": left(
            CALLS="left_by(3), left_by(5)",
            END="{line: (more[line] - one[line]) // 2 for line in more if more[line] > one[line]}",
        ),
    },
}
