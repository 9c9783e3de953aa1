"""Answers to the exercises of chapter 13: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import cell, variants

ONE, TWO, THREE, SENT, FEWEST = 14_250_000_000, 8_625_000_000, 3_000_000_000, 16_875_000_000, 12
COPY, ROOM, PADDING = 25_100, 6_400, 244


def hand(one: object = ONE, two: object = TWO, three: object = THREE, sent: object = SENT, fewest: object = FEWEST):
    """The five numbers of exercise 1."""
    names = "stage_1_bytes, stage_2_bytes, stage_3_bytes, sent_bytes, fewest_ranks"
    return f"{names} = {one}, {two}, {three}, {sent}, {fewest}"


def parts(copied: object = COPY, room: object = ROOM, padding: object = PADDING) -> str:
    """The three numbers of exercise 4."""
    return f"copy_bytes, room_bytes, padding_bytes = {copied}, {room}, {padding}"


def owned(value: str) -> str:
    """owner that returns an expression."""
    return f"def owner(index, numel, ranks):\n    return {value}"


moved = variants(
    """
    def moves(numel, before, after):
        old, new, made = -(-numel // before), -(-numel // after), []
        for source in range(before):
            for target in range(after):
                begin = BEGIN«max(source * old, target * new)»
                end = STOP«min((source + 1) * old, (target + 1) * new, numel)»
                if SENT«source != target and begin < end»:
                    MESSAGE«made.append((source, target, begin, end))»
        return FOUND«made»
    """
)


def sends(value: str) -> str:
    """piece_sent that returns an expression."""
    return f"def piece_sent(rank, step, ranks):\n    return {value}"


ring = variants(
    """
    def ring_all_reduce(flats, send):
        ranks = len(flats)
        size = SIZE«-(-len(flats[0]) // ranks)»
        BEFORE«pass»
        for step in range(STEPS«2 * (ranks - 1)»):
            for rank in range(ranks):
                piece = (rank - 1 - step) % ranks
                own = flats[rank][piece * size : (piece + 1) * size]
                theirs = flats[(rank + 1) % ranks][piece * size : (piece + 1) * size]
                message = send(SENDER«rank, own»)
                if step < ranks - 1:
                    ADD«theirs += message»
                else:
                    PUT«theirs.copy_(message)»
                AFTER«pass»
        END«pass»
    """
)


once = variants(
    """
    def side_by_side(params, ranks):
        trained = WHO«[p for p in params if p.requires_grad]»
        layout = FlatLayout([p.shape for p in trained], RANKS«ranks»)
        flat = FLAT«torch.zeros(layout.padded, dtype=trained[0].dtype)»
        for p, view in zip(trained, layout.views(flat)):
            GRAD«p.grad = view»
        END«return flat»
    """
)


mean = variants(
    """
    @contextmanager
    def averaged(model):
        BEGIN«works, ranks = [], distributed.get_world_size()»

        def average(p):
            DIVIDE«p.grad.div_(ranks)»
            SEND«works.append(distributed.all_reduce(p.grad, async_op=True))»

        handles = [
            p.register_post_accumulate_grad_hook(average)
            for p in WHO«model.parameters()»
            if IF«p.requires_grad»
        ]
        try:
            yield
            WAIT«[work.wait() for work in works]»
        CATCH«finally:»
            REMOVE«[handle.remove() for handle in handles]»
    """
)


sharded = variants(
    """
    class ShardedAdam:
        def __init__(self, params, rank, ranks, lr):
            self.params = list(params)
            layout = FlatLayout([p.shape for p in self.params], ranks)
            self.flat = FLAT«torch.zeros(layout.padded)»
            for p, view in zip(self.params, layout.views(self.flat)):
                DATA«p.data = view.copy_(p.data)»
            piece = PIECE«layout.own(self.flat, rank)»
            self.parts = PARTS«layout.part_views(piece, rank)»
            self.bounds = layout.parts(rank)
            self.adam = ADAM«torch.optim.AdamW(self.parts, lr=lr)»
            MADE«pass»

        def step(self):
            for p, part, (begin, end) in zip(self.params, self.parts, self.bounds):
                part.grad = GRAD«None if p.grad is None else p.grad.view(-1)[begin:end]»
            self.adam.step()
            AFTER«self.adam.zero_grad()»
    """
)


WRONG: dict[str, dict[str, str]] = {
    "held-answer": {
        "in GiB": hand(13, 8, 2),
        "nothing": hand(0, 0, 0, 0, 0),
        "all of it in stage 1": hand(one=48_000_000_000),
        "in GB": hand("14.25", "8.625", "3.0"),
        "sent in FP32": hand(sent=2 * SENT),
        "half of what is sent": hand(sent=SENT // 2),
        "a rank less": hand(fewest=11),
        "a fraction of a rank": hand(fewest=11.87),
        "stage 2 without its piece": hand(two=6_000_000_000),
        "stage 3 on all ranks": hand(three=48_000_000_000),
    },
    "owner-answer": {
        "rounded down": owned("divmod(index, numel // ranks or 1)"),
        "dealt like cards": owned("(index % ranks, index // ranks)"),
        "the place in the whole": owned("(index // -(-numel // ranks), index)"),
        "floats": owned("tuple(float(n) for n in divmod(index, -(-numel // ranks)))"),
        "the rank alone": owned("index // -(-numel // ranks)"),
        "by tensors": owned("divmod(index, torch.arange(numel).chunk(ranks)[0].numel())"),
        "no return": owned("None"),
        "unsolved": "def owner(index, numel, ranks):\n    raise NotImplementedError",
    },
    "moves-answer": {
        "triples": moved(MESSAGE="made.append((source, begin, end))"),
        "to oneself": moved(SENT="begin < end"),
        "empty messages": moved(SENT="source != target"),
        "whole pieces": moved(BEGIN="source * old", STOP="min((source + 1) * old, numel)"),
        "the other way round": moved(MESSAGE="made.append((target, source, begin, end))"),
        "ends that are included": moved(MESSAGE="made.append((source, target, begin, end - 1))"),
        "bytes": moved(MESSAGE="made.append((source, target, 4 * begin, 4 * end))"),
        "each element alone": moved(MESSAGE="made += [(source, target, i, i + 1) for i in range(begin, end)]"),
        "each twice": moved(FOUND="made * 2"),
        "a number": moved(FOUND="sum(end - begin for *_, begin, end in made)"),
        "no return": moved(FOUND="None"),
        "unsolved": "def moves(numel, before, after):\n    raise NotImplementedError",
    },
    "schedule-answer": {
        "its own first": sends("(rank - step) % ranks"),
        "without the remainder": sends("rank - 1 - step"),
        "the second half again from the start": sends("(rank - 1 - step % (ranks - 1)) % ranks"),
        "a list": sends("[(rank - 1 - step) % ranks]"),
        "a float": sends("float((rank - 1 - step) % ranks)"),
        "a tensor": sends("torch.tensor((rank - 1 - step) % ranks)"),
        "no return": sends("None"),
        "unsolved": "def piece_sent(rank, step, ranks):\n    raise NotImplementedError",
        "counts up": sends("(rank - 1 + step) % ranks"),
    },
    "ring-answer": {
        "half past the wire": ring(PUT="theirs.copy_(own)", SENDER="rank, own if step < ranks - 1 else own[:0]"),
        "memory-hungry": ring(BEFORE="torch.ones(2**30)"),
        "nothing": "def ring_all_reduce(flats, send):\n    pass",
        "sums what it sees, and sends for show": ring(
            ADD="pass",
            PUT="pass",
            END="[flats[0].add_(flat) for flat in flats[1:]]; [flat.copy_(flats[0]) for flat in flats[1:]]",
        ),
        "reduce-scatter alone": ring(STEPS="ranks - 1"),
        "new tensors": cell(
            """
            def ring_all_reduce(flats, send):
                flats[:] = [sum(flats)] * len(flats)
            """
        ),
        "rank 0 sends all": ring(SENDER="0, own"),
        "messages kept for good": "kept = []\n" + ring(AFTER="kept.append(message)"),
        "sends numbers": ring(SENDER="rank, own.tolist()"),
        "sends for a rank that is not there": ring(SENDER="rank + 1, own"),
        "unsolved": "def ring_all_reduce(flats, send):\n    raise NotImplementedError",
        "rounded down": ring(SIZE="len(flats[0]) // ranks or 1"),
    },
    "twice-answer": {
        "padding without the frozen one": parts(padding=244 - 4),
        "without biases": parts(copied=24_600),
        "elements": parts(COPY // 4, ROOM // 4, PADDING // 4),
        "elements of padding": parts(padding=61),
        "half of the room": parts(room=ROOM // 2),
        "no padding": parts(padding=0),
        "in KiB": parts(24.5, 6.25, 0.24),
        "floats": parts(float(COPY), float(ROOM), float(PADDING)),
    },
    "once-answer": {
        "padded for one rank": once(RANKS="1"),
        "memory-hungry": once(FLAT="torch.zeros(2**30)"),
        "a piece": once(FLAT="torch.zeros(layout.piece)"),
        "no views": once(GRAD="pass"),
        "copies of views": once(GRAD="p.grad = view.clone()"),
        "gradients for the frozen": once(WHO="list(params)", GRAD="p.grad = view"),
        "in the opposite order": once(WHO="[p for p in params if p.requires_grad][::-1]"),
        "with a graph": once(END="return flat.requires_grad_()"),
        "two buffers": once(END="params[0].other = flat.clone()\n    return flat"),
        "one for all": once(GRAD="p.grad = flat[: p.numel()].view(p.shape)"),
        "takes the list away": once(END="params.clear()\n    return flat"),
        "no return": once(END="pass"),
    },
    "averaged-answer": {
        "the sum": mean(DIVIDE="pass"),
        "swallows the error": mean(CATCH="except Exception:\n        pass\n    finally:"),
        "hooks stay on an error": mean(CATCH="except BaseException:\n        raise\n    else:"),
        "after backward": cell(
            """
            @contextmanager
            def averaged(model):
                yield
                for p in model.parameters():
                    if p.grad is not None:
                        distributed.all_reduce(p.grad.div_(distributed.get_world_size()))
            """
        ),
        "a divided copy": mean(DIVIDE="p.grad = p.grad / ranks"),
        "the tied one twice": mean(WHO="[p for m in model.modules() for p in m._parameters.values() if p is not None]"),
        "the biases are left out": mean(IF="p.requires_grad and p.ndim > 1"),
        "zeros for the unused": mean(
            WAIT="[distributed.all_reduce(p.grad) for p in model.parameters() "
            "if p.requires_grad and p.grad is None and p.register_hook(len) and setattr(p, 'grad', "
            "torch.zeros_like(p)) is None]; [work.wait() for work in works]"
        ),
        "all are gathered": mean(
            SEND="pieces = [torch.empty_like(p.grad) for _ in range(ranks)]; "
            "distributed.all_gather(pieces, p.grad); p.grad.copy_(sum(pieces))"
        ),
        "no context": "def averaged(model):\n    yield",
        "one rank dies": "import os\n" + mean(BEGIN="distributed.get_rank() or os._exit(3)"),
        "an endless loop that nothing stops": cell(
            """
            @contextmanager
            def averaged(model):
                while True:
                    try:
                        while True:
                            pass
                    except BaseException:
                        pass
                yield
            """
        ),
        "hooks stay": mean(REMOVE="pass"),
        "not waited for": mean(WAIT="pass"),
        "no yield": "@contextmanager\ndef averaged(model):\n    pass",
    },
    "sharded-answer": {
        "SGD": sharded(ADAM="torch.optim.SGD(self.parts, lr=lr)"),
        "leaves autograd switched off": sharded(AFTER="self.adam.zero_grad(); torch.set_grad_enabled(False)"),
        "memory-hungry": sharded(FLAT="torch.zeros(2**30)"),
        "the next rank's piece": sharded(PIECE="layout.own(self.flat, (rank + 1) % ranks)"),
        "the parameters stay where they are": sharded(DATA="view.copy_(p.data)"),
        "an empty buffer": sharded(DATA="p.data = view"),
        "old parameters kept": sharded(MADE="self.old = [p.detach().clone() for p in self.params]"),
        "gradients kept": sharded(AFTER="self.adam.zero_grad(); self.kept = [p.grad for p in self.params]"),
        "divides once more": sharded(GRAD="None if p.grad is None else p.grad.view(-1)[begin:end] / 2"),
        "another flat": sharded(AFTER="self.adam.zero_grad(); self.flat = self.flat.clone()"),
        "no flat": sharded().replace("self.flat", "self.buffer"),
        "a function": "def ShardedAdam(params, rank, ranks, lr):\n    return None",
    },
}

CRASHES = {"a piece", "no yield"}
"""Mistakes that end with an error of Python's or torch's own, which is told; all others are told why."""

RIGHT: dict[str, dict[str, str]] = {
    "held-answer": {
        "by factors": hand("19 * 3 * 10**9 // 4", "23 * 3 * 10**9 // 8", "3 * 10**9"),
    },
    "owner-answer": {
        "a list": owned("[index // ((numel + ranks - 1) // ranks), index % ((numel + ranks - 1) // ranks)]"),
        "by the layout": owned("divmod(index, FlatLayout([torch.Size([numel])], ranks).piece)"),
    },
    "moves-answer": {
        "a set": moved(FOUND="set(made)"),
        "by elements": cell(
            """
            def moves(numel, before, after):
                old, new, made = -(-numel // before), -(-numel // after), {}
                for i in range(numel):
                    if i // old != i // new:
                        made.setdefault((i // old, i // new), []).append(i)
                return [(*pair, found[0], found[-1] + 1) for pair, found in made.items()]
            """
        ),
    },
    "schedule-answer": {
        "by halves": sends("(rank - 1 - step) % ranks if step < ranks - 1 else (rank + ranks - 1 - step) % ranks"),
    },
    "ring-answer": {
        "pieces that are spread evenly": cell(
            """
            def ring_all_reduce(flats, send):
                ranks = len(flats)
                views = [flat.tensor_split(ranks) for flat in flats]
                for step in range(2 * ranks - 2):
                    for rank in range(ranks):
                        piece = (rank - 1 - step) % ranks
                        message = send(rank, views[rank][piece])
                        if step >= ranks - 1:
                            views[(rank + 1) % ranks][piece][:] = message
                        else:
                            views[(rank + 1) % ranks][piece].add_(message)
            """
        ),
    },
    "once-answer": {
        "by hand": cell(
            """
            def side_by_side(params, ranks):
                numel = sum(p.numel() for p in params if p.requires_grad)
                flat, at = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype), 0
                for p in params:
                    if p.requires_grad:
                        p.grad = flat[at : at + p.numel()].view_as(p)
                        at += p.numel()
                return flat
            """
        ),
    },
    "averaged-answer": {
        "divided at the end": cell(
            """
            class averaged:
                def __init__(self, model):
                    self.model, self.works = model, []

                def average(self, p):
                    self.works.append((distributed.all_reduce(p.grad, async_op=True), p))

                def __enter__(self):
                    self.handles = [
                        p.register_post_accumulate_grad_hook(self.average)
                        for p in self.model.parameters()
                        if p.requires_grad
                    ]

                def __exit__(self, *error):
                    for handle in self.handles:
                        handle.remove()
                    for work, p in self.works:
                        work.wait()
                        p.grad /= distributed.get_world_size()
            """
        ),
    },
    "sharded-answer": {
        "parameters of their own": sharded(
            PARTS="[nn.Parameter(part) for part in layout.part_views(piece, rank)]",
            ADAM="torch.optim.AdamW(self.parts, lr=lr, foreach=False)",
        ),
    },
}
