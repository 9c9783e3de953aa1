"""Tiles of attention: what its forward moves by the size of a tile, and which tiles fit a multiprocessor."""

from __future__ import annotations

from memlab.book.interactive import Interactive
from memlab.book.style import COLOURS, SMALL_SIZE, Picture, canvas, finish
from memlab.memory_hierarchy import PUBLISHED
from memlab.units import KiB, MiB, format_bytes

TILES = (16, 32, 64, 128, 256, 512)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)


def attention_traffic(tokens: int, head_dim: int, tile: int | None = None) -> int:
    """Bytes that attention's forward moves into and out of a GPU's multiprocessors, for one head in 16 bits.

    tile None: by hand, q kᵀ, softmax and the product with v one after the other; each reads and writes T×T. Else one
    kernel: q and the result once, k and v once for each tile of queries. Dao et al. 2022, section 3.2.
    """
    if tile is None:
        return 2 * (4 * tokens * tokens + 4 * tokens * head_dim)
    return 2 * (2 * tokens * head_dim + 2 * tokens * head_dim * -(-tokens // tile))


def fast_bytes(head_dim: int, tile: int) -> tuple[int, int]:
    """What a kernel holds for one tile of queries by one of keys: in shared memory (q, k, v, 16 bits), in registers."""
    return 2 * 3 * tile * head_dim, 4 * (tile * head_dim + tile * tile)


def fits(head_dim: int, tile: int, card: str = "H100-80GB") -> bool:
    """Whether one multiprocessor of a card has room for such a tile."""
    shared, registers = fast_bytes(head_dim, tile)
    return shared <= PUBLISHED[card].shared_memory and registers <= PUBLISHED[card].registers


def draw_tiles(tokens: int = 4096, tile: int = 64, head_dim: int = 64) -> Picture:
    """What attention's forward moves by the size of its tiles, and whether one such tile fits a multiprocessor."""
    card = PUBLISHED["H100-80GB"]
    figure, axes = canvas(8, 3.4, bottom=0.6, left=1.3)
    rows = {"by hand": attention_traffic(tokens, head_dim)} | {
        f"tiles of {t}": attention_traffic(tokens, head_dim, t) for t in TILES
    }
    for y, (name, nbytes) in enumerate(rows.items()):
        chosen = name == f"tiles of {tile}"
        colour = COLOURS["gradient"] if y == 0 else COLOURS["parameter"] if chosen else COLOURS["input"]
        axes.barh(y, nbytes / MiB, color=colour, edgecolor="black", linewidth=0.4)
        needs = ""
        if y:
            shared, registers = fast_bytes(head_dim, TILES[y - 1])
            needs = f"   needs {shared // KiB:,} KiB shared, {registers // KiB:,} KiB of registers"
            needs += "" if fits(head_dim, TILES[y - 1]) else ": too large"
        bold = {"fontweight": "bold"} if chosen else {}
        axes.text(nbytes / MiB, y, f"  {format_bytes(nbytes)}{needs}", va="center", fontsize=SMALL_SIZE, **bold)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=SMALL_SIZE)
    axes.invert_yaxis()
    axes.set_xlim(0, max(rows.values()) / MiB * 1.9)
    title = (
        f"one head of {head_dim}, {tokens:,} tokens; an H100's SM has {card.shared_memory // KiB} KiB of shared memory"
    )
    finish(axes, "moved into and out of multiprocessors (MiB)", "", title)
    moved = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in rows.items())
    fitting = [t for t in TILES if fits(head_dim, t)]
    largest = f"the largest tile that fits an H100's multiprocessor is {fitting[-1]}" if fitting else "no tile fits"
    return Picture(
        figure,
        f"Bars of the bytes that attention's forward moves, for {tokens:,} tokens and a head of {head_dim}: {moved}; "
        f"{largest}.",
    )


def explore_tiles() -> Interactive:
    """Sliders for the number of tokens, the size of a tile, and a head's width."""
    return Interactive(draw_tiles, tokens=TOKENS, tile=TILES, head_dim=(32, 64, 128))
