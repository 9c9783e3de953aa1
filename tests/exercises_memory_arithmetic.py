"""Answers to the exercises of chapter 02: wrong ones, each of which loses its points, and other right ones."""

import re
import textwrap
from collections.abc import Callable


def cell(text: str, **changes: str) -> str:
    """The text of an answer cell, with words in capitals replaced."""
    text = textwrap.dedent(text).strip()
    for word, replacement in changes.items():
        text = text.replace(word, replacement)
    return text


def variants(template: str) -> Callable[..., str]:
    """A maker of answers: where the template has NAME«default», stands what is given for NAME, or the default."""
    defaults = dict(re.findall(r"(\w+)«(.*?)»", textwrap.dedent(template), re.DOTALL))
    names = re.sub("«.*?»", "", template, flags=re.DOTALL)

    def answer(**changes: str) -> str:
        text = cell(names)
        for name, default in defaults.items():
            put = changes.pop(name, default).replace("\\", r"\\")
            text = re.sub(rf"\b{name}\b", put, text)
        assert not changes, changes
        return text

    return answer


ANYTHING = """
class Anything(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


"""


def adam(value: str) -> str:
    """adam_bytes that returns an expression."""
    return f"def adam_bytes(shapes):\n    return {value}"


block = variants(
    """
    def block_keeps(b, s, h, a, by_hand, dropout):
        kept = 32 * s * b * h + STATISTICS«16 * b * s»
        if by_hand:
            kept += s * s + WEIGHTS«2» * a * s * s * b
        else:
            kept += 4 * b * a * s + 16
        if dropout:
            kept += DROPPED«2 * s * b * h»
        if dropout and by_hand:
            kept += MORE«3» * a * s * s * b
        return END«kept»
    """
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


lora = variants(
    """
    def lora_bytes(n_in, n_out, rank, rows, bias):
        learning, frozen = rank * (n_in + n_out), FROZEN«n_out * n_in + bias * n_out»
        return {
            "parameters": PARAMETERS«4 * (frozen + learning)»,
            "gradients": GRADIENTS«4 * learning»,
            "optimizer states": 8 * learning + 8,
            "KEY«activations»": ACTIVATIONS«4 * rows * (n_in + rank)»,
        }
    """
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
        "half: one average": adam("sum(4 * math.prod(shape) + 4 for shape in shapes)"),
        "memory-hungry": adam("len([0] * (20 * 2**30 // 8))"),
        "in bits": adam("8 * sum(8 * math.prod(shape) + 4 for shape in shapes)"),
        "elements": adam("sum(2 * math.prod(shape) + 1 for shape in shapes)"),
        "a scalar has no elements": adam("sum(8 * (math.prod(shape) if shape else 0) + 4 for shape in shapes)"),
        "no return": "def adam_bytes(shapes):\n    sum(8 * math.prod(shape) + 4 for shape in shapes)",
        "a number instead of a function": "adam_bytes = 296",
        "empties the list": adam("sum(8 * math.prod(shapes.pop()) + 4 for _ in range(len(shapes)))"),
    },
    "block-keeps-answer": {
        "statistics forgotten": block(STATISTICS="0"),
        "in FP32": block(END="2 * kept"),
        "in KiB": block(END="kept // 1024"),
        "elements": block(END="kept // 2"),
        "scores' mask forgotten": block(MORE="2"),
        "equal to everything": ANYTHING + block(END="Anything()"),
        "measured instead": cell(
            """
            def block_keeps(b, s, h, a, by_hand, dropout):
                return show_kept(b, s, h, a, by_hand, dropout).rows[-1][2]
            """
        ),
        "an endless loop": "def block_keeps(b, s, h, a, by_hand, dropout):\n    while True:\n        pass",
        "dropout forgotten": block(DROPPED="0", MORE="0"),
        "scores in FP32": block(WEIGHTS="4"),
    },
    "unexplained-answer": {
        "all in one": parts(114_432, 114_432, 114_432),
        "elements": parts(2 * 600 * 24, 3 * 600 * 24, 8 * 24),
        "one gradient apart": parts(MATRIX, 3 * MATRIX, 768),
        "one gradient together, as planned": parts(2 * MATRIX, MATRIX, 768),
        "with the 4 bytes of the loss": parts(2 * MATRIX, 3 * MATRIX, 772),
        "nothing on its way": parts(2 * MATRIX, 3 * MATRIX, 0),
        "floats": parts(float(2 * MATRIX), float(3 * MATRIX), 768.0),
        "texts": parts('"115,200 B"', '"172,800 B"', '"768 B"'),
    },
    "largest-batch-answer": {
        "one by one": search("batch = 0\nwhile peak(batch + 1) <= capacity_bytes:\n    batch += 1\nreturn batch"),
        "memory-hungry": search("return len([peak(1)] * (20 * 2**30 // 8))"),
        "raises if nothing fits": search(BISECTION.replace("return fits", "return fits // bool(fits)")),
        "one too many": search(BISECTION.replace("return fits", "return too_many")),
        "the boundary does not fit": search(BISECTION.replace("<=", "<")),
        "-1 if nothing fits": search(BISECTION.replace("return fits", "return fits or -1")),
        "a straight line through two peaks": search(
            """
            slope = max(1, peak(2) - peak(1))
            return max(0, 1 + (capacity_bytes - peak(1)) // slope)
            """
        ),
        "asks for no texts": search("if peak(0) > capacity_bytes:\n    return 0" + BISECTION),
        "halves of texts": search(BISECTION.replace("// 2", "/ 2")),
        "a float": search(BISECTION.replace("return fits", "return float(fits)")),
    },
    "lora-linear-answer": {
        "W where no state_dict finds it": layer(
            "self.w, self.bias = linear.weight.detach(), linear.bias; del self.linear",
            "return nn.functional.linear(x, self.w, self.bias) + self.b(self.a(x))",
        ),
        "leaves a hook": layer(
            "torch.nn.modules.module.register_module_forward_hook(lambda *_: None)",
        ),
        "autograd switched off": layer("torch.set_grad_enabled(False)"),
        "the product applied beside": layer(
            forward="return self.linear(x) + x @ (self.b.weight @ self.a.weight).T",
        ),
        "the bias learns": layer("linear.weight.requires_grad_(False)", frozen="True"),
        "B begins at random": layer("nn.init.normal_(self.b.weight)"),
        "B begins with almost nothing": layer("nn.init.normal_(self.b.weight, std=1e-6)"),
        "A begins with ones": layer("nn.init.ones_(self.a.weight)"),
        "A begins with zeros": layer("nn.init.zeros_(self.a.weight)"),
        "remembers its output": layer(forward="self.last = self.linear(x) + self.b(self.a(x)); return self.last"),
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
        "a copy of the bias": layer(
            "self.linear.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), False)"
        ),
    },
    "lora-bytes-answer": {
        "x forgotten": lora(ACTIVATIONS="4 * rows * rank"),
        "in KiB": lora(ACTIVATIONS="4 * rows * (n_in + rank) // 1024"),
        "elements": lora(GRADIENTS="learning"),
        "twice": lora(ACTIVATIONS="8 * rows * (n_in + rank)"),
        "another key": lora(KEY="activation"),
        "floats": lora(PARAMETERS="4.0 * (frozen + learning)"),
        "a sum": "def lora_bytes(n_in, n_out, rank, rows, bias):\n    return 16 * rank * (n_in + n_out)",
        "measured instead": cell(
            """
            def lora_bytes(n_in, n_out, rank, rows, bias):
                return held(nn.Linear(n_in, n_out, bias=bias), n_in, rows)
            """
        ),
        "always a bias": lora(FROZEN="n_out * n_in + n_out"),
    },
}

CRASHES = {"autograd switched off", "raises if nothing fits"}
RIGHT: dict[str, dict[str, str]] = {
    "adam-bytes-answer": {
        "numpy's numbers": "import numpy\n\n\n"
        + adam("sum(8 * numpy.prod(shape, dtype=numpy.int64) + 4 for shape in shapes)"),
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
        "bisect of the standard library": search(
            """
            from bisect import bisect_right

            return bisect_right(range(1, 2**21), capacity_bytes, key=peak)
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
