"""Traffic: how many bytes a rank sends, collective by collective.

A send is counted as it is. What a library's collective puts on the wire, only the library knows; it is computed from
the formula of the algorithm that moves the fewest bytes, for n bytes in all and N ranks:

    all_reduce                    2·n·(N − 1)/N   ring: a reduce-scatter, then an all-gather
    all_gather, reduce_scatter      n·(N − 1)/N   ring: all pieces but one
    all_to_all                      n·(N − 1)/N   all but one's own part
    broadcast, reduce               n             a chain: each passes it on, but the last sends nothing
    scatter                         n·(N − 1)/N   by the root, the others nothing
    gather                          n/N           by each but the root, which sends nothing

NCCL's rings send these. gloo may choose other algorithms, and adds headers.

Source: Patarasuk and Yuan 2009; Thakur, Rabenseifner and Gropp 2005; Rajbhandari et al. 2020 (ZeRO), section 7.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from memlab.memory_timeline import Meter

# torch's op → the collective's name, for those of c10d, and those that DTensor and compiled code use.
_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "isend": "send",
    "recv": "receive",
    "recv_any_source": "receive",
    "irecv": "receive",
}
_KNOWN = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "scatter", "gather"}
_KNOWN |= {"send", "receive"}
_WHERE_INPUT = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "scatter": 1, "gather": 1}  # c10d: outputs first


@dataclass(frozen=True)
class Message:
    """One collective, send or receive, as one rank took part in it.

    name: "all_reduce", "send" …   tensor_bytes: of the whole, so for all_gather what all pieces have together.
    sent_bytes, received_bytes: by this rank.   ranks: how many are in the group.
    exact: whether the bytes are those of a tensor that was sent or received, or computed by the algorithm's formula.
    event: the moment in the open Meter's timeline, `totals[event]` being held then, where all memory is on one device
      (`Meter.event`); None without a Meter.
    """

    name: str
    tensor_bytes: int
    sent_bytes: int
    received_bytes: int
    ranks: int
    exact: bool
    event: int | None = None


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank sends and receives in its `with` block, which is not entered twice.

        with Meter(model) as meter, Traffic() as traffic:
            ...
        traffic.sent_bytes, traffic.records

    Sees what is called in this thread and in backward: torch.distributed's collectives and sends, DDP's, FSDP2's,
    DTensor's; of other threads nothing. Inside a Meter's block, it also notes at which moment of the timeline each one
    began. Several may be open; each counts everything. Sparse tensors count with their indices, by a dense one's
    formula.

    Travels as its records: return it from a rank.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self):
        super().__init__()
        self.records: list[Message] = []
        self._meter: Meter | None = None

    def __reduce__(self):
        return _closed, (self.records,)

    @property
    def sent_bytes(self) -> int:
        """All that this rank sent."""
        return sum(record.sent_bytes for record in self.records)

    @property
    def received_bytes(self) -> int:
        """All that this rank received."""
        return sum(record.received_bytes for record in self.records)

    @property
    def exact(self) -> bool:
        """Whether all of it was counted, and nothing computed by a formula."""
        return all(record.exact for record in self.records)

    def by_name(self) -> dict[str, int]:
        """Bytes sent, by the collective's name, in the order of their first use. A receive sends none."""
        sent: dict[str, int] = {}
        for record in self.records:
            sent[record.name] = sent.get(record.name, 0) + record.sent_bytes
        return sent

    def __enter__(self) -> Traffic:
        meters = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Meter)]
        self._meter = meters[-1] if meters else None
        super().__enter__()
        return self

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._meter = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and kind is not FakeTensor for kind in types):
            return NotImplemented  # a wrapper such as DTensor: let it unwrap itself, and see the ops on what is inside
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            event = None if self._meter is None else self._meter.event
            self.records += [replace(record, event=event) for record in _read(func, args, kwargs or {})]
        return func(*args, **(kwargs or {}))


def ring_bytes(name: str, tensor_bytes: int, ranks: int) -> int:
    """Bytes that each rank sends in an all_reduce, all_gather, reduce_scatter or all_to_all, rounded up to whole bytes.

    tensor_bytes: of the whole tensor, which for all_gather and reduce_scatter is `ranks` pieces.
    Raises ValueError for another collective, for ranks below 1, and for bytes that are negative or a fraction.

    >>> ring_bytes("all_reduce", 1000, 4), ring_bytes("all_gather", 1000, 4)
    (1500, 750)
    """
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
    if name not in rounds:
        raise ValueError(f"expected one of {', '.join(rounds)}, which go in rings, found {name!r}")
    if ranks < 1:
        raise ValueError(f"expected at least one rank, found {ranks}")
    if tensor_bytes < 0 or tensor_bytes != int(tensor_bytes):
        raise ValueError(f"expected tensor_bytes as a whole number, 0 or more, found {tensor_bytes!r}")
    tensor_bytes = int(tensor_bytes)
    return -(-rounds[name] * tensor_bytes * (ranks - 1) // ranks)


def _closed(records: list[Message]) -> Traffic:
    traffic = Traffic()
    traffic.records = records
    return traffic


def _read(func, args: tuple, kwargs: dict) -> Iterator[Message]:
    """What an op of torch's puts on the wire."""
    op = func._opname
    name = _NAMES.get(op, _NAMES.get(op.rstrip("_"), op.rstrip("_")))
    if name not in _KNOWN:
        return  # barriers, waiting
    given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    functional = func.namespace != "c10d"
    if functional:
        group = given["group_name"]
        group = _resolve_process_group(group) if isinstance(group, str) else group
    else:
        group = distributed.ProcessGroup.unbox(given["process_group"])
    ranks, rank = group.size(), group.rank()
    root = given.get("root_rank", given.get("src"))
    data = args[0] if functional else args[_WHERE_INPUT.get(name, 0)]
    own = sum(_nbytes(tensor) for tensor in tree_leaves(data) if isinstance(tensor, Tensor))
    whole, sent, received = own, 0, 0
    if name in ("send", "receive"):
        sent, received = (own, 0) if name == "send" else (0, own)
    elif name == "all_gather":
        whole = own * ranks
        sent = received = own * (ranks - 1)
    elif name == "all_to_all":
        sent, received = _all_to_all(given, own, ranks, rank)
    elif name == "reduce_scatter" and not functional and len(data) and isinstance(data[0], (list, tuple)):
        pieces = [sum(_nbytes(of_group[r]) for of_group in data) for r in range(ranks)]  # of any sizes
        sent, received = own - pieces[rank], own - pieces[(rank - 1) % ranks]
    elif name in ("all_reduce", "reduce_scatter"):
        sent = received = ring_bytes(name, own, ranks)
    elif ranks > 1 and name == "broadcast":  # root → root + 1 → … → root − 1
        sent, received = own * ((rank + 1) % ranks != root), own * (rank != root)
    elif ranks > 1 and name == "reduce":  # root + 1 → … → root
        sent, received = own * (rank != root), own * ((rank - 1) % ranks != root)
    elif name == "scatter":
        whole = sum(t.nbytes for t in tree_leaves(args[0])) * ranks
        sent, received = (whole // ranks * (ranks - 1), 0) if rank == root else (0, whole // ranks)
    elif name == "gather":
        whole = own * ranks
        sent, received = (0, own * (ranks - 1)) if rank == root else (own, 0)
    yield Message(name, whole, sent, received, ranks, exact=name in ("send", "receive"))


def _nbytes(tensor: Tensor) -> int:
    """Of its elements; of a sparse tensor's indices and values."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def _all_to_all(given: dict, own: int, ranks: int, rank: int) -> tuple[int, int]:
    """All parts but one's own. Parts are equal, unless the call says how many rows each has, or lists them."""
    if "output_tensors" in given:
        parts = [[tensor.nbytes for tensor in given[which]] for which in ("input_tensors", "output_tensors")]
        return tuple(sum(sizes) - sizes[rank] for sizes in parts)
    tensor = given["input"]
    row = math.prod(tensor.shape[1:]) * tensor.itemsize  # not of a first row: a rank may have none to send
    both = []
    for which in ("input_split_sizes", "output_split_sizes"):
        rows = [int(n) for n in given.get(which, ())]
        both.append((sum(rows) - rows[rank]) * row if rows else own * (ranks - 1) // ranks)
    return tuple(both)
