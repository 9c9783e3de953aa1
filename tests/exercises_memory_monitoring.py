"""Answers to the exercises of chapter 05: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import cell, variants

ROUNDING, CACHED, CONTEXT = 6_996_096, 887_046_144, 509_607_936


def left(value: str, grows: str = "growth_bytes > 0") -> str:
    """steps_left that returns an expression where something grows."""
    return cell(
        """
        def steps_left(end_bytes, peak_bytes, growth_bytes, budget):
            if not GROWS:
                return math.inf
            budget_bytes = parse_bytes(budget)
            return VALUE
        """,
        GROWS=grows,
        VALUE=value,
    )


def parts(rounding: object = ROUNDING, cached: object = CACHED, context: object = CONTEXT) -> str:
    """The three numbers of exercise 2."""
    return f"rounding_bytes, cached_bytes, context_bytes = {rounding}, {cached}, {context}"


silent = variants(
    """
    def silent_steps(segments, nbytes):
        block = -(-nbytes // 512) * 512
        pool = "small" if SMALL«block <= MiB» else "large"
        mine = [segment for segment in segments if segment["segment_type"] == pool]
        sizes = [b["size"] for segment in mine for b in segment["blocks"] if b["state"] == "inactive"]
        found = FOUND«sum(size // block for size in sizes)»
        return END«found»
    """
)


floor = variants(
    """
    def floor_growth(ends, period):
        BEGIN«pass»
        late = LATE«ends[len(ends) // 4 :]»
        stretches = STRETCHES«len(late) // period»
        floors = [min(late[k * period : (k + 1) * period]) for k in range(stretches)]
        slopes = [(floors[j] - floors[i]) / ((j - i) * period) for j in range(stretches) for i in range(j)]
        return FOUND«sorted(slopes)[len(slopes) // 2]»
    """
)


mended = variants(
    """
    class Mended(Trainer):
        def ramp(self, n, rows):
            BOUND«pass»
            if KEY«rows» not in self.ramps:
                self.ramps[KEY] = torch.linspace(0.5, 1, rows)[:, None]
            return self.ramps[KEY]

        def step(self, n):
            x, y = self.batches[n % len(self.batches)]
            seen = []
            hook = self.model.layers[0].register_forward_hook(lambda layer, args, out: seen.append(out.detach()))
            loss = self.model(x * self.ramp(n, len(x)), y)
            TAKE_OFF«hook.remove()»
            norm = seen[0].norm().item()
            loss.backward()
            descend(self.model)
            RECENT«self.recent.append(loss.detach())»
            evaluated = EVALUATE«self.model(*self.validation).item()»
            self.average = 0.9 * self.average + 0.1 * evaluated
            return END«loss.item(), norm, float(self.average)»
    """
)


def alarmed(then: str = "max(1, run.micro_batch // 2)", said: str = "run.micro_batch != before") -> str:
    """on_alarm with what micro_batch becomes, and what is returned."""
    return cell(
        """
        def on_alarm(run, alarm):
            before = run.micro_batch
            run.micro_batch = THEN
            return SAID
        """,
        THEN=then,
        SAID=said,
    )


step = variants(
    """
    def step(run, x, y):
        mean = 0.0
        BEGIN«pass»
        for first in range(0, len(x), run.micro_batch):
            rows = slice(first, first + run.micro_batch)
            loss = run.model(x[rows], y[rows]) * (SHARE«len(x[rows]) / len(x)»)
            BACKWARD«loss.backward()»
            AFTER«pass»
            mean += loss.item()
        FINALLY«pass»
        return END«mean»
    """
)


sampler = variants(
    """
    import time


    class Sampler:

        def __init__(self, read, every, most):
            self.read, self.every, self.left = read, every, threading.Event()
            self.samples, self.errors = SAMPLES«deque(maxlen=most)», 0
            self.thread = threading.Thread(target=self.watch, daemon=DAEMON«True»)
            INIT«pass»

        def __enter__(self):
            ENTER«self.thread.start()»
            return ENTERED«self»

        def __exit__(self, *error):
            self.left.set()
            JOIN«self.thread.join()»
            EXIT«return None»

        def watch(self):
            while WAIT«not self.left.wait(self.every)»:
                try:
                    SAMPLE«self.samples.append(self.read())»
                except Exception:
                    COUNT«self.errors += 1»
                TRIED«pass»
    """
)


WRONG: dict[str, dict[str, str]] = {
    "steps-left-answer": {
        "from the end": left("(budget_bytes - end_bytes) // growth_bytes"),
        "memory-hungry": left("len([0] * (20 * 2**30 // 8))"),
        "a budget that is a text": left("(budget - peak_bytes) // growth_bytes"),
        "rounded up": left("-(-(budget_bytes - peak_bytes) // growth_bytes)"),
        "a float": left("(budget_bytes - peak_bytes) / growth_bytes"),
        "a shrinking one is full": left("(budget_bytes - peak_bytes) // growth_bytes", "growth_bytes != 0"),
        "a number": "steps_left = 1024",
        "unsolved": "def steps_left(end_bytes, peak_bytes, growth_bytes, budget):\n    raise NotImplementedError",
        "rounded": left("round((budget_bytes - peak_bytes) / growth_bytes)"),
        "none where nothing grows": left("(budget_bytes - peak_bytes) // growth_bytes").replace("math.inf", "None"),
    },
    "unexplained-answer": {
        "in MiB": parts(ROUNDING, CACHED, 486),
        "the largest free block": parts(ROUNDING, "card.largest_free_bytes"),
        "twice": parts(ROUNDING, CACHED, 2 * CONTEXT),
        "half": parts(ROUNDING, CACHED // 2),
        "bits": parts(8 * ROUNDING),
        "floats": parts(float(ROUNDING)),
        "texts": parts('"6,996,096"'),
        "the last one unsolved": parts(context=0),
    },
    "silent-answer": {
        "one for each free block": silent(FOUND="sum(size >= block for size in sizes)"),
        "memory-hungry": silent(END="len([0] * (20 * 2**30 // 8))"),
        "the step that shows it": silent(END="found + 1"),
        "a float": silent(FOUND="sum(sizes) / block"),
        "changes the snapshot": silent(END="(found, segments.clear())[0]"),
        "tried out with tensors": silent(END="len([torch.empty(1) for _ in range(found)])"),
        "a list": silent(END="sizes"),
        "unsolved": "def silent_steps(segments, nbytes):\n    raise NotImplementedError",
        "the small pool": silent(SMALL="True"),
        "below 1 MiB": silent(SMALL="block < MiB"),
        "free blocks in one": silent(FOUND="sum(sizes) // block"),
    },
    "floor-answer": {
        "with the warm-up": floor(LATE="ends", FOUND="(floors[-1] - floors[0]) / ((len(floors) - 1) * period)"),
        "memory-hungry": floor(BEGIN="hoard = [0] * (20 * 2**30 // 8)"),
        "first and last after the warm-up": floor(FOUND="(late[-1] - late[0]) / (len(late) - 1)"),
        "the flattest": floor(FOUND="min(slopes)"),
        "not a number": floor(FOUND="math.nan"),
        "sorts what it is given": floor(BEGIN="ends.sort()"),
        "unsolved": "def floor_growth(ends, period):\n    raise NotImplementedError",
        "an endless loop": floor(FOUND="[0 for _ in iter(int, 1)]"),
        "never below zero": floor(FOUND="max(0, sorted(slopes)[len(slopes) // 2])"),
        "a cut-off stretch as well": floor(
            STRETCHES="-(-len(late) // period)", FOUND="(floors[-1] - floors[0]) / ((len(floors) - 1) * period)"
        ),
    },
    "mended-answer": {
        "ramps by step": mended(KEY="n"),
        "leaves autograd switched off": mended(
            RECENT="self.recent.append(loss.detach()); torch.set_grad_enabled(n < 23)"
        ),
        "memory-hungry": mended(TAKE_OFF="hook.remove(); torch.ones(2**30)"),
        "not a number": mended(END="math.nan, norm, float(self.average)"),
        "a backward hook at each step left": mended(
            EVALUATE="self.model.register_full_backward_hook(lambda *args: None) "
            "and self.model(*self.validation).item()"
        ),
        "recent averages": mended(RECENT="self.recent.append(self.average)"),
        "no cache": mended(BOUND="return torch.linspace(0.5, 1, rows)[:, None]"),
        "tensors": mended(END="loss, norm, self.average"),
        "a number": "Mended = 3",
        "as given": "Mended = Trainer",
        "the hooks left": mended(TAKE_OFF="pass"),
    },
    "on-alarm-answer": {
        "a number": "on_alarm = 32",
        "memory-hungry": alarmed("len([0] * (20 * 2**30 // 8))"),
        "growth alone": alarmed('max(1, run.micro_batch // 2) if alarm.kind == "growth" else before'),
        "a float": alarmed("max(1, run.micro_batch / 2)"),
        "one more attribute": alarmed("max(1, run.micro_batch // 2)\n    run.alarms = 1"),
        "always changed": alarmed(said="True"),
        "never changed": alarmed(said="False"),
        "unsolved": "def on_alarm(run, alarm):\n    raise NotImplementedError",
        "to two at least": alarmed("max(2, run.micro_batch // 2)"),
        "rounded up": alarmed("-(-run.micro_batch // 2)"),
    },
    "step-answer": {
        "a graph that grows": step(BEGIN="whole = 0.0", BACKWARD="whole = whole + loss", FINALLY="whole.backward()"),
        "memory-hungry": step(BEGIN="torch.ones(2**30)"),
        "leaves a hook on the model": step(BEGIN="run.model.register_forward_hook(lambda *args: None)"),
        "by the rows": step(SHARE="1 / len(x)"),
        "not a number": step(END="math.nan"),
        "losses left": "LEFT = []\n" + step(AFTER="LEFT.append(loss.detach())"),
        "a step as well": step(FINALLY="descend_ = [p.data.sub_(0.1 * p.grad) for p in run.model.parameters()]"),
        "forward in FP32": step(FINALLY="run.model.float()"),
        "micro_batch halved": step(FINALLY="run.micro_batch = max(1, run.micro_batch // 2)"),
        "no backward": step(BACKWARD="pass"),
        "no return": step(END="None"),
        "a number": "step = 32",
        "leaves autograd switched off": step(FINALLY="torch.set_grad_enabled(run.micro_batch != 48)"),
        "unsolved": "def step(run, x, y):\n    raise NotImplementedError",
    },
    "sampler-answer": {
        "no thread": sampler(ENTER="self.samples.append(self.read())", JOIN="pass"),
        "memory-hungry": sampler(INIT="[0] * (20 * 2**30 // 8)"),
        "begun by its making": sampler(INIT="self.thread.start()", ENTER="pass"),
        "unbounded": sampler(SAMPLES="[]"),
        "one too few": sampler(SAMPLES="deque(maxlen=max(1, most - 1))"),
        "errors not counted": sampler(COUNT="pass"),
        "swallows what the block raised": sampler(EXIT="return True"),
        "raises another error": sampler(EXIT="if error[1]: raise RuntimeError('the block has raised')"),
        "enters as None": sampler(ENTERED="None"),
        "a last look when the block is left": sampler(JOIN="self.thread.join(); self.samples.append(self.read())"),
        "without an exit": "class Sampler:\n    def __init__(self, read, every, most):\n        self.samples = deque()",
        "a number": "Sampler = 3",
        "the sample before, where there is none": sampler(
            COUNT="self.errors += 1; self.samples and self.samples.append(self.samples[-1])"
        ),
        "milliseconds": sampler(WAIT="not self.left.wait(self.every / 1000)"),
        "hours": sampler(WAIT="not self.left.wait(3600 * self.every)"),
        "stops after a sleep": sampler(WAIT="not self.left.is_set()", TRIED="time.sleep(self.every)"),
    },
}

CRASHES = {"a budget that is a text", "memory-hungry"}
"""Mistakes whose code raises by itself."""

RIGHT: dict[str, dict[str, str]] = {
    "steps-left-answer": {
        "as it is": left("(budget_bytes - peak_bytes) // growth_bytes"),
        "by divmod": left("divmod(budget_bytes - peak_bytes, growth_bytes)[0]"),
        "by another infinity": left("(budget_bytes - peak_bytes) // growth_bytes").replace("math.inf", 'float("inf")'),
    },
    "unexplained-answer": {
        "as they are": parts(),
        "the card's own counters": parts(
            "card.allocated_bytes - card.requested_bytes",
            "card.reserved_bytes - card.allocated_bytes",
            "nvidia_smi_bytes - card.reserved_bytes",
        ),
    },
    "silent-answer": {
        "as it is": silent(),
    },
    "floor-answer": {
        "as it is": floor(),
        "first and last floor": floor(FOUND="(floors[-1] - floors[0]) / ((len(floors) - 1) * period)"),
        "a third left out": floor(LATE="ends[len(ends) // 3 :]"),
        "rounded": floor(FOUND="round(sorted(slopes)[len(slopes) // 2])"),
    },
    "mended-answer": {
        "as it is": mended(),
        "detached": mended(EVALUATE="self.model(*self.validation).detach()"),
        "one hook for all": cell(
            """
            class Mended(Trainer):
                def __init__(self, model, batches, validation):
                    super().__init__(model, batches, validation)
                    self.model.layers[0].register_forward_hook(self.note)

                def note(self, layer, args, output):
                    self.norm = output.detach().norm().item()

                def ramp(self, n, rows):
                    return super().ramp(0, rows)

                def step(self, n):
                    x, y = self.batches[n % len(self.batches)]
                    loss = self.model(x * self.ramp(n, len(x)), y)
                    norm = self.norm
                    loss.backward()
                    descend(self.model)
                    self.recent.append(loss.detach())
                    self.average = 0.9 * self.average + 0.1 * self.model(*self.validation).item()
                    return loss.item(), norm, self.average
            """
        ),
        "losses as floats": mended(RECENT="self.recent.append(loss.item())"),
    },
    "on-alarm-answer": {
        "as it is": alarmed(),
        "in place": alarmed("run.micro_batch // 2 or 1"),
        "returns early": "def on_alarm(run, alarm):\n"
        "    if run.micro_batch > 1:\n        run.micro_batch //= 2\n        return True\n    return False",
    },
    "step-answer": {
        "as it is": step(),
        "by autograd's own gradient": step(
            SHARE="1", BACKWARD="loss.backward(torch.full_like(loss, len(x[rows]) / len(x)))"
        ).replace("loss.item()", "loss.item() * len(x[rows]) / len(x)"),
        "divided at the end": step(
            SHARE="len(x[rows])",
            FINALLY="[p.grad.div_(len(x)) for p in run.model.parameters()]",
            END="mean / len(x)",
        ),
    },
    "sampler-answer": {
        "as it is": sampler(),
        "no daemon": sampler(DAEMON="False"),
        "joins again until it has ended": sampler(JOIN="while self.thread.is_alive(): self.thread.join(timeout=1)"),
        "a look at first": sampler(WAIT="not self.left.is_set()", TRIED="self.left.wait(self.every)"),
    },
}
