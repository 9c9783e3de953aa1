"""Answers to the exercises of chapter 06: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

import textwrap

from tests.exercises_memory_arithmetic import ANYTHING, cell, variants


def smallest(value: str) -> str:
    """smallest_update that returns an expression."""
    return f"def smallest_update(weight, mantissa_bits):\n    return {value}"


held = variants(
    """
    def held_bytes(shapes, recipe):
        each = {"fp32": 16, "autocast": AUTOCAST«16», "mixed": MIXED«16»}
        each |= {"stochastic": STOCHASTIC«12», "bf16": BF16«8»}
        return SUM«sum(each[recipe] * math.prod(shape) + 4 for shape in shapes)»
    """
)


def step(**changes: str) -> str:
    """train_step, right but for the changes."""
    lines = {
        "LOSS": "loss = F.cross_entropy(model(x).float(), y)",
        "BACKWARD": "scaler.scale(loss).backward()",
        "UNSCALE": "scaler.unscale_(optimizer)",
        "CLIP": "norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        "STEP": "scaler.step(optimizer)",
        "UPDATE": "scaler.update()",
        "SCHEDULE": "scaler.step_scheduler(scheduler)",
        "CLEAR": "optimizer.zero_grad()",
        "END": "return loss.item(), norm.item()",
    } | changes
    body = "\n".join(["x, y = batch", *(text for text in lines.values() if text)])
    head = "def train_step(model, batch, optimizer, scaler, scheduler, max_norm):\n"
    return head + textwrap.indent(body, "    ")


def parts(copies: object, norms: object, rest: object) -> str:
    """The three numbers of exercise 4."""
    return f"copies_bytes, norms_bytes, rest_bytes = {copies}, {norms}, {rest}"


halves = variants(
    """
    def split(master):
        bits = master.view(torch.int32)
        upper = UPPER«(bits + 0x8000) >> 16»
        return WEIGHT«upper.to(torch.int16).view(torch.bfloat16)», REST«(bits - (upper << 16)).to(torch.int16)»


    def join(weight, rest):
        return MASTER«((weight.view(torch.int16).int() << 16) + rest).view(torch.float32)»
    """
)


lean = variants(
    """
    class SplitMasters:
        def __init__(self, params, update, split, join):
            self.params, self.update, self.split, self.join = list(params), update, split, join
            self.rests = RESTS«[torch.zeros_like(p, dtype=torch.int16) for p in self.params]»
            self.states = STATES«[{} for _ in self.params]»
            MORE«pass»

        @torch.no_grad()
        def step(self):
            split, join = self.split, self.join
            BEFORE«pass»
            for p, rest, state in zip(self.params, self.rests, self.states):
                if SKIP«p.grad is None»:
                    continue
                master = MASTER«join(p, rest)»
                gradient = GRADIENT«p.grad.float()»
                self.update(master, gradient, state)
                weight, low = split(master)
                WRITE«p.copy_(weight)»
                KEEP«rest.copy_(low)»
                AFTER«pass»
            END«pass»
    """
)


COPIES, NORMS, REST = 62_976, 28_800, 15_944
HALF_ULP = "2.0 ** (math.frexp(weight)[1] - 2 - mantissa_bits)"
MISSING = "master.sub(master.bfloat16().float())"

BOTH = cell(
    """
    def split(master):
        both = (master.contiguous().view(torch.int32) + 0x8000).view(-1, 1).view(torch.int16)
        low, high = (half.view(master.shape)COPIED for half in both.unbind(-1))
        return high.view(torch.bfloat16), low


    def join(weight, rest):
        both = torch.stack([rest, weight.view(torch.int16)], -1)
        return (both.view(torch.int32).squeeze(-1) - 0x8000).view(torch.float32)
    """
)

WRONG: dict[str, dict[str, str]] = {
    "smallest-update-answer": {
        "proportional to the weight": smallest("abs(weight) * 2.0 ** (-1 - mantissa_bits)"),
        "the exponent cut toward zero": smallest("2.0 ** (int(math.log2(abs(weight))) - 1 - mantissa_bits)"),
        "with a sign": smallest(f"math.copysign({HALF_ULP}, weight)"),
        "tried with FP32": smallest("torch.nextafter(torch.tensor(weight), torch.tensor(1e9)).item() - weight"),
        "equal to everything": ANYTHING.replace("int", "float") + smallest("Anything()"),
        "zero": smallest("0.0"),
        "nan": smallest('float("nan")'),
        "unsolved": "def smallest_update(weight, mantissa_bits):\n    raise NotImplementedError  # your answer",
        "BF16 always": smallest("2.0 ** (math.frexp(weight)[1] - 9)"),
    },
    "held-bytes-answer": {
        "autocast keeps its copies": held(AUTOCAST="18"),
        "memory-hungry": held(SUM="len([shapes] * (20 * 2**30 // 8))"),
        "masters forgotten": held(MIXED="12"),
        "makes the tensors": held(SUM="sum(each[recipe] * torch.ones(shape).numel() + 4 for shape in shapes)"),
        "equal to everything": ANYTHING + held(SUM="Anything()"),
        "empties the list": held(SUM="sum(each[recipe] * math.prod(shapes.pop()) + 4 for _ in range(len(shapes)))"),
        "unsolved": "def held_bytes(shapes, recipe):\n    raise NotImplementedError  # your answer",
        "an endless loop": "def held_bytes(shapes, recipe):\n    while True:\n        pass",
        "stochastic rounding has masters": held(STOCHASTIC="16"),
        "bf16's averages in FP32": held(BF16="12"),
        "a scalar has no elements": held(
            SUM="sum(each[recipe] * (math.prod(shape) if shape else 0) + 4 for shape in shapes)"
        ),
    },
    "train-step-answer": {
        "copies of the gradients": step(
            STEP="kept = [p.grad.clone() for p in model.parameters()]; scaler.step(optimizer)"
        ),
        "memory-hungry": step(LOSS="hoard = torch.ones(2**30); loss = F.cross_entropy(model(x).float(), y)"),
        "no scale": step(BACKWARD="loss.backward()"),
        "does not clip": step(CLIP='norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))'),
        "the scheduler counts skipped steps": step(SCHEDULE="scheduler.step()"),
        "unscaled by hand, too": step(
            CLIP="[p.grad.div_(scaler.get_scale()) for p in model.parameters()]\n"
            "norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
        ),
        "gradients left as zeros": step(CLEAR="optimizer.zero_grad(set_to_none=False)"),
        "gradients cleared only after a step": step(CLEAR="scaler.skipped(optimizer) or optimizer.zero_grad()"),
        "remembers its losses": "remembered = []\n\n\n"
        + step(END="remembered.append(loss); return loss.item(), norm.item()"),
        "equal to everything": ANYTHING.replace("int", "float") + step(END="return Anything(), Anything()"),
        "does nothing": step(LOSS="return 2.8, 0.5"),
    },
    "unexplained-answer": {
        "copies of all weights": parts(2 * 38_000, NORMS, REST),
        "nothing": parts(0, 0, 0),
        "halved already": parts(COPIES, NORMS // 2, REST // 2),
        "the head forgotten": parts(COPIES - 2 * 80 * 48, NORMS, REST),
        "copies in FP32": parts(2 * COPIES, NORMS, REST),
        "the scalars forgotten": parts(COPIES, NORMS, REST - 8),
        "in KiB": parts(61.5, 28.125, 15.6),
        "floats": parts(float(COPIES), float(NORMS), float(REST)),
    },
    "split-join-answer": {
        "the weight alone": halves(MASTER="weight.float()"),
        "memory-hungry": halves(MASTER="torch.ones(2**30)"),
        "joins side by side, which suits one dimension": halves(
            REST="(bits & 0xFFFF).to(torch.uint16).view(torch.int16)",
            MASTER="torch.stack((rest, weight.view(torch.int16) - (rest < 0).short()), 1).view(torch.float32)[:, 0]",
        ),
        "cut off, not rounded": halves(UPPER="bits >> 16"),
        "two halves of one storage": BOTH.replace("COPIED", ""),
        "the difference in FP32": halves(REST=MISSING, MASTER="weight.float() + rest"),
        "remembers the master": "remembered = []\n\n\n"
        + halves(WEIGHT="remembered.append(master.clone()) or master.bfloat16()", MASTER="remembered[-1].flatten()"),
        "join writes to the rest": halves(
            MASTER="((weight.view(torch.int16).int() << 16) + rest).view(torch.float32); rest.zero_()"
        )
        .replace("return ((weight", "found = ((weight")
        .replace("rest.zero_()", "rest.zero_(); return found"),
        "writes to the master": halves(REST="bits.sub_(upper << 16).to(torch.int16)"),
        "a weight in FP16": halves(WEIGHT="master.half()"),
        "no pair": halves(REST="REST").replace("return upper", "return [upper").replace(", REST", "]"),
        "one function": "def split(master):\n    return master.bfloat16(), master.half()\n\n\njoin = None",
    },
    "split-masters-answer": {
        "remembers the last master": lean(AFTER="self.last = master"),
        "leaves a hook": lean(MORE="torch.nn.modules.module.register_module_forward_hook(lambda *_: None)"),
        "a missing gradient is not thought of": lean(SKIP="False"),
        "a whole master is kept": lean(
            RESTS="[p.detach().float() for p in self.params]", MASTER="rest", KEEP="pass", WRITE="p.copy_(weight)"
        ),
        "gradients wait until the end of the step": lean(
            MORE="self.kept = []", AFTER="self.kept.append(gradient)", END="self.kept.clear()"
        ),
        "one state for all": lean(STATES="[{}] * len(self.params)"),
        "states shift where a gradient is missing": lean(
            BEFORE="states = iter(self.states)", GRADIENT="p.grad.float(); state = next(states)"
        ),
        "gradients in BF16": lean(GRADIENT="p.grad"),
        "zeros the gradients": lean(AFTER="p.grad.zero_()"),
        "the parameters become FP32": lean(WRITE="p.data = master.clone()"),
        "steps nothing": "class SplitMasters:\n    __init__ = step = lambda self, *_: None",
        "no class": "SplitMasters = 14",
        "a missing gradient is a zero": lean(
            SKIP="False", GRADIENT="torch.zeros(p.shape) if p.grad is None else p.grad.float()"
        ),
    },
}

CRASHES = {
    "a missing gradient is not thought of",
    "joins side by side, which suits one dimension",
    "no scale",
    "tried with FP32",
}
"""Mistakes that end with an error of torch's or the library's own, which is told; all others are told what is wrong."""

RIGHT: dict[str, dict[str, str]] = {
    "smallest-update-answer": {
        "by logarithm": smallest("2.0 ** (math.floor(math.log2(abs(weight))) - mantissa_bits) / 2"),
        "math.ulp, widened": smallest("math.ulp(weight) * 2.0 ** (52 - mantissa_bits - 1)"),
        "numpy's spacing": "import numpy\n\n\n"
        + smallest("numpy.spacing(abs(weight)) * 2.0 ** (52 - mantissa_bits) / 2"),
        "a whole number, where it is one": smallest(f"int({HALF_ULP}) if {HALF_ULP} % 1 == 0 else {HALF_ULP}"),
    },
    "held-bytes-answer": {
        "element by element": held(),
    },
    "train-step-answer": {
        "asks whether it was skipped": step(SCHEDULE="if not scaler.skipped(optimizer):\n    scheduler.step()"),
        "parameter by parameter": step(CLEAR="for p in model.parameters():\n    p.grad = None"),
        "numpy's floats": "import numpy\n\n\n"
        + step(END="return numpy.float64(loss.item()), numpy.float64(norm.item())"),
        "cleared before as well": step(LOSS="optimizer.zero_grad(); loss = F.cross_entropy(model(x).float(), y)"),
    },
    "unexplained-answer": {
        "numbers": parts(COPIES, NORMS, REST),
        "read from the timeline": cell(
            """
            alive = [s for s in auto.alive(turn(auto)) if s.category == "activation"]
            matrices = [(144, 48), (48, 48), (192, 48), (48, 192), (80, 48)]
            copies_bytes = sum(s.nbytes for s in alive if s.op == "_to_copy" and s.shape in matrices)
            norms_bytes = sum(s.nbytes for s in alive if "layer_norm" in s.reason)
            rest_bytes = sum(s.nbytes for s in alive if s.dtype != "bfloat16") - norms_bytes
            """
        ),
    },
    "split-join-answer": {
        "the low bits, and whether they were rounded up": halves(
            REST="bits.to(torch.int16)",
            MASTER="(((weight.view(torch.int16).int() - (rest < 0).int()) << 16) | (rest.int() & 0xFFFF))"
            ".view(torch.float32)",
        ),
        "a copy of each half": BOTH.replace("COPIED", ".clone()"),
        "halfway toward zero, counted from above": halves(
            UPPER="(bits + 0x7FFF) >> 16",
            REST="((upper << 16) - bits).to(torch.int16)",
            MASTER="((weight.view(torch.int16).int() << 16) - rest).view(torch.float32)",
        ),
    },
    "split-masters-answer": {
        "p.data, and new rests": lean(WRITE="p.data = weight", KEEP="self.rests[i] = low").replace(
            "for p, rest, state in zip(self.params, self.rests, self.states):",
            "for i, (p, rest, state) in enumerate(zip(self.params, self.rests, self.states)):",
        ),
    },
}
