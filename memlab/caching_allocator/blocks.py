"""Blocks: the runs of bytes that tile a segment, each knowing its neighbours; and pools, which hold the free ones.

A segment is a chain of blocks without a gap. Cutting a block leaves two neighbours, joining them makes one of two, and
no byte is ever copied: a block is its address and its size.
"""

from __future__ import annotations

from bisect import bisect_left, insort

IN_USE, FREE, UNMAPPED = "in use", "free", "unmapped"


class Block:
    """A run of bytes in a segment: `address`, `size`, the bytes `requested` of it (0 when free), its neighbours.

    It stands for a pointer: what is freed may be handed out again, and then the old name means the new owner's bytes.
    """

    __slots__ = ("address", "size", "requested", "state", "pool", "prev", "next")

    address: int
    size: int
    requested: int
    state: str
    pool: Pool
    prev: Block | None
    next: Block | None

    @classmethod
    def at(cls, address: int, size: int, pool: Pool) -> Block:
        """A free block without neighbours."""
        block = cls()
        block.address, block.size, block.requested, block.state = address, size, 0, FREE
        block.pool, block.prev, block.next = pool, None, None
        return block

    @property
    def in_use(self) -> bool:
        """Whether somebody holds it."""
        return self.state is IN_USE

    def __repr__(self) -> str:
        return f"Block({self.size:,} B at {self.address:#x}, {self.pool.name} pool, {self.state})"


class Pool:
    """The free blocks of one pool, in the order in which best fit looks at them: by size, then by address."""

    def __init__(self, name: str):
        self.name = name  # "small" or "large"
        self.free: list[tuple[int, int, Block]] = []  # (size, address, block), sorted

    def put(self, block: Block) -> Block:
        """Enter a free block, joined with its free neighbours; what has become of it."""
        free, before, after = self.free, block.prev, block.next
        if before is not None and before.state is FREE:
            del free[bisect_left(free, (before.size, before.address))]
            block = join(before, block)
        if after is not None and after.state is FREE:
            del free[bisect_left(free, (after.size, after.address))]
            join(block, after)
        insort(free, (block.size, block.address, block))
        return block

    def add(self, block: Block) -> None:
        """Enter a free block that has no free neighbour."""
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Take out a block that is in the pool."""
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def __repr__(self) -> str:
        return f"Pool({self.name}, {len(self.free)} free blocks)"


def cut(block: Block, size: int) -> Block:
    """Shorten a block to `size` bytes; what is left of it is a block of its own, right after, and free."""
    rest, following = Block(), block.next
    rest.address, rest.size, rest.requested, rest.state = block.address + size, block.size - size, 0, FREE
    rest.pool, rest.prev, rest.next = block.pool, block, following
    if following is not None:
        following.prev = rest
    block.size, block.next = size, rest
    return rest


def join(block: Block, following: Block) -> Block:
    """Lengthen a block by the one right after it, which is no more."""
    block.size += following.size
    block.next = following = following.next
    if following is not None:
        following.prev = block
    return block


def chain(block: Block | None) -> list[Block]:
    """A block and all that follow it in its segment."""
    blocks = []
    while block is not None:
        blocks.append(block)
        block = block.next
    return blocks


def described(blocks: list[Block], expandable: bool = False) -> dict:
    """Neighbouring blocks as a segment in PyTorch's snapshots."""
    in_use = sum(block.size for block in blocks if block.in_use)
    return {
        "address": blocks[0].address,
        "total_size": sum(block.size for block in blocks),
        "stream": 0,
        "segment_type": blocks[0].pool.name,
        "allocated_size": in_use,
        "active_size": in_use,
        "requested_size": sum(block.requested for block in blocks),
        "is_expandable": expandable,
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": "active_allocated" if block.in_use else "inactive",
            }
            for block in blocks
        ],
    }
