"""Answers to the exercises of chapter 14: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import ANYTHING, cell

PARAMETERS, SENT, LINK = 50_387_968, 469_762_048, 136_718_750_000
STREAM, STATISTICS, INPUTS = 8_192, 1_024, 16_384


def hand(parameters: object = PARAMETERS, sent: object = SENT, link: object = LINK) -> str:
    """The three numbers of exercise 1."""
    return f"parameter_bytes, sent_bytes, link_bytes_per_second = {parameters}, {sent}, {link}"


def kinds(stream: object = STREAM, statistics: object = STATISTICS, inputs: object = INPUTS) -> str:
    """The three numbers of exercise 5."""
    return f"stream_bytes, statistics_bytes, inputs_bytes = {stream}, {statistics}, {inputs}"


def ranges(**changes: str) -> str:
    """qkv_ranges, right but for the changes."""
    terms = {
        "COUNTS": "(heads, kv_heads, kv_heads)",
        "PIECES": "min(count, ranks)",
        "SIZE": "count // pieces * head_size",
        "PLACE": "rank * pieces // ranks",
        "START": "start + place * size",
        "PAIR": "(begin, begin + size)",
        "NEXT": "count * head_size",
        "FOUND": "found",
    }
    return cell(
        """
        def qkv_ranges(rank, ranks, heads, kv_heads, head_size):
            found, start = [], 0
            for count in COUNTS:
                pieces = PIECES
                size = SIZE
                place = PLACE
                begin = START
                found.append(PAIR)
                start += NEXT
            return FOUND
        """,
        **terms | changes,
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


def copied(**changes: str) -> str:
    """copy_to_ranks, right but for the changes."""
    terms = {
        "KEPT": "pass",
        "FORWARD": "x.view_as(x)",
        "TOTAL": "dy.clone()",
        "SUMMED": "ctx.all_reduce(total)",
        "GRADIENT": "total, None",
        "CALLED": "_Copy.apply(x, all_reduce)",
    }
    return cell(
        """
        class _Copy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, all_reduce):
                ctx.all_reduce = all_reduce
                KEPT
                return FORWARD

            @staticmethod
            def backward(ctx, dy):
                total = TOTAL
                SUMMED
                return GRADIENT


        def copy_to_ranks(x, all_reduce):
            return CALLED
        """,
        **terms | changes,
    )


def reduced(**changes: str) -> str:
    """reduce_from_ranks, right but for the changes."""
    terms = {
        "TOTAL": "x.clone()",
        "SUMMED": "all_reduce(total)",
        "FORWARD": "total",
        "BACK": "pass",
        "GRADIENT": "dy, None",
        "CALLED": "_Reduce.apply(x, all_reduce)",
    }
    return cell(
        """
        class _Reduce(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, all_reduce):
                ctx.all_reduce = all_reduce
                total = TOTAL
                SUMMED
                return FORWARD

            @staticmethod
            def backward(ctx, dy):
                BACK
                return GRADIENT


        def reduce_from_ranks(x, all_reduce):
            return CALLED
        """,
        **terms | changes,
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


def again(**changes: str) -> str:
    """column_parallel_rows, right but for the changes."""
    terms = {
        "WHOLE": "gather(x)",
        "SAVED": "x, weight",
        "KEPT": "pass",
        "OUTPUT": "F.linear(whole, weight, bias)",
        "UNPACKED": "x, weight",
        "GATHERED": "ctx.gather(x)",
        "DX": "ctx.reduce_scatter(dy @ weight)",
        "DW": "dy.t() @ whole",
        "DB": "dy.sum(0)",
        "CALLED": "_Again.apply(x, weight, bias, gather, reduce_scatter)",
    }
    return cell(
        """
        class _Again(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight, bias, gather, reduce_scatter):
                whole = WHOLE
                ctx.save_for_backward(SAVED)
                ctx.gather, ctx.reduce_scatter = gather, reduce_scatter
                KEPT
                return OUTPUT

            @staticmethod
            def backward(ctx, dy):
                UNPACKED = ctx.saved_tensors
                whole = GATHERED
                dx = DX
                return dx, DW, DB, None, None


        def column_parallel_rows(x, weight, bias, gather, reduce_scatter):
            return CALLED
        """,
        **terms | changes,
    )


def loss(**changes: str) -> str:
    """vocabulary_loss, right but for the changes."""
    terms = {
        "LARGEST": "logits.amax(-1)",
        "MAXIMUM": "all_reduce(largest, ReduceOp.MAX)",
        "SHIFTED": "logits - largest[:, None]",
        "HERE": "(targets >= start) & (targets < start + logits.shape[1])",
        "READ": "at_target[here] = z[here, targets[here] - start]",
        "EXP": "z.exp_()",
        "SUMMED": "all_reduce(both)",
        "LOSSES": "both[0].log() - both[1]",
        "SOFTMAX": "z.div_(both[0][:, None])",
        "LESS": "gradient[here, targets[here] - start] -= 1",
        "END": "losses, gradient",
    }
    return cell(
        """
        def vocabulary_loss(logits, targets, start, all_reduce):
            largest = LARGEST
            MAXIMUM
            z = SHIFTED
            here = HERE
            at_target = logits.new_zeros(len(targets))
            READ
            both = torch.stack([EXP.sum(-1), at_target])
            SUMMED
            losses = LOSSES
            gradient = SOFTMAX
            LESS
            return END
        """,
        **terms | changes,
    )


SUMMED = "regions.reduce_from_ranks(F.linear(x, weight))"
SCATTERED = "regions.reduce_scatter_sequence(F.linear(x, weight))"

WRONG: dict[str, dict[str, str]] = {
    "block-answer": {
        "nothing": hand(0, 0, 0),
        "the whole block": hand(402_759_680),
        "an eighth of all": hand(50_344_960),
        "the parts alone": hand(2 * (12 * 4096**2 + 7 * 4096) // 8),
        "weights alone": hand(50_331_648),
        "without biases": hand(50_331_648 + 32_768),
        "all biases whole": hand(50_331_648 + 106_496),
        "all biases cut": hand(2 * ((12 * 4096**2 + 9 * 4096) // 8 + 4 * 4096)),
        "without norms": hand(PARAMETERS - 32_768),
        "elements": hand(PARAMETERS // 2),
        "in FP32": hand(2 * PARAMETERS, 2 * SENT),
        "in MiB": hand(48, 448),
        "floats": hand(float(PARAMETERS), float(SENT)),
        "forward alone": hand(sent=SENT // 2),
        "reduce-scatters alone": hand(sent=SENT // 2),
        "one all-reduce": hand(sent=SENT // 4),
        "one collective": hand(sent=SENT // 8),
        "to itself as well": hand(sent=536_870_912),
        "four times the stream": hand(sent=268_435_456),
        "all ranks' traffic": hand(sent=8 * SENT),
        "six all-reduces": hand(sent=3 * SENT // 2),
        "of the hidden width": hand(sent=4 * SENT),
        "the whole block's time": hand(link=LINK // 8),
        "forward's time": hand(link=3 * LINK),
        "twice as fast": hand(link=2 * LINK),
        "bits a second": hand(link=8 * LINK),
        "GB a second": hand(link=136),
        "a fraction": hand(link=136_718_750_000.5),
        "texts": hand('"50,387,968 B"', '"469,762,048 B"', '"137 GB/s"'),
        "equal to everything": ANYTHING + hand(*["Anything()"] * 3),
    },
    "ranges-answer": {
        "cut in one": cell(
            """
            def qkv_ranges(rank, ranks, heads, kv_heads, head_size):
                rows = (heads + 2 * kv_heads) * head_size
                return [(rank * rows // ranks, (rank + 1) * rows // ranks)]
            """
        ),
        "cut in one, three times": cell(
            """
            def qkv_ranges(rank, ranks, heads, kv_heads, head_size):
                rows = (heads + 2 * kv_heads) * head_size // ranks
                return [(rank * rows + i * rows // 3, rank * rows + (i + 1) * rows // 3) for i in range(3)]
            """
        ),
        "as many keys as queries": ranges(COUNTS="(heads, heads, heads)"),
        "each in its own": ranges(NEXT="0"),
        "in heads": ranges(SIZE="count // pieces", NEXT="count"),
        "key-value heads cut": ranges(PIECES="ranks"),
        "all key-value heads": ranges(PIECES="ranks if count == heads else 1"),
        "one key-value head": ranges(SIZE="count // pieces * head_size if count == heads else head_size"),
        "shared in turns": ranges(PLACE="rank % pieces"),
        "the last first": ranges(PLACE="(ranks - 1 - rank) * pieces // ranks"),
        "rank 0's": ranges(PLACE="0"),
        "the next rank's": ranges(PLACE="(rank + 1) % ranks * pieces // ranks"),
        "lengths, not ends": ranges(PAIR="(begin, size)"),
        "ends that are included": ranges(PAIR="(begin, begin + size - 1)"),
        "values before keys": ranges(FOUND="[found[0], found[2], found[1]]"),
        "queries and keys": ranges(FOUND="found[:2]"),
        "bytes": ranges(PAIR="(4 * begin, 4 * (begin + size))"),
        "floats": ranges(PAIR="(float(begin), float(begin + size))"),
        "tensors": ranges(PAIR="tuple(torch.tensor([begin, begin + size]).tolist())"),
        "ranges": ranges(PAIR="range(begin, begin + size)"),
        "a number": ranges(FOUND="len(found)"),
        "no return": ranges(FOUND="None"),
        "an endless loop": ranges(PLACE="0\n        while True: pass"),
        "a syntax error": "def qkv_ranges(rank:\n    return 0",
        "an empty cell": "",
        "unsolved": "def qkv_ranges(rank, ranks, heads, kv_heads, head_size):\n    raise NotImplementedError",
    },
    "part-answer": {
        "FP32 for any dtype": part("torch.cat(views, dim).float()"),
        "views": part("views[0] if len(views) == 1 else torch.cat(views, dim)"),
        "contiguous views": part("views[0].contiguous() if len(views) == 1 else torch.cat(views, dim)"),
        "detached views": part("views[0].detach() if len(views) == 1 else torch.cat(views, dim)"),
        "parameters of views": part("nn.Parameter(views[0]) if len(views) == 1 else torch.cat(views, dim)"),
        "the whole": part("full"),
        "all of it copied": part("torch.cat(views, dim)", "copy = full.clone()"),
        "copied, then narrowed": part("torch.cat(full.clone().split(1, dim), dim)[:0]"),
        "a view of a copy": part(
            "full.clone().narrow(dim, ranges[0][0], views[0].shape[dim]) if len(views) == 1 else torch.cat(views, dim)"
        ),
        "pieces copied, then put together": part("torch.cat([view.clone() for view in views], dim)"),
        "copied twice": part("torch.cat(views, dim).clone()"),
        "one after the other": cell(
            """
            def part_of(full, dim, ranges):
                part = full.narrow(dim, 0, 0)
                for begin, end in ranges:
                    part = torch.cat([part, full.narrow(dim, begin, end - begin)], dim)
                return part
            """
        ),
        "the first range": part("views[0].clone()"),
        "always rows": part("torch.cat([full[begin:end] for begin, end in ranges])"),
        "always side by side": part("torch.cat(views, 1)"),
        "in the opposite order": part("torch.cat(views[::-1], dim)"),
        "a row too many": part("torch.cat([full.narrow(dim, 0, 1), *views], dim)"),
        "in double": part("torch.cat(views, dim).double()"),
        "flat": part("torch.cat(views, dim).flatten()"),
        "writes into the full one": part("torch.cat(views, dim).add_(full.mul_(0).sum())"),
        "kept for good": "kept = []\n" + part("torch.cat(views, dim)", "kept.append(full)"),
        "remembers its parts": "made = []\n"
        + part("made[-1]", "made.append(torch.cat(views, dim)); made.append(made[-1] + 0)"),
        "a list": part("views"),
        "no return": part("None"),
        "memory-hungry": part("torch.cat(views, dim)", "torch.ones(2**30)"),
        "an endless loop": part("views", "while True: pass"),
        "a syntax error": "def part_of(full, dim, ranges:\n    return 0",
        "an empty cell": "",
        "unsolved": "def part_of(full, dim, ranges):\n    raise NotImplementedError",
    },
    "copy-answer": {
        "no function": "def copy_to_ranks(x, all_reduce):\n    return x",
        "a view alone": copied(CALLED="x.view_as(x)"),
        "a copy in forward": copied(FORWARD="x.clone()"),
        "a sum in forward": copied(FORWARD="all_reduce(x) or x.view_as(x)"),
        "the sum of a copy in forward": copied(KEPT="total = x.clone(); all_reduce(total)"),
        "nothing in backward": copied(SUMMED="pass"),
        "in place": copied(TOTAL="dy"),
        "twice in backward": copied(SUMMED="ctx.all_reduce(total); ctx.all_reduce(total)"),
        "sent twice": copied(SUMMED="ctx.all_reduce(total); ctx.all_reduce(dy.clone())"),
        "the mean": copied(TOTAL="dy / 2"),
        "twice the sum": copied(TOTAL="2 * dy"),
        "the largest": copied(SUMMED="ctx.all_reduce(total, ReduceOp.MAX)"),
        "sent beside itself": copied(TOTAL="torch.cat([dy, dy])", GRADIENT="total[: len(dy)], None"),
        "the sum is lost": copied(GRADIENT="dy, None"),
        "no gradient": copied(GRADIENT="None, None"),
        "one gradient for two": copied(GRADIENT="total"),
        "zeros": copied(TOTAL="torch.zeros_like(dy)"),
        "detached": copied(CALLED="x.detach()"),
        "keeps a copy": copied(KEPT="ctx.x = x.clone()"),
        "keeps a copy for good": "kept = []\n" + copied(KEPT="kept.append(x.clone())"),
        "a hook that forgets the rest": cell(
            """
            def copy_to_ranks(x, all_reduce):
                x.register_hook(lambda dy: all_reduce(dy))
                return x
            """
        ),
        "by a hook on x": cell(
            """
            def copy_to_ranks(x, all_reduce):
                def summed(dy):
                    total = dy.clone()
                    all_reduce(total)
                    return total

                x.register_hook(summed)
                return x.view_as(x)
            """
        ),
        "other values": copied(FORWARD="x.view_as(x).neg_().neg_() * 2"),
        "another shape": copied(FORWARD="x.view(-1)"),
        "a list": copied(CALLED="[x]"),
        "no return": copied(CALLED="None"),
        "leaves autograd switched off": copied(
            CALLED="_Copy.apply(x, all_reduce) if torch.set_grad_enabled(False) else 0"
        ),
        "memory-hungry": copied(KEPT="torch.ones(2**30)"),
        "an endless loop": copied(SUMMED="while True: pass"),
        "collectives without end": copied(SUMMED="while True: ctx.all_reduce(total)"),
        "a syntax error": "def copy_to_ranks(x:\n    return 0",
        "an empty cell": "",
        "unsolved": "def copy_to_ranks(x, all_reduce):\n    raise NotImplementedError",
    },
    "reduce-answer": {
        "nothing": "def reduce_from_ranks(x, all_reduce):\n    return x",
        "nobody is asked": reduced(SUMMED="pass"),
        "in place": reduced(TOTAL="x"),
        "in place, as autograd is told": reduced(
            TOTAL="x", FORWARD="ctx.mark_dirty(x) or x", CALLED="_Reduce.apply(x.detach(), all_reduce)"
        ),
        "the mean": reduced(SUMMED="all_reduce(total); total /= 2"),
        "the largest": reduced(SUMMED="all_reduce(total, ReduceOp.MAX)"),
        "a sum in backward": reduced(BACK="dy = dy.clone(); ctx.all_reduce(dy)"),
        "a sum in backward, in place": reduced(BACK="ctx.all_reduce(dy)"),
        "sent in backward for nothing": reduced(BACK="ctx.all_reduce(dy.clone())"),
        "the gradient divided": reduced(GRADIENT="dy / 2, None"),
        "the gradient scaled in place": reduced(BACK="dy.mul_(2)"),
        "no gradient": reduced(GRADIENT="None, None"),
        "without a function": cell(
            """
            def reduce_from_ranks(x, all_reduce):
                total = x.detach().clone()
                all_reduce(total)
                return total
            """
        ),
        "the rest added": cell(
            """
            def reduce_from_ranks(x, all_reduce):
                total = x.detach().clone()
                all_reduce(total)
                return x + (total - x.detach())
            """
        ),
        "summed twice": reduced(SUMMED="all_reduce(total); all_reduce(total)"),
        "two copies": reduced(TOTAL="x.clone().clone()"),
        "a copy is kept": reduced(SUMMED="all_reduce(total); ctx.x = x.clone()"),
        "in FP32": reduced(TOTAL="x.float()"),
        "one rank does not call": reduced(SUMMED="x.sum() > 20 or all_reduce(total)"),
        "other shapes on ranks": reduced(SUMMED="all_reduce(total[: 1 + int(x.sum() > 20)])"),
        "other operations on ranks": reduced(
            SUMMED="all_reduce(total, ReduceOp.MAX if x.sum() > 20 else ReduceOp.SUM)"
        ),
        "the product": reduced(SUMMED="all_reduce(total, ReduceOp.PRODUCT)"),
        "a list is sent": reduced(SUMMED="all_reduce([total])"),
        "flat": reduced(FORWARD="total.view(-1)"),
        "a number": reduced(CALLED="0"),
        "no return": reduced(CALLED="None"),
        "memory-hungry": reduced(TOTAL="torch.ones(2**30)"),
        "an endless loop": reduced(SUMMED="while True: pass"),
        "a syntax error": "def reduce_from_ranks(x:\n    return 0",
        "an empty cell": "",
        "unsolved": "def reduce_from_ranks(x, all_reduce):\n    raise NotImplementedError",
    },
    "once-answer": {
        "on every rank": row("regions.reduce_from_ranks(F.linear(x, weight, bias))"),
        "no bias": row(SUMMED),
        "no sum": row("F.linear(x, weight, bias)"),
        "half of it on each": row("regions.reduce_from_ranks(F.linear(x, weight, bias / 2))"),
        "on rank 0 alone": row(
            "regions.reduce_from_ranks(F.linear(x, weight, bias if regions._wire.rank == 0 else None))"
        ),
        "a share each": row("regions.reduce_from_ranks(F.linear(x, weight, bias / regions._wire.ranks))"),
        "its gradient summed": row(f"{SUMMED} + regions.copy_to_ranks(bias)"),
        "its gradient lost": row(f"{SUMMED} + bias.detach()"),
        "the graph lost": row(f"{SUMMED}.detach() + bias"),
        "no graph at all": row(f"({SUMMED} + bias).detach()"),
        "a sum in backward": row("regions.reduce_from_ranks(F.linear(regions.copy_to_ranks(x), weight)) + bias"),
        "summed twice": row(f"regions.reduce_from_ranks({SUMMED}) + bias"),
        "scattered and gathered": row(f"regions.gather_sequence({SCATTERED}) + bias"),
        "its rows alone": row(f"{SCATTERED} + bias"),
        "gathered": row("regions.gather_sequence(F.linear(x, weight)) + bias"),
        "bias subtracted": row(f"{SUMMED} - bias"),
        "a number": row("0"),
        "no return": row("None"),
        "memory-hungry": row(f"{SUMMED} + bias", "torch.ones(2**30)"),
        "an endless loop": row("0", "while True: pass"),
        "a syntax error": "def row_parallel(x:\n    return 0",
        "an empty cell": "",
        "unsolved": "def row_parallel(x, weight, bias, regions):\n    raise NotImplementedError",
    },
    "own-rows-answer": {
        "its gradient is of its rows": own(f"{SCATTERED} + bias"),
        "on every rank": own("regions.reduce_scatter_sequence(F.linear(x, weight, bias))"),
        "no bias": own(SCATTERED),
        "whole": own(f"{SUMMED} + bias"),
        "all are summed": own(f"({SUMMED} + bias).chunk(regions._wire.ranks)[regions._wire.rank]"),
        "all are summed, backward as well": own(
            f"(regions.copy_to_ranks({SUMMED}) + regions.copy_to_ranks(bias)).chunk(regions._wire.ranks)"
            "[regions._wire.rank]"
        ),
        "a share each, with a small gradient": own(
            "regions.reduce_scatter_sequence(F.linear(x, weight, bias / regions._wire.ranks))"
        ),
        "summed to the bias": own(f"{SCATTERED} + regions.reduce_from_ranks(bias)"),
        "gathered": own(f"regions.gather_sequence({SCATTERED}) + bias"),
        "its gradient summed twice": own(f"{SCATTERED} + regions.copy_to_ranks(regions.copy_to_ranks(bias))"),
        "a bias for each row": own(f"{SCATTERED} + regions.copy_to_ranks(bias.expand(len(x), -1))[:1]"),
        "its gradient lost": own(f"{SCATTERED} + bias.detach()"),
        "x is summed as well": own(
            "regions.reduce_scatter_sequence(F.linear(regions.copy_to_ranks(x), weight)) + regions.copy_to_ranks(bias)"
        ),
        "no graph at all": own(f"({SCATTERED} + bias).detach()"),
        "a number": own("0"),
        "no return": own("None"),
        "memory-hungry": own(f"{SCATTERED} + bias", "torch.ones(2**30)"),
        "an endless loop": own("0", "while True: pass"),
        "an empty cell": "",
        "unsolved": "def row_parallel_rows(x, weight, bias, regions):\n    raise NotImplementedError",
    },
    "whole-answer": {
        "nothing": kinds(0, 0, 0),
        "two streams": kinds(stream=16_384),
        "no stream": kinds(stream=0),
        "stream and inputs": kinds(stream=24_576),
        "an eighth": kinds(1_024, 128, 2_048),
        "what is too many": kinds(7_168, 896, 14_336),
        "one norm": kinds(statistics=512),
        "one number": kinds(statistics=256),
        "statistics of 8 bytes": kinds(statistics=2_048),
        "norms' weights": kinds(statistics=512 + 4),
        "one layer": kinds(inputs=8_192),
        "row parallel ones, too": kinds(inputs=16_384 + 8_192),
        "with the hidden parts": kinds(inputs=24_576 + 8_192),
        "swapped": kinds(INPUTS, STATISTICS, STREAM),
        "elements": kinds(STREAM // 4, STATISTICS // 4, INPUTS // 4),
        "twice as much": kinds(2 * STREAM, 2 * STATISTICS, 2 * INPUTS),
        "in KiB": kinds(8, 1, 16),
        "floats": kinds(float(STREAM), float(STATISTICS), float(INPUTS)),
        "texts": kinds('"8,192 B"', '"1,024 B"', '"16,384 B"'),
        "equal to everything": ANYTHING + kinds(*["Anything()"] * 3),
    },
    "again-answer": {
        "saves what it has gathered": again(SAVED="whole, weight", UNPACKED="whole, weight", GATHERED="whole"),
        "keeps what it has gathered": again(KEPT="ctx.whole = whole", GATHERED="ctx.whole"),
        "keeps it beside": again(KEPT="ctx.whole = whole"),
        "keeps a copy of its rows": again(SAVED="x.clone(), weight"),
        "keeps a copy of the weight": again(SAVED="x, weight.clone()"),
        "keeps its output": again(KEPT="ctx.y = F.linear(whole, weight, bias)"),
        "keeps it for good": "kept = []\n" + again(KEPT="kept.append(whole)"),
        "its rows alone": again(WHOLE="x"),
        "its rows in backward": again(DW="dy[: len(x)].t() @ x"),
        "no scatter": again(DX="(dy @ weight)[: len(x)]"),
        "a gather for the scatter": again(DX="ctx.gather(dy @ weight)[: len(x)]"),
        "one gather more": again(DX="ctx.reduce_scatter(dy @ weight) + 0 * ctx.gather(x)[: len(x)]"),
        "gathers twice in forward": again(OUTPUT="F.linear(gather(x), weight, bias)"),
        "scatters the weight's gradient": again(DW="ctx.reduce_scatter(dy.t() @ whole).repeat(9, 1)[: dy.shape[1]]"),
        "twice dx": again(DX="2 * ctx.reduce_scatter(dy @ weight)"),
        "no bias": again(OUTPUT="F.linear(whole, weight)"),
        "no gradient of the bias": again(DB="None"),
        "the bias's mean": again(DB="dy.mean(0)"),
        "no gradient of the weight": again(DW="None"),
        "no gradient of x": again(DX="None"),
        "no function": again(CALLED="F.linear(gather(x), weight, bias)"),
        "no graph": again(CALLED="F.linear(gather(x.detach()), weight.detach(), bias.detach())"),
        "a list": again(CALLED="[x]"),
        "no return": again(CALLED="None"),
        "memory-hungry": again(KEPT="torch.ones(2**30)"),
        "an endless loop": again(KEPT="while True: pass"),
        "a syntax error": "def column_parallel_rows(x:\n    return 0",
        "an empty cell": "",
        "unsolved": "def column_parallel_rows(x, weight, bias, gather, reduce_scatter):\n    raise NotImplementedError",
    },
    "loss-answer": {
        "of its own logits": loss(MAXIMUM="pass", SUMMED="pass"),
        "its own maximum": loss(MAXIMUM="pass"),
        "no maximum": loss(LARGEST="logits.new_zeros(len(logits))", MAXIMUM="pass"),
        "the maxima's sum": loss(MAXIMUM="all_reduce(largest)"),
        "sums are maxima": loss(SUMMED="all_reduce(both, ReduceOp.MAX)"),
        "its own sum": loss(SUMMED="all_reduce(both[1])"),
        "its own target": loss(SUMMED="all_reduce(both[0])"),
        "a maximum over tokens": loss(LARGEST="logits.amax().expand(len(logits)).clone()"),
        "the target without a mask": loss(
            READ="at_target[:] = z.gather(1, (targets - start).clamp(0, logits.shape[1] - 1)[:, None])[:, 0]"
        ),
        "the wrong end": loss(HERE="(targets >= start) & (targets <= start + logits.shape[1] - 2)"),
        "the wrong beginning": loss(HERE="(targets > start) & (targets < start + logits.shape[1])"),
        "ids of the whole": loss(
            READ="at_target[here] = z[here, targets[here] % logits.shape[1] * 0]",
        ),
        "the sign": loss(LOSSES="both[1] - both[0].log()"),
        "without the target": loss(LOSSES="both[0].log()"),
        "without the logarithm": loss(LOSSES="both[0] - both[1]"),
        "base 2": loss(LOSSES="both[0].log2() - both[1]"),
        "the mean": loss(LOSSES="(both[0].log() - both[1]).mean()"),
        "the mean's gradient": loss(LESS="gradient[here, targets[here] - start] -= 1; gradient /= len(targets)"),
        "softmax alone": loss(LESS="pass"),
        "one is added": loss(LESS="gradient[here, targets[here] - start] += 1"),
        "less one everywhere": loss(LESS="gradient[:, 0] -= 1"),
        "less one on each rank": loss(
            LESS="gradient[range(len(targets)), (targets - start) % logits.shape[1]] -= 1",
        ),
        "no softmax": loss(SOFTMAX="z"),
        "softmax of its own": loss(SOFTMAX="z.div_(z.sum(-1, keepdim=True))"),
        "in the logits": loss(SHIFTED="logits.sub_(largest[:, None])"),
        "targets are changed": loss(HERE="(targets.sub_(start) >= 0) & (targets < logits.shape[1])").replace(
            "targets[here] - start", "targets[here]"
        ),
        "two tensors": loss(EXP="z.exp()", SOFTMAX="torch.softmax(z, -1)").replace(
            "torch.softmax(z, -1)", "z.exp() / both[0][:, None]"
        ),
        "in double": loss(
            READ="at_target = z.new_zeros(len(targets)); at_target[here] = z[here, targets[here] - start]",
            SHIFTED="logits.double() - largest[:, None]",
            SOFTMAX="z.div_(both[0][:, None]).float()",
        ),
        "in double to the end": loss(
            READ="at_target = z.new_zeros(len(targets)); at_target[here] = z[here, targets[here] - start]",
            SHIFTED="logits.double() - largest[:, None]",
        ),
        "in double on the wire": loss(SUMMED="both = both.double(); all_reduce(both); both = both.float()"),
        "logits are gathered": cell(
            """
            def vocabulary_loss(logits, targets, start, all_reduce):
                whole = logits.new_zeros(len(logits), 8 * logits.shape[1])
                whole[:, start : start + logits.shape[1]] = logits
                all_reduce(whole)
                whole[:, whole.abs().sum(0) == 0] = -torch.inf
                softmax = whole.softmax(-1)
                losses = F.cross_entropy(whole, targets, reduction="none")
                softmax[range(len(targets)), targets] -= 1
                return losses, softmax[:, start : start + logits.shape[1]]
            """
        ),
        "four numbers": loss(SUMMED="all_reduce(both); all_reduce(largest.clone(), ReduceOp.MAX)"),
        "a token less": loss(END="losses[1:], gradient"),
        "losses alone": loss(END="losses"),
        "kept for good": "kept = []\n" + loss(EXP="kept.append(z.clone()) or z.exp_()"),
        "one rank does not call": loss(SUMMED="start == 0 or all_reduce(both)"),
        "no return": loss(END="None"),
        "memory-hungry": loss(EXP="torch.ones(2**30) and z.exp_()"),
        "an endless loop": loss(SUMMED="while True: pass"),
        "an endless loop on one rank": loss(SUMMED="all_reduce(both)\n    while start: pass"),
        "a syntax error": "def vocabulary_loss(logits:\n    return 0",
        "an empty cell": "",
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
        "by Cut": cell(
            """
            from memlab.tensor_parallelism import Cut


            def qkv_ranges(rank, ranks, heads, kv_heads, head_size):
                few = min(kv_heads, ranks)
                sections = ((heads * head_size, ranks), (kv_heads * head_size, few), (kv_heads * head_size, few))
                return Cut((sum(size for size, _ in sections), 1), 0, rank, ranks, sections).ranges()
            """
        ),
        "lists": ranges(PAIR="[begin, begin + size]", FOUND="tuple(found)"),
    },
    "part-answer": {
        "written into an empty one": cell(
            """
            def part_of(full, dim, ranges):
                shape = list(full.shape)
                shape[dim] = sum(end - begin for begin, end in ranges)
                part, at = full.new_empty(shape), 0
                for begin, end in ranges:
                    part.narrow(dim, at, end - begin).copy_(full.narrow(dim, begin, end - begin))
                    at += end - begin
                return part
            """
        ),
        "cloned where there is one": part("views[0].clone() if len(views) == 1 else torch.cat(views, dim)"),
    },
    "copy-answer": {
        "as it is": copied(),
        "x itself": copied(FORWARD="x"),
        "a sum of its own": copied(TOTAL="dy + 0"),
        "a gradient for one argument": cell(
            """
            def copy_to_ranks(x, all_reduce):
                y = x.view_as(x)

                def summed(dy):
                    total = dy.clone()
                    all_reduce(total)
                    return total

                y.register_hook(summed)
                return y
            """
        ),
    },
    "whole-answer": {
        "as they are": kinds(),
        "as the meter has them": cell(
            """
            timeline, turn = step(8)
            found = {}
            for storage in timeline.alive(turn):
                if storage.category == "activation":
                    reason = storage.reason.split(" for ")[0], tuple(storage.shape)
                    found[reason] = found.get(reason, 0) + storage.nbytes
            stream_bytes = found["saved by layer_norm", (64, 32)]
            statistics_bytes = found["saved by layer_norm", (64, 1)]
            wide = sum(nbytes for (_, shape), nbytes in found.items() if shape == (64, 32))
            inputs_bytes = wide - stream_bytes
            """
        ),
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
        "recomputed by a checkpoint": cell(
            """
            from torch.utils.checkpoint import checkpoint


            class _Gather(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x, gather, reduce_scatter):
                    ctx.reduce_scatter = reduce_scatter
                    return gather(x)

                @staticmethod
                def backward(ctx, dy):
                    return ctx.reduce_scatter(dy), None, None


            def column_parallel_rows(x, weight, bias, gather, reduce_scatter):
                def layer(x):
                    return F.linear(_Gather.apply(x, gather, reduce_scatter), weight, bias)

                return checkpoint(layer, x, use_reentrant=False)
            """
        ),
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
