"""Answers to the exercises of chapter 08: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import ANYTHING, cell


def held(value: str) -> str:
    """held_bytes that returns an expression."""
    return cell(
        """
        def held_bytes(layers, segments, saved_bytes, input_bytes):
            size, longer = divmod(layers, segments)
            sizes = [size + (number < longer) for number in range(segments)]
            return VALUE
        """,
        VALUE=value,
    )


WORST = "max(before * input_bytes + size * saved_bytes for before, size in enumerate(sizes))"


def best(value: str) -> str:
    """best_segments that returns an expression of worst(segments) and of root, where the formula has its minimum."""
    return cell(
        """
        def best_segments(layers, saved_bytes, input_bytes):
            root = (layers * saved_bytes / input_bytes) ** 0.5

            def worst(segments):
                size, longer = divmod(layers, segments)
                sizes = [size + (number < longer) for number in range(segments)]
                return WORST

            return VALUE
        """,
        WORST=WORST,
        VALUE=value,
    )


def parts(view: object, twice: object, spared: object) -> str:
    """The three numbers of exercise 2."""
    return f"view_bytes, twice_bytes, spared_flops = {view}, {twice}, {spared}"


def mend(**changes: str) -> str:
    """mended, right but for the changes."""
    terms = {
        "START": "model.embedding(tokens[:, -model.window :])",
        "RESULT": "x + down(hidden), (hidden > 0).float().mean(-1)",
        "CALL": "checkpoint(block, up, down, x, preserve_rng_state=False)",
        "NOTE": "model.awake.append(awake)",
        "EACH": "pass",
        "END": "model.head(x)",
    }
    return cell(
        """
        def mended(model, tokens):
            def block(up, down, x):
                hidden = F.gelu(up(x))
                return RESULT

            x = START
            for up, down in zip(model.up, model.down):
                x, awake = CALL
                NOTE
                EACH
            return END
        """,
        **terms | changes,
    )


def node(**changes: str) -> str:
    """checkpoint_function, right but for the changes."""
    terms = {
        "NOTE": "ctx.random_state = torch.get_rng_state()",
        "SAVE": "ctx.save_for_backward(x)",
        "FIRST": "return function(x)",
        "LEAF": "ctx.saved_tensors[0].detach().requires_grad_()",
        "GRADS": "torch.enable_grad()",
        "FORK": "torch.random.fork_rng(devices=[])",
        "SEED": "torch.set_rng_state(ctx.random_state)",
        "SECOND": "out = ctx.function(x)",
        "THEN": "pass",
        "BACK": "torch.autograd.backward(out, grad)",
        "END": "return None, x.grad",
        "APPLY": "Again.apply(function, x)",
    }
    return cell(
        """
        class Again(torch.autograd.Function):
            @staticmethod
            def forward(ctx, function, x):
                ctx.function = function
                NOTE
                SAVE
                FIRST

            @staticmethod
            def backward(ctx, grad):
                x = LEAF
                with GRADS, FORK:
                    SEED
                    SECOND
                THEN
                BACK
                END


        def checkpoint_function(function, x):
            return APPLY
        """,
        **terms | changes,
    )


def hook(**changes: str) -> str:
    """checkpoint_hooks, right but for the changes."""
    terms = {
        "BEGIN": "pass",
        "PACK": "next(numbers)",
        "MISSING": "number not in again",
        "PLACES": "itertools.count()",
        "KEEP": "again[next(places)] = tensor.detach()",
        "GRADS": "torch.enable_grad()",
        "INNER": "saved_tensors_hooks(keep, lambda _: None)",
        "AGAIN": "function(*args)",
        "GIVE": "again.pop(number)",
        "OUTER": "saved_tensors_hooks(pack, unpack)",
        "RESULT": "function(*args)",
    }
    return cell(
        """
        def checkpoint_hooks(function, *args):
            numbers, again = itertools.count(), {}
            BEGIN

            def pack(tensor):
                return PACK

            def unpack(number):
                if MISSING:
                    places = PLACES

                    def keep(tensor):
                        KEEP

                    with GRADS, INNER:
                        AGAIN
                return GIVE

            with OUTER:
                return RESULT
        """,
        **terms | changes,
    )


def plan(**changes: str) -> str:
    """cuts, right but for the changes."""
    terms = {
        "BEGIN": "pass",
        "WAIT": "waiting + input_bytes[start]",
        "FITS": "waiting + sum(saved_bytes[start:stop]) <= budget",
        "CHOICE": "min(found)",
        "HIGH": "sum(saved_bytes)",
        "UP": "middle + 1, high",
        "END": "plan(low)[1][1:]",
    }
    return cell(
        """
        def cuts(saved_bytes, input_bytes):
            BEGIN

            def plan(budget):
                plans = {0: (0, [])}
                for stop in range(1, len(saved_bytes) + 1):
                    found = [
                        (WAIT, [*starts, start])
                        for start, (waiting, starts) in plans.items()
                        if FITS
                    ]
                    if found:
                        plans[stop] = CHOICE
                return plans.get(len(saved_bytes))

            low, high = 0, HIGH
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if plan(middle) else (UP)
            return END
        """,
        **terms | changes,
    )


def balanced(count: str) -> str:
    """cuts into so many segments of as many layers each."""
    return cell(
        """
        def cuts(saved_bytes, input_bytes):
            layers = len(saved_bytes)
            count = COUNT
            return [layers * number // count for number in range(1, count)]
        """,
        COUNT=count,
    )


def chosen(**changes: str) -> str:
    """compute_again, right but for the changes."""
    terms = {
        "BEGIN": "pass",
        "COUNTS": "range(len(ops) + 1)",
        "FITS": "total(c, 2) <= budget_flops",
        "WORTH": "total(c, 1)",
        "END": "list(most)",
    }
    return cell(
        """
        def compute_again(ops, budget_flops):
            BEGIN

            def total(chosen, what):
                return sum(ops[index][what] for index in chosen)

            every = [c for n in COUNTS for c in itertools.combinations(range(len(ops)), n)]
            most = max((c for c in every if FITS), key=lambda c: WORTH)
            return END
        """,
        **terms | changes,
    )


def greedy(order: str, fits: str = "ops[index][2] <= left") -> str:
    """compute_again that takes one op after the other, in an order."""
    return cell(
        """
        def compute_again(ops, budget_flops):
            left, taken = budget_flops, []
            for index in sorted(range(len(ops)), key=lambda index: ORDER):
                if FITS:
                    taken.append(index)
                    left -= ops[index][2]
            return taken
        """,
        ORDER=order,
        FITS=fits,
    )


VIEW, TWICE, SPARED = 24_576, 1_536, 4_194_304
DOWN, HEAD = 524_288, 1_048_576

WRONG: dict[str, dict[str, str]] = {
    "held-answer": {
        "nothing forgotten": held("layers * saved_bytes"),
        "all inputs, and the longest segment": held("segments * input_bytes + sizes[0] * saved_bytes"),
        "the inputs before the last, and the longest segment": held(
            "(segments - 1) * input_bytes + sizes[0] * saved_bytes"
        ),
        "its own input as well": held(f"{WORST} + input_bytes"),
        "the first segment": held("sizes[0] * saved_bytes"),
        "the last segment": held("(segments - 1) * input_bytes + sizes[-1] * saved_bytes"),
        "one layer at a time": held("(segments - 1) * input_bytes + saved_bytes"),
        "the inputs alone": held("segments * input_bytes"),
        "each segment's layers": held("segments * saved_bytes + sizes[0] * input_bytes"),
        "by division": held("(segments - 1) * input_bytes + layers / segments * saved_bytes"),
        "by whole division": held("(segments - 1) * input_bytes + layers // segments * saved_bytes"),
        "the smallest moment": held(WORST.replace("max(", "min(")),
        "all moments": held(WORST.replace("max(", "sum(")),
        "the shorter segments first": held(WORST.replace("(sizes)", "(sizes[::-1])")),
        "four times as much": held(f"4 * {WORST}"),
        "half": held(f"{WORST} // 2"),
        "in KiB": held(f"{WORST} // 1024"),
        "a float": held(f"float({WORST})"),
        "a text": held(f'f"{{{WORST}}} B"'),
        "a tensor": held(f"int(torch.tensor({WORST}))"),
        "hard-coded": held("{10: 3200, 16: 20480}.get(layers, 4096)"),
        "no return": held(WORST).replace("return max", "max"),
        "equal to everything": ANYTHING + held("Anything()"),
        "memory-hungry": held(f"len([0] * (20 * 2**30 // 8)) + {WORST}"),
        "a syntax error": "def held_bytes(layers, segments:\n    return 0",
        "an empty cell": "",
        "unsolved": "def held_bytes(layers, segments, saved_bytes, input_bytes):\n    raise NotImplementedError",
    },
    "best-answer": {
        "√layers": best("max(1, round(layers ** 0.5))"),
        "the formula": best("root"),
        "the formula, rounded": best("round(root)"),
        "the formula, rounded and clamped": best("min(max(round(root), 1), layers)"),
        "the formula, rounded up and clamped": best("min(max(int(root) + 1, 1), layers)"),
        "the neighbours of the formula": best(
            "min((k for k in (int(root), int(root) + 1) if 1 <= k <= layers), key=worst, default=layers)"
        ),
        "every layer": best("layers"),
        "one": best("1"),
        "the formula upside down": best("min(max(round((layers * input_bytes / saved_bytes) ** 0.5), 1), layers)"),
        "without the layers": best("min(max(round((saved_bytes / input_bytes) ** 0.5), 1), layers)"),
        "the last of several": best("min(range(layers, 0, -1), key=worst)"),
        "the worst": best("max(range(1, layers + 1), key=worst)"),
        "ends before layers": best("min(range(1, max(layers, 2)), key=worst)"),
        "begins with two": best("min(range(2, layers + 2), key=lambda k: worst(min(k, layers)))"),
        "only divisors": best("min((k for k in range(1, layers + 1) if layers % k == 0), key=worst)"),
        "all inputs and the longest": best(
            "min(range(1, layers + 1), key=lambda k: k * input_bytes - (-layers // k) * saved_bytes)"
        ),
        "stops at the first rise": best("next((k for k in range(1, layers) if worst(k + 1) >= worst(k)), layers)"),
        "bytes": best("min(map(worst, range(1, layers + 1)))"),
        "layers in a segment": best("layers // min(range(1, layers + 1), key=worst)"),
        "a float": best("float(min(range(1, layers + 1), key=worst))"),
        "tensors": best("int(torch.tensor([worst(k) for k in range(1, layers + 1)]).argmin()) + 1"),
        "counts from zero": best("min(range(layers), key=lambda k: worst(k + 1))"),
        "equal to everything": ANYTHING + best("Anything(3)"),
        "unsolved": best("None.unsolved").replace("    def worst", "    raise NotImplementedError\n\n    def worst"),
    },
    "unexplained-answer": {
        "nothing": parts(0, 0, 0),
        "the whole input": parts(32_768, TWICE, SPARED),
        "what is read of it": parts(8_192, TWICE, SPARED),
        "one text's": parts(VIEW // 4, TWICE, SPARED),
        "elements": parts(VIEW // 4, TWICE // 4, SPARED),
        "in FP64": parts(2 * VIEW, 2 * TWICE, SPARED),
        "the entries as well": parts(VIEW + TWICE, TWICE, SPARED),
        "the loss as well": parts(VIEW + 4, TWICE + 4, SPARED),
        "all entries": parts(VIEW, 2 * TWICE, SPARED),
        "one entry": parts(VIEW, 256, SPARED),
        "how many entries": parts(VIEW, 6, SPARED),
        "hidden units": parts(VIEW, 196_608, SPARED),
        "the blocks alone": parts(VIEW, TWICE, 6 * DOWN),
        "the head alone": parts(VIEW, TWICE, HEAD),
        "one block and the head": parts(VIEW, TWICE, DOWN + HEAD),
        "one layer": parts(VIEW, TWICE, DOWN),
        "both layers": parts(VIEW, TWICE, 12 * DOWN),
        "a forward": parts(VIEW, TWICE, 12 * DOWN + HEAD),
        "what backward took": parts(VIEW, TWICE, 2 * (12 * DOWN + HEAD)),
        "multiplications alone": parts(VIEW, TWICE, SPARED // 2),
        "a share": parts(VIEW, TWICE, SPARED / (12 * DOWN + HEAD)),
        "in KiB": parts(24.0, 1.5, 4096.0),
        "floats": parts(float(VIEW), float(TWICE), float(SPARED)),
        "texts": parts('"24,576 B"', '"1,536 B"', '"4,194,304"'),
        "equal to everything": ANYTHING + parts("Anything()", "Anything()", "Anything()"),
    },
    "mended-answer": {
        "the model's own": "def mended(model, tokens):\n    return model(tokens)",
        "the view as it was": mend(START="model.embedding(tokens)[:, -model.window :]"),
        "detached": mend(START="model.embedding(tokens)[:, -model.window :].detach()"),
        "the first tokens": mend(START="model.embedding(tokens[:, : model.window])"),
        "16 tokens": mend(START="model.embedding(tokens[:, -16:])"),
        "all tokens": mend(START="model.embedding(tokens)"),
        "no checkpoint": mend(CALL="block(up, down, x)"),
        "random numbers preserved": mend(CALL="checkpoint(block, up, down, x)"),
        "torch's, random numbers preserved": mend(
            CALL="torch.utils.checkpoint.checkpoint(block, up, down, x, use_reentrant=False)"
        ),
        "checkpoints only some": mend(
            CALL="(checkpoint if up is model.up[0] else lambda f, *args, **_: f(*args))"
            "(block, up, down, x, preserve_rng_state=False)"
        ),
        "all blocks in one": cell(
            """
            def mended(model, tokens):
                def blocks(x):
                    entries = []
                    for up, down in zip(model.up, model.down):
                        hidden = F.gelu(up(x))
                        entries.append((hidden > 0).float().mean(-1))
                        x = x + down(hidden)
                    return x, entries

                x, entries = checkpoint(blocks, model.embedding(tokens[:, -model.window :]), preserve_rng_state=False)
                model.awake += entries
                return model.head(x)
            """
        ),
        "appends inside": mend(
            RESULT="(model.awake.append((hidden > 0).float().mean(-1)), x + down(hidden))[::-1]", NOTE="pass"
        ),
        "appends inside, until there are enough": mend(
            RESULT="(len(model.awake) < len(model.up) and model.awake.append((hidden > 0).float().mean(-1)), "
            "x + down(hidden))[::-1]",
            NOTE="pass",
        ),
        "appends inside, and throws the first ones away": mend(
            START="(model.awake.clear(), model.embedding(tokens[:, -model.window :]))[1]",
            RESULT="x + down(hidden), model.awake.append((hidden > 0).float().mean(-1))",
            NOTE="pass",
        ),
        "no entries": mend(NOTE="pass"),
        "entries of the results": mend(NOTE="model.awake.append((x > 0).float().mean(-1))"),
        "entries as numbers": mend(NOTE="model.awake.append(awake.tolist())"),
        "entries with a graph": mend(
            RESULT="x + down(hidden), hidden.sigmoid().round().mean(-1) * 0 + (hidden > 0).float().mean(-1)"
        ),
        "the newest first": mend(NOTE="model.awake.insert(0, awake)"),
        "the hidden units, for later": mend(
            RESULT="x + down(hidden), hidden",
            NOTE="model.awake.append((awake > 0).float().mean(-1)); model.seen = awake",
        ),
        "hoards the streams": mend(EACH="model.__dict__.setdefault('streams', []).append(x.detach() + 0)"),
        "keeps the logits": mend(END="(setattr(model, 'last', model.head(x).detach()), model.head(x))[1]"),
        "a constant in place of the second layer's sum": mend(RESULT="down(hidden), (hidden > 0).float().mean(-1)"),
        "ReLU": mend(RESULT="x + down(F.relu(up(x))), (hidden > 0).float().mean(-1)"),
        "with copies of the weights": mend(
            CALL="checkpoint(block, up, lambda h, w=down.weight * 1: F.linear(h, w, down.bias), x, "
            "preserve_rng_state=False)"
        ),
        "returns the entries as well": mend(END="model.head(x), model.awake"),
        "no return": mend(END="None"),
        "under no_grad": mend(END="model.head(x).detach()"),
        "leaves autograd switched off": mend(END="(torch.set_grad_enabled(False), model.head(x))[1]"),
        "memory-hungry": mend(EACH="hoard = torch.ones(2**30)"),
        "an endless loop": mend(EACH="while True:\n            pass"),
        "unsolved": "def mended(model, tokens):\n    raise NotImplementedError  # your answer",
    },
    "function-answer": {
        "nothing forgotten": "def checkpoint_function(function, x):\n    return function(x)",
        "torch's": cell(
            """
            from torch.utils.checkpoint import checkpoint as torchs


            def checkpoint_function(function, x):
                return torchs(function, x, use_reentrant=True)
            """
        ),
        "torch's Function": cell(
            """
            from torch.utils.checkpoint import CheckpointFunction


            def checkpoint_function(function, x):
                return CheckpointFunction.apply(function, True, x)
            """
        ),
        "memlab's": cell(
            """
            from memlab.gradient_checkpointing import checkpoint as ready


            def checkpoint_function(function, x):
                return ready(function, x)
            """
        ),
        "the notebook's": "def checkpoint_function(function, x):\n    return checkpoint(function, x)",
        "hooks": cell(
            """
            def checkpoint_function(function, x):
                state, again = torch.get_rng_state(), []
                numbers = itertools.count()

                def unpack(number):
                    if not again:
                        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                            torch.set_rng_state(state)
                            with saved_tensors_hooks(lambda t: again.append(t.detach()), lambda _: None):
                                function(x)
                    tensor, again[number] = again[number], None
                    return tensor

                with saved_tensors_hooks(lambda _: next(numbers), unpack):
                    return function(x)
            """
        ),
        "autograd stays off": node(GRADS="torch.no_grad()"),
        "through the graph of x": node(LEAF="ctx.saved_tensors[0]"),
        "a leaf without a gradient": node(LEAF="ctx.saved_tensors[0].detach()"),
        "no random numbers again": node(SEED="pass"),
        "no fork": node(FORK="torch.enable_grad()"),
        "a seed of its own": node(SEED="torch.manual_seed(0)"),
        "the state after forward": node(
            NOTE="pass", FIRST="out = function(x)\n        ctx.random_state = torch.get_rng_state()\n        return out"
        ),
        "a seed in forward": node(NOTE="torch.manual_seed(0)\n        ctx.random_state = torch.get_rng_state()"),
        "without dropout": node(SECOND="out = ctx.function.function.eval()(x)", THEN="ctx.function.function.train()"),
        "gradient of x alone": node(BACK="(found,) = torch.autograd.grad(out, x, grad)", END="return None, found"),
        "gradient of the parameters alone": node(END="return None, None"),
        "no gradient for function": node(END="return x.grad"),
        "gradient in the wrong place": node(END="return x.grad, None"),
        "gradient of ones": node(SECOND="out = ctx.function(x).sum()", BACK="out.backward()"),
        "without backward": node(BACK="pass", END="return None, grad"),
        "twice": node(END="return None, 2 * x.grad"),
        "parameters twice": node(
            BACK="torch.autograd.backward(out, grad, retain_graph=True); "
            "torch.autograd.backward([out], [grad], inputs=list(ctx.function.function.parameters()))"
        ),
        "runs forward twice": node(
            FIRST="function(x)\n        torch.set_rng_state(ctx.random_state)\n        return function(x)"
        ),
        "runs again twice": node(
            SECOND="ctx.function(x)\n            torch.set_rng_state(ctx.random_state)\n"
            "            out = ctx.function(x)"
        ),
        "an attribute of ctx": node(SAVE="ctx.x = x", LEAF="ctx.x.detach().requires_grad_()"),
        "a copy of x": node(SAVE="ctx.x = x.clone()", LEAF="ctx.x.detach().requires_grad_()"),
        "saves the result as well": node(
            SAVE="pass",
            FIRST="out = function(x)\n        ctx.save_for_backward(x, out)\n        return out",
        ),
        "keeps a graph of forward": node(
            FIRST="with torch.enable_grad():\n            ctx.out = function(x.detach().requires_grad_())\n"
            "        return ctx.out.detach()"
        ),
        "the first graph, and no second run": node(
            FIRST="ctx.leaf = x.detach().requires_grad_()\n        with torch.enable_grad():\n"
            "            ctx.out = function(ctx.leaf)\n        return ctx.out.detach()",
            LEAF="ctx.leaf",
            SECOND="out = ctx.out",
        ),
        "remembers the second run": "seen = []\n\n\n" + node(THEN="seen.append(out)"),
        "remembers x": "seen = []\n\n\n" + node(THEN="seen.append(x.detach().clone())"),
        "remembers the state of the generator": "seen = []\n\n\n"
        + node(THEN="seen.append(torch.get_rng_state().clone())"),
        "in FP64": node(SECOND="out = ctx.function(x.double().float() * (1 + 1e-7))"),
        "retains the graph": node(
            BACK="ctx.out = out; torch.autograd.backward(out, grad, retain_graph=True)",
            END="return None, x.grad.clone()",
        ),
        "a pair": node(FIRST="return function(x), None"),
        "nothing": node(APPLY="None"),
        "leaves a hook": node(THEN="torch.nn.modules.module.register_module_forward_hook(lambda *_: None)"),
        "leaves autograd switched off": node(APPLY="(Again.apply(function, x), torch.set_grad_enabled(False))[0]"),
        "memory-hungry": node(THEN="hoard = torch.ones(2**30)"),
        "an endless loop": node(THEN="while True:\n            pass"),
        "an empty cell": "",
        "unsolved": "def checkpoint_function(function, x):\n    raise NotImplementedError  # your answer",
    },
    "hooks-answer": {
        "nothing forgotten": "def checkpoint_hooks(function, *args):\n    return function(*args)",
        "torch's": cell(
            """
            from torch.utils.checkpoint import checkpoint as torchs


            def checkpoint_hooks(function, *args):
                return torchs(function, *args, use_reentrant=False)
            """
        ),
        "the notebook's": "def checkpoint_hooks(function, *args):\n    return checkpoint(function, *args)",
        "the Function of exercise 3": cell(
            """
            def checkpoint_hooks(function, *args):
                return Takes.apply(function, *args)


            class Takes(torch.autograd.Function):
                @staticmethod
                def forward(ctx, function, *args):
                    ctx.function, ctx.args = function, args
                    return function(*args)

                @staticmethod
                def backward(ctx, *grads):
                    args = [a.detach().requires_grad_(a.requires_grad) if torch.is_tensor(a) else a for a in ctx.args]
                    with torch.enable_grad():
                        out = ctx.function(*args)
                    torch.autograd.backward(out, grads)
                    return None, *(a.grad if torch.is_tensor(a) else None for a in args)
            """
        ),
        "hooks that do nothing": hook(PACK="tensor", MISSING="False", GIVE="number"),
        "handles that hold the tensor": hook(PACK="(next(numbers), tensor)[1]", MISSING="False", GIVE="number"),
        "copies": hook(PACK="tensor.clone()", MISSING="False", GIVE="number"),
        "in half the bytes": hook(PACK="tensor.detach().half()", MISSING="False", GIVE="number.float()"),
        "handles and tensors": hook(BEGIN="kept = []", PACK="(kept.append(tensor), next(numbers))[1]"),
        "runs again at once": hook(RESULT="(function(*args), function(*args))[1]"),
        "runs again for each handle": hook(MISSING="True", GIVE="again[number]"),
        "runs again for each handle, and forgets": hook(MISSING="True", GIVE="(again[number], again.clear())[0]"),
        "never dies": hook(GIVE="again[number]"),
        "dies when all are used": hook(
            BEGIN="used = []",
            GIVE="(again[number], used.append(number), len(used) % len(again) or again.clear())[0]",
        ),
        "dies when backward comes back": hook(
            MISSING="number not in again or number == max(again)", GIVE="again[number]"
        ),
        "the last first": hook(GIVE="again.pop(max(again))"),
        "the first first": hook(MISSING="not again", GIVE="again.pop(min(again))"),
        "off by one": hook(PLACES="itertools.count(1)", MISSING="number + 1 not in again"),
        "counts on": hook(PLACES="numbers"),
        "autograd stays off": hook(GRADS="torch.no_grad()"),
        "remembers what it computed": "seen = []\n\n\n"
        + hook(KEEP="again[next(places)] = tensor.detach(); seen.append(tensor.detach())"),
        "copies of what it computed": "seen = []\n\n\n" + hook(AGAIN="seen.append(function(*args))"),
        "hooks inside save again": hook(
            INNER="saved_tensors_hooks(lambda t: (keep(t), t)[1], lambda t: t)", AGAIN="again[-1] = function(*args)"
        ),
        "detaches the arguments": hook(RESULT="function(*(a.detach() if torch.is_tensor(a) else a for a in args))"),
        "copies of the arguments": hook(BEGIN="args = [a.clone() if torch.is_tensor(a) else a for a in args]"),
        "copies of the arguments, for later": hook(
            BEGIN="copies = [a.detach().clone().requires_grad_(a.requires_grad) if torch.is_tensor(a) else a\n"
            "              for a in args]",
            AGAIN="function(*copies)",
        ),
        "tensors alone": hook(BEGIN="args = [a for a in args if torch.is_tensor(a)]"),
        "one argument": cell(hook()).replace("(function, *args)", "(function, args)", 1),
        "one result": hook(RESULT="(lambda out: out[0] if isinstance(out, tuple) else out)(function(*args))"),
        "a list of results": hook(RESULT="(lambda out: list(out) if isinstance(out, tuple) else out)(function(*args))"),
        "once and for all": hook(BEGIN="ran = []", MISSING="not ran", PLACES="(ran.append(1), itertools.count())[1]"),
        "hooks left on": cell(hook()).replace(
            "    with saved_tensors_hooks(pack, unpack):\n        return function(*args)",
            "    hooks = saved_tensors_hooks(pack, unpack)\n    hooks.__enter__()\n    return function(*args)",
        ),
        "default hooks left on": hook(
            RESULT="(function(*args), "
            "torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t))[0]",
            OUTER="torch.autograd.graph.saved_tensors_hooks(pack, unpack)",
        ),
        "without hooks in forward": hook(OUTER="torch.enable_grad()"),
        "no return": hook(RESULT="None"),
        "memory-hungry": hook(AGAIN="hoard = torch.ones(2**30)"),
        "an endless loop": hook(AGAIN="while True:\n                    pass"),
        "unsolved": "def checkpoint_hooks(function, *args):\n    raise NotImplementedError  # your answer",
    },
    "cuts-answer": {
        "one segment": "def cuts(saved_bytes, input_bytes):\n    return []",
        "each layer": "def cuts(saved_bytes, input_bytes):\n    return list(range(1, len(saved_bytes)))",
        "√layers, as many layers each": balanced("round(layers**0.5)"),
        "the best of as many layers each": balanced(
            "min(range(1, layers + 1), key=lambda n: peak_bytes([layers * i // n for i in range(1, n)], "
            "saved_bytes, input_bytes))"
        ),
        "as many bytes each": cell(
            """
            def cuts(saved_bytes, input_bytes):
                found, held = [], 0
                for layer, nbytes in enumerate(saved_bytes):
                    if layer and held + nbytes > sum(saved_bytes) / len(saved_bytes) ** 0.5:
                        found.append(layer)
                        held = 0
                    held += nbytes
                return found
            """
        ),
        "as long as it fits": cell(
            """
            def cuts(saved_bytes, input_bytes):
                def filled(budget):
                    found, start, waiting = [], 0, 0
                    for stop in range(1, len(saved_bytes) + 1):
                        if waiting + sum(saved_bytes[start:stop]) > budget:
                            waiting += input_bytes[start]
                            start = stop - 1
                            found.append(start)
                            if start == 0 or waiting + saved_bytes[start] > budget:
                                return None
                    return found

                return next(plan for n in range(4, sum(saved_bytes) + 8, 4) if (plan := filled(n)) is not None)
            """
        ),
        "at the narrowest place": cell(
            """
            def cuts(saved_bytes, input_bytes):
                places = range(1, len(saved_bytes))
                return sorted(sorted(places, key=lambda i: input_bytes[i])[: round(len(saved_bytes) ** 0.5)])
            """
        ),
        "the best one cut": cell(
            """
            def cuts(saved_bytes, input_bytes):
                plans = [[]] + [[i] for i in range(1, len(saved_bytes))]
                return min(plans, key=lambda plan: peak_bytes(plan, saved_bytes, input_bytes))
            """
        ),
        "one cut after the other": cell(
            """
            def cuts(saved_bytes, input_bytes):
                found = []
                while True:
                    more = [sorted({*found, i}) for i in range(1, len(saved_bytes))]
                    better = min([found, *more], key=lambda plan: peak_bytes(plan, saved_bytes, input_bytes))
                    if better == found:
                        return found
                    found = better
            """
        ),
        "every plan, an endless number": cell(
            """
            def cuts(saved_bytes, input_bytes):
                layers = range(1, len(saved_bytes))
                plans = (plan for n in range(len(saved_bytes)) for plan in itertools.combinations(layers, n))
                return list(min(plans, key=lambda plan: peak_bytes(plan, saved_bytes, input_bytes)))
            """
        ),
        "every plan of a few cuts": cell(
            """
            def cuts(saved_bytes, input_bytes):
                layers = range(1, len(saved_bytes))
                plans = (plan for n in range(4) for plan in itertools.combinations(layers, n))
                return list(min(plans, key=lambda plan: peak_bytes(plan, saved_bytes, input_bytes)))
            """
        ),
        "nothing waits": plan(WAIT="waiting"),
        "the input of the next one waits": plan(WAIT="waiting + (input_bytes + [0])[stop]"),
        "all inputs wait": plan(WAIT="waiting + sum(input_bytes[start:stop])"),
        "its own input as well": plan(
            FITS="waiting + input_bytes[start] + sum(saved_bytes[start:stop]) <= budget", HIGH="2 * sum(saved_bytes)"
        ),
        "saved bytes wait": plan(WAIT="waiting + saved_bytes[start]"),
        "without what waits": plan(FITS="sum(saved_bytes[start:stop]) <= budget"),
        "the most that waits": plan(CHOICE="max(found)"),
        "the first that fits": plan(CHOICE="found[0]"),
        "the longest segment": plan(CHOICE="max(found, key=lambda plan: stop - plan[1][-1])"),
        "any budget": plan(HIGH="0", END="plan(sum(saved_bytes))[1][1:]"),
        "twice the budget": plan(END="plan(2 * low)[1][1:]"),
        "starts with the first": plan(END="plan(low)[1]"),
        "with the end": plan(END="plan(low)[1][1:] + [len(saved_bytes)]"),
        "sizes of segments": plan(END="[b - a for a, b in itertools.pairwise([*plan(low)[1], len(saved_bytes)])]"),
        "one layer later": plan(END="[cut + 1 for cut in plan(low)[1][1:]]"),
        "backwards": plan(END="plan(low)[1][:0:-1]"),
        "the peak": plan(END="low"),
        "floats": plan(END="[float(cut) for cut in plan(low)[1][1:]]"),
        "a tensor": plan(END="torch.tensor(plan(low)[1][1:]).tolist()"),
        "takes the lists away": plan(END="plan(low)[1][1:] if not saved_bytes.pop() else []"),
        "no return": plan(END="None"),
        "an endless search": plan(UP="middle, high"),
        "memory-hungry": plan(BEGIN="hoard = [0] * (20 * 2**30 // 8)"),
        "equal to everything": ANYTHING + plan(END="[Anything(cut) for cut in plan(low)[1][1:]]"),
        "unsolved": "def cuts(saved_bytes, input_bytes):\n    raise NotImplementedError  # your answer",
    },
    "ops-answer": {
        "none": "def compute_again(ops, budget_flops):\n    return []",
        "all": "def compute_again(ops, budget_flops):\n    return list(range(len(ops)))",
        "the most bytes per FLOP first": greedy("-ops[index][1] / max(ops[index][2], 1e-9)"),
        "the most bytes per FLOP, while they fit": cell(
            """
            def compute_again(ops, budget_flops):
                taken = []
                for index in sorted(range(len(ops)), key=lambda i: -ops[i][1] / max(ops[i][2], 1e-9)):
                    budget_flops -= ops[index][2]
                    if budget_flops < 0:
                        break
                    taken.append(index)
                return taken
            """
        ),
        "the largest first": greedy("-ops[index][1]"),
        "the cheapest first": greedy("ops[index][2]"),
        "the most FLOPs first": greedy("-ops[index][2]"),
        "in their order": greedy("index"),
        "the better of two orders": cell(
            """
            def compute_again(ops, budget_flops):
                plans = []
                for key in (lambda op: -op[1] / max(op[2], 1e-9), lambda op: -op[1]):
                    left, taken = budget_flops, []
                    for index in sorted(range(len(ops)), key=lambda i: key(ops[i])):
                        if ops[index][2] <= left:
                            taken.append(index)
                            left -= ops[index][2]
                    plans.append(taken)
                return max(plans, key=lambda plan: sum(ops[i][1] for i in plan))
            """
        ),
        "all but matrix products": cell(
            """
            def compute_again(ops, budget_flops):
                dear = ("qkv", "scores", "mixed", "out", "up", "down")
                return [index for index, op in enumerate(ops) if op[0] not in dear]
            """
        ),
        "one op": cell(
            """
            def compute_again(ops, budget_flops):
                fits = [index for index in range(len(ops)) if ops[index][2] <= budget_flops]
                return [max(fits, key=lambda index: ops[index][1])] if fits else []
            """
        ),
        "each that fits by itself": greedy("index", fits="ops[index][2] <= budget_flops"),
        "what to keep": chosen(END="[index for index in range(len(ops)) if index not in most]"),
        "names": chosen(END="[ops[index][0] for index in most]"),
        "by names": chosen(END="[[op[0] for op in ops].index(ops[index][0]) for index in most]"),
        "bytes": chosen(END="total(most, 1)"),
        "the most FLOPs": chosen(WORTH="total(c, 2)"),
        "the most ops": chosen(WORTH="len(c)"),
        "the fewest bytes": chosen(WORTH="-total(c, 1)"),
        "the most bytes per FLOP together": chosen(WORTH="total(c, 1) / max(total(c, 2), 1)"),
        "less than the budget": chosen(FITS="total(c, 2) < budget_flops or not c"),
        "a budget of bytes": chosen(FITS="total(c, 1) <= budget_flops"),
        "FLOPs of what is kept": chosen(
            FITS="sum(op[2] for op in ops) - total(c, 2) <= budget_flops", WORTH="-total(c, 1)"
        ),
        "half of the budget": chosen(FITS="2 * total(c, 2) <= budget_flops"),
        "at least one": chosen(COUNTS="range(1, len(ops) + 1)", FITS="total(c, 2) <= budget_flops or len(c) == 1"),
        "never all": chosen(COUNTS="range(max(len(ops), 1))"),
        "three at most": chosen(COUNTS="range(min(len(ops), 3) + 1)"),
        "counts from one": chosen(END="[index + 1 for index in most]"),
        "indices twice": chosen(END="[*most, *most]"),
        "a text": chosen(END="str(most)"),
        "a tensor": chosen(END="torch.tensor(most).tolist()"),
        "takes the ops away": chosen(END="[ops.clear() or index for index in most]"),
        "no return": chosen(END="None"),
        "memory-hungry": chosen(BEGIN="hoard = [0] * (20 * 2**30 // 8)"),
        "an endless loop": chosen(BEGIN="while True:\n        pass"),
        "equal to everything": ANYTHING + chosen(END="[Anything(index) for index in most]"),
        "unsolved": chosen(BEGIN="raise NotImplementedError  # your answer"),
    },
}

CRASHES = {
    "under no_grad",
    "leaves autograd switched off",
    "autograd stays off",
    "through the graph of x",
    "no gradient for function",
    "gradient in the wrong place",
    "runs again at once",
    "the last first",
    "the first first",
    "off by one",
    "counts on",
    "detaches the arguments",
    "tensors alone",
    "one argument",
    "once and for all",
}
"""Mistakes that end with an error of Python's, torch's or the library's own, which is told; all others are told why."""

RIGHT: dict[str, dict[str, str]] = {
    "held-answer": {
        "two candidates": held(
            "max((longer - 1) * input_bytes + (size + 1) * saved_bytes if longer else 0, "
            "(segments - 1) * input_bytes + size * saved_bytes)"
        ),
        "a loop": cell(
            """
            def held_bytes(layers, segments, saved_bytes, input_bytes):
                most, left = 0, layers
                for number in range(segments):
                    size = -(-left // (segments - number))
                    most = max(most, number * input_bytes + size * saved_bytes)
                    left -= size
                return most
            """
        ),
    },
    "best-answer": {
        "by exercise 1's rule": best("sorted(range(1, layers + 1), key=lambda k: (worst(k), k))[0]"),
        "a loop": best("min((worst(k), k) for k in range(1, layers + 1))[1]"),
    },
    "unexplained-answer": {
        "numbers": parts(VIEW, TWICE, SPARED),
        "measured": cell(
            """
            at_turn = [s for s in timeline.alive(turn) if s.op == "embedding"]
            view_bytes = at_turn[0].nbytes - 4 * 16 * 32 * 4
            entries = [s.nbytes for s in timeline.alive(len(timeline)) if s.shape == (4, 16) and s.op == "mean"]
            twice_bytes = sum(entries) // 2
            spared_flops = 2 * once - sum(done)
            """
        ),
    },
    "mended-answer": {
        "a copy of the view": mend(START="model.embedding(tokens)[:, -model.window :].clone()"),
        "torch's checkpoint": mend(
            CALL="torch.utils.checkpoint.checkpoint(block, up, down, x, use_reentrant=False, preserve_rng_state=False)"
        ),
        "by numbers": cell(
            """
            def mended(model, tokens):
                def block(number, x):
                    hidden = model.up[number](x)
                    hidden = F.gelu(hidden)
                    return x + model.down[number](hidden), hidden.detach().gt(0).float().mean(-1)

                x = model.embedding(tokens[:, -model.window :].contiguous())
                for number in range(len(model.up)):
                    x, entry = checkpoint(block, number, x, preserve_rng_state=False)
                    model.awake = [*model.awake, entry]
                return model.head(x)
            """
        ),
        "only in forward": mend(
            RESULT="x + down(hidden), torch._C._current_graph_task_id() == -1 and "
            "model.awake.append((hidden > 0).float().mean(-1))",
            NOTE="pass",
        ),
    },
    "function-answer": {
        "the state by hand": node(
            FORK="torch.enable_grad()",
            SEED="state = torch.get_rng_state()\n            torch.set_rng_state(ctx.random_state)",
            THEN="torch.set_rng_state(state)",
        ),
        "torch.autograd.grad for all": node(
            SECOND="leaves = [x, *ctx.function.function.parameters()]\n            out = ctx.function(x)",
            BACK="found = torch.autograd.grad(out, leaves, grad)",
            END="for p, g in zip(leaves[1:], found[1:]):\n            p.grad = g if p.grad is None else p.grad + g\n"
            "        return None, found[0]",
        ),
        "out.backward": node(BACK="out.backward(grad)"),
    },
    "hooks-answer": {
        "handles that are objects": cell(
            """
            class Handle:
                tensor = None


            def checkpoint_hooks(function, *args):
                handles = []

                def pack(tensor):
                    handles.append(Handle())
                    return handles[-1]

                def unpack(handle):
                    if handle.tensor is None:
                        waiting = iter(handles)

                        def keep(tensor):
                            next(waiting).tensor = tensor.detach()

                        with torch.enable_grad(), saved_tensors_hooks(keep, lambda _: None):
                            function(*args)
                    tensor, handle.tensor = handle.tensor, None
                    return tensor

                with saved_tensors_hooks(pack, unpack):
                    return function(*args)
            """
        ),
        "stops early": cell(
            """
            class Enough(Exception):
                pass


            def checkpoint_hooks(function, *args):
                count, again = 0, {}

                def pack(tensor):
                    nonlocal count
                    count += 1
                    return count - 1

                def unpack(number):
                    if number not in again:
                        found = []

                        def keep(tensor):
                            found.append(tensor.detach())
                            if len(found) == count:
                                raise Enough

                        try:
                            with torch.enable_grad(), saved_tensors_hooks(keep, lambda _: None):
                                function(*args)
                        except Enough:
                            pass
                        again.update(enumerate(found))
                    return again.pop(number)

                with saved_tensors_hooks(pack, unpack):
                    return function(*args)
            """
        ),
        "with its graph": hook(KEEP="again[next(places)] = tensor"),
        "a list": hook(
            BEGIN="again = []",
            MISSING="not again or again[number] is None",
            PLACES="again.clear()",
            KEEP="again.append(tensor.detach())",
            GIVE="(again[number], again.__setitem__(number, None))[0]",
        ),
    },
    "cuts-answer": {
        "steps back": cell(
            """
            def cuts(saved_bytes, input_bytes):
                layers = len(saved_bytes)

                def plan(budget):
                    waiting, started = [0] + [None] * layers, [0] * (layers + 1)
                    for stop in range(1, layers + 1):
                        held = 0
                        for start in range(stop - 1, -1, -1):
                            held += saved_bytes[start]
                            if waiting[start] is None or waiting[start] + held > budget:
                                continue
                            wait = waiting[start] + input_bytes[start]
                            if waiting[stop] is None or wait < waiting[stop]:
                                waiting[stop], started[stop] = wait, start
                    return None if waiting[layers] is None else started

                low, high = max(saved_bytes), sum(saved_bytes)
                while low < high:
                    middle = (low + high) // 2
                    if plan(middle):
                        high = middle
                    else:
                        low = middle + 1
                started, found = plan(low), []
                stop = layers
                while started[stop]:
                    stop = started[stop]
                    found.insert(0, stop)
                return found
            """
        ),
        "plans that none beats": cell(
            """
            def cuts(saved_bytes, input_bytes):
                plans = [[(0, 0, ())]]
                for stop in range(1, len(saved_bytes) + 1):
                    made = sorted(
                        (wait + input_bytes[start], max(peak, wait + sum(saved_bytes[start:stop])), (*found, start))
                        for start in range(stop)
                        for wait, peak, found in plans[start]
                    )
                    good = []
                    for plan in made:
                        if not good or plan[1] < good[-1][1]:
                            good.append(plan)
                    plans.append(good)
                return list(min(plans[-1], key=lambda plan: plan[1])[2][1:])
            """
        ),
    },
    "ops-answer": {
        "a frozenset": cell(
            """
            def compute_again(ops, budget_flops):
                choices = [()]
                for index in range(len(ops)):
                    choices += [(*chosen, index) for chosen in choices]
                fit = (c for c in choices if sum(ops[i][2] for i in c) <= budget_flops)
                return frozenset(max(fit, key=lambda c: sum(ops[i][1] for i in c)))
            """
        ),
        "by bits": cell(
            """
            def compute_again(ops, budget_flops):
                best, most = [], -1
                for bits in range(2 ** len(ops)):
                    taken = [i for i in range(len(ops)) if bits >> i & 1]
                    freed = sum(ops[i][1] for i in taken)
                    if sum(ops[i][2] for i in taken) <= budget_flops and freed > most:
                        best, most = taken, freed
                return best
            """
        ),
        "with or without the first": cell(
            """
            def compute_again(ops, budget_flops, start=0):
                if start == len(ops):
                    return set()
                without = compute_again(ops, budget_flops, start + 1)
                if ops[start][2] > budget_flops:
                    return without
                with_it = {start} | compute_again(ops, budget_flops - ops[start][2], start + 1)
                return max(without, with_it, key=lambda taken: sum(ops[i][1] for i in taken))
            """
        ),
    },
}
