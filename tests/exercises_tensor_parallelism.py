"""Answers to the exercises of chapter 14: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import cell, variants

PARAMETERS, SENT, LINK = 50_387_968, 469_762_048, 136_718_750_000
STREAM, STATISTICS, INPUTS = 8_192, 1_024, 16_384


def hand(parameters: object = PARAMETERS, sent: object = SENT, link: object = LINK) -> str:
    """The three numbers of exercise 1."""
    return f"parameter_bytes, sent_bytes, link_bytes_per_second = {parameters}, {sent}, {link}"


def kinds(stream: object = STREAM, statistics: object = STATISTICS, inputs: object = INPUTS) -> str:
    """The three numbers of exercise 5."""
    return f"stream_bytes, statistics_bytes, inputs_bytes = {stream}, {statistics}, {inputs}"


ranges = variants(
    """
    def qkv_ranges(rank, ranks, heads, kv_heads, head_size):
        found, start = [], 0
        for count in COUNTS«(heads, kv_heads, kv_heads)»:
            pieces = PIECES«min(count, ranks)»
            size = SIZE«count // pieces * head_size»
            place = PLACE«rank * pieces // ranks»
            begin = start + place * size
            found.append(PAIR«(begin, begin + size)»)
            start += NEXT«count * head_size»
        return FOUND«found»
    """
)


def part(value: str, before: str = "pass") -> str:
    """part_of that returns an expression of full, dim, ranges and views."""
    return cell(
        """
        def part_of(full, dim, ranges):
            views = [full.narrow(dim, begin, end - begin) for begin, end in ranges]
            BEFORE
            return VALUE
        """,
        BEFORE=before,
        VALUE=value,
    )


copied = variants(
    """
    class _Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, all_reduce):
            ctx.all_reduce = all_reduce
            KEPT«pass»
            return FORWARD«x.view_as(x)»

        @staticmethod
        def backward(ctx, dy):
            total = TOTAL«dy.clone()»
            SUMMED«ctx.all_reduce(total)»
            return GRADIENT«total, None»


    def copy_to_ranks(x, all_reduce):
        return CALLED«_Copy.apply(x, all_reduce)»
    """
)


reduced = variants(
    """
    class _Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, all_reduce):
            ctx.all_reduce = all_reduce
            total = TOTAL«x.clone()»
            SUMMED«all_reduce(total)»
            return FORWARD«total»

        @staticmethod
        def backward(ctx, dy):
            BACK«pass»
            return GRADIENT«dy, None»


    def reduce_from_ranks(x, all_reduce):
        return CALLED«_Reduce.apply(x, all_reduce)»
    """
)


def row(value: str, before: str = "pass") -> str:
    """row_parallel that returns an expression."""
    return cell(
        """
        def row_parallel(x, weight, bias, regions):
            BEFORE
            return VALUE
        """,
        BEFORE=before,
        VALUE=value,
    )


def own(value: str, before: str = "pass") -> str:
    """row_parallel_rows that returns an expression."""
    return row(value, before).replace("row_parallel", "row_parallel_rows")


again = variants(
    """
    class _Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias, gather, reduce_scatter):
            whole = WHOLE«gather(x)»
            ctx.save_for_backward(x, weight)
            ctx.gather, ctx.reduce_scatter = gather, reduce_scatter
            KEPT«pass»
            return OUTPUT«F.linear(whole, weight, bias)»

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            whole = GATHERED«ctx.gather(x)»
            dx = DX«ctx.reduce_scatter(dy @ weight)»
            return dx, dy.t() @ whole, dy.sum(0), None, None


    def column_parallel_rows(x, weight, bias, gather, reduce_scatter):
        return CALLED«_Again.apply(x, weight, bias, gather, reduce_scatter)»
    """
)


loss = variants(
    """
    def vocabulary_loss(logits, targets, start, all_reduce):
        largest = LARGEST«logits.amax(-1)»
        all_reduce(largest, ReduceOp.MAX)
        z = SHIFTED«logits - largest[:, None]»
        here = (targets >= start) & (targets < start + logits.shape[1])
        at_target = logits.new_zeros(len(targets))
        READ«at_target[here] = z[here, targets[here] - start]»
        both = torch.stack([EXP«z.exp_()».sum(-1), at_target])
        SUMMED«all_reduce(both)»
        losses = both[0].log() - both[1]
        gradient = SOFTMAX«z.div_(both[0][:, None])»
        LESS«gradient[here, targets[here] - start] -= 1»
        return END«losses, gradient»
    """
)


SUMMED = "regions.reduce_from_ranks(F.linear(x, weight))"
SCATTERED = "regions.reduce_scatter_sequence(F.linear(x, weight))"

WRONG: dict[str, dict[str, str]] = {
    "block-answer": {
        "in MiB": hand(48, 448),
        "nothing": hand(0, 0, 0),
        "an eighth of all": hand(50_344_960),
        "forward alone": hand(sent=SENT // 2),
        "one collective": hand(sent=SENT // 8),
        "four times the stream": hand(sent=268_435_456),
        "of the hidden width": hand(sent=4 * SENT),
        "a fraction": hand(link=136_718_750_000.5),
    },
    "ranges-answer": {
        "as many keys as queries": ranges(COUNTS="(heads, heads, heads)"),
        "cut in one": cell(
            """
            def qkv_ranges(rank, ranks, heads, kv_heads, head_size):
                rows = (heads + 2 * kv_heads) * head_size
                return [(rank * rows // ranks, (rank + 1) * rows // ranks)]
            """
        ),
        "in heads": ranges(SIZE="count // pieces", NEXT="count"),
        "the last first": ranges(PLACE="(ranks - 1 - rank) * pieces // ranks"),
        "lengths, not ends": ranges(PAIR="(begin, size)"),
        "queries and keys": ranges(FOUND="found[:2]"),
        "floats": ranges(PAIR="(float(begin), float(begin + size))"),
        "tensors": ranges(PAIR="tuple(torch.tensor([begin, begin + size]).tolist())"),
        "no return": ranges(FOUND="None"),
        "unsolved": "def qkv_ranges(rank, ranks, heads, kv_heads, head_size):\n    raise NotImplementedError",
        "key-value heads cut": ranges(PIECES="ranks"),
        "one key-value head": ranges(SIZE="count // pieces * head_size if count == heads else head_size"),
    },
    "part-answer": {
        "no return": part("None"),
        "always side by side": part("torch.cat(views, 1)"),
        "FP32 for any dtype": part("torch.cat(views, dim).float()"),
        "pieces copied, then put together": part("torch.cat([view.clone() for view in views], dim)"),
        "in the opposite order": part("torch.cat(views[::-1], dim)"),
        "flat": part("torch.cat(views, dim).flatten()"),
        "writes into the full one": part("torch.cat(views, dim).add_(full.mul_(0).sum())"),
        "kept for good": "kept = []\n" + part("torch.cat(views, dim)", "kept.append(full)"),
        "an endless loop": part("views", "while True: pass"),
        "always rows": part("torch.cat([full[begin:end] for begin, end in ranges])"),
    },
    "copy-answer": {
        "no function": "def copy_to_ranks(x, all_reduce):\n    return x",
        "memory-hungry": copied(KEPT="torch.ones(2**30)"),
        "one gradient for two": copied(GRADIENT="total"),
        "a copy in forward": copied(FORWARD="x.clone()"),
        "a sum in forward": copied(FORWARD="all_reduce(x) or x.view_as(x)"),
        "in place": copied(TOTAL="dy"),
        "sent beside itself": copied(TOTAL="torch.cat([dy, dy])", GRADIENT="total[: len(dy)], None"),
        "other values": copied(FORWARD="x.view_as(x).neg_().neg_() * 2"),
        "another shape": copied(FORWARD="x.view(-1)"),
        "no return": copied(CALLED="None"),
        "leaves autograd switched off": copied(
            CALLED="_Copy.apply(x, all_reduce) if torch.set_grad_enabled(False) else 0"
        ),
        "collectives without end": copied(SUMMED="while True: ctx.all_reduce(total)"),
    },
    "reduce-answer": {
        "one rank does not call": reduced(SUMMED="x.sum() > 20 or all_reduce(total)"),
        "memory-hungry": reduced(TOTAL="torch.ones(2**30)"),
        "in place": reduced(TOTAL="x"),
        "sent in backward for nothing": reduced(BACK="ctx.all_reduce(dy.clone())"),
        "the gradient divided": reduced(GRADIENT="dy / 2, None"),
        "two copies": reduced(TOTAL="x.clone().clone()"),
        "in FP32": reduced(TOTAL="x.float()"),
        "other shapes on ranks": reduced(SUMMED="all_reduce(total[: 1 + int(x.sum() > 20)])"),
        "other operations on ranks": reduced(
            SUMMED="all_reduce(total, ReduceOp.MAX if x.sum() > 20 else ReduceOp.SUM)"
        ),
        "the product": reduced(SUMMED="all_reduce(total, ReduceOp.PRODUCT)"),
        "a list is sent": reduced(SUMMED="all_reduce([total])"),
        "no return": reduced(CALLED="None"),
        "flat": reduced(FORWARD="total.view(-1)"),
        "nothing": "def reduce_from_ranks(x, all_reduce):\n    return x",
        "unsolved": "def reduce_from_ranks(x, all_reduce):\n    raise NotImplementedError",
        "no gradient": reduced(GRADIENT="None, None"),
    },
    "once-answer": {
        "scattered and gathered": row(f"regions.gather_sequence({SCATTERED}) + bias"),
        "memory-hungry": row(f"{SUMMED} + bias", "torch.ones(2**30)"),
        "no bias": row(SUMMED),
        "no sum": row("F.linear(x, weight, bias)"),
        "its gradient summed": row(f"{SUMMED} + regions.copy_to_ranks(bias)"),
        "the graph lost": row(f"{SUMMED}.detach() + bias"),
        "no graph at all": row(f"({SUMMED} + bias).detach()"),
        "its rows alone": row(f"{SCATTERED} + bias"),
        "no return": row("None"),
        "on rank 0 alone": row(
            "regions.reduce_from_ranks(F.linear(x, weight, bias if regions._wire.rank == 0 else None))"
        ),
    },
    "own-rows-answer": {
        "all are summed": own(f"({SUMMED} + bias).chunk(regions._wire.ranks)[regions._wire.rank]"),
        "memory-hungry": own(f"{SCATTERED} + bias", "torch.ones(2**30)"),
        "on every rank": own("regions.reduce_scatter_sequence(F.linear(x, weight, bias))"),
        "gathered": own(f"regions.gather_sequence({SCATTERED}) + bias"),
        "a bias for each row": own(f"{SCATTERED} + regions.copy_to_ranks(bias.expand(len(x), -1))[:1]"),
        "its gradient lost": own(f"{SCATTERED} + bias.detach()"),
        "no graph at all": own(f"({SCATTERED} + bias).detach()"),
        "no return": own("None"),
        "unsolved": "def row_parallel_rows(x, weight, bias, regions):\n    raise NotImplementedError",
    },
    "whole-answer": {
        "norms' weights": kinds(statistics=512 + 4),
        "nothing": kinds(0, 0, 0),
        "an eighth": kinds(1_024, 128, 2_048),
        "with the hidden parts": kinds(inputs=24_576 + 8_192),
        "swapped": kinds(INPUTS, STATISTICS, STREAM),
        "elements": kinds(STREAM // 4, STATISTICS // 4, INPUTS // 4),
        "floats": kinds(float(STREAM), float(STATISTICS), float(INPUTS)),
        "texts": kinds('"8,192 B"', '"1,024 B"', '"16,384 B"'),
    },
    "again-answer": {
        "no scatter": again(DX="(dy @ weight)[: len(x)]"),
        "memory-hungry": again(KEPT="torch.ones(2**30)"),
        "keeps what it has gathered": again(KEPT="ctx.whole = whole", GATHERED="ctx.whole"),
        "its rows alone": again(WHOLE="x"),
        "gathers twice in forward": again(OUTPUT="F.linear(gather(x), weight, bias)"),
        "no bias": again(OUTPUT="F.linear(whole, weight)"),
        "no gradient of x": again(DX="None"),
        "no graph": again(CALLED="F.linear(gather(x.detach()), weight.detach(), bias.detach())"),
        "no return": again(CALLED="None"),
        "unsolved": "def column_parallel_rows(x, weight, bias, gather, reduce_scatter):\n    raise NotImplementedError",
        "one gather more": again(DX="ctx.reduce_scatter(dy @ weight) + 0 * ctx.gather(x)[: len(x)]"),
    },
    "loss-answer": {
        "one rank does not call": loss(SUMMED="start == 0 or all_reduce(both)"),
        "memory-hungry": loss(EXP="torch.ones(2**30) and z.exp_()"),
        "its own sum": loss(SUMMED="all_reduce(both[1])"),
        "a maximum over tokens": loss(LARGEST="logits.amax().expand(len(logits)).clone()"),
        "softmax of its own": loss(SOFTMAX="z.div_(z.sum(-1, keepdim=True))"),
        "in the logits": loss(SHIFTED="logits.sub_(largest[:, None])"),
        "in double to the end": loss(
            READ="at_target = z.new_zeros(len(targets)); at_target[here] = z[here, targets[here] - start]",
            SHIFTED="logits.double() - largest[:, None]",
        ),
        "in double on the wire": loss(SUMMED="both = both.double(); all_reduce(both); both = both.float()"),
        "a token less": loss(END="losses[1:], gradient"),
        "losses alone": loss(END="losses"),
        "kept for good": "kept = []\n" + loss(EXP="kept.append(z.clone()) or z.exp_()"),
        "unsolved": "def vocabulary_loss(logits, targets, start, all_reduce):\n    raise NotImplementedError",
    },
}

CRASHES = {"always side by side", "one gradient for two"}
"""Mistakes that end with an error of Python's or torch's own, which is told; all others are told why."""

RIGHT: dict[str, dict[str, str]] = {
    "block-answer": {
        "as they are": hand(),
        "by factors": hand(
            "2 * (12 * 4096**2 + 7 * 4096) // 8 + 12 * 4096", "7 * 2**26", "16 * 7 * 36 * 10**13 // (72 * 4096)"
        ),
    },
    "ranges-answer": {
        "as it is": ranges(),
        "lists": ranges(PAIR="[begin, begin + size]", FOUND="tuple(found)"),
    },
    "part-answer": {
        "cloned where there is one": part("views[0].clone() if len(views) == 1 else torch.cat(views, dim)"),
    },
    "copy-answer": {
        "as it is": copied(),
        "x itself": copied(FORWARD="x"),
        "a sum of its own": copied(TOTAL="dy + 0"),
    },
    "whole-answer": {
        "as they are": kinds(),
    },
    "reduce-answer": {
        "as it is": reduced(),
        "contiguous": reduced(TOTAL="x.clone(memory_format=torch.contiguous_format)"),
        "a view back": reduced(GRADIENT="dy.view_as(dy), None"),
    },
    "once-answer": {
        "by two": row("y + bias", f"y = {SUMMED}"),
        "without F": row("bias + regions.reduce_from_ranks(x @ weight.t())"),
    },
    "own-rows-answer": {
        "divided first": own(
            "regions.reduce_scatter_sequence(F.linear(x, weight, regions.copy_to_ranks(bias) / regions._wire.ranks))"
        ),
    },
    "again-answer": {
        "as it is": again(),
    },
    "loss-answer": {
        "as it is": loss(),
        "three sums": loss(SUMMED="total = both[0].clone(); all_reduce(total); all_reduce(both[1]); both[0] = total"),
        "by scatter": loss(
            LESS="gradient.scatter_add_(1, ((targets - start) * here)[:, None], -here.float()[:, None])"
        ),
        "numbers on their side": loss(
            SUMMED="both = both.t().contiguous(); all_reduce(both); both = both.t()",
        ),
    },
}
