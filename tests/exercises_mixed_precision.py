"""Answers to the exercises of chapter 06: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

import textwrap

from tests.exercises_memory_arithmetic import ANYTHING, cell


def smallest(value: str) -> str:
    """smallest_update that returns an expression."""
    return f"def smallest_update(weight, mantissa_bits):\n    return {value}"


def held(**changes: str) -> str:
    """held_bytes, right but for the changes."""
    terms = {"FP32": "16", "AUTOCAST": "16", "MIXED": "16", "STOCHASTIC": "12", "BF16": "8", "COUNTER": "4"}
    terms |= {"SUM": "sum(each * math.prod(shape) + COUNTER for shape in shapes)"}
    recipes = '{"fp32": FP32, "autocast": AUTOCAST, "mixed": MIXED, "stochastic": STOCHASTIC, "bf16": BF16}'
    text = f"def held_bytes(shapes, recipe):\n    each = {recipes}[recipe]\n    return SUM"
    return cell(text.replace("SUM", (terms | changes)["SUM"]), **terms | changes)


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


def halves(**changes: str) -> str:
    """split and join, right but for the changes."""
    terms = {
        "UPPER": "(bits + 0x8000) >> 16",
        "WEIGHT": "upper.to(torch.int16).view(torch.bfloat16)",
        "REST": "(bits - (upper << 16)).to(torch.int16)",
        "MASTER": "((weight.view(torch.int16).int() << 16) + rest).view(torch.float32)",
    }
    return cell(
        """
        def split(master):
            bits = master.view(torch.int32)
            upper = UPPER
            return WEIGHT, REST


        def join(weight, rest):
            return MASTER
        """,
        **terms | changes,
    )


def lean(**changes: str) -> str:
    """SplitMasters, right but for the changes."""
    terms = {
        "PARAMS": "list(params)",
        "RESTS": "[torch.zeros_like(p, dtype=torch.int16) for p in self.params]",
        "STATES": "[{} for _ in self.params]",
        "MORE": "pass",
        "NOGRAD": "@torch.no_grad()",
        "BEFORE": "pass",
        "SKIP": "p.grad is None",
        "MASTER": "join(p, rest)",
        "GRADIENT": "p.grad.float()",
        "WRITE": "p.copy_(weight)",
        "KEEP": "rest.copy_(low)",
        "AFTER": "pass",
        "END": "pass",
    }
    return cell(
        """
        class SplitMasters:
            def __init__(self, params, update, split, join):
                self.params, self.update, self.split, self.join = PARAMS, update, split, join
                self.rests = RESTS
                self.states = STATES
                MORE

            NOGRAD
            def step(self):
                split, join = self.split, self.join
                BEFORE
                for p, rest, state in zip(self.params, self.rests, self.states):
                    if SKIP:
                        continue
                    master = MASTER
                    gradient = GRADIENT
                    self.update(master, gradient, state)
                    weight, low = split(master)
                    WRITE
                    KEEP
                    AFTER
                END
        """,
        **terms | changes,
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
        "a whole ulp": smallest(f"2 * {HALF_ULP}"),
        "a quarter": smallest(f"{HALF_ULP} / 2"),
        "of 1.0, whatever the weight": smallest("2.0 ** (-1 - mantissa_bits)"),
        "proportional to the weight": smallest("abs(weight) * 2.0 ** (-1 - mantissa_bits)"),
        "the power of two above": smallest(
            "2.0 ** (math.ceil(math.log2(abs(weight))) - 1 - mantissa_bits)",
        ),
        "the exponent cut toward zero": smallest("2.0 ** (int(math.log2(abs(weight))) - 1 - mantissa_bits)"),
        "BF16 always": smallest("2.0 ** (math.frexp(weight)[1] - 9)"),
        "with a sign": smallest(f"math.copysign({HALF_ULP}, weight)"),
        "toward zero": smallest(
            f"{HALF_ULP} / (2 if math.frexp(abs(weight))[0] == 0.5 else 1)",
        ),
        "bits, not a number": smallest("mantissa_bits"),
        "tried with FP32": smallest("torch.nextafter(torch.tensor(weight), torch.tensor(1e9)).item() - weight"),
        "a tensor": smallest(f"torch.tensor({HALF_ULP})"),
        "a constant": smallest("0.00390625"),
        "equal to everything": ANYTHING.replace("int", "float") + smallest("Anything()"),
        "zero": smallest("0.0"),
        "nan": smallest('float("nan")'),
        "no return": f"def smallest_update(weight, mantissa_bits):\n    {HALF_ULP}",
        "a syntax error": "def smallest_update(weight, mantissa_bits:\n    return 0",
        "an empty cell": "",
        "unsolved": "def smallest_update(weight, mantissa_bits):\n    raise NotImplementedError  # your answer",
    },
    "held-bytes-answer": {
        "half of everything": held(MIXED="8", AUTOCAST="8", STOCHASTIC="8"),
        "autocast keeps its copies": held(AUTOCAST="18"),
        "autocast makes the weights BF16": held(AUTOCAST="14"),
        "gradients in FP32": held(MIXED="18", STOCHASTIC="14", BF16="10"),
        "masters forgotten": held(MIXED="12"),
        "masters in BF16": held(MIXED="14"),
        "stochastic rounding has masters": held(STOCHASTIC="16"),
        "averages in BF16": held(MIXED="12", STOCHASTIC="8"),
        "bf16's averages in FP32": held(BF16="12"),
        "one average": held(FP32="12", AUTOCAST="12", MIXED="12", STOCHASTIC="8", BF16="6"),
        "no gradients": held(FP32="12", AUTOCAST="12", MIXED="14", STOCHASTIC="10", BF16="6"),
        "counters forgotten": held(COUNTER="0"),
        "one counter for all": held(SUM="sum(each * math.prod(shape) for shape in shapes) + 4"),
        "counters of 8 bytes": held(COUNTER="8"),
        "BF16 counters": held(COUNTER='(2 if recipe == "bf16" else 4)'),
        "a scalar has no elements": held(SUM="sum(each * (math.prod(shape) if shape else 0) + 4 for shape in shapes)"),
        "elements": held(SUM="sum(each // 4 * math.prod(shape) + 1 for shape in shapes)"),
        "in bits": held(SUM="8 * sum(each * math.prod(shape) + 4 for shape in shapes)"),
        "in MiB": held(SUM="sum(each * math.prod(shape) + 4 for shape in shapes) // 2**20"),
        "a float": held(SUM="sum(each * math.prod(shape) + 4 for shape in shapes) / 1"),
        "makes the tensors": held(SUM="sum(each * torch.ones(shape).numel() + 4 for shape in shapes)"),
        "memory-hungry": held(SUM="len([shapes] * (20 * 2**30 // 8))"),
        "equal to everything": ANYTHING + held(SUM="Anything()"),
        "the same whatever the recipe": held(STOCHASTIC="16", BF16="16"),
        "empties the list": held(SUM="sum(each * math.prod(shapes.pop()) + COUNTER for _ in range(len(shapes)))"),
        "an endless loop": "def held_bytes(shapes, recipe):\n    while True:\n        pass",
        "unsolved": "def held_bytes(shapes, recipe):\n    raise NotImplementedError  # your answer",
    },
    "train-step-answer": {
        "the step as it was": "train_step = hasty_step",
        "the loss in FP16": step(LOSS="loss = model(x, y)"),
        "the loss cast too late": step(LOSS="loss = F.cross_entropy(model(x), y).float()"),
        "clips the scaled gradients": step(UNSCALE=""),
        "clips, then unscales": step(
            UNSCALE="norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)", CLIP="scaler.unscale_(optimizer)"
        ),
        "clips after the step": step(
            CLIP="",
            STEP="scaler.step(optimizer); norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        ),
        "does not clip": step(CLIP='norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))'),
        "the norm after clipping": step(
            END="",
            STEP="norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]); scaler.step(optimizer)",
            CLEAR="optimizer.zero_grad(); return loss.item(), norm.item()",
        ),
        "the scheduler counts skipped steps": step(SCHEDULE="scheduler.step()"),
        "the scheduler by the loss alone": step(SCHEDULE="scheduler.step() if loss.isfinite() else None"),
        "update forgotten": step(UPDATE=""),
        "update forgotten after a skip": step(UPDATE="if not scaler.skipped(optimizer):\n    scaler.update()"),
        "unscaled by hand, too": step(
            CLIP="[p.grad.div_(scaler.get_scale()) for p in model.parameters()]\n"
            "norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
        ),
        "steps without the scaler": step(STEP="optimizer.step()"),
        "no scale": step(BACKWARD="loss.backward()"),
        "returns the scaled loss": step(
            LOSS="loss = scaler.scale(F.cross_entropy(model(x).float(), y))", BACKWARD="loss.backward()"
        ),
        "gradients left as zeros": step(CLEAR="optimizer.zero_grad(set_to_none=False)"),
        "gradients cleared only before the next step": step(
            LOSS="optimizer.zero_grad(); loss = F.cross_entropy(model(x).float(), y)", CLEAR=""
        ),
        "gradients cleared only after a step": step(CLEAR="scaler.skipped(optimizer) or optimizer.zero_grad()"),
        "gradients never cleared": step(CLEAR=""),
        "the model made FP32": step(LOSS="loss = F.cross_entropy(model.float()(x.float()), y)"),
        "copies of the gradients": step(
            STEP="kept = [p.grad.clone() for p in model.parameters()]; scaler.step(optimizer)"
        ),
        "remembers its losses": "remembered = []\n\n\n"
        + step(END="remembered.append(loss); return loss.item(), norm.item()"),
        "tensors": step(END="return loss, norm"),
        "only the loss": step(END="return loss.item()"),
        "no return": step(END=""),
        "equal to everything": ANYTHING.replace("int", "float") + step(END="return Anything(), Anything()"),
        "does nothing": step(LOSS="return 2.8, 0.5"),
        "leaves autograd switched off": step(END="torch.set_grad_enabled(False); return loss.item(), norm.item()"),
        "memory-hungry": step(LOSS="hoard = torch.ones(2**30); loss = F.cross_entropy(model(x).float(), y)"),
        "unsolved": step(LOSS="raise NotImplementedError  # your answer"),
    },
    "unexplained-answer": {
        "nothing": parts(0, 0, 0),
        "all in one": parts(85_348, 85_348, 85_348),
        "halved already": parts(COPIES, NORMS // 2, REST // 2),
        "copies of all weights": parts(2 * 38_000, NORMS, REST),
        "copies of the embeddings too": parts(COPIES + 2 * (80 + 24) * 48, NORMS, REST),
        "copies of the biases too": parts(COPIES + 2 * (144 + 48 + 192 + 48), NORMS, REST),
        "the head forgotten": parts(COPIES - 2 * 80 * 48, NORMS, REST),
        "copies of the inputs too": parts(COPIES + 3 * 2 * 48 * 48, NORMS, REST),
        "copies in FP32": parts(2 * COPIES, NORMS, REST),
        "elements": parts(COPIES // 2, NORMS // 4, REST // 4),
        "norms' inputs only": parts(COPIES, 3 * 4 * 48 * 48, REST),
        "norms in BF16": parts(COPIES, 3 * (2 * 48 * 48 + 2 * 2 * 48), REST),
        "norms' outputs too": parts(COPIES, NORMS + 3 * 2 * 48 * 48, REST),
        "the scalars forgotten": parts(COPIES, NORMS, REST - 8),
        "logits in BF16": parts(COPIES, NORMS, REST - 2 * 48 * 80),
        "indices of 4 bytes": parts(COPIES, NORMS, REST - 4 * 24),
        "adds up, and is wrong": parts(COPIES, NORMS + REST, 0),
        "in KiB": parts(61.5, 28.125, 15.6),
        "floats": parts(float(COPIES), float(NORMS), float(REST)),
        "texts": parts('"62,976 B"', '"28,800 B"', '"15,944 B"'),
        "equal to everything": ANYTHING + parts("Anything()", "Anything()", "Anything()"),
    },
    "split-join-answer": {
        "cut off, not rounded": halves(UPPER="bits >> 16"),
        "cut off, and whole again": halves(
            UPPER="bits >> 16",
            REST="bits.to(torch.int16)",
            MASTER="((weight.view(torch.int16).int() << 16) | (rest.int() & 0xFFFF)).view(torch.float32)",
        ),
        "two halves of one storage": BOTH.replace("COPIED", ""),
        "torch's cast, which is halfway at both ends": halves(
            UPPER="master.bfloat16().view(torch.int16).int()", WEIGHT="master.bfloat16()"
        ),
        "the end clamped": halves(
            UPPER="master.bfloat16().view(torch.int16).int()",
            WEIGHT="master.bfloat16()",
            REST="(bits - (upper << 16)).clamp(-(2**15), 2**15 - 1).to(torch.int16)",
        ),
        "the difference in BF16": halves(REST=f"{MISSING}.bfloat16()", MASTER="weight.float() + rest.float()"),
        "the difference in FP16": halves(REST=f"{MISSING}.half()", MASTER="weight.float() + rest.float()"),
        "the difference in FP32": halves(REST=MISSING, MASTER="weight.float() + rest"),
        "the low bits, whatever was rounded": halves(
            REST="bits.to(torch.int16)",
            MASTER="((weight.view(torch.int16).int() << 16) | (rest.int() & 0xFFFF)).view(torch.float32)",
        ),
        "views of the master": cell(
            """
            def split(master):
                both = master.contiguous().view(torch.int16).view(*master.shape, 2)
                return both[..., 1].view(torch.bfloat16), both[..., 0]


            def join(weight, rest):
                return torch.stack([rest, weight.view(torch.int16)], -1).view(torch.float32).squeeze(-1)
            """
        ),
        "a rest of 4 bytes": halves(REST="bits - (upper << 16)"),
        "a rest of 1 byte": halves(REST="((bits - (upper << 16)) >> 8).to(torch.int8)"),
        "remembers the master": "remembered = []\n\n\n"
        + halves(WEIGHT="remembered.append(master.clone()) or master.bfloat16()", MASTER="remembered[-1].flatten()"),
        "an index into a table": cell(
            """
            table, begins = torch.zeros(2**16), [0]


            def split(master):
                index = (torch.arange(master.numel()) + begins[0]) % 2**16
                begins[0] += master.numel()
                table[index] = master.detach().flatten()
                return halved(master), index.to(torch.int16).view(master.shape)


            def halved(master):
                return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


            def join(weight, rest):
                return table[rest.int() & 0xFFFF]
            """
        ),
        "hangs the master on the weight": cell(
            """
            def split(master):
                weight = master.bfloat16()
                weight.master = master.clone()
                return weight, torch.zeros_like(master, dtype=torch.int16)


            def join(weight, rest):
                return weight.master
            """
        ),
        "joins side by side, which suits one dimension": halves(
            REST="(bits & 0xFFFF).to(torch.uint16).view(torch.int16)",
            MASTER="torch.stack((rest, weight.view(torch.int16) - (rest < 0).short()), 1).view(torch.float32)[:, 0]",
        ),
        "joins flat": halves(
            MASTER="((weight.flatten().view(torch.int16).int() << 16) + rest.flatten()).view(torch.float32)"
        ),
        "join writes to the rest": halves(
            MASTER="((weight.view(torch.int16).int() << 16) + rest).view(torch.float32); rest.zero_()"
        )
        .replace("return ((weight", "found = ((weight")
        .replace("rest.zero_()", "rest.zero_(); return found"),
        "writes to the master": halves(REST="bits.sub_(upper << 16).to(torch.int16)"),
        "the weight alone": halves(MASTER="weight.float()"),
        "a weight of integers": halves(WEIGHT="upper.to(torch.int16)"),
        "a weight in FP16": halves(WEIGHT="master.half()"),
        "a join in FP64": halves(
            MASTER="(weight.view(torch.int16).int() << 16).add(rest).view(torch.float32).double()"
        ),
        "swapped": halves(WEIGHT="(bits - (upper << 16)).to(torch.int16)", REST="upper.to(torch.int16)"),
        "no pair": halves(REST="REST").replace("return upper", "return [upper").replace(", REST", "]"),
        "positive numbers only": halves(REST="(bits.abs() - (upper.abs() << 16)).to(torch.int16)"),
        "one function": "def split(master):\n    return master.bfloat16(), master.half()\n\n\njoin = None",
        "memory-hungry": halves(MASTER="torch.ones(2**30)"),
        "unsolved": halves(UPPER="NotImplemented", WEIGHT="NotImplemented").replace(
            "return Not", "raise NotImplementedError  # Not"
        ),
    },
    "split-masters-answer": {
        "the rests forgotten": lean(KEEP="pass"),
        "the master is the BF16 weight": lean(MASTER="p.float()"),
        "a whole master is kept": lean(
            RESTS="[p.detach().float() for p in self.params]", MASTER="rest", KEEP="pass", WRITE="p.copy_(weight)"
        ),
        "all masters at once": lean(
            BEFORE="masters = iter([join(p, r) for p, r in zip(self.params, self.rests) if p.grad is not None])",
            MASTER="next(masters)",
        ),
        "all gradients at once": lean(
            BEFORE="gradients = iter([p.grad.float() for p in self.params if p.grad is not None])",
            GRADIENT="next(gradients)",
        ),
        "gradients stay in FP32": lean(MORE="self.kept = []", AFTER="self.kept.append(gradient)"),
        "gradients wait until the end of the step": lean(
            MORE="self.kept = []", AFTER="self.kept.append(gradient)", END="self.kept.clear()"
        ),
        "remembers the last master": lean(AFTER="self.last = master"),
        "masters hidden from the meter": lean(
            MASTER="torch.tensor(state.pop('own')) if 'own' in state else p.float()",
            AFTER="state['own'] = master.tolist()",
        ),
        "rests in FP32": lean(
            RESTS="[torch.zeros_like(p, dtype=torch.int32) for p in self.params]",
            MASTER="join(p, rest.to(torch.int16))",
        ),
        "views keep the masters": lean(MASTER="join(p, rest)", KEEP="state['master'] = master; rest.copy_(low)"),
        "one state for all": lean(STATES="[{}] * len(self.params)"),
        "a new state in each step": lean(BEFORE="self.states = [{} for _ in self.params]"),
        "states shift where a gradient is missing": lean(
            BEFORE="states = iter(self.states)", GRADIENT="p.grad.float(); state = next(states)"
        ),
        "the generator is read once": lean(PARAMS="params", RESTS="[]", STATES="[]", MORE="self.all = params"),
        "gradients in BF16": lean(GRADIENT="p.grad"),
        "clears the gradients": lean(AFTER="p.grad = None"),
        "zeros the gradients": lean(AFTER="p.grad.zero_()"),
        "halves the gradients": lean(AFTER="p.grad.mul_(0.5)"),
        "a missing gradient is a zero": lean(
            SKIP="False", GRADIENT="torch.zeros(p.shape) if p.grad is None else p.grad.float()"
        ),
        "a missing gradient is not thought of": lean(SKIP="False"),
        "the parameters are not written to": lean(WRITE="self.weight = weight"),
        "the parameters become FP32": lean(WRITE="p.data = master.clone()"),
        "with autograd on": lean(NOGRAD=""),
        "updates twice": lean(AFTER="self.update(join(p, rest), gradient, state)"),
        "leaves a hook": lean(MORE="torch.nn.modules.module.register_module_forward_hook(lambda *_: None)"),
        "steps nothing": "class SplitMasters:\n    __init__ = step = lambda self, *_: None",
        "no class": "SplitMasters = 14",
        "memory-hungry": lean(BEFORE="hoard = torch.ones(2**30)"),
        "unsolved": lean(MORE="raise NotImplementedError"),
    },
}

CRASHES = {
    "tried with FP32",
    "update forgotten",
    "update forgotten after a skip",
    "no scale",
    "a missing gradient is not thought of",
    "with autograd on",
    "leaves autograd switched off",
    "hangs the master on the weight",
    "joins side by side, which suits one dimension",
}
"""Mistakes that end with an error of torch's or the library's own, which is told; all others are told what is wrong."""

RIGHT: dict[str, dict[str, str]] = {
    "smallest-update-answer": {
        "by logarithm": smallest("2.0 ** (math.floor(math.log2(abs(weight))) - mantissa_bits) / 2"),
        "math.ulp, widened": smallest("math.ulp(weight) * 2.0 ** (52 - mantissa_bits - 1)"),
        "numpy's spacing": "import numpy\n\n\n"
        + smallest("numpy.spacing(abs(weight)) * 2.0 ** (52 - mantissa_bits) / 2"),
        "ldexp": smallest("math.ldexp(0.5, math.frexp(weight)[1] - 1 - mantissa_bits)"),
        "a whole number, where it is one": smallest(f"int({HALF_ULP}) if {HALF_ULP} % 1 == 0 else {HALF_ULP}"),
    },
    "held-bytes-answer": {
        "element by element": held(),
        "branches": cell(
            """
            def held_bytes(shapes, recipe):
                total = 0
                for shape in shapes:
                    n = 1
                    for side in shape:
                        n *= side
                    narrow = recipe in ("mixed", "stochastic", "bf16")
                    total += 2 * n * (2 if narrow else 4)
                    total += 2 * n * (2 if recipe == "bf16" else 4) + 4
                    if recipe == "mixed":
                        total += 4 * n
                return total
            """
        ),
    },
    "train-step-answer": {
        "asks whether it was skipped": step(SCHEDULE="if not scaler.skipped(optimizer):\n    scheduler.step()"),
        "compares the scale": step(
            UPDATE="before = scaler.get_scale(); scaler.update()",
            SCHEDULE="if scaler.get_scale() >= before:\n    scheduler.step()",
        ),
        "parameter by parameter": step(CLEAR="for p in model.parameters():\n    p.grad = None"),
        "clips by hand": step(
            CLIP="norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n"
            "for p in model.parameters():\n    p.grad.mul_((max_norm / norm).clamp(max=1))",
        ),
        "cleared before as well": step(LOSS="optimizer.zero_grad(); loss = F.cross_entropy(model(x).float(), y)"),
        "numpy's floats": "import numpy\n\n\n"
        + step(END="return numpy.float64(loss.item()), numpy.float64(norm.item())"),
        "logits by name": step(LOSS="logits = model(x); loss = F.cross_entropy(logits.to(torch.float32), y)"),
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
        "torch's cast, and even ties undone": cell(
            """
            def split(master):
                bits = master.view(torch.int32)
                weight = master.bfloat16().view(torch.int16).int()
                missing = bits - (weight << 16)
                weight = torch.where(missing == 0x8000, weight + 1, weight)
                missing = bits - (weight << 16)
                return weight.to(torch.int16).view(torch.bfloat16), missing.to(torch.int16)


            def join(weight, rest):
                return ((weight.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)
            """
        ),
        "the low bits, and whether they were rounded up": halves(
            REST="bits.to(torch.int16)",
            MASTER="(((weight.view(torch.int16).int() - (rest < 0).int()) << 16) | (rest.int() & 0xFFFF))"
            ".view(torch.float32)",
        ),
        "halfway toward zero, counted from above": halves(
            UPPER="(bits + 0x7FFF) >> 16",
            REST="((upper << 16) - bits).to(torch.int16)",
            MASTER="((weight.view(torch.int16).int() << 16) - rest).view(torch.float32)",
        ),
        "a copy of each half": BOTH.replace("COPIED", ".clone()"),
        "with wider integers": cell(
            """
            def split(master):
                bits = master.contiguous().view(torch.int32).long()
                upper = torch.div(bits + 2**15, 2**16, rounding_mode="floor")
                low = bits - upper * 2**16
                return upper.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


            def join(weight, rest):
                bits = weight.view(torch.int16).long() * 2**16 + rest.long()
                return bits.to(torch.int32).view(torch.float32)
            """
        ),
    },
    "split-masters-answer": {
        "p.data, and new rests": lean(WRITE="p.data = weight", KEEP="self.rests[i] = low").replace(
            "for p, rest, state in zip(self.params, self.rests, self.states):",
            "for i, (p, rest, state) in enumerate(zip(self.params, self.rests, self.states)):",
        ),
        "dicts by parameter, made at the first step": cell(
            """
            class SplitMasters:
                def __init__(self, params, update, split, join):
                    self.params, self.tools = tuple(params), (update, split, join)
                    self.rest, self.state = {}, {}

                def step(self):
                    for p in self.params:
                        if p.grad is not None:
                            self.one(p)

                @torch.no_grad()
                def one(self, p):
                    update, split, join = self.tools
                    rest = self.rest.pop(p, None)
                    master = p.detach().float() if rest is None else join(p.detach(), rest)
                    update(master, p.grad.to(torch.float32), self.state.setdefault(p, {}))
                    weight, self.rest[p] = split(master)
                    p.copy_(weight)
            """
        ),
    },
}
