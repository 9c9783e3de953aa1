"""From a meter of a loop that runs to rows with names: which lines pile up, whose graph keeps them, who holds that.

Tensors that Python has dropped may live on in autograd's graph, and Python's collector knows nothing of it. Nodes of a
graph are known by their sequence numbers, and the meter knows for which op each was made: so a storage is kept by the
graph of a tensor when the op that made it has its node there. What nodes have saved is never read.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memlab.memory_monitoring.holding import holders, known_holders
from memlab.memory_monitoring.lines import GrowingLine, Pile, piling_up
from memlab.memory_timeline import Line, Meter
from memlab.memory_timeline.nodes import Nodes

NAMED = 8  # rows of which the holder is looked for
CYCLES = "in reference cycles, which Python's collector frees when it comes round; gc.collect() frees them now"
WAITS = "saved for a backward that has not come"
UNSEEN = "made where no op is seen: by NumPy, another thread or process, or compiled code"


def live_tensors() -> Iterator[Tensor]:
    """All tensors that Python knows of and that have bytes. Those that only C++ holds are not among them.

    What stands for a tensor inside vmap or grad has no bytes of its own, and may outlive them in somebody's list.
    """
    imagined = any(getattr(mode, "imagines", None) for mode in _get_current_dispatch_mode_stack())
    for one in [one for one in gc.get_objects() if issubclass(type(one), Tensor)]:
        kind = type(one)
        plain = kind.__torch_dispatch__ is Tensor.__torch_dispatch__
        if not plain and not (imagined and kind.__name__ == "FakeTensor"):
            continue
        if torch._C._functorch.is_functorch_wrapped_tensor(one) or torch.nn.parameter.is_lazy(one):
            continue
        if one.layout is not torch.strided or one._is_zerotensor():
            continue
        if one.device.type != "meta" or imagined:
            yield one


Unseen = Mapping[int, tuple[weakref.ref, int]]


def unseen_by(meter: Meter) -> Unseen:
    """Tensors whose storages the meter has not met: the storage's address → (a weak reference to it, its bytes)."""
    found = {}
    for tensor in live_tensors():
        storage = tensor.untyped_storage()
        if storage._cdata not in meter._live and storage.nbytes():
            found[storage._cdata] = weakref.ref(tensor), storage.nbytes()
    return found


def named(meter: Meter, marks: Sequence[int], unseen: Unseen) -> list[GrowingLine]:
    """The rows, most bytes first. marks: `meter.event_count` at steps' ends; unseen: `unseen_by` it halfway."""
    piles = piling_up(meter.timeline, marks)
    gc.collect()
    alive = {number: address for address, number in meter._live.items()}
    in_cycles = [pile for pile in piles if not any(one in alive for one in pile.old)]
    rows = _explained(meter, [pile for pile in piles if pile not in in_cycles], alive)
    rows += _never_seen(meter, unseen, (len(marks) - 1) // 2 + 1)
    rows.sort(key=lambda row: -row.bytes_per_step)
    return rows + [pile.row._replace(reason=CYCLES) for pile in in_cycles]


def _never_seen(meter: Meter, halfway: Unseen, steps: int) -> list[GrowingLine]:
    """A row for tensors that no op made and no op read since: those that were there halfway, if more have come."""
    now = unseen_by(meter)
    tensors = [ref() for ref, _ in now.values()]
    in_python = known_holders(tensors)  # numbers that autograd has made tensors of are in none of Python's hands
    held = {address for address, tensor in zip(now, tensors, strict=True) if id(tensor) in in_python}
    del tensors
    old = [now[address] for address in held if address in halfway and halfway[address][0]() is not None]
    if min(len(old), len(held) - len(old)) < 3:
        return []
    nbytes, count = sum(nbytes for _, nbytes in old) / steps, len(old) / steps
    return [GrowingLine(Line("", ""), "input", nbytes, count, UNSEEN, holders(old[0][0]()))]


def _explained(meter: Meter, piles: list[Pile], alive: dict[int, int]) -> list[GrowingLine]:
    """The rows with their holders; those that a graph keeps under the line of the tensor whose graph it is."""
    objects = _objects({address: number for number, address in alive.items()})
    in_python = _held_by_python(objects)
    rows, taken = [], set()
    for number, kept in _roots(meter, piles, objects, in_python).items():
        line = meter._history.lines[meter._history.ops[meter._history.births[number].op].line]
        own = [pile for pile in piles if pile not in kept and (number in pile.old or pile.row.line == line)]
        taken.update(id(pile) for pile in (*own, *kept))
        rows.append(_root_row(line, own, kept)._replace(holder=holders(objects[number]())))
    for pile in piles:
        if id(pile) not in taken:
            sample = next((objects[one] for one in pile.old if one in in_python), None)
            rows.append(pile.row._replace(holder=holders(sample())) if sample and len(rows) < NAMED else pile.row)
    return sorted(rows, key=lambda row: -row.bytes_per_step)


def _objects(numbers: dict[int, int]) -> dict[int, weakref.ref]:
    """For storages by their number: a tensor that Python knows, one with a graph where there is one."""
    found: dict[int, weakref.ref] = {}
    for tensor in live_tensors():
        number = numbers.get(tensor.untyped_storage()._cdata)
        if number is not None and (number not in found or tensor.grad_fn is not None):
            found[number] = weakref.ref(tensor)
    return found


def _held_by_python(objects: dict[int, weakref.ref]) -> set[int]:
    tensors = [ref() for ref in objects.values()]
    ids = known_holders(tensors)
    return {number for number, tensor in zip(objects, tensors, strict=True) if id(tensor) in ids}


def _root_row(line: Line, own: list[Pile], kept: list[Pile]) -> GrowingLine:
    rows = [pile.row for pile in (*own, *kept)]
    first = next((row for row in rows if row.line == line), rows[0])
    count = len({row.line for row in rows})
    return GrowingLine(
        line,
        first.category,
        sum(row.bytes_per_step for row in rows),
        sum(row.storages_per_step for row in rows),
        f"its graph is kept, and with it what {count} line{'s' * (count > 1)} of the forward saved",
        keeps=tuple(
            row._replace(reason=WAITS) if "backward never read it" in row.reason else row
            for row in sorted(rows, key=lambda row: -row.bytes_per_step)
        ),
    )


def _roots(
    meter: Meter, every: list[Pile], objects: dict[int, weakref.ref], in_python: set[int]
) -> dict[int, list[Pile]]:
    """For tensors that Python holds: the piles whose storages were born in their graph. Each pile goes to one.

    The meter knows the ops that the graph's nodes are of. What nodes have saved is never read.
    """
    births = meter._history.births
    held = [number for number in sorted(in_python) if objects[number]().grad_fn is not None and births[number].op >= 0]
    youngest = {meter._history.ops[births[number].op].line: number for number in held}
    first = [next((one for one in pile.old if one in held), None) for pile in every]
    graphs = {n: _ops_of(objects[n]().grad_fn, meter._nodes) for n in {*youngest.values(), *first} if n is not None}
    found: dict[int, list[Pile]] = {}
    left = [pile for pile in every if any(one not in in_python for one in pile.old)]
    while left and graphs:
        best = max(graphs, key=lambda number: sum(_born_in(pile, births, graphs[number]) for pile in left))
        mine = [pile for pile in left if _born_in(pile, births, graphs[best])]
        if not mine:
            break
        found[best] = mine
        left = [pile for pile in left if pile not in mine]
        del graphs[best]
    if found:  # what was born outside the graph and is saved in it: a batch, a mask
        next(iter(found.values())).extend(pile for pile in left if not in_python.intersection(pile.old))
    return found


def _born_in(pile: Pile, births, ops: set[int]) -> bool:
    return any(births[one].op in ops for one in pile.old)


def _ops_of(node, nodes: Nodes) -> set[int]:
    """The meter's numbers of the ops whose nodes are in the graph under `node`."""
    seen, ops, stack = set(), set(), [node]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        ops.add(nodes.look_up(node)[1])
        stack.extend(below for below, _ in node.next_functions if below is not None)
    return ops - {-1}
