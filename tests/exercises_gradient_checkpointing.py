"""Answers to the exercises of chapter 08: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import cell, variants


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


mend = variants(
    """
    def mended(model, tokens):
        def block(up, down, x):
            hidden = F.gelu(up(x))
            return RESULT«x + down(hidden), (hidden > 0).float().mean(-1)»

        x = START«model.embedding(tokens[:, -model.window :])»
        for up, down in zip(model.up, model.down):
            x, awake = CALL«checkpoint(block, up, down, x, preserve_rng_state=False)»
            NOTE«model.awake.append(awake)»
            EACH«pass»
        return END«model.head(x)»
    """
)


node = variants(
    """
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, x):
            ctx.function = function
            NOTE«ctx.random_state = torch.get_rng_state()»
            SAVE«ctx.save_for_backward(x)»
            FIRST«return function(x)»

        @staticmethod
        def backward(ctx, grad):
            x = LEAF«ctx.saved_tensors[0].detach().requires_grad_()»
            with torch.enable_grad(), FORK«torch.random.fork_rng(devices=[])»:
                SEED«torch.set_rng_state(ctx.random_state)»
                out = ctx.function(x)
            THEN«pass»
            BACK«torch.autograd.backward(out, grad)»
            return None, x.grad


    def checkpoint_function(function, x):
        return APPLY«Again.apply(function, x)»
    """
)


hook = variants(
    """
    def checkpoint_hooks(function, *args):
        numbers, again = itertools.count(), {}
        BEGIN«pass»

        def pack(tensor):
            return PACK«next(numbers)»

        def unpack(number):
            if MISSING«number not in again»:
                places = PLACES«itertools.count()»

                def keep(tensor):
                    KEEP«again[next(places)] = tensor.detach()»

                with torch.enable_grad(), saved_tensors_hooks(keep, lambda _: None):
                    AGAIN«function(*args)»
            return GIVE«again.pop(number)»

        with OUTER«saved_tensors_hooks(pack, unpack)»:
            return RESULT«function(*args)»
    """
)


plan = variants(
    """
    def cuts(saved_bytes, input_bytes):
        BEGIN«pass»

        def plan(budget):
            plans = {0: (0, [])}
            for stop in range(1, len(saved_bytes) + 1):
                found = [
                    (WAIT«waiting + input_bytes[start]», [*starts, start])
                    for start, (waiting, starts) in plans.items()
                    if waiting + sum(saved_bytes[start:stop]) <= budget
                ]
                if found:
                    plans[stop] = CHOICE«min(found)»
            return plans.get(len(saved_bytes))

        low, high = 0, sum(saved_bytes)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if plan(middle) else (UP«middle + 1, high»)
        return END«plan(low)[1][1:]»
    """
)


chosen = variants(
    """
    def compute_again(ops, budget_flops):
        BEGIN«pass»

        def total(chosen, what):
            return sum(ops[index][what] for index in chosen)

        every = [c for n in range(len(ops) + 1) for c in itertools.combinations(range(len(ops)), n)]
        most = max((c for c in every if total(c, 2) <= budget_flops), key=lambda c: total(c, 1))
        return END«list(most)»
    """
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
        "all inputs, and the longest segment": held("segments * input_bytes + sizes[0] * saved_bytes"),
        "memory-hungry": held(f"len([0] * (20 * 2**30 // 8)) + {WORST}"),
        "the last segment": held("(segments - 1) * input_bytes + sizes[-1] * saved_bytes"),
        "by division": held("(segments - 1) * input_bytes + layers / segments * saved_bytes"),
        "all moments": held(WORST.replace("max(", "sum(")),
        "a tensor": held(f"int(torch.tensor({WORST}))"),
        "no return": held(WORST).replace("return max", "max"),
        "unsolved": "def held_bytes(layers, segments, saved_bytes, input_bytes):\n    raise NotImplementedError",
    },
    "best-answer": {
        "ends before layers": best("min(range(1, max(layers, 2)), key=worst)"),
        "√layers": best("max(1, round(layers ** 0.5))"),
        "the formula": best("root"),
        "the formula, rounded": best("round(root)"),
        "the formula, rounded up and clamped": best("min(max(int(root) + 1, 1), layers)"),
        "stops at the first rise": best("next((k for k in range(1, layers) if worst(k + 1) >= worst(k)), layers)"),
        "tensors": best("int(torch.tensor([worst(k) for k in range(1, layers + 1)]).argmin()) + 1"),
        "unsolved": best("None.unsolved").replace("    def worst", "    raise NotImplementedError\n\n    def worst"),
    },
    "unexplained-answer": {
        "the whole input": parts(32_768, TWICE, SPARED),
        "nothing": parts(0, 0, 0),
        "one text's": parts(VIEW // 4, TWICE, SPARED),
        "all entries": parts(VIEW, 2 * TWICE, SPARED),
        "multiplications alone": parts(VIEW, TWICE, SPARED // 2),
        "a share": parts(VIEW, TWICE, SPARED / (12 * DOWN + HEAD)),
        "in KiB": parts(24.0, 1.5, 4096.0),
        "texts": parts('"24,576 B"', '"1,536 B"', '"4,194,304"'),
    },
    "mended-answer": {
        "the model's own": "def mended(model, tokens):\n    return model(tokens)",
        "memory-hungry": mend(EACH="hoard = torch.ones(2**30)"),
        "under no_grad": mend(END="model.head(x).detach()"),
        "detached": mend(START="model.embedding(tokens)[:, -model.window :].detach()"),
        "no checkpoint": mend(CALL="block(up, down, x)"),
        "random numbers preserved": mend(CALL="checkpoint(block, up, down, x)"),
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
        "entries as numbers": mend(NOTE="model.awake.append(awake.tolist())"),
        "entries with a graph": mend(
            RESULT="x + down(hidden), hidden.sigmoid().round().mean(-1) * 0 + (hidden > 0).float().mean(-1)"
        ),
        "a constant in place of the second layer's sum": mend(RESULT="down(hidden), (hidden > 0).float().mean(-1)"),
        "returns the entries as well": mend(END="model.head(x), model.awake"),
        "the view as it was": mend(START="model.embedding(tokens)[:, -model.window :]"),
    },
    "function-answer": {
        "a leaf without a gradient": node(LEAF="ctx.saved_tensors[0].detach()"),
        "leaves a hook": node(THEN="torch.nn.modules.module.register_module_forward_hook(lambda *_: None)"),
        "leaves autograd switched off": node(APPLY="(Again.apply(function, x), torch.set_grad_enabled(False))[0]"),
        "nothing forgotten": "def checkpoint_function(function, x):\n    return function(x)",
        "the notebook's": "def checkpoint_function(function, x):\n    return checkpoint(function, x)",
        "no fork": node(FORK="torch.enable_grad()"),
        "a seed in forward": node(NOTE="torch.manual_seed(0)\n        ctx.random_state = torch.get_rng_state()"),
        "parameters twice": node(
            BACK="torch.autograd.backward(out, grad, retain_graph=True); "
            "torch.autograd.backward([out], [grad], inputs=list(ctx.function.function.parameters()))"
        ),
        "runs forward twice": node(
            FIRST="function(x)\n        torch.set_rng_state(ctx.random_state)\n        return function(x)"
        ),
        "saves the result as well": node(
            SAVE="pass",
            FIRST="out = function(x)\n        ctx.save_for_backward(x, out)\n        return out",
        ),
        "remembers x": "seen = []\n\n\n" + node(THEN="seen.append(x.detach().clone())"),
        "nothing": node(APPLY="None"),
    },
    "hooks-answer": {
        "never dies": hook(GIVE="again[number]"),
        "memory-hungry": hook(AGAIN="hoard = torch.ones(2**30)"),
        "one argument": cell(hook()).replace("(function, *args)", "(function, args)", 1),
        "the notebook's": "def checkpoint_hooks(function, *args):\n    return checkpoint(function, *args)",
        "in half the bytes": hook(PACK="tensor.detach().half()", MISSING="False", GIVE="number.float()"),
        "handles and tensors": hook(BEGIN="kept = []", PACK="(kept.append(tensor), next(numbers))[1]"),
        "copies of what it computed": "seen = []\n\n\n" + hook(AGAIN="seen.append(function(*args))"),
        "one result": hook(RESULT="(lambda out: out[0] if isinstance(out, tuple) else out)(function(*args))"),
        "hooks left on": cell(hook()).replace(
            "    with saved_tensors_hooks(pack, unpack):\n        return function(*args)",
            "    hooks = saved_tensors_hooks(pack, unpack)\n    hooks.__enter__()\n    return function(*args)",
        ),
        "without hooks in forward": hook(OUTER="torch.enable_grad()"),
    },
    "cuts-answer": {
        "the input of the next one waits": plan(WAIT="waiting + (input_bytes + [0])[stop]"),
        "memory-hungry": plan(BEGIN="hoard = [0] * (20 * 2**30 // 8)"),
        "starts with the first": plan(END="plan(low)[1]"),
        "floats": plan(END="[float(cut) for cut in plan(low)[1][1:]]"),
        "a tensor": plan(END="torch.tensor(plan(low)[1][1:]).tolist()"),
        "takes the lists away": plan(END="plan(low)[1][1:] if not saved_bytes.pop() else []"),
        "unsolved": "def cuts(saved_bytes, input_bytes):\n    raise NotImplementedError  # your answer",
        "an endless search": plan(UP="middle, high"),
        "each layer": "def cuts(saved_bytes, input_bytes):\n    return list(range(1, len(saved_bytes)))",
        "the first that fits": plan(CHOICE="found[0]"),
        "backwards": plan(END="plan(low)[1][:0:-1]"),
    },
    "ops-answer": {
        "the most FLOPs first": greedy("-ops[index][2]"),
        "memory-hungry": chosen(BEGIN="hoard = [0] * (20 * 2**30 // 8)"),
        "all": "def compute_again(ops, budget_flops):\n    return list(range(len(ops)))",
        "names": chosen(END="[ops[index][0] for index in most]"),
        "indices twice": chosen(END="[*most, *most]"),
        "a tensor": chosen(END="torch.tensor(most).tolist()"),
        "bytes": chosen(END="sum(ops[index][1] for index in most)"),
        "takes the ops away": chosen(END="[ops.clear() or index for index in most]"),
        "unsolved": chosen(BEGIN="raise NotImplementedError  # your answer"),
        "the most bytes per FLOP first": greedy("-ops[index][1] / max(ops[index][2], 1e-9)"),
        "the largest first": greedy("-ops[index][1]"),
        "by names": chosen(END="[[op[0] for op in ops].index(ops[index][0]) for index in most]"),
    },
}

CRASHES = {"leaves autograd switched off", "one argument", "under no_grad"}
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
        "out.backward": node(BACK="out.backward(grad)"),
    },
    "hooks-answer": {
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
    },
}
