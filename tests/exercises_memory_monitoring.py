"""Answers to the exercises of chapter 05: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import ANYTHING, cell

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


def silent(**changes: str) -> str:
    """silent_steps, right but for the changes."""
    terms = {
        "BLOCK": "-(-nbytes // 512) * 512",
        "SMALL": "block <= MiB",
        "MINE": 'segment["segment_type"] == pool',
        "FREE": 'b["state"] == "inactive"',
        "EACH": "size // block",
        "FOUND": "sum(EACH for size in sizes)",
        "END": "found",
    }
    return cell(
        """
        def silent_steps(segments, nbytes):
            block = BLOCK
            pool = "small" if SMALL else "large"
            sizes = [b["size"] for segment in segments if MINE for b in segment["blocks"] if FREE]
            found = FOUND
            return END
        """,
        **dict(sorted((terms | changes).items(), key=lambda term: term[0] != "FOUND")),
    )


def floor(**changes: str) -> str:
    """floor_growth, right but for the changes."""
    terms = {
        "BEGIN": "pass",
        "LATE": "ends[len(ends) // 4 :]",
        "STRETCHES": "len(late) // period",
        "LOWEST": "min(late[k * period : (k + 1) * period])",
        "SLOPE": "(floors[j] - floors[i]) / ((j - i) * period)",
        "FOUND": "sorted(slopes)[len(slopes) // 2]",
    }
    return cell(
        """
        def floor_growth(ends, period):
            BEGIN
            late = LATE
            stretches = STRETCHES
            floors = [LOWEST for k in range(stretches)]
            slopes = [SLOPE for j in range(stretches) for i in range(j)]
            return FOUND
        """,
        **terms | changes,
    )


def fitted(steps: str, ends: str) -> str:
    """floor_growth by least squares through some points."""
    return cell(
        """
        def floor_growth(ends, period):
            n = len(ends)
            xs, ys = list(STEPS), list(ENDS)
            x, y = sum(xs) / len(xs), sum(ys) / len(ys)
            return sum((a - x) * (b - y) for a, b in zip(xs, ys)) / sum((a - x) ** 2 for a in xs)
        """,
        STEPS=steps,
        ENDS=ends,
    )


def mended(**changes: str) -> str:
    """Mended, right but for the changes."""
    terms = {
        "INIT": "super().__init__(model, batches, validation)",
        "KEY": "rows",
        "MADE": "torch.linspace(0.5, 1, rows)[:, None]",
        "BOUND": "pass",
        "WATCH": "self.model.layers[0].register_forward_hook(lambda layer, args, out: seen.append(NOTED))",
        "NOTED": "out.detach()",
        "TAKE_OFF": "hook.remove()",
        "NORM": "seen[0].norm().item()",
        "LEARN": "descend(self.model)",
        "RECENT": "self.recent.append(loss.detach())",
        "EVALUATE": "self.model(*self.validation).item()",
        "AVERAGE": "0.9 * self.average + 0.1 * evaluated",
        "END": "loss.item(), norm, float(self.average)",
    }
    return cell(
        """
        class Mended(Trainer):
            def __init__(self, model, batches, validation):
                INIT

            def ramp(self, n, rows):
                BOUND
                if KEY not in self.ramps:
                    self.ramps[KEY] = MADE
                return self.ramps[KEY]

            def step(self, n):
                x, y = self.batches[n % len(self.batches)]
                seen = []
                hook = WATCH
                loss = self.model(x * self.ramp(n, len(x)), y)
                TAKE_OFF
                norm = NORM
                loss.backward()
                LEARN
                RECENT
                evaluated = EVALUATE
                self.average = AVERAGE
                return END
        """,
        **dict(sorted((terms | changes).items(), key=lambda term: term[0] != "WATCH")),
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


def step(**changes: str) -> str:
    """step, right but for the changes."""
    terms = {
        "BEGIN": "pass",
        "FIRSTS": "range(0, len(x), run.micro_batch)",
        "LAST": "first + run.micro_batch",
        "LOSS": "run.model(x[rows], y[rows])",
        "SHARE": "len(x[rows]) / len(x)",
        "BACKWARD": "loss.backward()",
        "AFTER": "pass",
        "ADD": "loss.item()",
        "FINALLY": "pass",
        "END": "mean",
    }
    return cell(
        """
        def step(run, x, y):
            mean = 0.0
            BEGIN
            for first in FIRSTS:
                rows = slice(first, LAST)
                loss = LOSS * (SHARE)
                BACKWARD
                AFTER
                mean += ADD
            FINALLY
            return END
        """,
        **terms | changes,
    )


def sampler(**changes: str) -> str:
    """Sampler, right but for the changes."""
    terms = {
        "SHARED": "pass",
        "SAMPLES": "deque(maxlen=most)",
        "INIT": "pass",
        "DAEMON": "True",
        "ENTERED": "self",
        "ENTER": "self.thread.start()",
        "STOP": "self.left.set()",
        "JOIN": "self.thread.join()",
        "EXIT": "return None",
        "WAIT": "not self.left.wait(self.every)",
        "CAUGHT": "Exception",
        "COUNT": "self.errors += 1",
        "SAMPLE": "self.samples.append(self.read())",
        "TRIED": "pass",
    }
    return cell(
        """
        import time


        class Sampler:
            SHARED

            def __init__(self, read, every, most):
                self.read, self.every, self.left = read, every, threading.Event()
                self.samples, self.errors = SAMPLES, 0
                self.thread = threading.Thread(target=self.watch, daemon=DAEMON)
                INIT

            def __enter__(self):
                ENTER
                return ENTERED

            def __exit__(self, *error):
                STOP
                JOIN
                EXIT

            def watch(self):
                while WAIT:
                    try:
                        SAMPLE
                    except CAUGHT:
                        COUNT
                    TRIED
        """,
        **terms | changes,
    )


WRONG: dict[str, dict[str, str]] = {
    "steps-left-answer": {
        "from the end": left("(budget_bytes - end_bytes) // growth_bytes"),
        "from an empty card": left("budget_bytes // growth_bytes"),
        "one too few": left("(budget_bytes - peak_bytes) // growth_bytes - 1"),
        "one too many": left("(budget_bytes - peak_bytes) // growth_bytes + 1"),
        "rounded up": left("-(-(budget_bytes - peak_bytes) // growth_bytes)"),
        "rounded": left("round((budget_bytes - peak_bytes) / growth_bytes)"),
        "peaks below the budget": left("(budget_bytes - peak_bytes - 1) // growth_bytes"),
        "twice": left("2 * (budget_bytes - peak_bytes) // growth_bytes"),
        "half": left("(budget_bytes - peak_bytes) // growth_bytes // 2"),
        "growth of end and of peak": left("(budget_bytes - peak_bytes) // (2 * growth_bytes)"),
        "peak and end": left("(budget_bytes - peak_bytes - end_bytes) // growth_bytes"),
        "GB for GiB": left(
            '(parse_bytes(budget.replace("GiB", "GB") if isinstance(budget, str) else budget) - peak_bytes)'
            " // growth_bytes"
        ),
        "GiB for GB": left(
            '(parse_bytes(budget.replace("GB", "GiB") if isinstance(budget, str) else budget) - peak_bytes)'
            " // growth_bytes"
        ),
        "a float": left("(budget_bytes - peak_bytes) / growth_bytes"),
        "a whole float": left("float((budget_bytes - peak_bytes) // growth_bytes)"),
        "none where nothing grows": left("(budget_bytes - peak_bytes) // growth_bytes").replace("math.inf", "None"),
        "0 where nothing grows": left("(budget_bytes - peak_bytes) // growth_bytes").replace("math.inf", "0"),
        "a shrinking one is full": left("(budget_bytes - peak_bytes) // growth_bytes", "growth_bytes != 0"),
        "divides by nothing": left("(budget_bytes - peak_bytes) // growth_bytes", "True"),
        "a budget that is a text": left("(budget - peak_bytes) // growth_bytes"),
        "hard-coded": left("1024"),
        "never": left("0", "False"),
        "in GiB": left("(budget_bytes // GiB - peak_bytes // GiB) // growth_bytes"),
        "no return": left("None"),
        "equal to everything": ANYTHING + left("Anything(3)"),
        "tried out in an endless loop": left("len([1 for _ in iter(lambda: peak_bytes <= budget_bytes, False)])"),
        "memory-hungry": left("len([0] * (20 * 2**30 // 8))"),
        "a number": "steps_left = 1024",
        "a syntax error": "def steps_left(end_bytes:\n    return 0",
        "an empty cell": "",
        "unsolved": "def steps_left(end_bytes, peak_bytes, growth_bytes, budget):\n    raise NotImplementedError",
    },
    "unexplained-answer": {
        "nothing": parts(0, 0, 0),
        "all is rounding": parts(ROUNDING + CACHED + CONTEXT, 0, 0),
        "all is cached": parts(ROUNDING, CACHED + CONTEXT),
        "rounding is cached": parts(ROUNDING, ROUNDING + CACHED),
        "all that is not reserved is context": parts(ROUNDING, CACHED, CACHED + CONTEXT),
        "swapped": parts(CACHED, ROUNDING),
        "context and cache swapped": parts(ROUNDING, CONTEXT, CACHED),
        "whole segments only": parts(ROUNDING, "CACHED - card.inactive_split_bytes".replace("CACHED", str(CACHED))),
        "split segments only": parts(ROUNDING, "card.inactive_split_bytes"),
        "the largest free block": parts(ROUNDING, "card.largest_free_bytes"),
        "allocated": parts("card.allocated_bytes"),
        "reserved": parts(ROUNDING, "card.reserved_bytes"),
        "what nvidia-smi shows": parts(ROUNDING, CACHED, "nvidia_smi_bytes"),
        "512 a block": parts(24 * 512),
        "one byte off": parts(ROUNDING + 1),
        "twice": parts(ROUNDING, CACHED, 2 * CONTEXT),
        "half": parts(ROUNDING, CACHED // 2),
        "bits": parts(8 * ROUNDING),
        "in MiB": parts(ROUNDING, CACHED, 486),
        "floats": parts(float(ROUNDING)),
        "texts": parts('"6,996,096"'),
        "negative": parts(-ROUNDING),
        "the last one unsolved": parts(context=0),
        "equal to everything": ANYTHING + parts(*["Anything(1)"] * 3),
        "unsolved": "rounding_bytes = cached_bytes = context_bytes = 0\nraise NotImplementedError",
    },
    "silent-answer": {
        "both pools": silent(MINE="True"),
        "the other pool": silent(MINE='segment["segment_type"] != pool'),
        "the large pool": silent(SMALL="False"),
        "the small pool": silent(SMALL="True"),
        "below 1 MiB": silent(SMALL="block < MiB"),
        "up to 2 MiB": silent(SMALL="block <= 2 * MiB"),
        "up to 10 MiB": silent(SMALL="block < 10 * MiB"),
        "free blocks in one": silent(FOUND="sum(sizes) // block"),
        "not rounded": silent(BLOCK="nbytes"),
        "rounded down": silent(BLOCK="max(512, nbytes // 512 * 512)"),
        "rounded to MiB": silent(BLOCK="-(-nbytes // MiB) * MiB"),
        "rounded to 4 KiB": silent(BLOCK="-(-nbytes // 4096) * 4096"),
        "the largest free block": silent(FOUND="max(sizes, default=0) // block"),
        "one for each free block": silent(EACH="(size >= block)"),
        "whole free segments": silent(MINE='segment["segment_type"] == pool and not segment["active_size"]'),
        "segments partly in use": silent(MINE='segment["segment_type"] == pool and segment["active_size"]'),
        "whole segments, in use or not": silent(FREE="True"),
        "blocks in use": silent(FREE='b["state"] != "inactive"'),
        "the step that shows it": silent(END="found + 1"),
        "one too few": silent(END="max(0, found - 1)"),
        "twice": silent(END="2 * found"),
        "half": silent(END="found // 2"),
        "a float": silent(FOUND="sum(sizes) / block"),
        "a whole float": silent(END="float(found)"),
        "bytes": silent(EACH="size"),
        "the number of free blocks": silent(END="len(sizes)"),
        "hard-coded": silent(END="828"),
        "none": silent(END="0"),
        "changes the snapshot": silent(END="(found, segments.clear())[0]"),
        "tried out with tensors": silent(END="len([torch.empty(1) for _ in range(found)])"),
        "a list": silent(END="sizes"),
        "no return": silent(END="None"),
        "equal to everything": ANYTHING + silent(END="Anything(found)"),
        "an endless loop": silent(END="[0 for _ in iter(int, 1)]"),
        "memory-hungry": silent(END="len([0] * (20 * 2**30 // 8))"),
        "a syntax error": "def silent_steps(segments:\n    return 0",
        "an empty cell": "",
        "unsolved": "def silent_steps(segments, nbytes):\n    raise NotImplementedError",
    },
    "floor-answer": {
        "first and last": floor(FOUND="(ends[-1] - ends[0]) / (len(ends) - 1)"),
        "first and last after the warm-up": floor(FOUND="(late[-1] - late[0]) / (len(late) - 1)"),
        "least squares": fitted("range(n)", "ends"),
        "least squares after the warm-up": fitted("range(n // 4, n)", "ends[n // 4 :]"),
        "highest of each stretch": floor(LOWEST="max(late[k * period : (k + 1) * period])"),
        "mean of each stretch": floor(LOWEST="sum(late[k * period : (k + 1) * period]) / period"),
        "median of each stretch": floor(LOWEST="sorted(late[k * period : (k + 1) * period])[period // 2]"),
        "first of each stretch": floor(LOWEST="late[k * period]"),
        "last of each stretch": floor(LOWEST="late[(k + 1) * period - 1]"),
        "with the warm-up": floor(LATE="ends", FOUND="(floors[-1] - floors[0]) / ((len(floors) - 1) * period)"),
        "the first tenth left out": floor(
            LATE="ends[len(ends) // 10 :]", FOUND="(floors[-1] - floors[0]) / ((len(floors) - 1) * period)"
        ),
        "stretches of half a period": floor(
            LOWEST="min(late[k * period : k * period + max(1, period // 2)])",
        ),
        "a cut-off stretch as well": floor(
            STRETCHES="-(-len(late) // period)", FOUND="(floors[-1] - floors[0]) / ((len(floors) - 1) * period)"
        ),
        "over all steps": floor(FOUND="(floors[-1] - floors[0]) / len(ends)"),
        "for each stretch": floor(SLOPE="(floors[j] - floors[i]) / (j - i)"),
        "in all": floor(FOUND="floors[-1] - floors[0]"),
        "the steepest": floor(FOUND="max(slopes)"),
        "the flattest": floor(FOUND="min(slopes)"),
        "never below zero": floor(FOUND="max(0, sorted(slopes)[len(slopes) // 2])"),
        "absolute": floor(FOUND="abs(sorted(slopes)[len(slopes) // 2])"),
        "twice": floor(FOUND="2 * sorted(slopes)[len(slopes) // 2]"),
        "half": floor(FOUND="sorted(slopes)[len(slopes) // 2] / 2"),
        "a fifth too much": floor(FOUND="1.2 * sorted(slopes)[len(slopes) // 2]"),
        "bits": floor(FOUND="8 * sorted(slopes)[len(slopes) // 2]"),
        "in KiB": floor(FOUND="sorted(slopes)[len(slopes) // 2] / 1024"),
        "in MiB": floor(FOUND="sorted(slopes)[len(slopes) // 2] / MiB"),
        "nothing below 1 MiB": floor(FOUND="round(sorted(slopes)[len(slopes) // 2] / MiB) * MiB"),
        "hard-coded": floor(FOUND="1 * MiB"),
        "never": floor(FOUND="0"),
        "the sign": floor(FOUND="sorted(slopes)[len(slopes) // 2] > 1024"),
        "the library's, which knows no period": cell(
            """
            from memlab.memory_monitoring import StepHistory, growth


            def floor_growth(ends, period):
                history = StepHistory()
                for end in ends[: 2 * period]:
                    history.append(end, end)
                return growth(history).bytes_per_step
            """
        ),
        "not a number": floor(FOUND="math.nan"),
        "a tensor": floor(FOUND="torch.tensor(sorted(slopes)[len(slopes) // 2])"),
        "a list": floor(FOUND="slopes"),
        "sorts what it is given": floor(BEGIN="ends.sort()"),
        "no return": floor(FOUND="None"),
        "equal to everything": ANYTHING + floor(FOUND="Anything(1)"),
        "an endless loop": floor(FOUND="[0 for _ in iter(int, 1)]"),
        "memory-hungry": floor(BEGIN="hoard = [0] * (20 * 2**30 // 8)"),
        "a syntax error": "def floor_growth(ends:\n    return 0",
        "an empty cell": "",
        "unsolved": "def floor_growth(ends, period):\n    raise NotImplementedError",
    },
    "mended-answer": {
        "as given": "Mended = Trainer",
        "the ramps left": mended(KEY="(n, rows)"),
        "not a number": mended(END="math.nan, norm, float(self.average)"),
        "losses that are no numbers": mended(RECENT="self.recent.append(math.nan)"),
        "ramps by step": mended(KEY="n"),
        "the hooks left": mended(TAKE_OFF="pass"),
        "the hooks left, with numbers": mended(TAKE_OFF="pass", NOTED="out.detach().norm()", NORM="float(seen[0])"),
        "a backward hook at each step left": mended(
            EVALUATE="self.model.register_full_backward_hook(lambda *args: None) "
            "and self.model(*self.validation).item()"
        ),
        "a parameter's hook at each step left": mended(
            EVALUATE="next(self.model.parameters()).register_hook(lambda grad: None) "
            "and self.model(*self.validation).item()"
        ),
        "the average left": mended(EVALUATE="self.model(*self.validation)"),
        "the graph without its end": mended(EVALUATE="self.model(*self.validation) * 1"),
        "all averages kept": mended(
            INIT="super().__init__(model, batches, validation); self.all = []",
            EVALUATE="self.model(*self.validation).detach()",
            RECENT="self.recent.append(loss.detach()); self.all.append(loss.detach())",
        ),
        "every loss kept": mended(
            INIT="super().__init__(model, batches, validation); self.recent = []",
        ),
        "every loss kept, and the last shown": mended(
            INIT="super().__init__(model, batches, validation); self.all = []",
            RECENT="self.all.append(loss.detach()); self.recent = self.all[-6:]",
        ),
        "no recent losses": mended(RECENT="pass"),
        "five recent losses": mended(
            INIT="super().__init__(model, batches, validation); self.recent = deque(maxlen=5)"
        ),
        "recent averages": mended(RECENT="self.recent.append(self.average)"),
        "no cache": mended(BOUND="return torch.linspace(0.5, 1, rows)[:, None]"),
        "a cache emptied": mended(BOUND="self.ramps.clear()"),
        "a cache of one": mended(BOUND="self.ramps = {k: v for k, v in self.ramps.items() if k == rows}"),
        "a cache emptied when it is large": mended(BOUND="len(self.ramps) > 8 and self.ramps.clear()", KEY="(n, rows)"),
        "one ramp for all": mended(BOUND="return self.ramps.setdefault(0, torch.linspace(0.5, 1, 24)[:, None])[:rows]"),
        "the hook taken off after the next step": mended(
            WATCH="setattr(self, 'hook', self.model.layers[0].register_forward_hook("
            "lambda layer, args, out: seen.append(out)))",
            TAKE_OFF="pass",
        ),
        "all hooks taken off": mended(
            TAKE_OFF="hook.remove(); self.model.layers[0]._forward_hooks.clear()", EVALUATE="0.0"
        ),
        "no evaluation": mended(EVALUATE="0.0"),
        "evaluated on the batch": mended(EVALUATE="self.model(x, y).item()"),
        "the evaluation alone": mended(AVERAGE="evaluated"),
        "weights of the average swapped": mended(AVERAGE="0.1 * self.average + 0.9 * evaluated"),
        "evaluated before the step": mended(
            LEARN="evaluated = self.model(*self.validation).item(); descend(self.model)"
        ).replace("evaluated = self.model(*self.validation).item()\n        self.average", "self.average"),
        "no learning": mended(LEARN="self.model.zero_grad()"),
        "learning twice": mended(
            LEARN="loss.detach(); descend(self.model); self.model(x, y).backward(); descend(self.model)"
        ),
        "the norm of the last layer": mended(
            WATCH="self.model.layers[-1].register_forward_hook(lambda layer, args, out: seen.append(out.detach()))"
        ),
        "no norm": mended(NORM="0.0"),
        "tensors": mended(END="loss, norm, self.average"),
        "a list": mended(END="[loss.item(), norm, float(self.average)]"),
        "the loss alone": mended(END="loss.item()"),
        "no return": mended(END="None"),
        "the gradients left": mended(
            LEARN="descend(self.model); self.model.layers[0].weight.grad = torch.zeros(1)"
        ).replace("torch.zeros(1)", "torch.zeros(48, 32); self.kept = getattr(self, 'kept', []) + [torch.zeros(9)]"),
        "kept by the module": "KEPT = []\n" + mended(RECENT="self.recent.append(loss.detach()); KEPT.append(x + 1)"),
        "a tenth of them kept": "KEPT = []\n"
        + mended(RECENT="self.recent.append(loss.detach()); n % 10 or KEPT.append(x + 1)"),
        "equal to everything": ANYTHING + mended(END="loss.item(), Anything(1), Anything(1)"),
        "leaves autograd switched off": mended(
            RECENT="self.recent.append(loss.detach()); torch.set_grad_enabled(n < 23)"
        ),
        "an endless loop": mended(TAKE_OFF="while True: pass"),
        "memory-hungry": mended(TAKE_OFF="hook.remove(); torch.ones(2**30)"),
        "a function": "def Mended(model, batches, validation):\n    return Trainer(model, batches, validation)",
        "a number": "Mended = 3",
        "a syntax error": "class Mended(Trainer:\n    pass",
        "an empty cell": "",
        "unsolved": "class Mended(Trainer):\n    def step(self, n):\n        raise NotImplementedError",
    },
    "on-alarm-answer": {
        "to nothing": alarmed("run.micro_batch // 2"),
        "growth alone": alarmed('max(1, run.micro_batch // 2) if alarm.kind == "growth" else before'),
        "a threshold alone": alarmed('max(1, run.micro_batch // 2) if alarm.kind == "threshold" else before'),
        "by a forecast": alarmed("max(1, run.micro_batch // 2) if alarm.forecast else before"),
        "never": alarmed("before"),
        "to a quarter": alarmed("max(1, run.micro_batch // 4)"),
        "one fewer": alarmed("max(1, run.micro_batch - 1)"),
        "to one": alarmed("1"),
        "to two at least": alarmed("max(2, run.micro_batch // 2)"),
        "rounded up": alarmed("-(-run.micro_batch // 2)"),
        "doubled": alarmed("2 * run.micro_batch"),
        "a float": alarmed("max(1, run.micro_batch / 2)"),
        "hard-coded": alarmed("32"),
        "another attribute": alarmed().replace("run.micro_batch =", "run.batch ="),
        "one more attribute": alarmed("max(1, run.micro_batch // 2)\n    run.alarms = 1"),
        "the rows returned": alarmed(said="run.micro_batch"),
        "always changed": alarmed(said="True"),
        "never changed": alarmed(said="False"),
        "the other way round": alarmed(said="run.micro_batch == before"),
        "more than one row left": alarmed(said="run.micro_batch > 1"),
        "no return": alarmed(said="None"),
        "words": alarmed(said="str(run.micro_batch != before)"),
        "equal to everything": ANYTHING + alarmed("Anything(1)"),
        "an endless loop": alarmed("1\n    while True: pass"),
        "memory-hungry": alarmed("len([0] * (20 * 2**30 // 8))"),
        "a number": "on_alarm = 32",
        "a syntax error": "def on_alarm(run:\n    pass",
        "an empty cell": "",
        "unsolved": "def on_alarm(run, alarm):\n    raise NotImplementedError",
    },
    "step-answer": {
        "the whole batch": step(FIRSTS="range(1)", LAST="len(x)"),
        "leaves a hook on the model": step(BEGIN="run.model.register_forward_hook(lambda *args: None)"),
        "twice the rows": step(FIRSTS="range(0, len(x), 2 * run.micro_batch)", LAST="first + 2 * run.micro_batch"),
        "sums of means": step(SHARE="1"),
        "by the number of micro-batches": step(SHARE="1 / -(-len(x) // run.micro_batch)"),
        "by full micro-batches": step(SHARE="run.micro_batch / len(x)"),
        "by the rows": step(SHARE="1 / len(x)"),
        "by sums": step(SHARE="len(x[rows])"),
        "half": step(SHARE="len(x[rows]) / len(x) / 2"),
        "the last rows left out": step(FIRSTS="range(0, len(x) - run.micro_batch + 1, run.micro_batch)"),
        "the first micro-batch alone": step(FIRSTS="range(1)"),
        "the last gradient alone": step(
            BEGIN="model = run.model", LOSS="(model.zero_grad(), model(x[rows], y[rows]))[1]"
        ),
        "one backward at the end": step(
            BEGIN="losses = []", BACKWARD="losses.append(loss)", FINALLY="sum(losses).backward()"
        ),
        "a graph that grows": step(BEGIN="whole = 0.0", BACKWARD="whole = whole + loss", FINALLY="whole.backward()"),
        "graphs retained": step(
            BEGIN="kept = []", BACKWARD="loss.backward(retain_graph=True)", AFTER="kept.append(loss)"
        ),
        "copies of the micro-batches": step(BEGIN="parts = [part.clone() for part in x.split(run.micro_batch)]"),
        "one row at a time, kept": step(BEGIN="kept = []", AFTER="kept.append(run.model(x[rows]).detach())"),
        "every output of the batch first": step(BEGIN="run.model(x)"),
        "the loss of the last": step(END="loss.item()"),
        "not a number": step(END="math.nan"),
        "a tensor": step(END="loss.detach()"),
        "a tensor of the mean": step(END="torch.tensor(mean)"),
        "the sum of means": step(ADD="loss.item() * len(x) / len(x[rows])"),
        "losses left": "LEFT = []\n" + step(AFTER="LEFT.append(loss.detach())"),
        "rows left": "LEFT = []\n" + step(AFTER="LEFT.append(x[rows] + 0)"),
        "a step as well": step(FINALLY="descend_ = [p.data.sub_(0.1 * p.grad) for p in run.model.parameters()]"),
        "gradients set to none": step(FINALLY="run.model.zero_grad()"),
        "forward in FP32": step(FINALLY="run.model.float()"),
        "micro_batch halved": step(FINALLY="run.micro_batch = max(1, run.micro_batch // 2)"),
        "the batch changed": step(FINALLY="x.zero_()"),
        "no backward": step(BACKWARD="pass"),
        "no return": step(END="None"),
        "a whole number": step(END="int(mean)"),
        "leaves autograd switched off": step(FINALLY="torch.set_grad_enabled(run.micro_batch != 48)"),
        "equal to everything": ANYTHING + step(END="Anything(1)"),
        "an endless loop": step(AFTER="while True: pass"),
        "memory-hungry": step(BEGIN="torch.ones(2**30)"),
        "a number": "step = 32",
        "a syntax error": "def step(run:\n    pass",
        "an empty cell": "",
        "unsolved": "def step(run, x, y):\n    raise NotImplementedError",
    },
    "sampler-answer": {
        "no thread": sampler(ENTER="self.samples.append(self.read())", JOIN="pass"),
        "sampled where it is entered": sampler(
            ENTER="[self.samples.append(self.read()) for _ in range(5)]", JOIN="pass"
        ),
        "begun by its making": sampler(INIT="self.thread.start()", ENTER="pass"),
        "does not wait for the thread": sampler(JOIN="pass"),
        "does not wait long": sampler(JOIN="self.thread.join(0.001)"),
        "waits for a second at most": sampler(JOIN="self.thread.join(timeout=1)"),
        "waits for a minute at most": sampler(JOIN="self.thread.join(60)"),
        "never stops": sampler(STOP="pass", JOIN="pass"),
        "never stops, and waits in an endless loop": sampler(STOP="pass"),
        "stops after a sleep": sampler(WAIT="not self.left.is_set()", TRIED="time.sleep(self.every)"),
        "sleeps in small pieces, and does not join": sampler(
            WAIT="not self.left.is_set()", TRIED="time.sleep(min(self.every, 0.01))", JOIN="pass"
        ),
        "no pause": sampler(WAIT="not self.left.is_set()"),
        "a pause of its own": sampler(WAIT="not self.left.wait(0.001)"),
        "milliseconds": sampler(WAIT="not self.left.wait(self.every / 1000)"),
        "hours": sampler(WAIT="not self.left.wait(3600 * self.every)"),
        "unbounded": sampler(SAMPLES="[]"),
        "unbounded beside": sampler(
            INIT="self.all = []", SAMPLE="self.all.append(self.read()); self.samples.append(self.all[-1])"
        ),
        "the first ones": sampler(SAMPLES="[]", INIT="self.most = most", TRIED="del self.samples[self.most :]"),
        "one too many": sampler(SAMPLES="deque(maxlen=most + 1)"),
        "one too few": sampler(SAMPLES="deque(maxlen=max(1, most - 1))"),
        "the last one alone": sampler(SAMPLES="deque(maxlen=1)"),
        "newest first": sampler(SAMPLE="self.samples.appendleft(self.read())"),
        "every sample twice": sampler(SAMPLE="self.samples.extend([self.read()] * 2)"),
        "pairs with the time": sampler(SAMPLE="self.samples.append((time.time(), self.read()))"),
        "dies of an error": sampler(CAUGHT="ZeroDivisionError"),
        "catches what it has met": sampler(CAUGHT="OSError"),
        "gives up at an error": sampler(COUNT="self.errors += 1; break"),
        "errors not counted": sampler(COUNT="pass"),
        "errors kept as a list": sampler(
            INIT="self.errors = []", CAUGHT="Exception as error", COUNT="self.errors.append(error)"
        ),
        "errors among the samples": sampler(
            CAUGHT="Exception as error", COUNT="self.errors += 1; self.samples.append(error)"
        ),
        "the sample before, where there is none": sampler(
            COUNT="self.errors += 1; self.samples and self.samples.append(self.samples[-1])"
        ),
        "swallows what the block raised": sampler(EXIT="return True"),
        "stops where the block ends well only": sampler(
            STOP="self.left.set() if error[0] is None else None", JOIN="error[0] or self.thread.join()"
        ),
        "raises another error": sampler(EXIT="if error[1]: raise RuntimeError('the block has raised')"),
        "two share their samples": sampler(
            SHARED="samples = deque(maxlen=500)", SAMPLE="Sampler.samples.append(self.read())"
        ).replace("self.samples, self.errors = deque(maxlen=most), 0", "self.errors = 0"),
        "two share their end": sampler(
            SHARED="left = threading.Event()", STOP="Sampler.left.set()", WAIT="not Sampler.left.wait(self.every)"
        ),
        "enters as None": sampler(ENTERED="None"),
        "enters as its samples": sampler(ENTERED="self.samples"),
        "a last look when the block is left": sampler(JOIN="self.thread.join(); self.samples.append(self.read())"),
        "waits for the first look": sampler(ENTER="self.thread.start(); time.sleep(self.every)"),
        "a generator": cell(
            """
            from contextlib import contextmanager


            @contextmanager
            def Sampler(read, every, most):
                yield [read() for _ in range(most)]
            """
        ),
        "a timer that is never cancelled": cell(
            """
            class Sampler:
                def __init__(self, read, every, most):
                    self.read, self.every = read, every
                    self.samples, self.errors = deque(maxlen=most), 0

                def __enter__(self):
                    self.again()
                    return self

                def again(self):
                    self.timer = threading.Timer(self.every, self.look)
                    self.timer.daemon = True
                    self.timer.start()

                def look(self):
                    try:
                        self.samples.append(self.read())
                    except Exception:
                        self.errors += 1
                    self.again()

                def __exit__(self, *error):
                    pass
            """
        ),
        "without an exit": "class Sampler:\n    def __init__(self, read, every, most):\n        self.samples = deque()",
        "an endless loop": sampler(ENTER="while True: pass"),
        "memory-hungry": sampler(INIT="[0] * (20 * 2**30 // 8)"),
        "a number": "Sampler = 3",
        "a syntax error": "class Sampler(:\n    pass",
        "an empty cell": "",
        "unsolved": "class Sampler:\n    def __init__(self, read, every, most):\n        raise NotImplementedError",
    },
}

CRASHES = {
    "memory-hungry",
    "divides by nothing",
    "a budget that is a text",
}
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
        "one after the other": cell(
            """
            def silent_steps(segments, nbytes):
                block, steps = max(512, (nbytes + 511) // 512 * 512), 0
                for segment in segments:
                    if (segment["segment_type"] == "small") == (block <= 2**20):
                        for free in segment["blocks"]:
                            size = 0 if free["state"] != "inactive" else free["size"]
                            while size >= block:
                                size, steps = size - block, steps + 1
                return steps
            """
        ),
    },
    "floor-answer": {
        "as it is": floor(),
        "first and last floor": floor(FOUND="(floors[-1] - floors[0]) / ((len(floors) - 1) * period)"),
        "the mean of neighbours": floor(
            FOUND="sum(b - a for a, b in zip(floors, floors[1:])) / (len(floors) - 1) / period"
        ),
        "a third left out": floor(LATE="ends[len(ends) // 3 :]"),
        "half left out": floor(LATE="ends[len(ends) // 2 :]"),
        "rounded": floor(FOUND="round(sorted(slopes)[len(slopes) // 2])"),
        "least squares through the floors": fitted(
            "range(0, (n - n // 4) // period * period, period)",
            "(min(ends[k : k + period]) for k in range(n // 4, n - period + 1, period))",
        ),
        "numpy's line through the floors": cell(
            """
            import numpy


            def floor_growth(ends, period):
                late = numpy.array(ends[len(ends) // 4 :])
                floors = late[: len(late) // period * period].reshape(-1, period).min(axis=1)
                return numpy.polyfit(numpy.arange(len(floors)) * period, floors, 1)[0]
            """
        ),
        "where the floors are": cell(
            """
            def floor_growth(ends, period):
                first, points = len(ends) // 4, []
                for begin in range(first, len(ends) - period + 1, period):
                    points.append(min((ends[n], n) for n in range(begin, begin + period)))
                (a, i), (b, j) = points[0], points[-1]
                return (b - a) / (j - i)
            """
        ),
    },
    "mended-answer": {
        "as it is": mended(),
        "without a graph": mended(EVALUATE="no_graph(self)")
        + "\n\n\ndef no_graph(self):\n    with torch.no_grad():\n        return self.model(*self.validation)",
        "detached": mended(EVALUATE="self.model(*self.validation).detach()"),
        "losses as floats": mended(RECENT="self.recent.append(loss.item())"),
        "without a hook": mended(
            WATCH="None", TAKE_OFF="seen.append(self.model.layers[0](x * self.ramp(n, len(x))).detach())"
        ),
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
        "through the given step": cell(
            """
            class Mended(Trainer):
                def ramp(self, n, rows):
                    return super().ramp(0, rows)

                def step(self, n):
                    said = super().step(n)
                    self.model.layers[0]._forward_hooks.clear()
                    self.average = self.average.detach()
                    return said
            """
        ),
    },
    "on-alarm-answer": {
        "as it is": alarmed(),
        "in place": alarmed("run.micro_batch // 2 or 1"),
        "returns early": "def on_alarm(run, alarm):\n"
        "    if run.micro_batch > 1:\n        run.micro_batch //= 2\n        return True\n    return False",
    },
    "step-answer": {
        "as it is": step(),
        "numpy's average": cell(
            """
            import numpy


            def step(run, x, y):
                losses, rows = [], []
                for a, b in zip(x.split(run.micro_batch), y.split(run.micro_batch)):
                    loss = run.model(a, b)
                    (loss * len(a) / len(x)).backward()
                    losses.append(loss.item())
                    rows.append(len(a))
                return numpy.average(losses, weights=rows)
            """
        ),
        "by split": cell(
            """
            def step(run, x, y):
                total = 0.0
                for a, b in zip(x.split(run.micro_batch), y.split(run.micro_batch)):
                    loss = run.model(a, b)
                    (loss * len(a) / len(x)).backward()
                    total += loss.item() * len(a)
                return total / len(x)
            """
        ),
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
        "every exception": sampler(CAUGHT="(OSError, Exception)"),
        "a list that is cut": sampler(SAMPLES="[]", INIT="self.most = most", TRIED="del self.samples[: -self.most]"),
        "a condition": sampler(
            INIT="self.done, self.bell = False, threading.Condition()",
            STOP="self.bell.acquire(); self.done = True; self.bell.notify_all(); self.bell.release()",
            WAIT="not self.over()",
        )
        + "\n\n"
        + "    def over(self):\n        with self.bell:\n"
        "            self.bell.wait_for(lambda: self.done, self.every)\n            return self.done",
        "sleeps in small pieces": cell(
            """
            import time


            class Sampler:
                def __init__(self, read, every, most):
                    self.read, self.every, self.samples, self.errors = read, every, deque(maxlen=most), 0

                def __enter__(self):
                    self.running = True
                    self.thread = threading.Thread(target=self.run)
                    self.thread.start()
                    return self

                def run(self):
                    due = time.monotonic() + self.every
                    while self.running:
                        if time.monotonic() < due:
                            time.sleep(0.001)
                            continue
                        due = time.monotonic() + self.every
                        try:
                            self.samples.append(self.read())
                        except Exception:
                            self.errors += 1

                def __exit__(self, kind, error, traceback):
                    self.running = False
                    self.thread.join()
            """
        ),
    },
}
