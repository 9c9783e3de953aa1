"""Answers to the exercises of chapter 03: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import ANYTHING, cell, variants


def per_byte(value: str) -> str:
    """intensity that returns an expression."""
    return f"def intensity(m, k, n, itemsize):\n    return {value}"


enough = variants(
    """
    def fewest_rows(k, n, itemsize, flops_per_second, bytes_per_second):
        BEGIN«pass»
        moved = MOVED«itemsize * flops_per_second»
        gain = 2 * k * n * bytes_per_second - moved * (k + n)
        if NEVER«gain <= 0»:
            return NONE«None»
        return FOUND«-(-moved * k * n // gain)»
    """
)


summed = variants(
    """
    def loss_in_pieces(pieces, labels):
        BEGIN«start, rows = 0, torch.arange(len(labels))»
        for piece in PIECES«pieces»:
            BEFORE«pass»
            if start == 0:
                lse, of_labels = piece.logsumexp(1), piece.new_zeros(len(labels))
            else:
                lse = torch.logaddexp(lse, piece.logsumexp(1))
            here = (labels >= start) & (labels < start + piece.shape[1])
            of_labels[here] = piece[rows[here], COLUMN«labels[here] - start»]
            AFTER«start += piece.shape[1]»
        loss = LOSS«(lse - of_labels).mean()»
        return RETURN«loss.item()»
    """
)


corrected = variants(
    """
    def loss_in_pieces(pieces, labels):
        start, m, z = 0, LOWEST«torch.full((len(labels),), -1e30)», 0
        of_labels = torch.zeros(len(labels), dtype=torch.float64)
        for piece in pieces:
            m = m.to(piece.dtype)
            larger = LARGER«torch.maximum(m, piece.amax(1))»
            correction = (m - larger).exp()
            z = z * correction + (piece - larger[:, None]).exp().sum(1)
            m = larger
            for row, label in enumerate(labels.tolist()):
                if start <= label < start + piece.shape[1]:
                    of_labels[row] = piece[row, label - start]
            start += piece.shape[1]
        return (m + z.log() - of_labels).mean().item()
    """
)


merged = variants(
    """
    def merge(one, other):
        (m1, z1, a1), (m2, z2, a2) = one, other
        BEGIN«pass»
        m = torch.maximum(m1, m2)
        about = ABOUT«m.clamp(min=torch.finfo(m.dtype).min)»
        by1, by2 = FIRST«(m1 - about).exp()», SECOND«(m2 - about).exp()»
        z = SUM«z1 * by1 + z2 * by2»
        a = VALUES«a1 * by1 + a2 * by2»
        return END«m, z, a»
    """
)


SCORES, COPIES, SUMS, MASK = 1_048_576, 491_520, 212_992, 32_768


def parts(scores: object, copies: object, sums: object, mask: object) -> str:
    """The four numbers of exercise 4."""
    return f"scores_bytes, copies_bytes, sums_bytes, mask_bytes = {scores}, {copies}, {sums}, {mask}"


fitting = variants(
    """
    def best_tiles(head_dim, shared_bytes, register_bytes):
        sizes = SIZES«[2**i for i in range(20, 3, -1)]»
        for t in sizes:
            for u in KEYS«sizes»:
                shared = SHARED«2 * head_dim * (t + 2 * u)»
                registers = REGISTERS«4 * t * (head_dim + u + 2)»
                if FITS«shared <= shared_bytes and registers <= register_bytes»:
                    return FOUND«t, u»
        return NONE«None»
    """
)


moved = variants(
    """
    def moved_bytes(tokens, head_dim, tile_queries, causal):
        ends = [END«min(first + tile_queries, tokens)» for first in FIRSTS«range(0, tokens, tile_queries)»]
        keys = KEYS«sum(ends) if causal else tokens * len(ends)»
        return BYTES«2 * head_dim * (2 * tokens + 2 * keys)»
    """
)


window = variants(
    """
    def window_attention(q, k, v, window):
        BEGIN«out, tokens = torch.empty_like(q), q.shape[-2]»
        side = TILE«64»
        for i in range(0, tokens, side):
            first, end = FROM«max(0, i - window + 1)», UNTIL«min(i + side, tokens)»
            scores = q[..., i:end, :] @ k[..., first:end, :].mT * q.shape[-1] ** -0.5
            apart = torch.arange(i, end)[:, None] - torch.arange(first, end)
            scores = scores.masked_fill(HIDDEN«(apart < 0) | (apart >= window)», -math.inf)
            out[..., i:end, :] = scores.softmax(-1) @ v[..., first:end, :]
            THEN«pass»
        return RETURN«out»
    """
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
        "measured": per_byte("2 * m * k * n / sum(torch.zeros(s).nbytes for s in ((m, k), (k, n), (m, n)))"),
        "no return": "def intensity(m, k, n, itemsize):\n    2 * m * k * n",
        "a number instead of a function": "intensity = 10.7",
        "unsolved": "def intensity(m, k, n, itemsize):\n    raise NotImplementedError  # your answer",
        "always FP32": per_byte("2 * m * k * n / (4 * (m * k + k * n + m * n))"),
        "square matrices": per_byte("n / 3 * 2 / itemsize"),
    },
    "rows-answer": {
        "the ridge": enough(FOUND="-(-flops_per_second // bytes_per_second)"),
        "divides by zero": enough(NEVER="gain < 0"),
        "one more": enough(FOUND="moved * k * n // gain + 1"),
        "zero for none": enough(NONE="0"),
        "infinity for none": enough(NONE="math.inf"),
        "a limit of one FLOP for a multiply-add": enough(NEVER="gain <= moved * (k + n)"),
        "makes tensors": enough(FOUND="int(torch.tensor(moved * k * n / gain).ceil())"),
        "an endless loop": enough(BEGIN="m = 1\n    while 2 * m * k * n * bytes_per_second >= 0: m += 1"),
        "always 2 bytes": enough(MOVED="2 * flops_per_second"),
    },
    "loss-answer": {
        "hard-coded": "def loss_in_pieces(pieces, labels):\n    return 9.2",
        "leaves autograd switched off": summed(
            BEGIN="torch.set_grad_enabled(False); start, rows = 0, torch.arange(64)"
        ),
        "needs a length": summed(BEFORE="len(pieces)"),
        "a list of pieces": summed(PIECES="list(pieces)"),
        "remembers the last piece": summed(BEFORE="loss_in_pieces.last = piece"),
        "writes to the labels": summed(AFTER="start += piece.shape[1]; labels[here] = 0"),
        "a tensor": summed(RETURN="loss"),
        "equal to everything": ANYTHING.replace("int", "float") + summed(RETURN="Anything(0)"),
        "labels not shifted": summed(COLUMN="labels[here] % piece.shape[1]", LOSS="(lse - of_labels).mean()"),
        "the last piece's maximum": corrected(LARGER="piece.amax(1)"),
        "begins with −∞": corrected(LOWEST="torch.full((len(labels),), -math.inf)"),
    },
    "merge-answer": {
        "values not corrected": merged(VALUES="a1 + a2"),
        "leaves autograd switched off": merged(BEGIN="torch.set_grad_enabled(False)"),
        "memory-hungry": merged(BEGIN="hoard = torch.ones(2**30)"),
        "sums of different maxima": merged(SUM="z1 + z2", VALUES="a1 + a2"),
        "−∞ minus −∞": merged(ABOUT="m"),
        "never −∞": merged(END="about, z, a"),
        "divided": merged(END="m, z, a / z"),
        "writes to z": merged(SUM="z1.mul_(by1).add_(z2 * by2)"),
        "keeps its parts with the result": merged(VALUES="a1 * by1 + a2 * by2\n    a.parts = one, other, by1"),
        "many copies": merged(BEGIN="hoard = [a1.clone() for _ in range(12)]"),
        "a list": merged(END="[m, z, a]"),
        "numbers": merged(END="m.max().item(), z.sum().item(), a.sum().item()"),
    },
    "unexplained-answer": {
        "a among the copies": parts(SCORES, COPIES + 196_608, 16_384, MASK),
        "nothing": parts(0, 0, 0, 0),
        "in BF16": parts(SCORES // 2, COPIES // 2, SUMS // 2, MASK),
        "in FP64": parts(2 * SCORES, 2 * COPIES, 2 * SUMS, MASK),
        "a mask in bits": parts(SCORES, COPIES, SUMS, MASK // 8),
        "in KiB": parts(1024, 480, 208, 32),
        "floats": parts(float(SCORES), float(COPIES), float(SUMS), float(MASK)),
        "texts": parts('"1 MiB"', '"480 KiB"', '"208 KiB"', '"32 KiB"'),
        "a alone": parts(SCORES, COPIES, 196_608, MASK),
    },
    "tiles-answer": {
        "alike": fitting(KEYS="[t]"),
        "memory-hungry": fitting(SIZES="[16] * (20 * 2**30 // 8)"),
        "the smallest tile of keys": fitting(KEYS="sizes[::-1]"),
        "shared memory alone": fitting(FITS="shared <= shared_bytes"),
        "tiles below 16": fitting(SIZES="[2**i for i in range(20, -1, -1)]"),
        "floats": fitting(FOUND="float(t), float(u)"),
        "makes tensors": fitting(SHARED="torch.zeros(t + 2 * u, head_dim).nbytes // 2"),
        "no return": fitting(FOUND="None"),
        "unsolved": fitting(SIZES="[]").replace("sizes = []", "raise NotImplementedError"),
        "v forgotten": fitting(SHARED="2 * head_dim * (t + u)"),
        "m and z once": fitting(REGISTERS="4 * (t * (head_dim + u) + 2)"),
        "16 if nothing fits": fitting(NONE="16, 16"),
    },
    "moved-answer": {
        "half if causal": moved(KEYS="tokens * len(ends) // (2 if causal else 1)"),
        "k and v once": moved(KEYS="tokens"),
        "a fraction of a tile": moved(KEYS="sum(ends) if causal else tokens * tokens / tile_queries"),
        "makes tensors": moved(BYTES="2 * torch.zeros(2 * tokens + 2 * keys, head_dim).numel()"),
        "hard-coded": "def moved_bytes(tokens, head_dim, tile_queries, causal):\n    return 68157440",
        "equal to everything": ANYTHING + moved(BYTES="Anything()"),
        "no return": moved(BYTES="None"),
        "unsolved": moved(FIRSTS="[]").replace("return", "raise NotImplementedError\n    return"),
        "whole tiles only": moved(KEYS="sum(ends) if causal else tokens * (tokens // tile_queries)"),
        "the last tile as long as the others": moved(END="first + tile_queries"),
    },
    "window-answer": {
        "one key too few": window(HIDDEN="(apart < 0) | (apart >= max(window - 1, 1))"),
        "leaves autograd switched off": window(
            BEGIN="torch.set_grad_enabled(False); out, tokens = torch.empty_like(q), q.shape[-2]"
        ),
        "whole tiles only": window(UNTIL="i + 64"),
        "a byte for each pair, for a moment": window(
            BEGIN="out, tokens = torch.empty_like(q), q.shape[-2]; torch.empty(tokens, tokens, dtype=torch.bool)",
            TILE="256",
        ),
        "all earlier keys, masked": window(FROM="0"),
        "tiles that grow with the tokens": window(TILE="(tokens // 4 + 1)"),
        "remembers its tiles": "tiles = []\n\n\n" + window(THEN="tiles.append(scores)"),
        "in FP32": window(RETURN="out.float()"),
        "writes to q": window(BEGIN="out, tokens = q, q.shape[-2]"),
        "by hand": BY_HAND,
        "one tile": window(TILE="tokens"),
    },
}

CRASHES = {"divides by zero", "leaves autograd switched off", "needs a length", "whole tiles only"}
"""Mistakes that end with an error of Python's, torch's or the library's own, which is told; all others are told why."""

RIGHT: dict[str, dict[str, str]] = {
    "intensity-answer": {
        "numpy's sum": "import numpy\n\n\n"
        + per_byte("2 * m * k * n / (itemsize * numpy.array([m * k, k * n, m * n]).sum())"),
        "one by one": per_byte("2 / itemsize / (1 / m + 1 / k + 1 / n)"),
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
    },
    "merge-answer": {
        "where the maximum is −∞, zero": merged(ABOUT="m.masked_fill(m == -math.inf, 0)"),
        "by where": merged(
            ABOUT="m",
            FIRST="torch.where(m1 == -math.inf, 0.0, (m1 - m).exp())",
            SECOND="torch.where(m2 == -math.inf, 0.0, (m2 - m).exp())",
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
    },
    "moved-answer": {
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
    },
}
