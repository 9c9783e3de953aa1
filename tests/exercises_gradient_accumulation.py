"""Answers to the exercises of chapter 07: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import ANYTHING, cell


def factors(value: str) -> str:
    """weights that returns an expression."""
    return f"def weights(label_counts):\n    return {value}"


def parts(waiting: object, fixed: object, fresh: object) -> str:
    """The three numbers of exercise 2."""
    return f"waiting_bytes, fixed_bytes, fresh_bytes = {waiting}, {fixed}, {fresh}"


def fewest(**changes: str) -> str:
    """fewest_micro_batches, right but for the changes."""
    terms = {
        "ALL": "range(1, batch + 1)",
        "SAME": "batch % k == 0",
        "WAITING": "weight_bytes if k > 1 else 0",
        "HELD": "weight_bytes + waiting + other_bytes + example_bytes * (batch // k)",
        "FITS": "held <= budget_bytes",
        "FOUND": "k",
        "NONE": "None",
    }
    return cell(
        """
        def fewest_micro_batches(budget_bytes, weight_bytes, other_bytes, example_bytes, batch):
            for k in ALL:
                if SAME:
                    waiting = WAITING
                    held = HELD
                    if FITS:
                        return FOUND
            return NONE
        """,
        **terms | changes,
    )


LOSS = 'F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")'
MEAN = "F.cross_entropy(model(x).flatten(0, 1), y.flatten())"


def loop(**changes: str) -> str:
    """accumulated_gradients, right but for the changes."""
    terms = {
        "LABELS": "sum(int((y != -100).sum()) for _, y in micro_batches)",
        "BEFORE": "pass",
        "LOSS": f"{LOSS} / labels",
        "BACKWARD": "loss.backward()",
        "TOTAL": "total += loss.item()",
        "AFTER": "pass",
        "END": "pass",
        "RETURN": "total",
    }
    return cell(
        """
        def accumulated_gradients(model, micro_batches):
            labels, total = LABELS, 0.0
            BEFORE
            for x, y in micro_batches:
                loss = LOSS
                BACKWARD
                TOTAL
                AFTER
            END
            return RETURN
        """,
        **terms | changes,
    )


def grouped(**changes: str) -> str:
    """groups, right but for the changes."""
    terms = {"FULL": "len(group) == k", "GIVE": "group", "ANEW": "group = []", "LAST": "if group:", "REST": "group"}
    return cell(
        """
        def groups(batches, k):
            group = []
            for batch in batches:
                group.append(batch)
                if FULL:
                    yield GIVE
                    ANEW
            LAST
                yield REST
        """,
        **terms | changes,
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


def one(**changes: str) -> str:
    """step, right but for the changes."""
    terms = {
        "BEGIN": "total = 0.0",
        "FIRST": "pass",
        "LOSS": "share(model, micro_batch, group)",
        "BACKWARD": "loss.backward()",
        "TOTAL": "total += loss.item()",
        "THEN": "pass",
        "CLIP": CLIP,
        "STEP": "optimizer.step()",
        "CLEAR": "optimizer.zero_grad()",
        "END": "return total, norm.item()",
    }
    return cell(
        """
        def step(model, optimizer, group, max_norm, share):
            BEGIN
            for micro_batch in group:
                FIRST
                loss = LOSS
                BACKWARD
                TOTAL
                THEN
            CLIP
            STEP
            CLEAR
            END
        """,
        **terms | changes,
    )


def cut(**changes: str) -> str:
    """token_batches, right but for the changes."""
    terms = {
        "BEGIN": "pass",
        "ORDER": "sorted(range(len(lengths)), key=lambda index: lengths[index])",
        "LONG": "lengths[index] > max_tokens",
        "REFUSE": 'raise ValueError(f"text {index} has {lengths[index]} tokens")',
        "FULL": "(len(batch) + 1) * lengths[index] > max_tokens",
        "EACH": "index",
        "END": "batches + [batch] if batch else batches",
    }
    return cell(
        """
        def token_batches(lengths, max_tokens):
            BEGIN
            batches, batch = [], []
            for index in ORDER:
                if LONG:
                    REFUSE
                if FULL:
                    batches.append(batch)
                    batch = []
                batch.append(EACH)
            return END
        """,
        **terms | changes,
    )


def merged(**changes: str) -> str:
    """merge, right but for the changes."""
    terms = {
        "BEGIN": "pass",
        "NUMBER": "n_a + n_b",
        "MEAN": "mean_a + n_b / n * apart",
        "VARIANCE": "(n_a * variance_a + n_b * variance_b) / n + n_a * n_b / n**2 * apart**2",
        "END": "n, mean, variance",
    }
    return cell(
        """
        def merge(a, b):
            (n_a, mean_a, variance_a), (n_b, mean_b, variance_b) = a, b
            BEGIN
            n, apart = NUMBER, mean_b - mean_a
            mean = MEAN
            variance = VARIANCE
            return END
        """,
        **terms | changes,
    )


WAITING, FIXED, FRESH = 214_080, 104, 49_152

WRONG: dict[str, dict[str, str]] = {
    "weights-answer": {
        "the mean of the means": factors("[1 / len(label_counts)] * len(label_counts)"),
        "the mean of those that have labels": factors(
            "[(n > 0) / sum(m > 0 for m in label_counts) for n in label_counts]"
        ),
        "the labels": factors("label_counts"),
        "the floats of the labels": factors("[float(n) for n in label_counts]"),
        "one over the labels": factors("[1 / n if n else 0.0 for n in label_counts]"),
        "one over all labels": factors("[1 / sum(label_counts)] * len(label_counts)"),
        "of the largest": factors("[n / max(label_counts) for n in label_counts]"),
        "of the mean": factors("[n * len(label_counts) / sum(label_counts) for n in label_counts]"),
        "in percent": factors("[100 * n / sum(label_counts) for n in label_counts]"),
        "half of what it should be": factors("[n / sum(label_counts) / 2 for n in label_counts]"),
        "whole numbers": factors("[n // sum(label_counts) for n in label_counts]"),
        "rounded": factors("[round(n / sum(label_counts), 3) for n in label_counts]"),
        "without those that have no labels": factors("[n / sum(label_counts) for n in label_counts if n]"),
        "the other way round": factors("[n / sum(label_counts) for n in label_counts][::-1]"),
        "at least one": factors("[max(n, 1) / sum(label_counts) for n in label_counts]"),
        "NaN for no labels": factors("[n / sum(label_counts) * n / n if n else float('nan') for n in label_counts]"),
        "a tensor": factors("torch.tensor(label_counts) / sum(label_counts)"),
        "tensors": factors("list(torch.tensor(label_counts) / sum(label_counts))"),
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
        "no return": "def weights(label_counts):\n    [n / sum(label_counts) for n in label_counts]",
        "a syntax error": "def weights(label_counts:\n    return []",
        "an empty cell": "",
        "unsolved": "def weights(label_counts):\n    raise NotImplementedError  # your answer",
    },
    "unexplained-answer": {
        "nothing": parts(0, 0, 0),
        "all in one": parts(214_158, 214_158, 214_158),
        "of three micro-batches": parts(3 * WAITING, FIXED, FRESH),
        "three quarters": parts(3 * WAITING // 4, 3 * FIXED // 4, 3 * FRESH // 4),
        "gradients of the matrices alone": parts(WAITING - 6_720, FIXED, FRESH),
        "elements": parts(WAITING // 4, FIXED, FRESH // 4),
        "gradients in FP64": parts(2 * WAITING, FIXED, 2 * FRESH),
        "positions alone": parts(WAITING, 96, FRESH),
        "positions of 4 bytes": parts(WAITING, FIXED - 48, FRESH),
        "scalars alone": parts(WAITING, 8, FRESH),
        "the batch as well": parts(WAITING, FIXED + 1_536, FRESH),
        "statistics of the norms as well": parts(WAITING, FIXED + 6 * 96, FRESH),
        "all gradients anew": parts(WAITING, FIXED, WAITING),
        "both of the weight's gradients": parts(WAITING, FIXED, 2 * FRESH),
        "the gradient of the logits": parts(WAITING, FIXED, 24_576),
        "all temporaries": parts(WAITING, FIXED, 78_340),
        "another weight's": parts(WAITING, FIXED, 36_864),
        "adds up, and is wrong": parts(WAITING + 78, 0, FRESH),
        "in KiB": parts(209.0625, 0.1015625, 48.0),
        "floats": parts(float(WAITING), float(FIXED), float(FRESH)),
        "texts": parts('"214,080 B"', '"104 B"', '"49,152 B"'),
        "equal to everything": ANYTHING + parts("Anything()", "Anything()", "Anything()"),
    },
    "fewest-answer": {
        "no gradients wait": fewest(WAITING="0"),
        "gradients wait always": fewest(WAITING="weight_bytes"),
        "two gradients wait": fewest(WAITING="2 * weight_bytes if k > 1 else 0"),
        "gradients of every micro-batch wait": fewest(WAITING="(k - 1) * weight_bytes"),
        "the weights shrink as well": fewest(
            HELD="(weight_bytes + waiting + example_bytes * batch) // k + other_bytes"
        ),
        "the weights forgotten": fewest(HELD="waiting + other_bytes + example_bytes * (batch // k)"),
        "the others forgotten": fewest(HELD="weight_bytes + waiting + example_bytes * (batch // k)"),
        "the whole batch": fewest(HELD="weight_bytes + waiting + other_bytes + example_bytes * batch"),
        "one example": fewest(HELD="weight_bytes + waiting + other_bytes + example_bytes * k"),
        "halves only": fewest(ALL="[2**i for i in range(batch.bit_length())]"),
        "starts with two": fewest(ALL="range(2, batch + 1)"),
        "ends before the batch": fewest(ALL="range(1, batch)"),
        "the most": fewest(ALL="range(batch, 0, -1)"),
        "not of the same size": fewest(
            SAME="True", HELD="weight_bytes + waiting + other_bytes + example_bytes * -(-batch // k)"
        ),
        "must be less than the budget": fewest(FITS="held < budget_bytes"),
        "the examples of a micro-batch": fewest(FOUND="batch // k"),
        "a float": fewest(FOUND="k / 1"),
        "bytes": fewest(FOUND="held"),
        "zero for none": fewest(NONE="0"),
        "the batch for none": fewest(NONE="batch"),
        "by division alone": cell(
            """
            def fewest_micro_batches(budget_bytes, weight_bytes, other_bytes, example_bytes, batch):
                room = budget_bytes - 2 * weight_bytes - other_bytes
                divisors = [k for k in range(1, batch + 1) if batch % k == 0]
                return next((k for k in divisors if example_bytes * batch <= room * k), None)
            """
        ),
        "stops where two need more": cell(
            """
            def fewest_micro_batches(budget_bytes, weight_bytes, other_bytes, example_bytes, batch):
                before = None
                for k in range(1, batch + 1):
                    held = weight_bytes * (1 + (k > 1)) + other_bytes + example_bytes * batch // k
                    if batch % k == 0 and (held <= budget_bytes or before is not None and held > before):
                        return k if held <= budget_bytes else None
                    before = held
            """
        ),
        "makes tensors": fewest(FITS="bool(torch.tensor(held) <= budget_bytes)"),
        "memory-hungry": fewest(ALL="[1] * (20 * 2**30 // 8)"),
        "equal to everything": ANYTHING + fewest(FOUND="Anything(k)", NONE="Anything()"),
        "unsolved": fewest(ALL="[].unsolved").replace(
            "for k in [].unsolved:", "raise NotImplementedError\n    while 1:"
        ),
    },
    "accumulated-answer": {
        "the mean of the means": loop(LOSS=f"{MEAN} / len(micro_batches)"),
        "the mean of the means that are there": loop(
            LOSS=f"{MEAN} / 3", BEFORE="micro_batches = [(x, y) for x, y in micro_batches if (y != -100).any()]"
        ),
        "means, times their labels": loop(LOSS=f"{MEAN} * int((y != -100).sum()) / labels"),
        "by positions": loop(LABELS="sum(y.numel() for _, y in micro_batches)"),
        "by rows": loop(LABELS="sum(len(y) for _, y in micro_batches)"),
        "the sum": loop(LABELS="1"),
        "the sum, by micro-batches": loop(LABELS="len(micro_batches)"),
        "by labels and micro-batches": loop(LOSS=f"{LOSS} / labels / len(micro_batches)"),
        "twice as much": loop(LOSS=f"2 * {LOSS} / labels"),
        "padding has labels": loop(
            LOSS='F.cross_entropy(model(x).flatten(0, 1), y.flatten().clamp(min=0), reduction="sum") / labels'
        ),
        "the last micro-batch alone": loop(LOSS=f"(model.zero_grad(), {LOSS})[1] / labels"),
        "the first micro-batch left out": loop(BEFORE="micro_batches = micro_batches[1:]"),
        "the model in FP32": loop(
            LOSS=f"{LOSS} / labels",
            BEFORE="model.float()",
            END="model.double()",
        ),
        "logits in FP32": loop(LOSS=LOSS.replace("model(x)", "model(x).float()") + " / labels"),
        "logits keep their name": loop(
            LOSS='F.cross_entropy((logits := model(x)).flatten(0, 1), y.flatten(), reduction="sum") / labels'
        ),
        "remembers the logits": loop(
            BEFORE="seen = []",
            LOSS=LOSS.replace("model(x)", "(seen.append(model(x)) or seen[-1])") + " / labels",
        ),
        "remembers the logits without their graph": loop(
            BEFORE="seen = []",
            LOSS=LOSS.replace("model(x)", "(seen.append(model(x)) or seen[-1])") + " / labels",
            AFTER="seen[-1] = seen[-1].detach()",
        ),
        "a list of losses, one backward": loop(
            BEFORE="kept = []", BACKWARD="kept.append(loss)", END="sum(kept).backward()"
        ),
        "a sum of losses, one backward": loop(
            BACKWARD="total = total + loss", TOTAL="pass", END="total.backward()", RETURN="total.item()"
        ),
        "graphs retained": loop(BACKWARD="loss.backward(retain_graph=True)"),
        "all in one batch": cell(
            """
            def accumulated_gradients(model, micro_batches):
                longest = max(x.shape[1] for x, _ in micro_batches)
                x = torch.cat([F.pad(x, (0, longest - x.shape[1])) for x, _ in micro_batches])
                y = torch.cat([F.pad(y, (0, longest - y.shape[1]), value=-100) for _, y in micro_batches])
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                loss.backward()
                return loss.item()
            """
        ),
        "a second place for gradients": loop(
            BEFORE="sums = [torch.zeros_like(p) for p in model.parameters()]",
            AFTER="for p, s in zip(model.parameters(), sums):\n            s += p.grad\n            p.grad = None",
            END="for p, s in zip(model.parameters(), sums):\n        p.grad = s",
        ),
        "gradients by torch.autograd.grad": loop(
            BACKWARD="for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):\n"
            "            p.grad = g if p.grad is None else p.grad + g"
        ),
        "remembers its losses": "remembered = []\n\n\n" + loop(AFTER="remembered.append(loss.detach())"),
        "a copy of the weights, just in case": loop(
            BEFORE="model.saved = [p.detach().clone() for p in model.parameters()]"
        ),
        "a hook for the logits": loop(
            BEFORE="model.head.register_forward_hook(lambda *_: None)",
        ),
        "in eval mode": loop(BEFORE="model.eval()"),
        "takes a step": loop(END="torch.optim.SGD(model.parameters(), 0.1).step()"),
        "takes the micro-batches away": loop(AFTER="pass", END="micro_batches.clear()"),
        "writes to the labels": loop(END="micro_batches[0][1].clamp_(min=0)"),
        "returns the sum": loop(RETURN="total * labels"),
        "returns the last loss": loop(RETURN="loss.item()"),
        "returns the mean of its losses": loop(RETURN="total / len(micro_batches)"),
        "returns a tensor": loop(TOTAL="total = total + loss.detach()"),
        "returns the graph": loop(TOTAL="total = total + loss"),
        "no return": loop(RETURN="None"),
        "forgets backward": loop(BACKWARD="pass"),
        "under no_grad": loop(BEFORE="torch.set_grad_enabled(False)"),
        "leaves a hook on a weight": loop(
            BEFORE="model.head.weight.register_post_accumulate_grad_hook(lambda p: None)"
        ),
        "leaves a hook": loop(BEFORE="torch.nn.modules.module.register_module_forward_hook(lambda *_: None)"),
        "equal to everything": ANYTHING.replace("int", "float") + loop(RETURN="Anything()"),
        "memory-hungry": loop(BEFORE="hoard = torch.ones(2**30)"),
        "an endless loop": loop(AFTER="micro_batches.append((x[:1, :1], y[:1, :1]))"),
        "unsolved": loop(BEFORE="raise NotImplementedError  # your answer"),
    },
    "groups-answer": {
        "the last group dropped": grouped(LAST="if False:"),
        "dropped, as in the loop": cell(
            """
            def groups(batches, k):
                batches = list(batches)
                for number in range(len(batches) // k):
                    yield batches[number * k : (number + 1) * k]
            """
        ),
        "all held at once": cell(
            """
            def groups(batches, k):
                batches = list(batches)
                for start in range(0, len(batches), k):
                    yield batches[start : start + k]
            """
        ),
        "a list of groups": cell(
            """
            def groups(batches, k):
                made = []
                for number, batch in enumerate(batches):
                    if number % k == 0:
                        made.append([])
                    made[-1].append(batch)
                return made
            """
        ),
        "looks one group ahead": cell(
            """
            def groups(batches, k):
                batches, ready = iter(batches), []
                while group := [batch for _, batch in zip(range(k), batches)]:
                    ready.append(group)
                    if len(ready) > 1:
                        yield ready.pop(0)
                yield from ready
            """
        ),
        "zip draws one batch too many": cell(
            """
            def groups(batches, k):
                batches = iter(batches)
                while group := [batch for batch, _ in zip(batches, range(k))]:
                    yield group
            """
        ),
        "remembers its groups": "seen = []\n\n\n" + grouped(GIVE="(seen.append(group) or group)"),
        "remembers the last group": "seen = []\n\n\n" + grouped(REST="(seen.append(group) or group)"),
        "remembers the epoch, and forgets it": grouped(ANEW="epoch = [*locals().get('epoch', []), *group]; group = []"),
        "begins a new one when the next comes": cell(
            """
            def groups(batches, k):
                group = []
                for batch in batches:
                    if len(group) == k:
                        yield group
                        group = []
                    group.append(batch)
                if group:
                    yield group
            """
        ),
        "the same list again": grouped(ANEW="group.clear()"),
        "an empty group at the end": grouped(LAST="if True:"),
        "needs a length": cell(
            """
            def groups(batches, k):
                for start in range(0, len(batches), k):
                    yield batches[start : start + k]
            """
        ),
        "one too few": grouped(FULL="len(group) == k - 1"),
        "one too many": grouped(FULL="len(group) > k"),
        "twice as many": grouped(FULL="len(group) == 2 * k"),
        "growing": grouped(ANEW="pass"),
        "the rest filled up": grouped(REST="group + [batch] * (k - len(group))"),
        "tuples": grouped(GIVE="tuple(group)", REST="tuple(group)"),
        "k groups": "def groups(batches, k):\n    held = list(batches)\n    return [held[i::k] for i in range(k)]",
        "counts": grouped(GIVE="len(group)", REST="len(group)"),
        "no return": "def groups(batches, k):\n    list(batches)",
        "memory-hungry": grouped(GIVE="[0] * (20 * 2**30 // 8)"),
        "unsolved": "def groups(batches, k):\n    raise NotImplementedError  # your answer",
    },
    "share-answer": {
        "the mean of the means": shared("F.cross_entropy(model(x), y) / len(group)"),
        "divided by k, which is 4": shared("F.cross_entropy(model(x), y) / 4"),
        "the mean": shared("F.cross_entropy(model(x), y)"),
        "the sum": shared('F.cross_entropy(model(x), y, reduction="sum")'),
        "the sum, by micro-batches": shared('F.cross_entropy(model(x), y, reduction="sum") / len(group)'),
        "the mean, by examples": shared("F.cross_entropy(model(x), y) / examples"),
        "as large as the first": shared(
            'F.cross_entropy(model(x), y, reduction="sum") / len(group) / len(group[0][1])'
        ),
        "twice as much": shared('2 * F.cross_entropy(model(x), y, reduction="sum") / examples'),
        "the mean of the group": shared(
            "sum(F.cross_entropy(model(x), y, reduction='sum') for x, y in group) / examples"
        ),
        "runs over the group": shared(
            "F.cross_entropy(model(torch.cat([x for x, _ in group])), torch.cat([y for _, y in group])) "
            "* len(y) / examples"
        ),
        "runs twice": shared('F.cross_entropy(model(x) * 0.5 + model(x) * 0.5, y, reduction="sum") / examples'),
        "each loss": shared('F.cross_entropy(model(x), y, reduction="none") / examples'),
        "a number": shared('F.cross_entropy(model(x), y, reduction="sum").item() / examples'),
        "no graph": shared('F.cross_entropy(model(x), y, reduction="sum").detach() / examples'),
        "backward as well": shared(
            '(loss := F.cross_entropy(model(x), y, reduction="sum") / examples, loss.backward())[0]'
        ),
        "a value with another gradient": shared(
            "(loss := F.cross_entropy(model(x), y), loss / len(group) + "
            "(loss * len(y) / examples - loss / len(group)).detach())[1]"
        ),
        "in FP32": shared('F.cross_entropy(model(x).float(), y, reduction="sum") / examples'),
        "no return": shared("None"),
        "memory-hungry": shared("torch.ones(2**30)"),
        "unsolved": "def share(model, micro_batch, group):\n    raise NotImplementedError  # your answer",
    },
    "step-answer": {
        "cleared before each micro-batch": one(FIRST="optimizer.zero_grad()"),
        "clipped after each micro-batch": one(THEN=CLIP, CLIP="pass"),
        "clipped after each, and at the end": one(THEN=CLIP),
        "clipped after the step": one(CLIP="optimizer.step()", STEP=CLIP),
        "not clipped": one(CLIP="norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])"),
        "not clipped at all": one(CLIP='norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))'),
        "clipped to the first step's norm": one(CLIP=CLIP.replace("max_norm", "0.32")),
        "clipped by value": one(CLIP=f"{CLIP}; nn.utils.clip_grad_value_(model.parameters(), max_norm / 100)"),
        "clipped twice as short": one(CLIP=CLIP.replace("max_norm", "max_norm / 2")),
        "each parameter clipped by itself": one(
            CLIP="norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])\n"
            "    for p in model.parameters():\n        nn.utils.clip_grad_norm_(p, max_norm)"
        ),
        "the norm after clipping": one(
            STEP="norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]); optimizer.step()"
        ),
        "never cleared": one(CLEAR="pass"),
        "cleared only before the next step": one(BEGIN="total = 0.0; optimizer.zero_grad()", CLEAR="pass"),
        "gradients left as zeros": one(CLEAR="optimizer.zero_grad(set_to_none=False)"),
        "cleared before the step": one(STEP="optimizer.zero_grad(); optimizer.step()"),
        "a step for each micro-batch": one(THEN="optimizer.step()", STEP="pass"),
        "two steps": one(STEP="optimizer.step(); optimizer.step()"),
        "no step": one(STEP="pass"),
        "divided by the micro-batches": one(LOSS="share(model, micro_batch, group) / len(group)"),
        "a share of the micro-batch alone": one(LOSS="share(model, micro_batch, [micro_batch])"),
        "the loss of the last": one(TOTAL="total = loss.item()"),
        "the loss, divided once more": one(END="return total / len(group), norm.item()"),
        "the last one forgotten": one().replace("in group:", "in group[:-1]:"),
        "the first one twice": one().replace("in group:", "in [group[0], *group]:"),
        "one backward for all": one(
            BACKWARD="pass", TOTAL="total = total + loss", CLIP=f"total.backward(); {CLIP}"
        ).replace("return total,", "return total.item(),"),
        "graphs retained": one(BACKWARD="loss.backward(retain_graph=True)", THEN="optimizer.kept = loss"),
        "copies of the gradients": one(CLIP=f"kept = [p.grad.clone() for p in model.parameters()]; {CLIP}"),
        "remembers its losses": "remembered = []\n\n\n" + one(TOTAL="total += loss.item(); remembered.append(loss)"),
        "does without the share": one(
            LOSS='F.cross_entropy(model(micro_batch[0]), micro_batch[1], reduction="sum") '
            "/ sum(len(y) for _, y in group)"
        ),
        "tensors": one(TOTAL="total = total + loss.detach()", END="return total, norm"),
        "returns the graph": one(TOTAL="total = total + loss", END="return total, norm.item()"),
        "only the loss": one(END="return total"),
        "no return": one(END="pass"),
        "does nothing": one(BEGIN="return 2.8, 0.5"),
        "equal to everything": ANYTHING.replace("int", "float") + one(END="return Anything(), Anything()"),
        "memory-hungry": one(BEGIN="total, hoard = 0.0, torch.ones(2**30)"),
        "unsolved": one(BEGIN="raise NotImplementedError  # your answer"),
    },
    "token-batches-answer": {
        "padding not counted": cut(FULL="sum(lengths[i] for i in batch) + lengths[index] > max_tokens"),
        "a fixed number of rows": cut(FULL="len(batch) == 32", BEGIN="max(lengths, default=0)"),
        "rows of the longest of all": cut(FULL="(len(batch) + 1) * max(lengths) > max_tokens"),
        "not in order": cut(
            ORDER="range(len(lengths))",
            FULL="(len(batch) + 1) * max(lengths[i] for i in [*batch, index]) > max_tokens",
        ),
        "a row too many": cut(FULL="len(batch) * lengths[index] > max_tokens"),
        "a row too few": cut(FULL="batch and (len(batch) + 2) * lengths[index] > max_tokens"),
        "the longest before the next": cut(FULL="batch and (len(batch) + 1) * lengths[batch[-1]] > max_tokens"),
        "must be less than the budget": cut(FULL="batch and (len(batch) + 1) * lengths[index] >= max_tokens"),
        "half of the budget": cut(FULL="batch and (len(batch) + 1) * lengths[index] > max_tokens // 2"),
        "each by itself": cut(FULL="batch"),
        "all in one": cut(FULL="False"),
        "the last batch dropped": cut(END="batches"),
        "an empty batch at the end": cut(END="[*batches, batch]"),
        "an empty batch at the beginning": cut(END="[[], *batches, batch] if batch else batches"),
        "the lengths": cut(EACH="lengths[index]"),
        "places in the order": cut(ORDER="range(len(lengths))", BEGIN="lengths = sorted(lengths)"),
        "sorts what it is given": cut(ORDER="range(len(lengths))", BEGIN="lengths.sort()"),
        "sorts what it is given when all is done": cut(
            END="(lengths.sort(), [*batches, batch] if batch else batches)[1]"
        ),
        "by length, found by index": cut(ORDER="[lengths.index(length) for length in sorted(lengths)]"),
        "by length, as a dict": cut(ORDER="[i for _, i in sorted({n: i for i, n in enumerate(lengths)}.items())]"),
        "drops what is too long": cut(REFUSE="continue"),
        "cuts what is too long": cut(REFUSE="pass"),
        "refuses what just fits": cut(LONG="lengths[index] >= max_tokens"),
        "does not say which": cut(REFUSE='raise ValueError("a text is too long")'),
        "says how long": cut(REFUSE='raise ValueError(f"a text of {lengths[index]} tokens is too long")'),
        "names its place in the order": cut(
            REFUSE='raise ValueError(f"text {sorted(lengths).index(lengths[index]) - 100} is too long")'
        ),
        "an assertion": cut(REFUSE="assert False, index"),
        "a generator": cut(END="(each for each in [*batches, batch])"),
        "tensors": cut(EACH="torch.tensor(index)"),
        "tuples": cut(END="[tuple(each) for each in [*batches, batch]]"),
        "no return": cut(END="None"),
        "equal to everything": ANYTHING + cut(EACH="Anything(index)"),
        "memory-hungry": cut(BEGIN="hoard = [0] * (20 * 2**30 // 8)"),
        "an endless loop": cut(ORDER='iter(lambda: 0, "never")', FULL="False", EACH="0"),
        "unsolved": cut(BEGIN="raise NotImplementedError  # your answer"),
    },
    "merge-answer": {
        "the mean of the means": merged(MEAN="(mean_a + mean_b) / 2"),
        "the mean of the variances": merged(VARIANCE="(n_a * variance_a + n_b * variance_b) / n"),
        "the plain mean of the variances": merged(
            VARIANCE="(variance_a + variance_b) / 2 + n_a * n_b / n**2 * apart**2"
        ),
        "the squares": merged(
            VARIANCE="(n_a * (variance_a + mean_a**2) + n_b * (variance_b + mean_b**2)) / n - mean**2"
        ),
        "the squares, never below 0": merged(
            VARIANCE="((n_a * (variance_a + mean_a**2) + n_b * (variance_b + mean_b**2)) / n - mean**2).clamp(min=0)"
        ),
        "the squares in FP64": merged(
            VARIANCE="((n_a * (variance_a.double() + mean_a.double()**2) + n_b * (variance_b.double() "
            "+ mean_b.double()**2)) / n - mean.double()**2).to(mean_a)"
        ),
        "the mean from the sums, in FP16": merged(MEAN="((n_a * mean_a + n_b * mean_b) / n).half().to(mean_a)"),
        "swapped": merged(MEAN="mean_a + n_a / n * apart"),
        "too far": merged(MEAN="mean_a + apart"),
        "between, divided once": merged(
            VARIANCE="(n_a * variance_a + n_b * variance_b) / n + n_a * n_b / n * apart**2"
        ),
        "between, not weighted": merged(VARIANCE="(n_a * variance_a + n_b * variance_b) / n + apart**2 / 4"),
        "between, not squared": merged(
            VARIANCE="(n_a * variance_a + n_b * variance_b) / n + n_a * n_b / n**2 * apart.abs()"
        ),
        "unbiased": merged(VARIANCE="(n_a * variance_a + n_b * variance_b + n_a * n_b / n * apart**2) / max(n - 1, 1)"),
        "taken for unbiased": merged(
            VARIANCE="((n_a - 1) * variance_a + (n_b - 1) * variance_b + n_a * n_b / n * apart**2) / (n - 1)"
        ),
        "the deviations": merged(
            VARIANCE="((n_a * variance_a.sqrt() + n_b * variance_b.sqrt()) / n) ** 2 + n_a * n_b / n**2 * apart**2"
        ),
        "the sum of squares": merged(VARIANCE="n_a * variance_a + n_b * variance_b + n_a * n_b / n * apart**2"),
        "a running average, as BatchNorm's": merged(
            MEAN="mean_a.lerp(mean_b, 0.1)", VARIANCE="variance_a.lerp(variance_b, 0.1)"
        ),
        "one mean for all channels": merged(MEAN="(mean_a + n_b / n * apart).mean().expand_as(mean_a)"),
        "n of the last": merged(END="n_b, mean, variance"),
        "n is a tensor": merged(END="torch.tensor(n), mean, variance"),
        "n is a float": merged(END="float(n), mean, variance"),
        "in FP32": merged(END="n, mean.float(), variance.float()"),
        "in FP64": merged(
            BEGIN="mean_a, mean_b = mean_a.double(), mean_b.double()",
            END="n, mean, variance.double()",
        ),
        "numbers": merged(END="n, mean.mean().item(), variance.mean().item()"),
        "writes to what it is given": merged(MEAN="mean_a.add_(n_b / n * apart)"),
        "writes to the variance": merged(
            VARIANCE="variance_a.mul_(n_a).add_(n_b * variance_b).div_(n).add_(n_a * n_b / n**2 * apart**2)"
        ),
        "n = 0 is not a number": merged(
            MEAN="mean_a + apart / (1 + n_a / n_b if n_a else n_a / n_a)",
        ),
        "n = 0 is left out": merged(BEGIN="if n_a == 0:\n        return a"),
        "n = 0 in the second is handed back": merged(BEGIN="if n_b == 0:\n        return b"),
        "n = 0 has a mean of 0": merged(MEAN="mean_a + (n_b / n if n_a else 0) * apart"),
        "remembers the last result": merged(END="n, mean, variance").replace(
            "return n", "merge.last = mean.clone()\n    return n"
        ),
        "remembers its parts": "seen = []\n\n\n"
        + merged(MEAN="(seen.append((a, b, apart)), mean_a + n_b / n * apart)[1]"),
        "keeps its parts with the result": merged(END="n, mean, variance").replace(
            "return n", "mean.parts = a, b\n    return n"
        ),
        "a copy of each example": merged(
            BEGIN="rows = torch.cat([mean_a.expand(n_a, -1), mean_b.expand(n_b, -1)]) if n_a else None"
        ),
        "the pair": merged(END="mean, variance"),
        "a list": merged(END="[n, mean, variance]"),
        "no return": merged(END="None"),
        "leaves autograd switched off": merged(BEGIN="torch.set_grad_enabled(False)"),
        "memory-hungry": merged(BEGIN="hoard = torch.ones(2**30)"),
        "unsolved": merged(BEGIN="raise NotImplementedError  # your answer"),
    },
}

CRASHES = {
    "forgets backward",
    "needs a length",
    "under no_grad",
    "cleared before the step",
    "an assertion",
    "n = 0 is not a number",
    "leaves autograd switched off",
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
        "a function for each": cell(
            """
            def accumulated_gradients(model, micro_batches):
                labels = sum((y != -100).sum().item() for x, y in micro_batches)

                def one(x, y):
                    logits = model(x)
                    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1), reduction="sum") / labels
                    del logits
                    loss.backward()
                    return loss.item()

                return sum(one(x, y) for x, y in micro_batches)
            """
        ),
        "divided at the end": loop(
            LOSS=LOSS,
            END="for p in model.parameters():\n        p.grad.div_(labels)",
            RETURN="total / labels",
        ),
        "means, where there are labels": loop(
            BEFORE="micro_batches = [(x, y) for x, y in micro_batches if (y != -100).any()]",
            LOSS=f"{MEAN} * int((y != -100).sum()) / labels",
        ),
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
        "modulo": cell(
            """
            def groups(batches, k):
                group = []
                for number, batch in enumerate(batches, 1):
                    group = [*group, batch]
                    if number % k == 0:
                        yield group
                        group = []
                if len(group):
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
        "clips by hand": one(
            CLIP="norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n"
            "    for p in model.parameters():\n        p.grad.mul_((max_norm / norm).clamp(max=1))"
        ),
        "tensors inside": one(TOTAL="total = total + loss.detach()", END="return total.item(), float(norm)"),
        "by names": one(LOSS="share(model=model, micro_batch=micro_batch, group=group)"),
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
        "the last batch grows in place": cell(
            """
            def token_batches(lengths, max_tokens):
                batches = []
                for length, index in sorted((length, index) for index, length in enumerate(lengths)):
                    if length > max_tokens:
                        raise ValueError(f"no batch can hold text {index}")
                    if batches and (len(batches[-1]) + 1) * length <= max_tokens:
                        batches[-1].append(index)
                    else:
                        batches.append([index])
                return batches
            """
        ),
    },
    "merge-answer": {
        "about the mean of all": merged(
            MEAN="(n_a * mean_a + n_b * mean_b) / n",
            VARIANCE="n_a / n * (variance_a + (mean_a - mean) ** 2) + n_b / n * (variance_b + (mean_b - mean) ** 2)",
        ),
        "sums of squared deviations": merged(
            VARIANCE="(n_a * variance_a + n_b * variance_b + apart * apart * n_a * n_b / n) / n"
        ),
        "nothing to merge": merged(BEGIN="if n_a == 0:\n        return b"),
    },
}
