"""Schedule: which tensors to send first.

Every byte that is away for the whole of a step's peak lowers it as much as any other, and takes the link as long. What
differs is how long a tensor could be away, its *idle time*: from its last use in forward to its first in backward.

    first come             the earliest in forward, which is what a hook does that knows no future
    largest first          fewest transfers for so many bytes
    idle time × bytes      the largest area of absence (Zhang et al. 2019, AutoSwap, where it is one of four scores)

In a plain chain tensors that are born first are needed last: first come *is* the longest idle time, and the factor of
bytes makes it prefer what is large to what is early. Of layers that are alike both send the same; of others the factor
costs time more often than it saves any. It pays where lifetimes do not nest, as in a step with several losses, whose
first come first and are needed at once.

Peng et al. 2020 (Capuchin) take what the transfers leave of the idle time; Huang et al. 2020 (SwapAdvisor) search for a
schedule; vDNN (Rhu et al. 2016) is first come.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from memlab.checking import one_of
from memlab.memory_timeline import Timeline
from memlab.offloading.simulation import Held, Run, simulate

POLICIES: dict[str, Callable[[Held], float]] = {
    "first come": lambda tensor: tensor.leaves,
    "largest first": lambda tensor: -tensor.nbytes,
    "idle time × bytes": lambda tensor: -tensor.idle_seconds * tensor.nbytes,
}
"""By what the tensors that may leave are sorted; the least first."""


def ordered(tensors: Sequence[Held], policy: str) -> list[int]:
    """The places of the tensors that may leave, the first to send first. Raises ValueError for no policy of ours."""
    one_of("policy", policy, tuple(POLICIES))
    return sorted(
        (i for i, t in enumerate(tensors) if t.needed is not None), key=lambda i: POLICIES[policy](tensors[i])
    )


def chosen(tensors: Sequence[Held], policy: str, send_bytes: float) -> list[int]:
    """The first of a policy's order, as many as `send_bytes` allow: the order ends at the first that does not fit."""
    order = ordered(tensors, policy)
    sums = itertools.accumulate(tensors[i].nbytes for i in order)
    return [i for i, nbytes in zip(order, sums, strict=True) if nbytes <= send_bytes]


def plan_sends(
    tensors: Sequence[Held], limit_bytes: int, policy: str, bytes_per_second: float
) -> tuple[list[int], Run] | None:
    """The fastest step within a limit that a policy's order allows: what it sends, and its run; None if none fits.

    The first 0, 1, 2 … of the order are tried; of steps that last equally long, the one that sends least is taken.
    """
    order, best = ordered(tensors, policy), None
    for k in range(len(order) + 1):
        run = simulate(tensors, order[:k], bytes_per_second, limit_bytes=limit_bytes)
        if run.peak_bytes <= limit_bytes and (best is None or _cost(run) < _cost(best[1])):
            best = order[:k], run
    return best


def _cost(run: Run) -> tuple[float, int]:
    return round(run.step_seconds, 12), run.sent_bytes


# ---- a metered step as such a list


def held_in(
    timeline: Timeline, forward_seconds: float = 1.0, backward_seconds: float = 2.0, *, min_bytes: int = 0
) -> list[Held]:
    """Everything that a metered step held on the timeline's device until its backward ended, as simulate() takes it.

    One forward and one backward. What autograd saved in forward may leave; all else stays. A timeline knows births and
    frees, not reads. So a tensor is taken to be read last in forward when the next one is born, and first in backward
    just before it is freed: for one that several ops saved, or that a variable holds, that is a few ops off.

    The events of forward are spread evenly over forward_seconds, those of backward over backward_seconds. The
    optimizer's step is left out. min_bytes: what is smaller stays.

    Raises ValueError for a timeline without a backward.
    """
    turn = next((span.start for span in timeline.phases if span.phase in ("backward", "recompute")), None)
    if turn is None:
        raise ValueError("expected the timeline of a step with a backward, found none; meter loss.backward() too")
    end = max(span.stop for span in timeline.phases if span.phase in ("backward", "recompute"))
    clock = [forward_seconds * i / turn for i in range(turn)]
    clock += [forward_seconds + backward_seconds * i / (end - turn + 1) for i in range(1, len(timeline) + 2 - turn)]
    births = [i for i in range(1, turn) if timeline.events[i - 1].delta > 0]
    following = dict(zip(births, [*births[1:], turn], strict=True))
    held = []
    for storage in timeline.storages.values():
        if not storage.nbytes:
            continue
        born, freed = timeline.lifetime(storage.id)
        if born > end:
            continue
        saved = storage.category == "activation" and storage.reason.startswith("saved by")
        may = (
            saved
            and storage.nbytes >= min_bytes
            and storage.phase == "forward"
            and freed is not None
            and turn < freed <= end
            and born in following
        )
        absent = (clock[following[born]], clock[max(turn, freed - 1)]) if may else (None, None)
        until = math.inf if freed is None or freed > end else clock[freed]
        held.append(Held(storage.nbytes, clock[born], min(until, clock[end]), *absent, name=storage.op))
    return held
