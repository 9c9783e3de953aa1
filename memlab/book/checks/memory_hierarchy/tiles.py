"""Exercise 5 of chapter 03: the tiles that fit a multiprocessor, and the bytes that they move."""

from __future__ import annotations

import itertools

import torch

from memlab.book.checks.answers import Wrong, a_function, exercise, whole_bytes
from memlab.book.checks.memory_arithmetic.sizes import NoTensors
from memlab.memory_hierarchy import PUBLISHED
from memlab.units import KiB

# ---- first part

_TILES = [2**i for i in range(4, 16)]
_CARDS = ("T4-16GB", "V100-16GB", "A100-40GB", "H100-80GB")


def _held(head_dim: int, t: int, u: int) -> tuple[int, int]:
    """Bytes in shared memory and in registers: the tensors themselves, if only on paper."""
    on_paper = {"device": "meta"}
    shared = [torch.empty(rows, head_dim, dtype=torch.bfloat16, **on_paper) for rows in (t, u, u)]
    registers = [torch.empty(t, width, **on_paper) for width in (head_dim, u, 1, 1)]
    return sum(x.nbytes for x in shared), sum(x.nbytes for x in registers)


def _fit(head_dim: int, shared_bytes: int, register_bytes: int) -> list[tuple[int, int]]:
    """All pairs of tiles that fit, the one asked for first."""
    fitting = []
    for t, u in itertools.product(_TILES, _TILES):
        if 2 * head_dim * (t + 2 * u) > shared_bytes or 4 * t * (head_dim + u) > register_bytes:
            continue  # far too large to write down
        shared, registers = _held(head_dim, t, u)
        if shared <= shared_bytes and registers <= register_bytes:
            fitting.append((t, u))
    return sorted(fitting, reverse=True)


def _machines() -> dict[str, tuple[int, int, int]]:
    """head_dim, bytes of shared memory and of registers."""
    asked = {
        f"{card}, head_dim {head_dim}": (head_dim, PUBLISHED[card].shared_memory, PUBLISHED[card].registers)
        for card in _CARDS
        for head_dim in (64, 128, 256)
    }
    shared, registers = _held(80, 64, 32)
    asked |= {
        "what just fits": (80, shared, registers),
        "a byte too few of shared memory": (80, shared - 1, registers),
        "a byte too few of registers": (80, shared, registers - 1),
        "much shared memory, few registers": (64, 1024 * KiB, 24 * KiB),
        "many registers, little shared memory": (64, 20 * KiB, 1024 * KiB),
        "nothing fits": (256, 24 * KiB, 64 * KiB),
        "no registers to speak of": (128, 228 * KiB, KiB),
    }
    return asked


@exercise
def best_tiles(answer: object) -> str:
    """Exercise 5, first part: (head_dim, shared_bytes, register_bytes) → (tile_queries, tile_keys), or None."""
    function = a_function(answer, "best_tiles(head_dim, shared_bytes, register_bytes)")
    for name, sizes in _machines().items():
        fitting, (head_dim, shared_bytes, register_bytes) = _fit(*sizes), sizes
        where = f"{name}: best_tiles({', '.join(f'{n:,}' for n in sizes)})"
        with NoTensors():
            found = function(*sizes)
        if found is None:
            if fitting:
                raise Wrong(f"{where}: you say that nothing fits; tiles of {fitting[0]} do.")
            continue
        if not isinstance(found, tuple) or len(found) != 2 or any(type(tile) is not int for tile in found):
            raise Wrong(f"{where}: expected (tile_queries, tile_keys), two int, or None; found {str(found)[:40]}.")
        if found[0] not in _TILES or found[1] not in _TILES:
            raise Wrong(f"{where}: expected powers of two, at least 16; found {found}.")
        shared, registers = _held(head_dim, *found)
        for what, needs, has in (("shared memory", shared, shared_bytes), ("registers", registers, register_bytes)):
            if needs > has:
                raise Wrong(f"{where}: tiles of {found} need {needs:,} B of {what}, {needs - has:,} too many.")
        best = fitting[0]
        if found[0] < best[0]:
            look = ""
            if found[0] == found[1] == max(t for t, u in fitting if t == u):
                look = " The two need not be alike."
            elif found[1] > best[1]:
                look = " Of keys, no tile is too small to be right: what does a larger one save?"
            raise Wrong(
                f"{where}: {found} fits, and so does {best}. k and v are read once for each tile of queries, so the "
                f"larger that is, the less is moved.{look}"
            )
        if found[1] < best[1]:
            raise Wrong(f"{where}: {found} moves as little as can be, but with {best}, which fits, a loop ends sooner.")
    return "The tile of queries decides what is moved; that of keys takes the room that is left."


# ---- second part

_FORWARDS = (
    (4096, 80, 64),
    (4096, 64, 128),
    (2048, 128, 16),
    (64, 64, 64),
    (100, 32, 64),
    (1000, 64, 128),
    (5, 16, 16),
    (65, 80, 64),
    (3000, 64, 4096),
)


def moves(tokens: int, head_dim: int, tile: int, causal: bool) -> int:
    """What the tiles read and write: the slices themselves, if only on paper."""
    q, k, v, out = (torch.empty(tokens, head_dim, dtype=torch.bfloat16, device="meta") for _ in range(4))
    moved = 0
    for i in range(0, tokens, tile):
        end = min(i + tile, tokens)
        seen = slice(0, end if causal else tokens)
        moved += sum(x.nbytes for x in (q[i:end], out[i:end], k[seen], v[seen]))
    return moved


@exercise
def moved_bytes(answer: object) -> str:
    """Exercise 5, second part: (tokens, head_dim, tile_queries, causal) → bytes to and from the GPU's memory."""
    function = a_function(answer, "moved_bytes(tokens, head_dim, tile_queries, causal)")
    for causal, (tokens, head_dim, tile) in itertools.product((False, True), _FORWARDS):
        where = f"moved_bytes({tokens}, {head_dim}, {tile}, {causal})"
        with NoTensors():
            found = whole_bytes(function(tokens, head_dim, tile, causal), where)
        right = moves(tokens, head_dim, tile, causal)
        if found == right:
            continue
        row, ends = 2 * tokens * head_dim, [min(i + tile, tokens) for i in range(0, tokens, tile)]
        tiles, unmasked = len(ends), moves(tokens, head_dim, tile, False)
        slips = {}
        if causal:
            slips = {
                "what it is without a mask; tiles above the diagonal are not read": unmasked,
                "with half of k and v; of the tile on the diagonal all is read": 2 * row + tiles * row,
                "half of what it is without a mask, or all but each tile's own keys": unmasked // 2,
                "without each tile's own keys": right - 2 * row,
                "with keys beyond the text, in the last tile": right + 4 * head_dim * (tiles * tile - tokens),
            }
        slips |= {
            "in elements": right // 2,
            "in FP32; an element has 2 bytes here": 2 * right,
            "without q, or without the result": right - row,
            "without q and the result": right - 2 * row,
            "with k and v read once in all; each tile of queries reads them again": 4 * row,
            "with k alone, or v alone": row + right // 2,
            "with the result written for each tile": right + row * (tiles - 1),
            "with k and v read for each query": 2 * row + 2 * tokens * row,
            "without the last, shorter tile, which reads k and v all the same": 2 * row + 2 * (tokens // tile) * row,
            "what three ops move, by hand": 2 * (4 * tokens * tokens + 4 * tokens * head_dim),
            "in KiB": right // 1024,
        }
        look = next((f" That would be {what}." for what, slip in slips.items() if slip == found), "")
        if not look and tokens % tile:
            look = f" The last of {tiles} tiles has {tokens - (tiles - 1) * tile} queries."
        many = "too many" if found > right else "too few"
        raise Wrong(f"{where} is {right:,} B, you have {found:,} B, {abs(found - right):,} {many}.{look}")
    return "To the byte, also where the last tile is short and where the future is never read."
