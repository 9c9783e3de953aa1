"""Wrong and right answers to the exercises of chapter 01: by answer cell, what is done in words, and its source."""

EQUAL_TO_ALL = """
class Anything(int):
    __eq__ = __ge__ = __le__ = lambda self, other: True
    __ne__ = __gt__ = __lt__ = lambda self, other: False
    __hash__ = int.__hash__
"""

LEFT_BY = """
def leaks(step):
    def left_by(calls):
        with Meter() as meter:
            for _ in range(calls):
                step()
        left = Counter()
        for storage in meter.timeline.alive(len(meter.timeline)):
            if storage.phase != "before":
                left[str(storage.line)] += storage.nbytes
        return left
"""
LEARN = """
def train(model, optimizer, batches, validation):
    history = []
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""

WRONG = {
    "largest-category-answer": {
        "asks at the end, not at the peak": """
def largest_category(timeline):
    held = timeline.bytes_by_category(len(timeline))
    return max(held, key=held.get)
""",
        "asks which was ever the largest": """
def largest_category(timeline):
    return max(timeline.curves, key=lambda name: max(timeline.curves[name]))
""",
        "an event too early": """
def largest_category(timeline):
    held = timeline.bytes_by_category(max(timeline.peak_event - 1, 0))
    return max(held, key=held.get)
""",
        "an event too late": """
def largest_category(timeline):
    held = timeline.bytes_by_category(min(timeline.peak_event + 1, len(timeline)))
    return max(held, key=held.get)
""",
        "a constant": """
def largest_category(timeline):
    return "activation"
""",
        "prints and returns nothing": """
def largest_category(timeline):
    held = timeline.bytes_by_category(timeline.peak_event)
    print(max(held, key=held.get))
""",
        "a text, not a function": 'largest_category = "activation"',
        "the event in place of the category": """
def largest_category(timeline):
    return timeline.peak_event
""",
        "an endless loop": """
def largest_category(timeline):
    while True:
        pass
""",
        "an endless loop that catches what stops it once": """
def largest_category(timeline):
    while True:
        try:
            while True:
                pass
        except Exception:
            pass
""",
        "ends the program": """
def largest_category(timeline):
    raise SystemExit
""",
        "a syntax error": "def largest_category(timeline)\n    return 1",
        "an empty cell": "",
    },
    "bytes-by-line-answer": {
        "with what was there before": """
def bytes_by_line(timeline, event):
    found = Counter()
    for storage in timeline.alive(event):
        found[str(storage.line)] += storage.nbytes
    return found
""",
        "by category, not by phase": """
def bytes_by_line(timeline, event):
    found = Counter()
    for storage in timeline.alive(event):
        if storage.category not in ("parameter", "input", "buffer"):
            found[str(storage.line)] += storage.nbytes
    return found
""",
        "always at the peak": """
def bytes_by_line(timeline, event):
    found = Counter()
    for storage in timeline.alive(timeline.peak_event):
        if storage.phase != "before":
            found[str(storage.line)] += storage.nbytes
    return found
""",
        "elements, not bytes": """
def bytes_by_line(timeline, event):
    found = Counter()
    for storage in timeline.alive(event):
        if storage.phase != "before":
            found[str(storage.line)] += storage.nbytes // 4
    return found
""",
        "in KiB": """
def bytes_by_line(timeline, event):
    found = Counter()
    for storage in timeline.alive(event):
        if storage.phase != "before":
            found[str(storage.line)] += storage.nbytes / 1024
    return found
""",
        "the last storage of each line only": """
def bytes_by_line(timeline, event):
    return {str(s.line): s.nbytes for s in timeline.alive(event) if s.phase != "before"}
""",
        "forward only": """
def bytes_by_line(timeline, event):
    found = Counter()
    for storage in timeline.alive(event):
        if storage.phase == "forward":
            found[str(storage.line)] += storage.nbytes
    return found
""",
        "by function": """
def bytes_by_line(timeline, event):
    found = Counter()
    for storage in timeline.alive(event):
        if storage.phase != "before":
            found[storage.line.function] += storage.nbytes
    return found
""",
        "keys that are no text": """
def bytes_by_line(timeline, event):
    found = Counter()
    for storage in timeline.alive(event):
        if storage.phase != "before":
            found[storage.line] += storage.nbytes
    return found
""",
        "a list of pairs": """
def bytes_by_line(timeline, event):
    return [(str(s.line), s.nbytes) for s in timeline.alive(event) if s.phase != "before"]
""",
        "sizes equal to everything": EQUAL_TO_ALL
        + """
def bytes_by_line(timeline, event):
    return {str(s.line): Anything() for s in timeline.alive(event) if s.phase != "before"}
""",
        "20 GB on the way": """
def bytes_by_line(timeline, event):
    return [0] * (20 * 2**30 // 8)
""",
    },
    "unexplained-answer": {
        "all in one": "counters_bytes, batch_bytes, scratch_bytes = 132_476, 132_476, 132_476",
        "x and y counted apart": "counters_bytes, batch_bytes, scratch_bytes = 116, 512, 131_848",
        "one temporary": "counters_bytes, batch_bytes, scratch_bytes = 116, 264, 65_536",
        "the parameter before forgotten": "counters_bytes, batch_bytes, scratch_bytes = 116, 264, 131_072",
        "elements": "counters_bytes, batch_bytes, scratch_bytes = 29, 33, 33_024",
        "bits": "counters_bytes, batch_bytes, scratch_bytes = 928, 2_112, 1_056_768",
        "floats": "counters_bytes, batch_bytes, scratch_bytes = 116.0, 264.0, 132_096.0",
        "texts": "counters_bytes, batch_bytes, scratch_bytes = '116 B', '264 B', '129 KiB'",
        "numbers equal to everything": EQUAL_TO_ALL + "counters_bytes = batch_bytes = scratch_bytes = Anything()",
        "swapped": "counters_bytes, batch_bytes, scratch_bytes = 264, 116, 132_096",
    },
    "frugal-training-answer": {
        "the loop as it was": "train = wasteful",
        "losses detached, not made numbers": LEARN
        + """        with torch.no_grad():
            history.append((loss.detach(), model(*validation)))
    return history
""",
        "an evaluation with its graph": LEARN
        + """        history.append((loss.item(), model(*validation).item()))
    return history
""",
        "model.eval() in place of no_grad": """
def train(model, optimizer, batches, validation):
    history = []
    for x, y in batches:
        model.train()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        history.append((loss.item(), model(*validation).item()))
    return history
""",
        "gradients left as zeros": """
def train(model, optimizer, batches, validation):
    history = []
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            history.append((loss.item(), model(*validation).item()))
    return history
""",
        "evaluates before the step": """
def train(model, optimizer, batches, validation):
    history = []
    for x, y in batches:
        with torch.no_grad():
            evaluated = model(*validation).item()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss.item(), evaluated))
    return history
""",
        "gradients cleared only before the next step": """
def train(model, optimizer, batches, validation):
    history = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            history.append((loss.item(), model(*validation).item()))
    optimizer.zero_grad()
    return history
""",
        "gradients never cleared": """
def train(model, optimizer, batches, validation):
    history = []
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            history.append((loss.item(), model(*validation).item()))
    return history
""",
        "leaks the graphs into a global": """
kept = []


def train(model, optimizer, batches, validation):
    history = []
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        evaluated = model(*validation)
        kept.append(evaluated)
        history.append((loss.item(), evaluated.item()))
    return history
""",
        "leaves autograd switched off": """
def train(model, optimizer, batches, validation):
    history = []
    for x, y in batches:
        torch.set_grad_enabled(True)
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.set_grad_enabled(False)
        history.append((loss.item(), model(*validation).item()))
    return history
""",
        "leaves the model in eval mode": LEARN
        + """        model.eval()
        with torch.no_grad():
            history.append((loss.item(), model(*validation).item()))
    return history
""",
        "leaves a hook on a layer": "def train(model, optimizer, batches, validation):\n"
        "    model.register_forward_hook(lambda *args: None)\n"
        "    return learned(model, optimizer, batches, validation)\n"
        + LEARN.replace("train", "learned")
        + """        with torch.no_grad():
            history.append((loss.item(), model(*validation).item()))
    return history
""",
        "leaves a hook on a weight": "def train(model, optimizer, batches, validation):\n"
        "    next(model.parameters()).register_hook(lambda grad: None)\n"
        "    return learned(model, optimizer, batches, validation)\n"
        + LEARN.replace("train", "learned")
        + """        with torch.no_grad():
            history.append((loss.item(), model(*validation).item()))
    return history
""",
        "training losses only": LEARN
        + """        history.append(loss.item())
    return history
""",
    },
    "leaks-answer": {
        "whatever one call leaves": """
def leaks(step):
    step()
    with Meter() as meter:
        step()
    found = Counter()
    for storage in meter.timeline.alive(len(meter.timeline)):
        if storage.phase != "before":
            found[str(storage.line)] += storage.nbytes
    return found
""",
        "no call to fill the cache": LEFT_BY
        + """
    two, one = left_by(2), left_by(1)
    return {line: nbytes - one[line] for line, nbytes in two.items() if nbytes > one[line]}
""",
        "bytes of two calls": LEFT_BY
        + """
    step()
    one, three = left_by(1), left_by(3)
    return {line: three[line] - one[line] for line in three if three[line] > one[line]}
""",
        "nothing ever leaks": "def leaks(step):\n    return {}",
        "errors are swallowed": """
def leaks(step):
    def left_by(calls):
        left = Counter()
        with Meter() as meter:
            for _ in range(calls):
                step()
        for storage in meter.timeline.alive(len(meter.timeline)):
            if storage.phase != "before":
                left[str(storage.line)] += storage.nbytes
        return left

    try:
        step()
        one, two = left_by(1), left_by(2)
    except RuntimeError:
        return {}
    return {line: two[line] - one[line] for line in two if two[line] > one[line]}
""",
        "a meter stays on when step raises": """
def leaks(step):
    def left_by(calls):
        meter = Meter()
        meter.__enter__()
        for _ in range(calls):
            step()
        meter.__exit__(None, None, None)
        left = Counter()
        for storage in meter.timeline.alive(len(meter.timeline)):
            if storage.phase != "before":
                left[str(storage.line)] += storage.nbytes
        return left

    one, two, three = left_by(1), left_by(1), left_by(2)
    return {line: three[line] - two[line] for line in three if three[line] > two[line]}
""",
        "a meter stays on when a later call raises": """
def leaks(step):
    def left_by(calls):
        meter = Meter()
        meter.__enter__()
        for _ in range(calls):
            step()
        meter.__exit__(None, None, None)
        left = Counter()
        for storage in meter.timeline.alive(len(meter.timeline)):
            if storage.phase != "before":
                left[str(storage.line)] += storage.nbytes
        return left

    step()
    one, two = left_by(1), left_by(2)
    return {line: two[line] - one[line] for line in two if two[line] > one[line]}
""",
        "errors of later calls are swallowed": LEFT_BY
        + """
    step()
    try:
        one, two = left_by(1), left_by(2)
    except RuntimeError:
        return {}
    return {line: two[line] - one[line] for line in two if two[line] > one[line]}
""",
        "hundreds of calls": LEFT_BY
        + """
    step()
    one, many = left_by(1), left_by(101)
    return {line: (many[line] - one[line]) // 100 for line in many if many[line] > one[line]}
""",
        "storages, not bytes": """
def leaks(step):
    def left_by(calls):
        with Meter() as meter:
            for _ in range(calls):
                step()
        return Counter(str(s.line) for s in meter.timeline.alive(len(meter.timeline)) if s.phase != "before")

    step()
    one, two = left_by(1), left_by(2)
    return {line: two[line] - one[line] for line in two if two[line] > one[line]}
""",
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
        "from the third call to the fifth": LEFT_BY
        + """
    step()
    few, more = left_by(3), left_by(5)
    return {line: (more[line] - few[line]) // 2 for line in more if more[line] > few[line]}
""",
    },
}
