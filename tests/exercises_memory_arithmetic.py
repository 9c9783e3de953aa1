"""Answers to the exercises of chapter 02: wrong ones, each of which loses its points, and other right ones."""

import textwrap


def cell(text: str, **changes: str) -> str:
    """The text of an answer cell, with words in capitals replaced."""
    text = textwrap.dedent(text).strip()
    for word, replacement in changes.items():
        text = text.replace(word, replacement)
    return text


ANYTHING = """
class Anything(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


"""


def adam(value: str) -> str:
    """adam_bytes that returns an expression."""
    return f"def adam_bytes(shapes):\n    return {value}"


def block(**changes: str) -> str:
    """block_keeps, right but for the changes."""
    terms = {"STREAM": "32", "STATISTICS": "16 * b * s", "MASK": "s * s", "WEIGHTS": "2", "SCORES": "a * s * s * b"}
    terms |= {"ROWS": "4 * b * a * s", "RANDOM": "16", "DROPPED": "2 * s * b * h", "MORE": "3", "END": "kept"}
    return cell(
        """
        def block_keeps(b, s, h, a, by_hand, dropout):
            kept = STREAM * s * b * h + STATISTICS
            if by_hand:
                kept += MASK + WEIGHTS * SCORES
            else:
                kept += ROWS + RANDOM
            if dropout:
                kept += DROPPED
            if dropout and by_hand:
                kept += MORE * SCORES
            return END
        """,
        **terms | changes,
    )


def parts(apart: object, together: object, passing: object) -> str:
    """The three numbers of exercise 3."""
    return f"apart_bytes, together_bytes, passing_bytes = {apart}, {together}, {passing}"


def search(body: str) -> str:
    """largest_batch with this body."""
    return "def largest_batch(peak, capacity_bytes):\n" + textwrap.indent(cell(body), "    ")


def layer(init: str = "", forward: str = "return self.linear(x) + self.b(self.a(x))", frozen: str = "False") -> str:
    """LoRALinear, right but for what init adds, and forward."""
    return cell(
        """
        class LoRALinear(nn.Module):
            def __init__(self, linear, rank):
                super().__init__()
                self.linear = linear.requires_grad_(FROZEN)
                self.a = nn.Linear(linear.in_features, rank, bias=False)
                self.b = nn.Linear(rank, linear.out_features, bias=False)
                nn.init.zeros_(self.b.weight)
                INIT

            def forward(self, x):
                FORWARD
        """,
        FROZEN=frozen,
        INIT=init or "pass",
        FORWARD=forward,
    )


def lora(**changes: str) -> str:
    """lora_bytes, right but for the changes."""
    terms = {"LEARNING": "rank * (n_in + n_out)", "FROZEN": "n_out * n_in + bias * n_out", "COUNTERS": "8"}
    terms |= {"PARAMETERS": "4 * (frozen + learning)", "GRADIENTS": "4 * learning", "STATES": "8 * learning"}
    terms |= {"ACTIVATIONS": "4 * rows * (n_in + rank)", "KEY": "activations"}
    return cell(
        """
        def lora_bytes(n_in, n_out, rank, rows, bias):
            learning, frozen = LEARNING, FROZEN
            return {
                "parameters": PARAMETERS,
                "gradients": GRADIENTS,
                "optimizer states": STATES + COUNTERS,
                "KEY": ACTIVATIONS,
            }
        """,
        **terms | changes,
    )


BISECTION = """
fits, too_many = 0, 1
while peak(too_many) <= capacity_bytes:
    fits, too_many = too_many, 2 * too_many
while too_many - fits > 1:
    middle = (fits + too_many) // 2
    fits, too_many = (middle, too_many) if peak(middle) <= capacity_bytes else (fits, middle)
return fits
"""
MATRIX = 4 * 600 * 24

WRONG: dict[str, dict[str, str]] = {
    "adam-bytes-answer": {
        "in KiB": adam("sum(8 * math.prod(shape) + 4 for shape in shapes) // 1024"),
        "in bits": adam("8 * sum(8 * math.prod(shape) + 4 for shape in shapes)"),
        "elements": adam("sum(2 * math.prod(shape) + 1 for shape in shapes)"),
        "half: one average": adam("sum(4 * math.prod(shape) + 4 for shape in shapes)"),
        "twice": adam("2 * sum(8 * math.prod(shape) + 4 for shape in shapes)"),
        "in BF16": adam("sum(4 * math.prod(shape) + 4 for shape in shapes)"),
        "counters forgotten": adam("sum(8 * math.prod(shape) for shape in shapes)"),
        "one counter for all": adam("sum(8 * math.prod(shape) for shape in shapes) + 4"),
        "a counter of 8 bytes": adam("sum(8 * math.prod(shape) + 8 for shape in shapes)"),
        "gradients too": adam("sum(12 * math.prod(shape) + 4 for shape in shapes)"),
        "weights and gradients too": adam("sum(16 * math.prod(shape) + 4 for shape in shapes)"),
        "sides added up": adam("sum(8 * sum(shape) + 4 for shape in shapes)"),
        "a scalar has no elements": adam("sum(8 * (math.prod(shape) if shape else 0) + 4 for shape in shapes)"),
        "a constant": adam("296"),
        "a float": adam("float(sum(8 * math.prod(shape) + 4 for shape in shapes))"),
        "a tensor": adam("torch.tensor(sum(8 * math.prod(shape) + 4 for shape in shapes))"),
        "equal to everything": ANYTHING + adam("Anything()"),
        "no return": "def adam_bytes(shapes):\n    sum(8 * math.prod(shape) + 4 for shape in shapes)",
        "a number instead of a function": "adam_bytes = 296",
        "empties the list": adam("sum(8 * math.prod(shapes.pop()) + 4 for _ in range(len(shapes)))"),
        "makes the tensors": adam("sum(2 * torch.ones(shape).nbytes + 4 for shape in shapes)"),
        "memory-hungry": adam("len([0] * (20 * 2**30 // 8))"),
        "a syntax error": "def adam_bytes(shapes:\n    return 0",
    },
    "block-keeps-answer": {
        "the formula of 2022 for every kind": block(END="34 * s * b * h + 5 * a * s * s * b"),
        "the formulas without the small change": block(STATISTICS="0", MASK="0", ROWS="0", RANDOM="0"),
        "in FP32": block(END="2 * kept"),
        "in KiB": block(END="kept // 1024"),
        "elements": block(END="kept // 2"),
        "dropout forgotten": block(DROPPED="0", MORE="0"),
        "dropout's masks in BF16": block(DROPPED="4 * s * b * h"),
        "one dropout mask": block(DROPPED="s * b * h"),
        "scores' mask forgotten": block(MORE="2"),
        "dropped weights forgotten": block(MORE="1"),
        "scores in FP32": block(WEIGHTS="4"),
        "scores of one head": block(SCORES="s * s * b"),
        "scores of one text": block(SCORES="a * s * s"),
        "s and h swapped": block(SCORES="a * h * h * b"),
        "causal mask forgotten": block(MASK="0"),
        "a causal mask a head": block(MASK="a * s * s"),
        "statistics forgotten": block(STATISTICS="0"),
        "statistics in BF16": block(STATISTICS="8 * b * s"),
        "statistics of one norm": block(STATISTICS="8 * b * s"),
        "rows of scores forgotten": block(ROWS="0"),
        "rows of scores in BF16": block(ROWS="2 * b * a * s"),
        "random state forgotten": block(RANDOM="0"),
        "random state only with dropout": block(RANDOM="16 * dropout"),
        "the input forgotten": block(STREAM="30"),
        "the output counted": block(STREAM="34"),
        "always by hand": block(END="32 * s * b * h + 2 * a * s * s * b"),
        "a constant": block(END="33_816"),
        "equal to everything": ANYTHING + block(END="Anything()"),
        "a float": block(END="kept / 1"),
        "measured instead": cell(
            """
            def block_keeps(b, s, h, a, by_hand, dropout):
                return show_kept(b, s, h, a, by_hand, dropout).rows[-1][2]
            """
        ),
        "an endless loop": "def block_keeps(b, s, h, a, by_hand, dropout):\n    while True:\n        pass",
    },
    "unexplained-answer": {
        "nothing": parts(0, 0, 0),
        "all in one": parts(114_432, 114_432, 114_432),
        "elements": parts(2 * 600 * 24, 3 * 600 * 24, 8 * 24),
        "in BF16": parts(MATRIX, 3 * MATRIX // 2, 2 * 8 * 24),
        "twice": parts(4 * MATRIX, 6 * MATRIX, 2 * 768),
        "one gradient apart": parts(MATRIX, 3 * MATRIX, 768),
        "one gradient together, as planned": parts(2 * MATRIX, MATRIX, 768),
        "two gradients together": parts(2 * MATRIX, 2 * MATRIX, 768),
        "with the 4 bytes of the loss": parts(2 * MATRIX, 3 * MATRIX, 772),
        "nothing on its way": parts(2 * MATRIX, 3 * MATRIX, 0),
        "adds up, and is wrong": parts(2 * MATRIX, 3 * MATRIX - 768, 0),
        "as the table rounds": parts(int(2 * 56.2 * 1024), int(3 * 56.2 * 1024), 768),
        "floats": parts(float(2 * MATRIX), float(3 * MATRIX), 768.0),
        "texts": parts('"115,200 B"', '"172,800 B"', '"768 B"'),
        "equal to everything": ANYTHING + parts("Anything()", "Anything()", "Anything()"),
    },
    "largest-batch-answer": {
        "one by one": search("batch = 0\nwhile peak(batch + 1) <= capacity_bytes:\n    batch += 1\nreturn batch"),
        "one too many": search(BISECTION.replace("return fits", "return too_many")),
        "a power of two": search("b = 1\nwhile peak(2 * b) <= capacity_bytes:\n    b *= 2\nreturn b"),
        "half": search(BISECTION.replace("return fits", "return fits // 2")),
        "the boundary does not fit": search(BISECTION.replace("<=", "<")),
        "at least one": search(BISECTION.replace("return fits", "return max(1, fits)")),
        "None if nothing fits": search(BISECTION.replace("return fits", "return fits or None")),
        "-1 if nothing fits": search(BISECTION.replace("return fits", "return fits or -1")),
        "raises if nothing fits": search(BISECTION.replace("return fits", "return fits // bool(fits)")),
        "a straight line through two peaks": search(
            """
            slope = max(1, peak(2) - peak(1))
            return max(0, 1 + (capacity_bytes - peak(1)) // slope)
            """
        ),
        "a straight line through two others": search(
            """
            slope = max(1, peak(4) - peak(3))
            return max(0, 4 + (capacity_bytes - peak(4)) // slope)
            """
        ),
        "a multiple of one text's peak": search("return capacity_bytes // peak(1)"),
        "from 1 to 1,024": search(
            """
            fits, too_many = 0, 1025
            while too_many - fits > 1:
                middle = (fits + too_many) // 2
                fits, too_many = (middle, too_many) if peak(middle) <= capacity_bytes else (fits, middle)
            return fits
            """
        ),
        "asks for no texts": search("if peak(0) > capacity_bytes:\n    return 0" + BISECTION),
        "halves of texts": search(BISECTION.replace("// 2", "/ 2")),
        "a float": search(BISECTION.replace("return fits", "return float(fits)")),
        "a bool": search(BISECTION.replace("return fits", "return True if fits == 1 else fits or False")),
        "the bytes": search(BISECTION.replace("return fits", "return peak(fits) if fits else 0")),
        "GiB for bytes": search(BISECTION.replace("capacity_bytes", "capacity_bytes * 2**30")),
        "a constant": search("return 5"),
        "equal to everything": ANYTHING + search("return Anything()"),
        "the story's peak, whatever is given": search(BISECTION.replace("peak(", "story_peak(")),
        "an endless bisection": search("low, high = 0, 1000\nwhile low < high:\n    low = (low + high) // 2"),
        "an endless loop of calls": search("while True:\n    peak(1)"),
        "an endless loop that catches all": search(
            """
            while len(calls := []) < 1:
                try:
                    peak(1)
                except Exception:
                    return 0
            """
        ),
        "memory-hungry": search("return len([peak(1)] * (20 * 2**30 // 8))"),
    },
    "lora-linear-answer": {
        "the product of A and B is made": layer(
            forward="return F.linear(x, self.linear.weight + self.b.weight @ self.a.weight, self.linear.bias)".replace(
                "F.", "nn.functional."
            )
        ),
        "the product applied beside": layer(
            forward="return self.linear(x) + x @ (self.b.weight @ self.a.weight).T",
        ),
        "W learns": layer(frozen="True"),
        "the bias learns": layer("linear.weight.requires_grad_(False)", frozen="True"),
        "B begins at random": layer("nn.init.normal_(self.b.weight)"),
        "B begins with almost nothing": layer("nn.init.normal_(self.b.weight, std=1e-6)"),
        "A begins with ones": layer("nn.init.ones_(self.a.weight)"),
        "a copy of the bias": layer(
            "self.linear.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), False)"
        ),
        "A begins with zeros": layer("nn.init.zeros_(self.a.weight)"),
        "A and B have biases": layer(
            "self.b = nn.Linear(rank, linear.out_features); nn.init.zeros_(self.b.weight); nn.init.zeros_(self.b.bias)"
        ),
        "twice the rank": layer(
            "self.a = nn.Linear(linear.in_features, 2 * rank, bias=False); "
            "self.b = nn.Linear(2 * rank, linear.out_features, bias=False); nn.init.zeros_(self.b.weight)"
        ),
        "half the change": layer(forward="return self.linear(x) + self.b(self.a(x)) / 2"),
        "only the change": layer(forward="return self.b(self.a(x))"),
        "the bias twice": layer(
            forward="return self.linear(x) + self.b(self.a(x)) + (0 if self.linear.bias is None else self.linear.bias)"
        ),
        "W where no state_dict finds it": layer(
            "self.w, self.bias = linear.weight.detach(), linear.bias; del self.linear",
            "return nn.functional.linear(x, self.w, self.bias) + self.b(self.a(x))",
        ),
        "a copy of W": layer("import copy; self.linear = copy.deepcopy(linear)"),
        "W twice": layer('self.register_buffer("copied", linear.weight.detach().clone())'),
        "x is cut off": layer(forward="return self.linear(x) + self.b(self.a(x.detach()))"),
        "a factor that is kept": layer(
            "self.one = torch.ones(1, requires_grad=False)",
            "return self.linear(x) + (self.b(self.a(x)) * 1.0).exp().log()",
        ),
        "remembers its output": layer(forward="self.last = self.linear(x) + self.b(self.a(x)); return self.last"),
        "remembers its input": layer(
            "self.seen = []", "self.seen.append(x); return self.linear(x) + self.b(self.a(x))"
        ),
        "leaves a hook": layer(
            "torch.nn.modules.module.register_module_forward_hook(lambda *_: None)",
        ),
        "autograd switched off": layer("torch.set_grad_enabled(False)"),
        "an ordinary Linear": "def LoRALinear(linear, rank):\n    return linear",
        "no module": "class LoRALinear:\n    def __init__(self, linear, rank):\n        self.linear = linear",
        "equal to everything": cell(
            """
            class LoRALinear(nn.Module):
                def __init__(self, linear, rank):
                    super().__init__()

                def __eq__(self, other):
                    return True

                def forward(self, x):
                    return self
            """
        ),
        "forward without an answer": layer(forward="raise NotImplementedError"),
        "an endless loop": layer(forward="while True: pass"),
    },
    "lora-bytes-answer": {
        "in KiB": lora(ACTIVATIONS="4 * rows * (n_in + rank) // 1024"),
        "elements": lora(GRADIENTS="learning"),
        "in BF16": lora(PARAMETERS="2 * (frozen + learning)"),
        "twice": lora(ACTIVATIONS="8 * rows * (n_in + rank)"),
        "no activations, since W is frozen": lora(ACTIVATIONS="0"),
        "x forgotten": lora(ACTIVATIONS="4 * rows * rank"),
        "as an ordinary layer": lora(ACTIVATIONS="4 * rows * n_in"),
        "the output counted": lora(ACTIVATIONS="4 * rows * (n_in + rank + n_out)"),
        "x once for each product": lora(ACTIVATIONS="4 * rows * (2 * n_in + rank)"),
        "n_in and n_out swapped": lora(ACTIVATIONS="4 * rows * (n_out + rank)"),
        "frozen parameters forgotten": lora(PARAMETERS="4 * learning"),
        "the bias forgotten": lora(FROZEN="n_out * n_in"),
        "always a bias": lora(FROZEN="n_out * n_in + n_out"),
        "a bias as long as the input": lora(FROZEN="n_out * n_in + bias * n_in"),
        "A only": lora(LEARNING="rank * n_in"),
        "the product of the sides": lora(LEARNING="rank * n_in * n_out"),
        "W has a gradient": lora(GRADIENTS="4 * (frozen + learning)"),
        "W has states": lora(STATES="8 * (frozen + learning)"),
        "one average": lora(STATES="4 * learning"),
        "counters forgotten": lora(COUNTERS="0"),
        "one counter": lora(COUNTERS="4"),
        "a counter for W as well": lora(COUNTERS="12 + 4 * bias"),
        "16 bytes a parameter": lora(STATES="16 * learning"),
        "another key": lora(KEY="activation"),
        "floats": lora(PARAMETERS="4.0 * (frozen + learning)"),
        "a sum": "def lora_bytes(n_in, n_out, rank, rows, bias):\n    return 16 * rank * (n_in + n_out)",
        "a constant": cell(
            """
            def lora_bytes(n_in, n_out, rank, rows, bias):
                return {"parameters": 3920, "gradients": 3920, "optimizer states": 7848, "activations": 1344}
            """
        ),
        "equal to everything": ANYTHING + lora(ACTIVATIONS="Anything()"),
        "a dict equal to everything": cell(
            """
            class Same(dict):
                def __eq__(self, other):
                    return True

                __hash__ = None


            def lora_bytes(n_in, n_out, rank, rows, bias):
                return Same()
            """
        ),
        "measured instead": cell(
            """
            def lora_bytes(n_in, n_out, rank, rows, bias):
                return held(nn.Linear(n_in, n_out, bias=bias), n_in, rows)
            """
        ),
        "an endless loop": "def lora_bytes(n_in, n_out, rank, rows, bias):\n    while True:\n        pass",
    },
}

CRASHES = {"raises if nothing fits", "autograd switched off"}
RIGHT: dict[str, dict[str, str]] = {
    "adam-bytes-answer": {
        "numpy's numbers": "import numpy\n\n\n"
        + adam("sum(8 * numpy.prod(shape, dtype=numpy.int64) + 4 for shape in shapes)"),
        "a loop": cell(
            """
            def adam_bytes(shapes):
                total = 0
                for shape in shapes:
                    elements = 1
                    for side in shape:
                        elements *= side
                    total += elements * 4 + elements * 4 + 4
                return total
            """
        ),
        "numel": adam("8 * sum(shape.numel() for shape in shapes) + 4 * len(shapes)"),
        "a lambda": "adam_bytes = lambda shapes: sum(8 * math.prod(shape) for shape in shapes) + len(shapes) * 4",
        "tensors without bytes": adam('sum(2 * torch.empty(shape, device="meta").nbytes + 4 for shape in shapes)'),
    },
    "block-keeps-answer": {
        "one expression": cell(
            """
            def block_keeps(b, s, h, a, by_hand, dropout):
                scores = (5 if dropout else 2) * a * s * s * b + s * s if by_hand else 4 * a * b * s + 16
                return (34 if dropout else 32) * s * b * h + 16 * b * s + scores
            """
        ),
        "tensor by tensor": cell(
            """
            def block_keeps(b, s, h, a, by_hand, dropout):
                stream, scores = b * s * h, b * a * s * s
                two = [stream] * 4 + [3 * stream] + [stream] + [4 * stream] * 2 + [scores] * by_hand
                two += [scores] * (by_hand and dropout)
                one = [stream] * 2 * dropout + [scores] * (by_hand and dropout) + [s * s] * by_hand
                four = [b * s] * 4 + [b * a * s] * (not by_hand)
                eight = [] if by_hand else [1, 1]
                return 2 * sum(two) + sum(one) + 4 * sum(four) + 8 * sum(eight)
            """
        ),
    },
    "unexplained-answer": {
        "numbers": parts(115_200, 172_800, 768),
        "read from the timelines": cell(
            """
            def gradients(timeline):
                alive = timeline.alive(timeline.peak_event)
                return sum(s.nbytes for s in alive if s.shape == (600, 24) and "gradient" in s.reason)


            apart_bytes, together_bytes = gradients(apart), gradients(together)
            passing_bytes = together_bytes - apart_bytes // 2 - (said - fell)
            """
        ),
    },
    "largest-batch-answer": {
        "from the top": search(
            """
            fits, too_many = 0, 2_000_000
            while fits + 1 < too_many:
                middle = (fits + too_many) // 2
                if peak(middle) > capacity_bytes:
                    too_many = middle
                else:
                    fits = middle
            return fits
            """
        ),
        "bisect of the standard library": search(
            """
            from bisect import bisect_right

            return bisect_right(range(1, 2**21), capacity_bytes, key=peak)
            """
        ),
        "bit by bit": search(
            """
            batch = 0
            for bit in reversed(range(21)):
                if peak(batch + 2**bit) <= capacity_bytes:
                    batch += 2**bit
            return batch
            """
        ),
        "recursive": cell(
            """
            def largest_batch(peak, capacity_bytes, low=0, high=2**20):
                if high - low == 1:
                    return low
                middle = (low + high) // 2
                if peak(middle) <= capacity_bytes:
                    return largest_batch(peak, capacity_bytes, middle, high)
                return largest_batch(peak, capacity_bytes, low, middle)
            """
        ),
        "numpy's whole numbers": "import numpy\n\n\n"
        + search(
            """
            low, high = numpy.int64(0), numpy.int64(2**20)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if peak(middle) <= capacity_bytes else (low, middle)
            return low
            """
        ),
    },
    "lora-linear-answer": {
        "parameters": cell(
            """
            class LoRALinear(nn.Module):
                def __init__(self, linear, rank):
                    super().__init__()
                    self.weight, self.bias = linear.weight.requires_grad_(False), linear.bias
                    if self.bias is not None:
                        self.bias.requires_grad_(False)
                    self.A = nn.Parameter(torch.randn(rank, linear.in_features) / rank)
                    self.B = nn.Parameter(torch.zeros(linear.out_features, rank))

                def forward(self, x):
                    return nn.functional.linear(x, self.weight, self.bias) + x @ self.A.T @ self.B.T
            """
        ),
        "buffers, and A and B transposed": cell(
            """
            class LoRALinear(nn.Module):
                def __init__(self, linear, rank):
                    super().__init__()
                    self.register_buffer("weight", linear.weight.detach())
                    self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())
                    self.A = nn.Parameter(torch.rand(linear.in_features, rank))
                    self.B = nn.Parameter(torch.zeros(rank, linear.out_features))

                def forward(self, x):
                    y = x @ self.weight.T
                    if self.bias is not None:
                        y += self.bias
                    return torch.addmm(y, x @ self.A, self.B)
            """
        ),
        "a Linear of its own kind": cell(
            """
            class LoRALinear(nn.Linear):
                def __init__(self, linear, rank):
                    nn.Module.__init__(self)
                    self.in_features, self.out_features = linear.in_features, linear.out_features
                    self.weight, self.bias = linear.weight, linear.bias
                    self.requires_grad_(False)
                    self.a = nn.Parameter(torch.empty(rank, self.in_features).uniform_())
                    self.b = nn.Parameter(torch.zeros(self.out_features, rank))

                def forward(self, x):
                    low = nn.functional.linear(x, self.a)
                    return super().forward(x).add_(nn.functional.linear(low, self.b))
            """
        ),
    },
    "lora-bytes-answer": {
        "matrix by matrix": cell(
            """
            def lora_bytes(n_in, n_out, rank, rows, bias):
                a, b, w = 4 * rank * n_in, 4 * n_out * rank, 4 * n_out * n_in
                x, low = 4 * rows * n_in, 4 * rows * rank
                offset = 4 * n_out if bias else 0
                states = sum(2 * matrix + 4 for matrix in (a, b))
                values = (w + offset + a + b, a + b, states, x + low)
                return dict(zip(("parameters", "gradients", "optimizer states", "activations"), values))
            """
        ),
        "bias as a number": lora(FROZEN="n_out * (n_in + bias)"),
    },
}
