"""Answers to the exercises of chapter 07: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import ANYTHING, cell, variants


def factors(value: str) -> str:
    """weights that returns an expression."""
    return f"def weights(label_counts):\n    return {value}"


def parts(waiting: object, fixed: object, fresh: object) -> str:
    """The three numbers of exercise 2."""
    return f"waiting_bytes, fixed_bytes, fresh_bytes = {waiting}, {fixed}, {fresh}"


fewest = variants(
    """
    def fewest_micro_batches(budget_bytes, weight_bytes, other_bytes, example_bytes, batch):
        for k in ALL«range(1, batch + 1)»:
            if SAME«batch % k == 0»:
                waiting = WAITING«weight_bytes if k > 1 else 0»
                held = HELD«weight_bytes + waiting + other_bytes + example_bytes * (batch // k)»
                if FITS«held <= budget_bytes»:
                    return FOUND«k»
        return None
    """
)


MEAN = "F.cross_entropy(model(x).flatten(0, 1), y.flatten())"


loop = variants(
    """
    def accumulated_gradients(model, micro_batches):
        labels, total = LABELS«sum(int((y != -100).sum()) for _, y in micro_batches)», 0.0
        BEFORE«pass»
        for x, y in micro_batches:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / labels
            BACKWARD«loss.backward()»
            TOTAL«total += loss.item()»
            AFTER«pass»
        END«pass»
        return RETURN«total»
    """
)


grouped = variants(
    """
    def groups(batches, k):
        group = []
        for batch in batches:
            group.append(batch)
            if len(group) == k:
                yield GIVE«group»
                ANEW«group = []»
        LAST«if group:»
            yield REST«group»
    """
)


def shared(value: str) -> str:
    """share that returns an expression of x, y, and the number of examples of the group."""
    return cell(
        """
        def share(model, micro_batch, group):
            x, y = micro_batch
            examples = sum(len(labels) for _, labels in group)
            return VALUE
        """,
        VALUE=value,
    )


CLIP = "norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)"


one = variants(
    """
    def step(model, optimizer, group, max_norm, share):
        BEGIN«total = 0.0»
        for micro_batch in group:
            FIRST«pass»
            loss = share(model, micro_batch, group)
            BACKWARD«loss.backward()»
            TOTAL«total += loss.item()»
            THEN«pass»
        CLIP«norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)»
        optimizer.step()
        CLEAR«optimizer.zero_grad()»
        END«return total, norm.item()»
    """
)


cut = variants(
    """
    def token_batches(lengths, max_tokens):
        BEGIN«pass»
        batches, batch = [], []
        for index in ORDER«sorted(range(len(lengths)), key=lambda index: lengths[index])»:
            if LONG«lengths[index] > max_tokens»:
                REFUSE«raise ValueError(f"text {index} has {lengths[index]} tokens")»
            if FULL«(len(batch) + 1) * lengths[index] > max_tokens»:
                batches.append(batch)
                batch = []
            batch.append(EACH«index»)
        return END«batches + [batch] if batch else batches»
    """
)


merged = variants(
    """
    def merge(a, b):
        (n_a, mean_a, variance_a), (n_b, mean_b, variance_b) = a, b
        BEGIN«pass»
        n, apart = n_a + n_b, mean_b - mean_a
        mean = MEAN«mean_a + n_b / n * apart»
        variance = VARIANCE«(n_a * variance_a + n_b * variance_b) / n + n_a * n_b / n**2 * apart**2»
        return END«n, mean, variance»
    """
)


WAITING, FIXED, FRESH = 214_080, 104, 49_152

WRONG: dict[str, dict[str, str]] = {
    "weights-answer": {
        "at least one": factors("[max(n, 1) / sum(label_counts) for n in label_counts]"),
        "the mean of the means": factors("[1 / len(label_counts)] * len(label_counts)"),
        "without those that have no labels": factors("[n / sum(label_counts) for n in label_counts if n]"),
        "NaN for no labels": factors("[n / sum(label_counts) * n / n if n else float('nan') for n in label_counts]"),
        "a tensor": factors("torch.tensor(label_counts) / sum(label_counts)"),
        "writes to its counts": cell(
            """
            def weights(label_counts):
                total = sum(label_counts)
                for i, n in enumerate(label_counts):
                    label_counts[i] = n / total
                return label_counts
            """
        ),
        "equal to everything": ANYTHING.replace("int", "float") + factors("[Anything() for _ in label_counts]"),
        "unsolved": "def weights(label_counts):\n    raise NotImplementedError  # your answer",
        "rounded": factors("[round(n / sum(label_counts), 3) for n in label_counts]"),
    },
    "unexplained-answer": {
        "all in one": parts(214_158, 214_158, 214_158),
        "nothing": parts(0, 0, 0),
        "elements": parts(WAITING // 4, FIXED, FRESH // 4),
        "positions alone": parts(WAITING, 96, FRESH),
        "both of the weight's gradients": parts(WAITING, FIXED, 2 * FRESH),
        "in KiB": parts(209.0625, 0.1015625, 48.0),
        "floats": parts(float(WAITING), float(FIXED), float(FRESH)),
        "texts": parts('"214,080 B"', '"104 B"', '"49,152 B"'),
    },
    "fewest-answer": {
        "the others forgotten": fewest(HELD="weight_bytes + waiting + example_bytes * (batch // k)"),
        "memory-hungry": fewest(ALL="[1] * (20 * 2**30 // 8)"),
        "gradients wait always": fewest(WAITING="weight_bytes"),
        "two gradients wait": fewest(WAITING="2 * weight_bytes if k > 1 else 0"),
        "a float": fewest(FOUND="k / 1"),
        "bytes": fewest(FOUND="held"),
        "makes tensors": fewest(FITS="bool(torch.tensor(held) <= budget_bytes)"),
        "unsolved": fewest(ALL="[].unsolved").replace(
            "for k in [].unsolved:", "raise NotImplementedError\n    while 1:"
        ),
    },
    "accumulated-answer": {
        "the sum, by micro-batches": loop(LABELS="len(micro_batches)"),
        "leaves a hook": loop(BEFORE="torch.nn.modules.module.register_module_forward_hook(lambda *_: None)"),
        "under no_grad": loop(BEFORE="torch.set_grad_enabled(False)"),
        "graphs retained": loop(BACKWARD="loss.backward(retain_graph=True)"),
        "remembers its losses": "remembered = []\n\n\n" + loop(AFTER="remembered.append(loss.detach())"),
        "in eval mode": loop(BEFORE="model.eval()"),
        "writes to the labels": loop(END="micro_batches[0][1].clamp_(min=0)"),
        "returns the sum": loop(RETURN="total * labels"),
        "returns the graph": loop(TOTAL="total = total + loss"),
        "no return": loop(RETURN="None"),
        "forgets backward": loop(BACKWARD="pass"),
        "an endless loop": loop(AFTER="micro_batches.append((x[:1, :1], y[:1, :1]))"),
        "takes a step": loop(END="torch.optim.SGD(model.parameters(), 0.1).step()"),
    },
    "groups-answer": {
        "the last group dropped": grouped(LAST="if False:"),
        "needs a length": cell(
            """
            def groups(batches, k):
                for start in range(0, len(batches), k):
                    yield batches[start : start + k]
            """
        ),
        "dropped, as in the loop": cell(
            """
            def groups(batches, k):
                batches = list(batches)
                for number in range(len(batches) // k):
                    yield batches[number * k : (number + 1) * k]
            """
        ),
        "remembers its groups": "seen = []\n\n\n" + grouped(GIVE="(seen.append(group) or group)"),
        "remembers the epoch, and forgets it": grouped(ANEW="epoch = [*locals().get('epoch', []), *group]; group = []"),
        "growing": grouped(ANEW="pass"),
        "the same list again": grouped(ANEW="group.clear()"),
        "tuples": grouped(GIVE="tuple(group)", REST="tuple(group)"),
        "no return": "def groups(batches, k):\n    list(batches)",
        "unsolved": "def groups(batches, k):\n    raise NotImplementedError  # your answer",
    },
    "share-answer": {
        "the sum": shared('F.cross_entropy(model(x), y, reduction="sum")'),
        "memory-hungry": shared("torch.ones(2**30)"),
        "runs twice": shared('F.cross_entropy(model(x) * 0.5 + model(x) * 0.5, y, reduction="sum") / examples'),
        "a number": shared('F.cross_entropy(model(x), y, reduction="sum").item() / examples'),
        "no graph": shared('F.cross_entropy(model(x), y, reduction="sum").detach() / examples'),
        "backward as well": shared(
            '(loss := F.cross_entropy(model(x), y, reduction="sum") / examples, loss.backward())[0]'
        ),
        "a value with another gradient": shared(
            "(loss := F.cross_entropy(model(x), y), loss / len(group) + "
            "(loss * len(y) / examples - loss / len(group)).detach())[1]"
        ),
        "unsolved": "def share(model, micro_batch, group):\n    raise NotImplementedError  # your answer",
    },
    "step-answer": {
        "cleared before each micro-batch": one(FIRST="optimizer.zero_grad()"),
        "memory-hungry": one(BEGIN="total, hoard = 0.0, torch.ones(2**30)"),
        "clipped to the first step's norm": one(CLIP=CLIP.replace("max_norm", "0.32")),
        "cleared only before the next step": one(BEGIN="total = 0.0; optimizer.zero_grad()", CLEAR="pass"),
        "the loss, divided once more": one(END="return total / len(group), norm.item()"),
        "copies of the gradients": one(CLIP=f"kept = [p.grad.clone() for p in model.parameters()]; {CLIP}"),
        "remembers its losses": "remembered = []\n\n\n" + one(TOTAL="total += loss.item(); remembered.append(loss)"),
        "does nothing": one(BEGIN="return 2.8, 0.5"),
        "equal to everything": ANYTHING.replace("int", "float") + one(END="return Anything(), Anything()"),
        "unsolved": one(BEGIN="raise NotImplementedError  # your answer"),
        "graphs retained": one(BACKWARD="loss.backward(retain_graph=True)", THEN="optimizer.kept = loss"),
    },
    "token-batches-answer": {
        "a row too many": cut(FULL="len(batch) * lengths[index] > max_tokens"),
        "memory-hungry": cut(BEGIN="hoard = [0] * (20 * 2**30 // 8)"),
        "an assertion": cut(REFUSE="assert False, index"),
        "rows of the longest of all": cut(FULL="(len(batch) + 1) * max(lengths) > max_tokens"),
        "not in order": cut(
            ORDER="range(len(lengths))",
            FULL="(len(batch) + 1) * max(lengths[i] for i in [*batch, index]) > max_tokens",
        ),
        "the last batch dropped": cut(END="batches"),
        "an empty batch at the end": cut(END="[*batches, batch]"),
        "sorts what it is given": cut(ORDER="range(len(lengths))", BEGIN="lengths.sort()"),
        "refuses what just fits": cut(LONG="lengths[index] >= max_tokens"),
        "says how long": cut(REFUSE='raise ValueError(f"a text of {lengths[index]} tokens is too long")'),
        "tensors": cut(EACH="torch.tensor(index)"),
        "no return": cut(END="None"),
        "drops what is too long": cut(REFUSE="continue"),
    },
    "merge-answer": {
        "the mean of the variances": merged(VARIANCE="(n_a * variance_a + n_b * variance_b) / n"),
        "leaves autograd switched off": merged(BEGIN="torch.set_grad_enabled(False)"),
        "n = 0 is not a number": merged(
            MEAN="mean_a + apart / (1 + n_a / n_b if n_a else n_a / n_a)",
        ),
        "swapped": merged(MEAN="mean_a + n_a / n * apart"),
        "n is a float": merged(END="float(n), mean, variance"),
        "in FP32": merged(END="n, mean.float(), variance.float()"),
        "writes to what it is given": merged(MEAN="mean_a.add_(n_b / n * apart)"),
        "n = 0 in the second is handed back": merged(BEGIN="if n_b == 0:\n        return b"),
        "remembers its parts": "seen = []\n\n\n"
        + merged(MEAN="(seen.append((a, b, apart)), mean_a + n_b / n * apart)[1]"),
        "a copy of each example": merged(
            BEGIN="rows = torch.cat([mean_a.expand(n_a, -1), mean_b.expand(n_b, -1)]) if n_a else None"
        ),
        "the pair": merged(END="mean, variance"),
        "n = 0 is left out": merged(BEGIN="if n_a == 0:\n        return a"),
        "the squares": merged(
            VARIANCE="(n_a * (variance_a + mean_a**2) + n_b * (variance_b + mean_b**2)) / n - mean**2"
        ),
    },
}

CRASHES = {
    "an assertion",
    "forgets backward",
    "leaves autograd switched off",
    "n = 0 is not a number",
    "needs a length",
    "under no_grad",
}
"""Mistakes that end with an error of Python's, torch's or the library's own, which is told; all others are told why."""

RIGHT: dict[str, dict[str, str]] = {
    "weights-answer": {
        "a tuple": factors("tuple(n / sum(label_counts) for n in label_counts)"),
        "numpy's numbers": "import numpy\n\n\n" + factors("list(numpy.array(label_counts) / sum(label_counts))"),
        "by torch": factors("(torch.tensor(label_counts).double() / sum(label_counts)).tolist()"),
        "an int for no labels": factors("[n and n / sum(label_counts) for n in label_counts]"),
    },
    "unexplained-answer": {
        "numbers": parts(WAITING, FIXED, FRESH),
        "read from the timeline": cell(
            """
            kept = [{s.shape for s in t.alive(turn(t)) if s.category == "activation"} for t in (once, four)]
            alive = [s for s in four.alive(turn(four)) if s.category == "activation"]
            waiting_bytes = sum(p.nbytes for p in GPT(layers=1, width=48, context=12).parameters())
            fixed_bytes = sum(s.nbytes for s in alive if s.shape in kept[0])
            there = [s for s in four.alive(four.peak_event) if s.category == "temporary"]
            fresh_bytes = sum(s.nbytes for s in there if s.shape == (256, 48))
            """
        ),
    },
    "fewest-answer": {
        "the divisors first": fewest(ALL="[k for k in range(1, batch + 1) if not batch % k]", SAME="True"),
        "the whole batch by itself": cell(
            """
            def fewest_micro_batches(budget_bytes, weight_bytes, other_bytes, example_bytes, batch):
                room = budget_bytes - weight_bytes - other_bytes
                if batch * example_bytes <= room:
                    return 1
                room -= weight_bytes
                fits = [k for k in range(2, batch + 1) if batch % k == 0 and batch // k * example_bytes <= room]
                return min(fits, default=None)
            """
        ),
    },
    "accumulated-answer": {
        "numpy's sum": "import numpy\n\n\n" + loop(RETURN="numpy.float64(total)"),
        "a total as a tensor": loop(TOTAL="total = total + loss.detach()", RETURN="total.item()"),
        "a total in FP32": loop(BEFORE="sums = torch.zeros(())", TOTAL="sums += loss.detach()", RETURN="sums.item()"),
        "a list of losses, after backward": loop(
            BEFORE="kept = []", TOTAL="kept.append(loss)", RETURN="sum(loss.item() for loss in kept)"
        ),
    },
    "groups-answer": {
        "itertools": cell(
            """
            from itertools import islice


            def groups(batches, k):
                batches = iter(batches)
                while group := list(islice(batches, k)):
                    yield group
            """
        ),
    },
    "share-answer": {
        "a mean, weighted": shared("F.cross_entropy(model(x), y) * (len(y) / examples)"),
        "each loss, summed": shared('F.cross_entropy(model(x), y, reduction="none").sum() / examples'),
        "by the model's own loss": shared("model(x, y) * len(x) / examples"),
    },
    "step-answer": {
        "parameter by parameter": one(CLEAR="for p in model.parameters():\n        p.grad = None"),
        "cleared before as well": one(BEGIN="total = 0.0; optimizer.zero_grad()"),
        "tensors inside": one(TOTAL="total = total + loss.detach()", END="return total.item(), float(norm)"),
    },
    "token-batches-answer": {
        "from the longest": cut(
            ORDER="sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)",
            FULL="batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens",
        ),
        "numpy's order": "import numpy\n\n\n" + cut(ORDER='numpy.argsort(lengths, kind="stable")'),
        "looks for what is too long first": cut(
            BEGIN="for i, n in enumerate(lengths):\n"
            '        if n > max_tokens:\n            raise ValueError(f"lengths[{i}] is {n}, more than {max_tokens}")'
        ),
    },
    "merge-answer": {
        "sums of squared deviations": merged(
            VARIANCE="(n_a * variance_a + n_b * variance_b + apart * apart * n_a * n_b / n) / n"
        ),
        "nothing to merge": merged(BEGIN="if n_a == 0:\n        return b"),
        "about the mean of all": merged(
            MEAN="(n_a * mean_a + n_b * mean_b) / n",
            VARIANCE="n_a / n * (variance_a + (mean_a - mean) ** 2) + n_b / n * (variance_b + (mean_b - mean) ** 2)",
        ),
    },
}
