"""Answers to the exercises of chapter 03: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import ANYTHING, cell


def per_byte(value: str) -> str:
    """intensity that returns an expression."""
    return f"def intensity(m, k, n, itemsize):\n    return {value}"


def enough(**changes: str) -> str:
    """fewest_rows, right but for the changes."""
    terms = {
        "BEGIN": "pass",
        "MOVED": "itemsize * flops_per_second",
        "WORK": "2 * k * n * bytes_per_second",
        "ROW": "k + n",
        "FOUND": "-(-moved * k * n // gain)",
        "NEVER": "gain <= 0",
        "NONE": "None",
    }
    return cell(
        """
        def fewest_rows(k, n, itemsize, flops_per_second, bytes_per_second):
            BEGIN
            moved = MOVED
            gain = WORK - moved * (ROW)
            if NEVER:
                return NONE
            return FOUND
        """,
        **terms | changes,
    )


def summed(**changes: str) -> str:
    """loss_in_pieces, right but for the changes."""
    terms = {
        "BEGIN": "start, rows = 0, torch.arange(len(labels))",
        "PIECES": "pieces",
        "FIRST": "piece.logsumexp(1)",
        "NEXT": "torch.logaddexp(lse, piece.logsumexp(1))",
        "BEFORE": "pass",
        "HERE": "(labels >= start) & (labels < start + piece.shape[1])",
        "COLUMN": "labels[here] - start",
        "AFTER": "start += piece.shape[1]",
        "LOSS": "(lse - of_labels).mean()",
        "RETURN": "loss.item()",
    }
    return cell(
        """
        def loss_in_pieces(pieces, labels):
            BEGIN
            for piece in PIECES:
                BEFORE
                if start == 0:
                    lse, of_labels = FIRST, piece.new_zeros(len(labels))
                else:
                    lse = NEXT
                here = HERE
                of_labels[here] = piece[rows[here], COLUMN]
                AFTER
            loss = LOSS
            return RETURN
        """,
        **terms | changes,
    )


def corrected(**changes: str) -> str:
    """loss_in_pieces by m and z, right but for the changes."""
    terms = {
        "LOWEST": "torch.full((len(labels),), -1e30)",
        "LARGER": "torch.maximum(m, piece.amax(1))",
        "CORRECT": "(m - larger).exp()",
        "SUM": "z * correction + (piece - larger[:, None]).exp().sum(1)",
        "LSE": "m + z.log()",
    }
    return cell(
        """
        def loss_in_pieces(pieces, labels):
            start, m, z = 0, LOWEST, 0
            of_labels = torch.zeros(len(labels), dtype=torch.float64)
            for piece in pieces:
                m = m.to(piece.dtype)
                larger = LARGER
                correction = CORRECT
                z = SUM
                m = larger
                for row, label in enumerate(labels.tolist()):
                    if start <= label < start + piece.shape[1]:
                        of_labels[row] = piece[row, label - start]
                start += piece.shape[1]
            return (LSE - of_labels).mean().item()
        """,
        **terms | changes,
    )


def merged(**changes: str) -> str:
    """merge, right but for the changes."""
    terms = {
        "BEGIN": "pass",
        "LARGER": "torch.maximum(m1, m2)",
        "ABOUT": "m.clamp(min=torch.finfo(m.dtype).min)",
        "FIRST": "(m1 - about).exp()",
        "SECOND": "(m2 - about).exp()",
        "SUM": "z1 * by1 + z2 * by2",
        "VALUES": "a1 * by1 + a2 * by2",
        "END": "m, z, a",
    }
    return cell(
        """
        def merge(one, other):
            (m1, z1, a1), (m2, z2, a2) = one, other
            BEGIN
            m = LARGER
            about = ABOUT
            by1, by2 = FIRST, SECOND
            z = SUM
            a = VALUES
            return END
        """,
        **terms | changes,
    )


SCORES, COPIES, SUMS, MASK = 1_048_576, 491_520, 212_992, 32_768


def parts(scores: object, copies: object, sums: object, mask: object) -> str:
    """The four numbers of exercise 4."""
    return f"scores_bytes, copies_bytes, sums_bytes, mask_bytes = {scores}, {copies}, {sums}, {mask}"


def fitting(**changes: str) -> str:
    """best_tiles, right but for the changes."""
    terms = {
        "SIZES": "[2**i for i in range(20, 3, -1)]",
        "QUERIES": "sizes",
        "KEYS": "sizes",
        "SHARED": "2 * head_dim * (t + 2 * u)",
        "REGISTERS": "4 * t * (head_dim + u + 2)",
        "FITS": "shared <= shared_bytes and registers <= register_bytes",
        "FOUND": "t, u",
        "NONE": "None",
    }
    return cell(
        """
        def best_tiles(head_dim, shared_bytes, register_bytes):
            sizes = SIZES
            for t in QUERIES:
                for u in KEYS:
                    shared = SHARED
                    registers = REGISTERS
                    if FITS:
                        return FOUND
            return NONE
        """,
        **terms | changes,
    )


def moved(**changes: str) -> str:
    """moved_bytes, right but for the changes."""
    terms = {
        "FIRSTS": "range(0, tokens, tile_queries)",
        "END": "min(first + tile_queries, tokens)",
        "KEYS": "sum(ends) if causal else tokens * len(ends)",
        "BYTES": "2 * head_dim * (2 * tokens + 2 * keys)",
    }
    return cell(
        """
        def moved_bytes(tokens, head_dim, tile_queries, causal):
            ends = [END for first in FIRSTS]
            keys = KEYS
            return BYTES
        """,
        **terms | changes,
    )


def window(**changes: str) -> str:
    """window_attention, right but for the changes."""
    terms = {
        "BEGIN": "out, tokens = torch.empty_like(q), q.shape[-2]",
        "TILE": "64",
        "FROM": "max(0, i - window + 1)",
        "UNTIL": "min(i + TILE, tokens)",
        "SCALE": "q.shape[-1] ** -0.5",
        "HIDDEN": "(apart < 0) | (apart >= window)",
        "WEIGHTS": "scores.softmax(-1)",
        "THEN": "pass",
        "RETURN": "out",
    }
    changes = terms | changes
    changes["UNTIL"] = changes["UNTIL"].replace("TILE", changes["TILE"])
    return cell(
        """
        def window_attention(q, k, v, window):
            BEGIN
            for i in range(0, tokens, TILE):
                first, end = FROM, UNTIL
                scores = q[..., i:end, :] @ k[..., first:end, :].mT * SCALE
                apart = torch.arange(i, end)[:, None] - torch.arange(first, end)
                scores = scores.masked_fill(HIDDEN, -math.inf)
                out[..., i:end, :] = WEIGHTS @ v[..., first:end, :]
                THEN
            return RETURN
        """,
        **changes,
    )


BY_HAND = """
def window_attention(q, k, v, window):
    i = torch.arange(q.shape[-2])
    apart = i[:, None] - i
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill((apart < 0) | (apart >= window), -math.inf)
    return scores.softmax(-1) @ v
"""

WRONG: dict[str, dict[str, str]] = {
    "intensity-answer": {
        "a multiply-add is one": per_byte("m * k * n / (itemsize * (m * k + k * n + m * n))"),
        "four FLOPs": per_byte("4 * m * k * n / (itemsize * (m * k + k * n + m * n))"),
        "elements": per_byte("2 * m * k * n / (m * k + k * n + m * n)"),
        "bits": per_byte("2 * m * k * n / (8 * itemsize * (m * k + k * n + m * n))"),
        "always FP32": per_byte("2 * m * k * n / (4 * (m * k + k * n + m * n))"),
        "always BF16": per_byte("2 * m * k * n / (2 * (m * k + k * n + m * n))"),
        "the result forgotten": per_byte("2 * m * k * n / (itemsize * (m * k + k * n))"),
        "the result read as well": per_byte("2 * m * k * n / (itemsize * (m * k + k * n + 2 * m * n))"),
        "the weight alone": per_byte("2 * m * k * n / (itemsize * k * n)"),
        "square matrices": per_byte("n / 3 * 2 / itemsize"),
        "square of the rows": per_byte("2 * m / (3 * itemsize)"),
        "upside down": per_byte("itemsize * (m * k + k * n + m * n) / (2 * m * k * n)"),
        "FLOPs": per_byte("2 * m * k * n"),
        "bytes": per_byte("itemsize * (m * k + k * n + m * n)"),
        "a sum of products": per_byte("m * n * (2 * k - 1) / (itemsize * (m * k + k * n + m * n))"),
        "whole numbers": per_byte("2 * m * k * n // (itemsize * (m * k + k * n + m * n))"),
        "rounded": per_byte("round(2 * m * k * n / (itemsize * (m * k + k * n + m * n)), 1)"),
        "hard-coded": per_byte("10.666666666666666"),
        "measured": per_byte("2 * m * k * n / sum(torch.zeros(s).nbytes for s in ((m, k), (k, n), (m, n)))"),
        "a text": per_byte("f'{2 * m * k * n / (itemsize * (m * k + k * n + m * n))} FLOPs a byte'"),
        "equal to everything": ANYTHING.replace("int", "float") + per_byte("Anything()"),
        "no return": "def intensity(m, k, n, itemsize):\n    2 * m * k * n",
        "a number instead of a function": "intensity = 10.7",
        "a syntax error": "def intensity(m, k, n, itemsize:\n    return 1",
        "an empty cell": "",
        "unsolved": "def intensity(m, k, n, itemsize):\n    raise NotImplementedError  # your answer",
    },
    "rows-answer": {
        "the ridge": enough(FOUND="-(-flops_per_second // bytes_per_second)"),
        "the weight is all that moves": enough(ROW="0"),
        "results are not written": enough(ROW="k"),
        "the input is not read": enough(ROW="n"),
        "a multiply-add is one": enough(WORK="k * n * bytes_per_second"),
        "elements": enough(MOVED="flops_per_second"),
        "always 2 bytes": enough(MOVED="2 * flops_per_second"),
        "rounded down": enough(FOUND="max(1, moved * k * n // gain)"),
        "one more": enough(FOUND="moved * k * n // gain + 1"),
        "one too many": enough(FOUND="-(-moved * k * n // gain) + 1"),
        "a float": enough(FOUND="moved * k * n / gain"),
        "zero for none": enough(NONE="0"),
        "infinity for none": enough(NONE="math.inf"),
        "never none": enough(NEVER="False", FOUND="abs(-(-moved * k * n // (gain or 1)))"),
        "divides by zero": enough(NEVER="gain < 0"),
        "a limit of one FLOP for a multiply-add": enough(NEVER="gain <= moved * (k + n)"),
        "a power of two": enough(FOUND="1 << (-(-moved * k * n // gain) - 1).bit_length()"),
        "tries a few": enough(
            FOUND="next((m for m in range(1, 257) if m * gain >= moved * k * n), None)",
        ),
        "an endless loop": enough(BEGIN="m = 1\n    while 2 * m * k * n * bytes_per_second >= 0: m += 1"),
        "hard-coded": enough(FOUND="346"),
        "the other ridge": enough(MOVED="itemsize * bytes_per_second", WORK="2 * k * n * flops_per_second"),
        "makes tensors": enough(FOUND="int(torch.tensor(moved * k * n / gain).ceil())"),
        "equal to everything": ANYTHING + enough(FOUND="Anything(1)", NONE="Anything(1)"),
        "no return": enough(FOUND="None", NONE="None"),
        "unsolved": enough(BEGIN="raise NotImplementedError  # your answer"),
    },
    "loss-answer": {
        "a list of pieces": summed(PIECES="list(pieces)"),
        "all pieces together": cell(
            """
            def loss_in_pieces(pieces, labels):
                return F.cross_entropy(torch.cat(list(pieces), 1), labels).item()
            """
        ),
        "grows by a piece at a time": cell(
            """
            def loss_in_pieces(pieces, labels):
                logits = next(pieces)
                for piece in pieces:
                    logits = torch.cat([logits, piece], 1)
                return F.cross_entropy(logits, labels).item()
            """
        ),
        "keeps each piece for later": summed(BEGIN="start, rows, kept = 0, torch.arange(len(labels)), []").replace(
            "pass", "kept.append(piece)"
        ),
        "keeps the exponentials": summed(BEGIN="start, rows, kept = 0, torch.arange(len(labels)), []").replace(
            "pass", "kept.append(piece.exp())"
        ),
        "keeps a view of each piece": summed(BEGIN="start, rows, kept = 0, torch.arange(len(labels)), []").replace(
            "pass", "kept.append(piece[:, 0])"
        ),
        "remembers the last piece": summed(BEFORE="loss_in_pieces.last = piece"),
        "remembers the sums": summed(RETURN="(setattr(loss_in_pieces, 'lse', lse), loss.item())[1]"),
        "many copies of a piece": summed(BEFORE="hoard = [piece.exp() for _ in range(8)]"),
        "one-hot labels": summed(BEGIN="start, rows = 0, torch.arange(len(labels)); F.one_hot(labels)"),
        "the sum": summed(LOSS="(lse - of_labels).sum()"),
        "without the label": summed(LOSS="lse.mean()"),
        "the wrong sign": summed(LOSS="(of_labels - lse).mean()"),
        "in bits": summed(LOSS="(lse - of_labels).mean() / math.log(2)"),
        "twice": summed(LOSS="2 * (lse - of_labels).mean()"),
        "the first row": summed(LOSS="(lse - of_labels)[0]"),
        "the last piece alone": summed(NEXT="piece.logsumexp(1)"),
        "the first piece alone": summed(NEXT="lse"),
        "log-sum-exps added": summed(NEXT="lse + piece.logsumexp(1)"),
        "the largest log-sum-exp": summed(NEXT="torch.maximum(lse, piece.logsumexp(1))"),
        "a mean of losses": cell(
            """
            def loss_in_pieces(pieces, labels):
                losses = [F.cross_entropy(piece, labels % piece.shape[1]).item() for piece in pieces]
                return sum(losses) / len(losses)
            """
        ),
        "labels not shifted": summed(COLUMN="labels[here] % piece.shape[1]", LOSS="(lse - of_labels).mean()"),
        "labels one too far": summed(
            HERE="(labels > start) & (labels <= start + piece.shape[1])", COLUMN=("labels[here] - start - 1")
        ),
        "the last label of a piece missed": summed(HERE="(labels >= start) & (labels < start + piece.shape[1] - 1)"),
        "all pieces as wide as the first": summed(
            BEFORE="width = piece.shape[1] if start == 0 else width",
            HERE="(labels >= start) & (labels < start + min(width, piece.shape[1]))",
            AFTER="start += width",
        ),
        "without a maximum": summed(
            FIRST="piece.exp().sum(1)", NEXT="lse + piece.exp().sum(1)", LOSS="(lse.log() - of_labels).mean()"
        ),
        "one maximum for all rows": corrected(
            LARGER="torch.maximum(m, piece.max())", LOWEST="torch.full((len(labels),), -1e30)"
        ),
        "not corrected": corrected(CORRECT="1"),
        "corrected the wrong way": corrected(CORRECT="(larger - m).clamp(max=700).exp()"),
        "the last piece's maximum": corrected(LARGER="piece.amax(1)"),
        "the maximum not added again": corrected(LSE="z.log()"),
        "begins with −∞": corrected(LOWEST="torch.full((len(labels),), -math.inf)"),
        "begins with 0": corrected(LOWEST="torch.zeros(len(labels))"),
        "in FP32": summed(BEFORE="piece = piece.float()"),
        "asks for no more than four pieces": summed(PIECES="[piece for _, piece in zip(range(4), pieces)]"),
        "writes to the labels": summed(AFTER="start += piece.shape[1]; labels[here] = 0"),
        "a tensor": summed(RETURN="loss"),
        "equal to everything": ANYTHING.replace("int", "float") + summed(RETURN="Anything(0)"),
        "needs a length": summed(BEFORE="len(pieces)"),
        "hard-coded": "def loss_in_pieces(pieces, labels):\n    return 9.2",
        "no return": summed(RETURN="None"),
        "leaves autograd switched off": summed(
            BEGIN="torch.set_grad_enabled(False); start, rows = 0, torch.arange(64)"
        ),
        "memory-hungry": summed(BEFORE="hoard = torch.ones(2**30)"),
        "unsolved": summed(BEFORE="raise NotImplementedError  # your answer"),
    },
    "merge-answer": {
        "sums of different maxima": merged(SUM="z1 + z2", VALUES="a1 + a2"),
        "values not corrected": merged(VALUES="a1 + a2"),
        "only the second corrected": merged(FIRST="torch.ones_like(m1)"),
        "only the first corrected": merged(SECOND="torch.ones_like(m2)"),
        "corrections swapped": merged(SUM="z1 * by2 + z2 * by1", VALUES="a1 * by2 + a2 * by1"),
        "corrected the wrong way": merged(FIRST="(about - m1).clamp(max=300).exp()"),
        "corrected twice": merged(FIRST="(2 * (m1 - about)).exp()"),
        "weights by 2": merged(FIRST="(m1 - about).exp2()", SECOND="(m2 - about).exp2()"),
        "no maximum": merged(
            LARGER="torch.maximum(m1, m2)",
            ABOUT="torch.zeros_like(m)",
        ),
        "the smaller": merged(LARGER="torch.minimum(m1, m2)"),
        "the first's": merged(LARGER="m1"),
        "the sum of both": merged(LARGER="m1 + m2"),
        "the mean of both": merged(LARGER="(m1 + m2) / 2"),
        "one maximum for all rows": merged(LARGER="torch.maximum(m1, m2).max().expand_as(m1).clone()"),
        "−∞ minus −∞": merged(ABOUT="m"),
        "NaN made 0": merged(
            ABOUT="m", FIRST="(m1 - m).nan_to_num().exp()", LARGER="torch.maximum(m1, m2).nan_to_num()"
        ),
        "never −∞": merged(END="about, z, a"),
        "0 in place of −∞": merged(END="m.clamp(min=0), z, a"),
        "divided": merged(END="m, z, a / z"),
        "divided and 1": merged(END="m, torch.ones_like(z), a / z"),
        "the log-sum-exp": merged(END="m, m + z.log(), a"),
        "the mean of both results": merged(SUM="(z1 + z2) / 2", VALUES="(a1 / z1 + a2 / z2) / 2"),
        "z twice": merged(SUM="2 * (z1 * by1 + z2 * by2)"),
        "the other's sums": merged(SUM="z2 * by2", VALUES="a2 * by2"),
        "in FP32": merged(END="m.float(), z.float(), a.float()"),
        "inside in FP32": merged(VALUES="(a1.float() * by1 + a2.float() * by2).to(m)"),
        "in FP16 inside": merged(FIRST="(m1 - about).half().exp().to(m)"),
        "in FP64": merged(END="m.double(), z.double(), a.double()"),
        "writes to what it is given": merged(VALUES="a1.mul_(by1).add_(a2 * by2)"),
        "writes to z": merged(SUM="z1.mul_(by1).add_(z2 * by2)"),
        "without the last dimension": merged(END="m[..., 0], z[..., 0], a"),
        "remembers its parts": "seen = []\n\n\n"
        + merged(BEGIN="seen.append((a1, by)) if (by := m1.clone()) is m1 else seen.append(a1 + a2)"),
        "remembers the result": merged(BEGIN="merge.last = z1 + 0, a1 + 0"),
        "keeps its parts with the result": merged(VALUES="a1 * by1 + a2 * by2\n    a.parts = one, other, by1"),
        "many copies": merged(BEGIN="hoard = [a1.clone() for _ in range(12)]"),
        "a list": merged(END="[m, z, a]"),
        "the pair": merged(END="z, a"),
        "numbers": merged(END="m.max().item(), z.sum().item(), a.sum().item()"),
        "no return": merged(END="None"),
        "leaves autograd switched off": merged(BEGIN="torch.set_grad_enabled(False)"),
        "memory-hungry": merged(BEGIN="hoard = torch.ones(2**30)"),
        "unsolved": merged(BEGIN="raise NotImplementedError  # your answer"),
    },
    "unexplained-answer": {
        "nothing": parts(0, 0, 0, 0),
        "in BF16": parts(SCORES // 2, COPIES // 2, SUMS // 2, MASK),
        "elements": parts(SCORES // 4, COPIES // 4, SUMS // 4, MASK),
        "in FP64": parts(2 * SCORES, 2 * COPIES, 2 * SUMS, MASK),
        "scores of one head": parts(SCORES // 8, COPIES, SUMS, MASK),
        "scores of two heads": parts(SCORES // 4, COPIES, SUMS, MASK),
        "T × T": parts(4 * 8 * 1024 * 1024, COPIES, SUMS, MASK),
        "half of the scores, as that is unexplained": parts(SCORES // 2, COPIES, SUMS, MASK),
        "a mask of each head": parts(SCORES, COPIES, SUMS, 8 * MASK),
        "a mask in bits": parts(SCORES, COPIES, SUMS, MASK // 8),
        "a mask in BF16": parts(SCORES, COPIES, SUMS, 2 * MASK),
        "a mask of T × T": parts(SCORES, COPIES, SUMS, 1024 * 1024),
        "half of the mask": parts(SCORES, COPIES, SUMS, MASK // 2),
        "copies of 8 heads each": parts(SCORES, 262_144 + 4 * (131_072 + 98_304), SUMS, MASK),
        "the copy of q alone": parts(SCORES, 262_144, SUMS, MASK),
        "the copies of k and v alone": parts(SCORES, 131_072 + 98_304, SUMS, MASK),
        "values as wide as keys": parts(SCORES, 262_144 + 2 * 131_072, SUMS, MASK),
        "a among the copies": parts(SCORES, COPIES + 196_608, 16_384, MASK),
        "q among the sums": parts(SCORES, COPIES - 262_144, SUMS + 262_144, MASK),
        "a alone": parts(SCORES, COPIES, 196_608, MASK),
        "numbers alone": parts(SCORES, COPIES, 16_384, MASK),
        "a and m and z": parts(SCORES, COPIES, 196_608 + 8_192, MASK),
        "a as wide as a key": parts(SCORES, COPIES, 262_144 + 16_384, MASK),
        "the result among the sums": parts(SCORES, COPIES, SUMS + 786_432, MASK),
        "all together": parts(1_785_856, 1_785_856, 1_785_856, 1_785_856),
        "what is unexplained": parts(892_928, 0, 0, 0),
        "swapped": parts(COPIES, SCORES, SUMS, MASK),
        "adds up, and is wrong": parts(SCORES, COPIES + 16_384, SUMS - 16_384, MASK),
        "in KiB": parts(1024, 480, 208, 32),
        "floats": parts(float(SCORES), float(COPIES), float(SUMS), float(MASK)),
        "texts": parts('"1 MiB"', '"480 KiB"', '"208 KiB"', '"32 KiB"'),
        "equal to everything": ANYTHING + parts("Anything()", "Anything()", "Anything()", "Anything()"),
    },
    "tiles-answer": {
        "alike": fitting(KEYS="[t]"),
        "the largest tile of keys": fitting(
            FOUND="u, t", SHARED="2 * head_dim * (u + 2 * t)", REGISTERS=("4 * u * (head_dim + t + 2)")
        ),
        "swapped": fitting(FOUND="u, t"),
        "the smallest tile of keys": fitting(KEYS="sizes[::-1]"),
        "the smallest that fits": fitting(QUERIES="sizes[::-1]"),
        "shared memory alone": fitting(FITS="shared <= shared_bytes"),
        "registers alone": fitting(FITS="registers <= register_bytes"),
        "v forgotten": fitting(SHARED="2 * head_dim * (t + u)"),
        "q forgotten": fitting(SHARED="2 * head_dim * 2 * u"),
        "three tiles of queries": fitting(SHARED="2 * head_dim * 3 * t"),
        "shared memory in FP32": fitting(SHARED="4 * head_dim * (t + 2 * u)"),
        "shared memory in elements": fitting(SHARED="head_dim * (t + 2 * u)"),
        "registers in 16 bits": fitting(REGISTERS="2 * t * (head_dim + u + 2)"),
        "registers in elements": fitting(REGISTERS="t * (head_dim + u + 2)"),
        "scores forgotten": fitting(REGISTERS="4 * t * (head_dim + 2)"),
        "a forgotten": fitting(REGISTERS="4 * t * (u + 2)"),
        "m and z forgotten": fitting(REGISTERS="4 * t * (head_dim + u)"),
        "m and z once": fitting(REGISTERS="4 * (t * (head_dim + u) + 2)"),
        "one memory": fitting(FITS="shared + registers <= shared_bytes + register_bytes"),
        "must be less": fitting(FITS="shared < shared_bytes and registers < register_bytes"),
        "at most 128": fitting(SIZES="[2**i for i in range(7, 3, -1)]"),
        "no power of two": fitting(SIZES="range(512, 15, -16)"),
        "tiles below 16": fitting(SIZES="[2**i for i in range(20, -1, -1)]"),
        "hard-coded": "def best_tiles(head_dim, shared_bytes, register_bytes):\n    return 128, 64",
        "16 if nothing fits": fitting(NONE="16, 16"),
        "a list": fitting(FOUND="[t, u]"),
        "floats": fitting(FOUND="float(t), float(u)"),
        "one number": fitting(FOUND="t"),
        "makes tensors": fitting(SHARED="torch.zeros(t + 2 * u, head_dim).nbytes // 2"),
        "equal to everything": ANYTHING + fitting(FOUND="Anything(t), Anything(u)"),
        "memory-hungry": fitting(SIZES="[16] * (20 * 2**30 // 8)"),
        "no return": fitting(FOUND="None"),
        "unsolved": fitting(SIZES="[]").replace("sizes = []", "raise NotImplementedError"),
    },
    "moved-answer": {
        "k and v once": moved(KEYS="tokens"),
        "k and v for each query": moved(KEYS="tokens * tokens"),
        "by hand": moved(BYTES="2 * (4 * tokens * tokens + 4 * tokens * head_dim)"),
        "whole tiles only": moved(KEYS="sum(ends) if causal else tokens * (tokens // tile_queries)"),
        "a fraction of a tile": moved(KEYS="sum(ends) if causal else tokens * tokens / tile_queries"),
        "the last tile as long as the others": moved(END="first + tile_queries"),
        "elements": moved(BYTES="head_dim * (2 * tokens + 2 * keys)"),
        "in FP32": moved(BYTES="4 * head_dim * (2 * tokens + 2 * keys)"),
        "the result forgotten": moved(BYTES="2 * head_dim * (tokens + 2 * keys)"),
        "q and the result forgotten": moved(BYTES="2 * head_dim * 2 * keys"),
        "v forgotten": moved(BYTES="2 * head_dim * (2 * tokens + keys)"),
        "the result for each tile": moved(BYTES="2 * head_dim * (tokens + tokens * len(ends) + 2 * keys)"),
        "causal forgotten": moved(KEYS="tokens * len(ends)"),
        "always causal": moved(KEYS="sum(ends)"),
        "half if causal": moved(KEYS="tokens * len(ends) // (2 if causal else 1)"),
        "half of all if causal": moved(BYTES="2 * head_dim * (2 * tokens + 2 * tokens * len(ends)) // (1 + causal)"),
        "without the diagonal": moved(KEYS="sum(ends) - tokens if causal else tokens * len(ends)"),
        "the first query's keys": moved(END="first"),
        "one key too many": moved(END="min(first + tile_queries, tokens) + 1"),
        "in KiB": moved(BYTES="2 * head_dim * (2 * tokens + 2 * keys) // 1024"),
        "a float": moved(BYTES="2 * head_dim * (2 * tokens + 2 * keys) / 1"),
        "makes tensors": moved(BYTES="2 * torch.zeros(2 * tokens + 2 * keys, head_dim).numel()"),
        "hard-coded": "def moved_bytes(tokens, head_dim, tile_queries, causal):\n    return 68157440",
        "equal to everything": ANYTHING + moved(BYTES="Anything()"),
        "no return": moved(BYTES="None"),
        "unsolved": moved(FIRSTS="[]").replace("return", "raise NotImplementedError\n    return"),
    },
    "window-answer": {
        "by hand": BY_HAND,
        "by PyTorch, with a mask": BY_HAND.replace(
            "scores.softmax(-1) @ v", "F.scaled_dot_product_attention(q, k, v, (apart >= 0) & (apart < window))"
        ),
        "by hand, in place": BY_HAND.replace(".masked_fill(", ".masked_fill_("),
        "a mask of T × T": window(
            BEGIN="out, tokens = torch.empty_like(q), q.shape[-2]; all_seen = torch.ones(tokens, tokens).bool().tril()",
            HIDDEN="(apart >= window) | ~all_seen[i:end, first:end]",
        ),
        "a byte for each pair, for a moment": window(
            BEGIN="out, tokens = torch.empty_like(q), q.shape[-2]; torch.empty(tokens, tokens, dtype=torch.bool)",
            TILE="256",
        ),
        "room for half of the scores": window(
            BEGIN="out, tokens = torch.empty_like(q), q.shape[-2]; room = torch.empty(tokens * tokens // 2)"
        ),
        "all earlier keys, masked": window(FROM="0"),
        "all keys, masked": window(FROM="0")
        .replace("k[..., first:end, :]", "k")
        .replace("v[..., first:end, :]", "v")
        .replace("torch.arange(first, end)", "torch.arange(tokens)"),
        "tiles that grow with the tokens": window(TILE="(tokens // 4 + 1)"),
        "one tile": window(TILE="tokens"),
        "keeps the scores": window(
            BEGIN="out, tokens, kept = torch.empty_like(q), q.shape[-2], []", FROM="0", THEN="kept.append(scores)"
        ),
        "remembers the last tile": window(THEN="window_attention.scores = scores"),
        "remembers its tiles": "tiles = []\n\n\n" + window(THEN="tiles.append(scores)"),
        "without a window": window(FROM="0", HIDDEN="apart < 0"),
        "a window of tiles": window(HIDDEN="apart < 0"),
        "one key too many": window(FROM="max(0, i - window)", HIDDEN="(apart < 0) | (apart > window)"),
        "one key too few": window(HIDDEN="(apart < 0) | (apart >= max(window - 1, 1))"),
        "the slice begins too late": window(FROM="max(0, i - window + 2)"),
        "the slice begins with the tile": window(FROM="i"),
        "the future as well": window(UNTIL="min(i + TILE, tokens)", HIDDEN="(apart <= -window) | (apart >= window)"),
        "the next key as well": window(HIDDEN="(apart < -1) | (apart >= window)"),
        "not its own key": window(HIDDEN="(apart < 1) & (apart > -2) & (window > 1) | (apart < 0) | (apart >= window)"),
        "no scale": window(SCALE="1"),
        "divided by head_dim": window(SCALE="1 / q.shape[-1]"),
        "scaled by the window": window(SCALE="window ** -0.5"),
        "zeros in place of −∞": window().replace("-math.inf", "0"),
        "hidden after the softmax": window(
            WEIGHTS="scores.nan_to_num(neginf=0.0).softmax(-1).masked_fill(HID, 0)"
        ).replace("HID", "(apart < 0) | (apart >= window)"),
        "without a maximum": window(WEIGHTS="scores.exp() / scores.exp().sum(-1, keepdim=True)"),
        "the last tile forgotten": window(BEGIN="out, tokens = torch.zeros_like(q), q.shape[-2] // 64 * 64"),
        "whole tiles only": window(UNTIL="i + 64"),
        "not normalised": window(WEIGHTS="(scores - scores.amax(-1, keepdim=True)).exp()"),
        "softmax over the queries": window(WEIGHTS="scores.softmax(-2)"),
        "the keys returned": window(RETURN="v.clone()"),
        "in FP32": window(RETURN="out.float()"),
        "inside in FP32": window(WEIGHTS="scores.float().softmax(-1).to(v)"),
        "writes to q": window(BEGIN="out, tokens = q, q.shape[-2]"),
        "scales q in place": window(
            BEGIN="out, tokens = torch.empty_like(q), q.shape[-2]; q.mul_(q.shape[-1] ** -0.5)", SCALE="1"
        ),
        "for two dimensions of heads": window(BEGIN="(b, h, tokens, d), out = q.shape, torch.empty_like(q)"),
        "no return": window(RETURN="None"),
        "equal to everything": ANYTHING + window(RETURN="Anything()"),
        "leaves autograd switched off": window(
            BEGIN="torch.set_grad_enabled(False); out, tokens = torch.empty_like(q), q.shape[-2]"
        ),
        "memory-hungry": window(THEN="hoard = torch.ones(2**30)"),
        "an endless loop": "def window_attention(q, k, v, window):\n    while True:\n        pass",
        "unsolved": window(BEGIN="raise NotImplementedError  # your answer"),
    },
}

CRASHES = {
    "divides by zero",
    "needs a length",
    "leaves autograd switched off",
    "whole tiles only",
    "for two dimensions of heads",
    "labels one too far",
    "all pieces as wide as the first",
}
"""Mistakes that end with an error of Python's, torch's or the library's own, which is told; all others are told why."""

RIGHT: dict[str, dict[str, str]] = {
    "intensity-answer": {
        "numpy's sum": "import numpy\n\n\n"
        + per_byte("2 * m * k * n / (itemsize * numpy.array([m * k, k * n, m * n]).sum())"),
        "one by one": per_byte("2 / itemsize / (1 / m + 1 / k + 1 / n)"),
        "FLOPs over bytes": cell(
            """
            def intensity(m, k, n, itemsize):
                flops = 2 * m * k * n
                elements = m * k + k * n + m * n
                return flops / itemsize / elements
            """
        ),
    },
    "rows-answer": {
        "by the ridge": cell(
            """
            def fewest_rows(k, n, itemsize, flops_per_second, bytes_per_second):
                ridge = flops_per_second / bytes_per_second
                if 2 * k * n <= ridge * itemsize * (k + n):
                    return None
                return math.ceil(ridge * itemsize * k * n / (2 * k * n - ridge * itemsize * (k + n)))
            """
        ),
        "tries one after the other": cell(
            """
            def fewest_rows(k, n, itemsize, flops_per_second, bytes_per_second):
                for m in range(1, 20_000):
                    time_of_bytes = itemsize * (m * k + k * n + m * n) * flops_per_second
                    if 2 * m * k * n * bytes_per_second >= time_of_bytes:
                        return m
            """
        ),
    },
    "loss-answer": {
        "m and z": corrected(),
        "the lowest of all": corrected(LOWEST="torch.full((len(labels),), -torch.finfo(torch.float32).max)"),
        "numpy's mean": summed(RETURN="(lse - of_labels).numpy().mean()"),
        "in place, and let go": summed(BEFORE="pass", AFTER="start += piece.shape[1]; del piece"),
        "the library's online softmax, the label among the values": cell(
            """
            from memlab.memory_hierarchy import online_softmax


            def loss_in_pieces(pieces, labels):
                found = torch.zeros(len(labels), dtype=torch.float64)

                def looked_up():
                    start = 0
                    for piece in pieces:
                        here = (labels >= start) & (labels < start + piece.shape[1])
                        found[here] = piece[here].gather(1, labels[here, None] - start)[:, 0].double()
                        start += piece.shape[1]
                        yield piece

                def nothing():
                    while True:
                        yield None

                lse = None
                for piece in looked_up():
                    new = online_softmax([piece], [piece.new_zeros(piece.shape[1], 1)])[1][:, 0]
                    lse = new if lse is None else torch.logaddexp(lse, new)
                return (lse - found).mean().item()
            """
        ),
    },
    "merge-answer": {
        "where the maximum is −∞, zero": merged(ABOUT="m.masked_fill(m == -math.inf, 0)"),
        "by where": merged(
            ABOUT="m",
            FIRST="torch.where(m1 == -math.inf, 0.0, (m1 - m).exp())",
            SECOND="torch.where(m2 == -math.inf, 0.0, (m2 - m).exp())",
        ),
        "stacked": cell(
            """
            def merge(one, other):
                m, z, a = (torch.stack(both) for both in zip(one, other))
                larger = m.amax(0)
                by = (m - larger.clamp(min=-1e30)).exp()
                return larger, (z * by).sum(0), (a * by).sum(0)
            """
        ),
    },
    "unexplained-answer": {
        "numbers": parts(SCORES, COPIES, SUMS, MASK),
        "read from the timeline": cell(
            """
            held = [s for s in narrow.alive(narrow.peak_event) if s.category == "temporary"]
            scores_bytes = next(s.nbytes for s in held if "s_store" in str(s.line))
            mask_bytes = next(s.nbytes for s in held if s.dtype == "bool")
            copies_bytes = 262_144 + sum(s.nbytes for s in held if "k_store" in str(s.line))
            sums_bytes = sum(s.nbytes for s in held if s.dtype == "float32") - scores_bytes - copies_bytes
            """
        ),
    },
    "tiles-answer": {
        "the largest of all that fit": cell(
            """
            def best_tiles(head_dim, shared_bytes, register_bytes):
                sizes = [16 * 2**i for i in range(14)]
                fit = [
                    (t, u)
                    for t in sizes
                    for u in sizes
                    if 2 * (t + u + u) * head_dim <= shared_bytes and 4 * t * (u + 2 + head_dim) <= register_bytes
                ]
                return max(fit, default=None)
            """
        ),
        "queries first, then keys": cell(
            """
            def best_tiles(head_dim, shared_bytes, register_bytes):
                def fits(t, u):
                    return 2 * head_dim * (t + 2 * u) <= shared_bytes and 4 * t * (head_dim + u + 2) <= register_bytes

                if not fits(16, 16):
                    return None
                t = u = 16
                while fits(2 * t, u):
                    t *= 2
                while fits(t, 2 * u):
                    u *= 2
                return t, u
            """
        ),
    },
    "moved-answer": {
        "tile by tile": cell(
            """
            def moved_bytes(tokens, head_dim, tile_queries, causal):
                moved, first = 0, 0
                while first < tokens:
                    queries = min(tile_queries, tokens - first)
                    seen = first + queries if causal else tokens
                    moved += 2 * head_dim * (2 * queries + 2 * seen)
                    first += queries
                return moved
            """
        ),
        "closed": moved(
            KEYS="tokens * (n := -(-tokens // tile_queries)) if not causal else "
            "tile_queries * (-(-tokens // tile_queries) - 1) * -(-tokens // tile_queries) // 2 + tokens"
        ),
    },
    "window-answer": {
        "tiles of 128": window(TILE="128"),
        "tiles of 16": window(TILE="16"),
        "a list of tiles": window(BEGIN="tokens, tiles = q.shape[-2], []", RETURN="torch.cat(tiles, -2)")
        .replace("out[..., i:end, :] =", "tile =")
        .replace("pass", "tiles.append(tile)"),
        "query by query": cell(
            """
            def window_attention(q, k, v, window):
                out = torch.empty_like(q)
                for i in range(q.shape[-2]):
                    seen = slice(max(0, i - window + 1), i + 1)
                    scores = (k[..., seen, :] @ q[..., i, :, None] * q.shape[-1] ** -0.5)[..., 0]
                    out[..., i, :] = (scores.softmax(-1)[..., None, :] @ v[..., seen, :])[..., 0, :]
                return out
            """
        ),
        "by PyTorch, tile by tile": cell(
            """
            def window_attention(q, k, v, window):
                out = torch.empty_like(q)
                for i, tile in enumerate(q.split(64, -2)):
                    i *= 64
                    end = i + tile.shape[-2]
                    first = max(0, i - window + 1)
                    apart = torch.arange(i, end)[:, None] - torch.arange(first, end)
                    k_seen, v_seen = k[..., first:end, :], v[..., first:end, :]
                    seen = (apart >= 0) & (apart < window)
                    out[..., i:end, :] = F.scaled_dot_product_attention(tile, k_seen, v_seen, seen)
                return out
            """
        ),
        "online": cell(
            """
            from memlab.memory_hierarchy import online_softmax


            def window_attention(q, k, v, window):
                out, tokens = torch.empty_like(q), q.shape[-2]
                for i in range(0, tokens, 64):
                    end = min(i + 64, tokens)
                    pieces = [slice(j, min(j + 32, end)) for j in range(max(0, i - window + 1), end, 32)]

                    def scores():
                        for piece in pieces:
                            apart = torch.arange(i, end)[:, None] - torch.arange(piece.start, piece.stop)
                            s = q[..., i:end, :] @ k[..., piece, :].mT * q.shape[-1] ** -0.5
                            yield s.masked_fill((apart < 0) | (apart >= window), -math.inf)

                    out[..., i:end, :] = online_softmax(scores(), (v[..., piece, :] for piece in pieces))[0]
                return out
            """
        ),
    },
}
