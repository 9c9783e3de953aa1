"""Answers to the exercises of chapter 13: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import ANYTHING, cell

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


def moved(**changes: str) -> str:
    """moves, right but for the changes."""
    terms = {
        "OLD": "-(-numel // before)",
        "NEW": "-(-numel // after)",
        "BEGIN": "max(source * old, target * new)",
        "STOP": "min((source + 1) * old, (target + 1) * new, numel)",
        "SENT": "source != target and begin < end",
        "MESSAGE": "made.append((source, target, begin, end))",
        "FOUND": "made",
    }
    return cell(
        """
        def moves(numel, before, after):
            old, new, made = OLD, NEW, []
            for source in range(before):
                for target in range(after):
                    begin = BEGIN
                    end = STOP
                    if SENT:
                        MESSAGE
            return FOUND
        """,
        **terms | changes,
    )


def sends(value: str) -> str:
    """piece_sent that returns an expression."""
    return f"def piece_sent(rank, step, ranks):\n    return {value}"


def ring(**changes: str) -> str:
    """ring_all_reduce, right but for the changes."""
    terms = {
        "SIZE": "-(-len(flats[0]) // ranks)",
        "STEPS": "2 * (ranks - 1)",
        "PIECE": "(rank - 1 - step) % ranks",
        "BEFORE": "pass",
        "SENDER": "rank, own",
        "ADDS": "step < ranks - 1",
        "ADD": "theirs += message",
        "PUT": "theirs.copy_(message)",
        "AFTER": "pass",
        "END": "pass",
    }
    return cell(
        """
        def ring_all_reduce(flats, send):
            ranks = len(flats)
            size = SIZE
            BEFORE
            for step in range(STEPS):
                for rank in range(ranks):
                    piece = PIECE
                    own = flats[rank][piece * size : (piece + 1) * size]
                    theirs = flats[(rank + 1) % ranks][piece * size : (piece + 1) * size]
                    message = send(SENDER)
                    if ADDS:
                        ADD
                    else:
                        PUT
                    AFTER
            END
        """,
        **terms | changes,
    )


def once(**changes: str) -> str:
    """side_by_side, right but for the changes."""
    terms = {
        "WHO": "[p for p in params if p.requires_grad]",
        "RANKS": "ranks",
        "FLAT": "torch.zeros(layout.padded, dtype=trained[0].dtype)",
        "VIEWS": "layout.views(flat)",
        "GRAD": "p.grad = view",
        "END": "return flat",
    }
    return cell(
        """
        def side_by_side(params, ranks):
            trained = WHO
            layout = FlatLayout([p.shape for p in trained], RANKS)
            flat = FLAT
            for p, view in zip(trained, VIEWS):
                GRAD
            END
        """,
        **terms | changes,
    )


def mean(**changes: str) -> str:
    """averaged, right but for the changes."""
    terms = {
        "BEGIN": "works, ranks = [], distributed.get_world_size()",
        "DIVIDE": "p.grad.div_(ranks)",
        "SEND": "works.append(distributed.all_reduce(p.grad, async_op=True))",
        "WHO": "model.parameters()",
        "IF": "p.requires_grad",
        "HOOK": "p.register_post_accumulate_grad_hook(average)",
        "WAIT": "[work.wait() for work in works]",
        "REMOVE": "[handle.remove() for handle in handles]",
        "CATCH": "finally:",
    }
    return cell(
        """
        @contextmanager
        def averaged(model):
            BEGIN

            def average(p):
                DIVIDE
                SEND

            handles = [HOOK for p in WHO if IF]
            try:
                yield
                WAIT
            CATCH
                REMOVE
        """,
        **terms | changes,
    )


def late(body: str) -> str:
    """averaged without hooks: all of it after backward, by some lines for each parameter p that has a gradient."""
    return cell(
        """
        @contextmanager
        def averaged(model):
            yield
            for p in model.parameters():
                if p.grad is not None:
                    BODY
        """,
        BODY=body,
    )


def sharded(**changes: str) -> str:
    """ShardedAdam, right but for the changes."""
    terms = {
        "FLAT": "torch.zeros(layout.padded)",
        "DATA": "p.data = view.copy_(p.data)",
        "PIECE": "layout.own(self.flat, rank)",
        "PARTS": "layout.part_views(piece, rank)",
        "BOUNDS": "layout.parts(rank)",
        "ADAM": "torch.optim.AdamW(self.parts, lr=lr)",
        "MADE": "pass",
        "BEFORE": "pass",
        "GRAD": "None if p.grad is None else p.grad.view(-1)[begin:end]",
        "STEP": "self.adam.step()",
        "AFTER": "self.adam.zero_grad()",
    }
    return cell(
        """
        class ShardedAdam:
            def __init__(self, params, rank, ranks, lr):
                self.params = list(params)
                layout = FlatLayout([p.shape for p in self.params], ranks)
                self.flat = FLAT
                for p, view in zip(self.params, layout.views(self.flat)):
                    DATA
                piece = PIECE
                self.parts = PARTS
                self.bounds = BOUNDS
                self.adam = ADAM
                MADE

            def step(self):
                BEFORE
                for p, part, (begin, end) in zip(self.params, self.parts, self.bounds):
                    part.grad = GRAD
                STEP
                AFTER
        """,
        **terms | changes,
    )


WRONG: dict[str, dict[str, str]] = {
    "held-answer": {
        "nothing": hand(0, 0, 0, 0, 0),
        "all of it in stage 1": hand(one=48_000_000_000),
        "stages in the opposite order": hand(THREE, TWO, ONE),
        "a stage too far": hand(TWO, THREE, THREE),
        "stage 1 without its piece": hand(one=12_000_000_000),
        "stage 1's piece alone": hand(one=2_250_000_000),
        "stage 2 without its piece": hand(two=6_000_000_000),
        "stage 2 with whole states": hand(two=42_375_000_000),
        "stage 2 as stage 1": hand(two=ONE),
        "stage 3 on all ranks": hand(three=48_000_000_000),
        "stage 3 with whole weights": hand(three=TWO),
        "twice as much": hand(2 * ONE, 2 * TWO, 2 * THREE),
        "elements": hand(three=187_500_000),
        "states of 8 bytes": hand(one=13_500_000_000),
        "in GB": hand("14.25", "8.625", "3.0"),
        "in GiB": hand(13, 8, 2),
        "floats": hand(float(ONE), float(TWO), float(THREE)),
        "an all-reduce": hand(sent=11_250_000_000),
        "one collective": hand(sent=5_625_000_000),
        "four collectives": hand(sent=22_500_000_000),
        "to itself as well": hand(sent=18_000_000_000),
        "sent in FP32": hand(sent=2 * SENT),
        "half of what is sent": hand(sent=SENT // 2),
        "all ranks' traffic": hand(sent=16 * SENT),
        "one piece": hand(sent=1_125_000_000),
        "a rank less": hand(fewest=11),
        "a rank more": hand(fewest=13),
        "of 14 GB": hand(fewest=18),
        "for stage 2": hand(fewest=5),
        "for stage 3": hand(fewest=4),
        "states alone": hand(fewest=3),
        "a fraction of a rank": hand(fewest=11.87),
        "a power of two": hand(fewest=16),
        "texts": hand('"14,250,000,000 B"', '"8,625,000,000 B"', '"3,000,000,000 B"', '"16,875,000,000 B"', '"12"'),
        "equal to everything": ANYTHING + hand(*["Anything()"] * 5),
    },
    "owner-answer": {
        "rounded down": owned("divmod(index, numel // ranks or 1)"),
        "one more": owned("divmod(index, numel // ranks + 1)"),
        "dealt like cards": owned("(index % ranks, index // ranks)"),
        "by the number of ranks": owned("divmod(index, ranks)"),
        "the place first": owned("divmod(index, -(-numel // ranks))[::-1]"),
        "the place in the whole": owned("(index // -(-numel // ranks), index)"),
        "floats": owned("tuple(float(n) for n in divmod(index, -(-numel // ranks)))"),
        "bytes": owned("divmod(4 * index, -(-numel // ranks))"),
        "the rank alone": owned("index // -(-numel // ranks)"),
        "evenly spread": cell(
            """
            def owner(index, numel, ranks):
                small, more = divmod(numel, ranks)
                for rank in range(ranks):
                    size = small + (rank < more)
                    if index < size:
                        return rank, index
                    index -= size
            """
        ),
        "by tensors": owned("divmod(index, torch.arange(numel).chunk(ranks)[0].numel())"),
        "no return": owned("None"),
        "an endless loop": "def owner(index, numel, ranks):\n    while True:\n        pass",
        "a syntax error": "def owner(index, numel, ranks:\n    return 0, 0",
        "an empty cell": "",
        "unsolved": "def owner(index, numel, ranks):\n    raise NotImplementedError",
    },
    "moves-answer": {
        "nothing travels": moved(FOUND="[]"),
        "padding travels": moved(STOP="min((source + 1) * old, (target + 1) * new)"),
        "to oneself": moved(SENT="begin < end"),
        "empty messages": moved(SENT="source != target"),
        "empty ones of one kind": moved(SENT="source != target and begin <= end"),
        "rounded down": moved(OLD="numel // before or 1"),
        "new pieces rounded down": moved(NEW="numel // after or 1"),
        "whole pieces": moved(BEGIN="source * old", STOP="min((source + 1) * old, numel)"),
        "what the target wants": moved(BEGIN="target * new", STOP="min((target + 1) * new, numel)"),
        "the other way round": moved(MESSAGE="made.append((target, source, begin, end))"),
        "counts, not ends": moved(MESSAGE="made.append((source, target, begin, end - begin))"),
        "ends that are included": moved(MESSAGE="made.append((source, target, begin, end - 1))"),
        "places in the piece": moved(MESSAGE="made.append((source, target, begin - source * old, end - source * old))"),
        "bytes": moved(MESSAGE="made.append((source, target, 4 * begin, 4 * end))"),
        "each element alone": moved(MESSAGE="made += [(source, target, i, i + 1) for i in range(begin, end)]"),
        "each twice": moved(FOUND="made * 2"),
        "the first message is lost": moved(FOUND="made[1:]"),
        "the union": moved(BEGIN="min(source * old, target * new)", STOP="max((source + 1) * old, (target + 1) * new)"),
        "all from rank 0": cell(
            """
            def moves(numel, before, after):
                new = -(-numel // after)
                pieces = [(0, r, r * new, min((r + 1) * new, numel)) for r in range(1, after)]
                return [message for message in pieces if message[2] < message[3]]
            """
        ),
        "neighbours only": moved(SENT="abs(source - target) == 1 and begin < end"),
        "new ranks only": moved(SENT="target >= before and begin < end"),
        "triples": moved(MESSAGE="made.append((source, begin, end))"),
        "floats": moved(MESSAGE="made.append((source, target, float(begin), float(end)))"),
        "a number": moved(FOUND="sum(end - begin for *_, begin, end in made)"),
        "no return": moved(FOUND="None"),
        "an endless loop": moved(MESSAGE="while True: pass"),
        "unsolved": "def moves(numel, before, after):\n    raise NotImplementedError",
    },
    "schedule-answer": {
        "its own first": sends("(rank - step) % ranks"),
        "counts up": sends("(rank - 1 + step) % ranks"),
        "one too early": sends("(rank + 1 - step) % ranks"),
        "two too early": sends("(rank - 2 - step) % ranks"),
        "always its own": sends("rank"),
        "the step's": sends("step % ranks"),
        "always the first": sends("0"),
        "without the remainder": sends("rank - 1 - step"),
        "of one rank more": sends("(rank - 1 - step) % (ranks + 1)"),
        "its own in the second half": sends("(rank - 1 - step) % ranks if step < ranks - 1 else rank"),
        "the second half again from the start": sends("(rank - 1 - step % (ranks - 1)) % ranks"),
        "a pause between the halves": sends("(rank - 1 - step - (step >= ranks - 1)) % ranks"),
        "for four ranks": sends("(rank - 1 - step) % 4"),
        "to the left": sends("(rank + 1 + step) % ranks"),
        "a list": sends("[(rank - 1 - step) % ranks]"),
        "a float": sends("float((rank - 1 - step) % ranks)"),
        "a tensor": sends("torch.tensor((rank - 1 - step) % ranks)"),
        "no return": sends("None"),
        "an endless loop": "def piece_sent(rank, step, ranks):\n    while True:\n        pass",
        "unsolved": "def piece_sent(rank, step, ranks):\n    raise NotImplementedError",
    },
    "ring-answer": {
        "nothing": "def ring_all_reduce(flats, send):\n    pass",
        "sums what it sees, and sends for show": ring(
            ADD="pass",
            PUT="pass",
            END="[flats[0].add_(flat) for flat in flats[1:]]; [flat.copy_(flats[0]) for flat in flats[1:]]",
        ),
        "reduce-scatter alone": ring(STEPS="ranks - 1"),
        "a step less": ring(STEPS="2 * (ranks - 1) - 1"),
        "a step more": ring(STEPS="2 * ranks - 1"),
        "always adds": ring(ADDS="True"),
        "never adds": ring(ADDS="False"),
        "adds a step longer": ring(ADDS="step < ranks"),
        "another schedule": ring(PIECE="(rank + step) % ranks"),
        "rounded down": ring(SIZE="len(flats[0]) // ranks or 1"),
        "the mean": ring(END="[flat.div_(ranks) for flat in flats]"),
        "twice the sum": ring(END="[flat.mul_(2) for flat in flats]"),
        "new tensors": cell(
            """
            def ring_all_reduce(flats, send):
                flats[:] = [sum(flats)] * len(flats)
            """
        ),
        "returned": cell(
            """
            def ring_all_reduce(flats, send):
                return [sum(flats)] * len(flats)
            """
        ),
        "past the wire": cell(
            """
            def ring_all_reduce(flats, send):
                total = sum(flats)
                for flat in flats:
                    flat.copy_(total)
            """
        ),
        "half past the wire": ring(PUT="theirs.copy_(own)", SENDER="rank, own if step < ranks - 1 else own[:0]"),
        "by rank 0": cell(
            """
            def ring_all_reduce(flats, send):
                for rank in range(1, len(flats)):
                    flats[0] += send(rank, flats[rank])
                for flat in flats[1:]:
                    flat.copy_(send(0, flats[0]))
            """
        ),
        "whole tensors around the ring": cell(
            """
            def ring_all_reduce(flats, send):
                ranks = len(flats)
                first = [flat.clone() for flat in flats]
                for step in range(ranks - 1):
                    first = [send(r - 1, first[r - 1]) for r in range(ranks)]
                    for flat, message in zip(flats, first):
                        flat += message
            """
        ),
        "whole tensors as messages": ring(SENDER="rank, flats[rank]", AFTER="pass").replace(
            "message = send(rank, flats[rank])", "message = send(rank, flats[rank])[piece * size : (piece + 1) * size]"
        ),
        "each piece sent twice": ring(AFTER="send(rank, own)"),
        "rank 0 sends all": ring(SENDER="0, own"),
        "a copy of all": ring(BEFORE="before = [flat.clone() for flat in flats]", END="del before"),
        "pieces copied": ring(BEFORE="kept = []", AFTER="kept.append(own.clone())"),
        "messages kept": ring(BEFORE="kept = []", AFTER="kept.append(message)"),
        "messages kept for good": "kept = []\n" + ring(AFTER="kept.append(message)"),
        "a buffer kept for good": "kept = []\n" + ring(END="kept.append(flats[0].clone())"),
        "sends numbers": ring(SENDER="rank, own.tolist()"),
        "sends for a rank that is not there": ring(SENDER="rank + 1, own"),
        "memory-hungry": ring(BEFORE="torch.ones(2**30)"),
        "an endless loop": ring(AFTER="while True: pass"),
        "unsolved": "def ring_all_reduce(flats, send):\n    raise NotImplementedError",
    },
    "twice-answer": {
        "nothing": parts(0, 0, 0),
        "the whole buffer": parts(copied=31_744),
        "the frozen one's as well": parts(copied=31_500),
        "gradients and copies": parts(copied=50_200),
        "without biases": parts(copied=24_600),
        "elements": parts(COPY // 4, ROOM // 4, PADDING // 4),
        "elements of padding": parts(padding=61),
        "room for all": parts(room=31_500),
        "room and padding": parts(room=ROOM + PADDING),
        "a row of room": parts(room=128),
        "room and padding swapped": parts(room=PADDING, padding=ROOM),
        "half of the room": parts(room=ROOM // 2),
        "the remainder": parts(padding=12),
        "an element a rank": parts(padding=256),
        "padding without the frozen one": parts(padding=244 - 4),
        "a piece": parts(padding=496),
        "no padding": parts(padding=0),
        "twice as much": parts(2 * COPY, 2 * ROOM, 2 * PADDING),
        "in KiB": parts(24.5, 6.25, 0.24),
        "floats": parts(float(COPY), float(ROOM), float(PADDING)),
        "texts": parts('"25,100 B"', '"6,400 B"', '"244 B"'),
        "equal to everything": ANYTHING + parts(*["Anything()"] * 3),
    },
    "once-answer": {
        "no views": once(GRAD="pass"),
        "FP32 for any dtype": once(FLAT="torch.zeros(layout.padded)"),
        "copies of views": once(GRAD="p.grad = view.clone()"),
        "room for the frozen": once(WHO="list(params)", GRAD="p.grad = view if p.requires_grad else None"),
        "gradients for the frozen": once(WHO="list(params)", GRAD="p.grad = view"),
        "without padding": once(FLAT="torch.zeros(layout.numel)"),
        "padded for one rank": once(RANKS="1"),
        "a piece": once(FLAT="torch.zeros(layout.piece)"),
        "in the opposite order": once(WHO="[p for p in params if p.requires_grad][::-1]"),
        "ones": once(FLAT="torch.ones(layout.padded)"),
        "the weights": once(FLAT="torch.cat([p.detach().flatten() for p in trained] + [torch.zeros(layout.padding)])"),
        "double": once(
            FLAT="torch.zeros(layout.padded, dtype=torch.double)",
            GRAD="p.grad = view.float()",
        ),
        "with a graph": once(END="return flat.requires_grad_()"),
        "another buffer": once(END="return flat.clone()"),
        "two buffers": once(END="params[0].other = flat.clone()\n    return flat"),
        "a part of a larger buffer": once(
            FLAT="torch.zeros(layout.padded + 10_000)[: layout.padded]",
        ),
        "hooks that copy": once(
            GRAD="p.register_post_accumulate_grad_hook(lambda p, view=view: (view.copy_(p.grad), None)[1])",
        ),
        "one for all": once(GRAD="p.grad = flat[: p.numel()].view(p.shape)"),
        "takes the list away": once(END="params.clear()\n    return flat"),
        "a list of views": once(END="return layout.views(flat)"),
        "no return": once(END="pass"),
        "memory-hungry": once(FLAT="torch.zeros(2**30)"),
        "an endless loop": once(GRAD="while True: pass"),
        "a syntax error": "def side_by_side(params, ranks:\n    return 0",
        "an empty cell": "",
        "unsolved": "def side_by_side(params, ranks):\n    raise NotImplementedError",
    },
    "averaged-answer": {
        "nothing": "@contextmanager\ndef averaged(model):\n    yield",
        "the sum": mean(DIVIDE="pass"),
        "divided twice": mean(WAIT="[(work.wait(), p.grad.div_(ranks)) for work, p in zip(works, done)]")
        .replace("p.grad.div_(ranks)\n        works", "p.grad.div_(ranks)\n        done.append(p)\n        works")
        .replace("works, ranks = [], ", "works, done, ranks = [], [], "),
        "for two ranks": mean(DIVIDE="p.grad.div_(2)"),
        "not waited for": mean(WAIT="pass"),
        "the first waited for": mean(WAIT="works[0].wait()"),
        "backward waits": mean(SEND="distributed.all_reduce(p.grad)"),
        "backward waits for works": mean(SEND="distributed.all_reduce(p.grad, async_op=True).wait()"),
        "after backward": late("distributed.all_reduce(p.grad.div_(distributed.get_world_size()))"),
        "never sent": mean(SEND="pass"),
        "a copy is sent": mean(
            DIVIDE="p.sent = p.grad / ranks",
            SEND="works.append(distributed.all_reduce(p.sent, async_op=True))",
            REMOVE="[(h.remove(), p.grad.copy_(p.sent)) for h, p in zip(handles, "
            "[p for p in model.parameters() if p.requires_grad]) if hasattr(p, 'sent')]",
        ),
        "a divided copy": mean(DIVIDE="p.grad = p.grad / ranks"),
        "sent in double": mean(
            DIVIDE="p.sent = p.grad.double() / ranks",
            SEND="works.append(distributed.all_reduce(p.sent, async_op=True))",
            WAIT="[work.wait() for work in works]; "
            "[p.grad.copy_(p.sent) for p in model.parameters() if hasattr(p, 'sent')]",
        ),
        "the biases are left out": mean(IF="p.requires_grad and p.ndim > 1"),
        "the tied one is left out": mean(IF="p.requires_grad and p is not model.tied.weight"),
        "the tied one twice": mean(
            WHO="[p for m in model.modules() for p in m._parameters.values() if p is not None]",
        ),
        "zeros for the unused": mean(
            WAIT="[distributed.all_reduce(p.grad) for p in model.parameters() "
            "if p.requires_grad and p.grad is None and p.register_hook(len) and setattr(p, 'grad', "
            "torch.zeros_like(p)) is None]; [work.wait() for work in works]"
        ),
        "the frozen as well": mean(IF="True"),
        "the module's hooks": cell(
            """
            @contextmanager
            def averaged(model):
                def average(module, *gradients):
                    for p in module.parameters():
                        if p.grad is not None:
                            distributed.all_reduce(p.grad.div_(3))

                handle = model.register_full_backward_hook(average)
                yield
                handle.remove()
            """
        ),
        "hooks stay": mean(REMOVE="pass"),
        "hooks stay on an error": mean(CATCH="else:")
        .replace("    try:\n        yield", "    if True:\n        yield")
        .replace("    else:\n", "    if True:\n"),
        "swallows the error": mean(CATCH="except Exception:\n        pass\n    finally:"),
        "one hook stays": mean(REMOVE="[handle.remove() for handle in handles[1:]]"),
        "all are gathered": mean(
            SEND="pieces = [torch.empty_like(p.grad) for _ in range(ranks)]; "
            "distributed.all_gather(pieces, p.grad); p.grad.copy_(sum(pieces))"
        ),
        "to rank 0": mean(SEND="works.append(distributed.reduce(p.grad, 0, async_op=True))"),
        "no context": "def averaged(model):\n    yield",
        "hooks, no context": cell(
            """
            def averaged(model):
                for p in model.parameters():
                    if p.requires_grad:
                        p.register_post_accumulate_grad_hook(
                            lambda p: distributed.all_reduce(p.grad.div_(distributed.get_world_size()))
                        )
            """
        ),
        "no yield": "@contextmanager\ndef averaged(model):\n    pass",
        "one rank does not call": mean(IF="p.requires_grad and distributed.get_rank()"),
        "one rank dies": "import os\n" + mean(BEGIN="distributed.get_rank() or os._exit(3)"),
        "one rank raises": mean(BEGIN="1 / distributed.get_rank()"),
        "memory-hungry": mean(BEGIN="works, ranks, hoard = [], distributed.get_world_size(), torch.ones(2**30)"),
        "a text": 'averaged = "all_reduce"',
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
        "an endless loop on one rank": mean(DIVIDE="while distributed.get_rank() == 1: pass"),
        "a syntax error": "def averaged(model:\n    yield",
        "an empty cell": "",
        "unsolved": "@contextmanager\ndef averaged(model):\n    raise NotImplementedError",
    },
    "sharded-answer": {
        "goes through the parameters twice": cell(
            """
            class ShardedAdam:
                def __init__(self, params, rank, ranks, lr):
                    layout = FlatLayout([p.shape for p in params], ranks)
                    self.flat = torch.zeros(layout.padded)
                    for p, view in zip(params, layout.views(self.flat)):
                        p.data = view.copy_(p.data)
                    self.parts = layout.part_views(layout.own(self.flat, rank), rank)
                    self.own = [(p, part, *at) for p, part, at in zip(params, self.parts, layout.parts(rank))]
                    self.adam = torch.optim.AdamW(self.parts, lr=lr)

                def step(self):
                    for p, part, begin, end in self.own:
                        part.grad = None if p.grad is None else p.grad.view(-1)[begin:end]
                    self.adam.step()
                    self.adam.zero_grad()
            """
        ),
        "states of all": sharded(
            PARTS="[view.view(-1) for view in layout.views(self.flat)]", BOUNDS="[(0, n) for n in layout.numels]"
        ),
        "rank 0's piece": sharded(
            PIECE="layout.own(self.flat, 0)", PARTS="layout.part_views(piece, 0)", BOUNDS="layout.parts(0)"
        ),
        "the next rank's piece": sharded(PIECE="layout.own(self.flat, (rank + 1) % ranks)"),
        "the gradient's beginning": sharded(GRAD="None if p.grad is None else p.grad.view(-1)[: end - begin]"),
        "the gradient's end": sharded(GRAD="None if p.grad is None else p.grad.view(-1)[p.numel() - (end - begin) :]"),
        "copies of the parts": sharded(PARTS="[part.clone() for part in layout.part_views(piece, rank)]"),
        "masters beside": sharded(
            PARTS="[part.clone() for part in layout.part_views(piece, rank)]",
            AFTER="self.adam.zero_grad(); self.piece.copy_(torch.cat([*self.parts, self.pad]))",
            MADE="self.piece = piece; self.pad = torch.zeros(len(piece) - sum(map(len, self.parts)))",
        ),
        "the parameters stay where they are": sharded(DATA="view.copy_(p.data)"),
        "an empty buffer": sharded(DATA="p.data = view"),
        "old parameters kept": sharded(MADE="self.old = [p.detach().clone() for p in self.params]"),
        "without padding": sharded(FLAT="torch.zeros(layout.numel)"),
        "gradients copied": sharded(
            BEFORE="copies = [None if p.grad is None else p.grad.clone() for p in self.params]"
        ),
        "gradients flat": sharded(
            BEFORE="flat = torch.cat([p.grad.view(-1) for p in self.params if p.grad is not None])"
        ),
        "gradients are held": sharded(AFTER="pass"),
        "gradients are zeroed": sharded(AFTER="self.adam.zero_grad(set_to_none=False)"),
        "gradients kept": sharded(AFTER="self.adam.zero_grad(); self.kept = [p.grad for p in self.params]"),
        "steps whoever has none": sharded(
            GRAD="p.new_zeros(end - begin) if p.grad is None else p.grad.view(-1)[begin:end]"
        ),
        "SGD": sharded(ADAM="torch.optim.SGD(self.parts, lr=lr)"),
        "Adam": sharded(ADAM="torch.optim.Adam(self.parts, lr=lr)"),
        "without weight decay": sharded(ADAM="torch.optim.AdamW(self.parts, lr=lr, weight_decay=0)"),
        "ten times as fast": sharded(ADAM="torch.optim.AdamW(self.parts, lr=10 * lr)"),
        "half as fast": sharded(ADAM="torch.optim.AdamW(self.parts, lr=lr / 2)"),
        "amsgrad": sharded(ADAM="torch.optim.AdamW(self.parts, lr=lr, amsgrad=True)"),
        "a new Adam each time": sharded(BEFORE="self.adam = torch.optim.AdamW(self.parts, lr=1e-2)"),
        "steps twice": sharded(STEP="self.adam.step(); self.adam.step()"),
        "never steps": sharded(STEP="pass"),
        "divides once more": sharded(GRAD="None if p.grad is None else p.grad.view(-1)[begin:end] / 2"),
        "the parts that are long": sharded(
            STEP="[setattr(p, 'grad', None) for p in self.parts if len(p) < 40]; self.adam.step()"
        ),
        "states before the first step": sharded(
            MADE="[setattr(p, 'grad', torch.zeros_like(p)) for p in self.parts]; self.adam.step()"
        ),
        "another flat": sharded(AFTER="self.adam.zero_grad(); self.flat = self.flat.clone()"),
        "the padding is stepped": sharded(AFTER="self.adam.zero_grad(); self.flat.add_(1)"),
        "history": sharded(
            MADE="self.history = []", AFTER="self.adam.zero_grad(); self.history.append(self.flat.clone())"
        ),
        "no flat": sharded().replace("self.flat", "self.buffer"),
        "no step": sharded().replace("def step", "def update"),
        "a function": "def ShardedAdam(params, rank, ranks, lr):\n    return None",
        "leaves autograd switched off": sharded(AFTER="self.adam.zero_grad(); torch.set_grad_enabled(False)"),
        "memory-hungry": sharded(FLAT="torch.zeros(2**30)"),
        "an endless loop": sharded(STEP="while True: pass"),
        "unsolved": "class ShardedAdam:\n    def __init__(self, *args):\n        raise NotImplementedError",
    },
}

CRASHES = {"FP32 for any dtype", "the frozen as well", "one rank raises", "no yield", "a piece"}
"""Mistakes that end with an error of Python's or torch's own, which is told; all others are told why."""

RIGHT: dict[str, dict[str, str]] = {
    "held-answer": {"by factors": hand("19 * 3 * 10**9 // 4", "23 * 3 * 10**9 // 8", "3 * 10**9")},
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
        "by halves": sends("(rank - 1 - step) % ranks if step < ranks - 1 else (rank + ranks - 1 - step) % ranks")
    },
    "ring-answer": {
        "all messages of a step at once": cell(
            """
            def ring_all_reduce(flats, send):
                ranks = len(flats)
                size = -(-len(flats[0]) // ranks)

                def view(rank, piece):
                    return flats[rank % ranks][piece % ranks * size : (piece % ranks + 1) * size]

                for step in range(2 * (ranks - 1)):
                    messages = [send(rank, view(rank, rank - 1 - step)) for rank in range(ranks)]
                    for rank, message in enumerate(messages):
                        theirs = view(rank + 1, rank - 1 - step)
                        theirs.copy_(message) if step >= ranks - 1 else theirs.add_(message)
                    del messages, message
            """
        ),
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
        "one part": cell(
            """
            class ShardedAdam:
                def __init__(self, params, rank, ranks, lr):
                    self.params = list(params)
                    layout = FlatLayout([p.shape for p in self.params], ranks)
                    self.flat = torch.cat([p.detach().flatten() for p in self.params] + [torch.zeros(layout.padding)])
                    for p, view in zip(self.params, layout.views(self.flat)):
                        p.data = view
                    self.bounds = layout.parts(rank)
                    self.parts = layout.part_views(layout.own(self.flat, rank), rank)
                    self.adams = [torch.optim.AdamW([part], lr=lr) for part in self.parts]

                def step(self):
                    for p, part, (begin, end), adam in zip(self.params, self.parts, self.bounds, self.adams):
                        if p.grad is not None and end > begin:
                            part.grad = p.grad.flatten()[begin:end]
                            adam.step()
                            part.grad = None
            """
        ),
        "parameters of their own": sharded(
            PARTS="[nn.Parameter(part) for part in layout.part_views(piece, rank)]",
            ADAM="torch.optim.AdamW(self.parts, lr=lr, foreach=False)",
        ),
    },
}
