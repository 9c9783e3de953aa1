"""Who holds it: from a tensor that should be gone, up through Python's own references, to a name the reader wrote.

Python's collector knows who refers to whom (`gc.get_referrers`). From the tensor the search climbs, level by level, and
ends at the first name: a global, a local of a function that runs, an attribute of a class, a variable that a function
has enclosed. The way there is told from the tensor outwards:

    list, local `losses` of train()
    local `x` of forward(), traceback of ValueError, list, global `errors` of __main__

What the collector does not track stays unseen: C++ (autograd's graph, another tensor's base) and NumPy's arrays.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections import deque
from collections.abc import Container, Iterator
from types import (
    BuiltinMethodType,
    CellType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    TracebackType,
)

LEVELS, WIDTH = 10, 300
_HERE = os.path.dirname(__file__) + os.sep
_SEQUENCES = (list, tuple, set, frozenset)


def holders(held: object) -> str:
    """What keeps an object alive, as text from the object outwards to a name; "" where the collector knows nobody.

    held: a tensor, or any object that Python's collector tracks. Each level of the climb looks through all objects of
    the process, some 10 ms for every 100,000 of them. No reference is left behind.
    """
    told = {id(held): ""}  # an object on the way → the way from `held` to it
    frontier = [held]
    try:
        for _ in range(LEVELS):
            ids = {id(one) for one in frontier}
            for frame in _running():
                if found := _local(frame, ids):
                    name, value = found
                    return _joined(told[value], name)
            reached = above = None  # lists of the level before, which refer to the frontier
            reached, above = gc.get_referrers(*frontier), []
            own = {id(frontier), id(above), id(reached), id(told)}
            for one in reached:
                if id(one) in told or id(one) in own or (type(one) is FrameType and _ours(one)):
                    continue
                for value, link, final in _links(one, ids, told):
                    text = _joined(told[value], link)
                    if final:
                        return text
                    told[id(one)] = text
                    above.append(one)
                    break
            if not above:
                break
            del above[WIDTH:]
            frontier = above
        return max((told[id(one)] for one in frontier), key=len) if frontier else ""
    finally:
        frontier = reached = above = one = held = frame = None  # a frame in a traceback would keep them


def known_holders(objects: list) -> set[int]:
    """The ids of those objects that something in Python refers to, beside the list they come in.

    A tensor that only autograd's graph keeps may still have its Python object, and nobody in Python refers to it.
    """
    ids = {id(one) for one in objects}
    found: set[int] = set()
    reached = gc.get_referrers(*objects)
    for one in reached:
        if one is not objects and not (type(one) is FrameType and _ours(one)):
            found.update(ids.intersection(map(id, gc.get_referents(one))))
    del reached
    for frame in _running():
        found.update(value for _, value in _locals(frame, ids))
    return found


def _joined(way: str, link: str) -> str:
    return f"{way}, {link}" if way and link else way or link


def _links(one: object, ids: set[int], told: Container[int]) -> Iterator[tuple[int, str, bool]]:
    """How `one` refers to an object of `ids`: the object's id, the link in words, and whether it is a name.

    told: the ids of all that the search has come by. Nothing of an object's own is called: a proxy may be unbound, a
    dict of its own kind may load what it is asked for.
    """
    kind = type(one)
    if issubclass(kind, dict):
        key, value = next(((key, id(value)) for key, value in list(dict.items(one)) if id(value) in ids), (None, 0))
        if not value:
            yield from ((id(key), f"key of {kind.__name__}", False) for key in list(dict.keys(one)) if id(key) in ids)
            return
        name = dict.get(one, "__name__")
        if type(name) is str and _attributes(sys.modules.get(name)) is one:
            yield value, f"global `{key}` of {name}", True
        elif (owner := _owner(one)) is not None:
            yield value, *owner(key)
        else:
            yield value, kind.__name__, False
    elif kind is FrameType:
        if found := _local(one, ids):
            yield found[1], found[0], False
    elif kind is CellType:
        yield id(one.cell_contents), "", False
    elif kind is FunctionType:
        if id(one.__closure__) in ids:
            named = zip(one.__code__.co_freevars, one.__closure__, strict=True)
            name = next((name for name, cell in named if id(cell) in told), "?")
            yield id(one.__closure__), f"`{name}` enclosed by {one.__qualname__}()", False
        for what in (one.__defaults__, one.__kwdefaults__, one.__dict__):
            if id(what) in ids:
                yield id(what), f"default or attribute of {one.__qualname__}()", False
    elif kind is GeneratorType:
        if one.gi_frame is not None and (found := _local(one.gi_frame, ids)):
            yield found[1], found[0], False
    elif kind is TracebackType:
        yield (id(one.tb_frame) if id(one.tb_frame) in ids else id(one.tb_next)), "", False
    elif issubclass(kind, BaseException) and id(one.__traceback__) in ids:
        yield id(one.__traceback__), f"traceback of {kind.__name__}", False
    elif issubclass(kind, type):
        for name, value in list(vars(one).items()):
            if id(value) in ids:
                yield id(value), f"attribute `{name}` of class {one.__qualname__}", True
    elif kind in (MethodType, BuiltinMethodType):
        yield id(one.__self__), "", False
    elif not issubclass(kind, ModuleType):
        for name, value in list((_attributes(one) or {}).items()):
            if id(value) in ids:
                yield id(value), f"attribute `{name}` of {kind.__name__}", False
        inside = next((id(item) for item in gc.get_referents(one) if id(item) in ids), 0)
        if inside:
            bound = one.maxlen if kind is deque else None
            link = kind.__name__ if bound is None else f"deque of at most {bound}"
            closure = kind is tuple and all(type(item) is CellType for item in one)
            yield inside, "" if closure else link, False


def _owner(namespace: dict):
    """For the dict of an object's or a class's attributes: a function from key to a link in words; else None."""
    for owner in gc.get_referrers(namespace):
        kind = type(owner)
        if issubclass(kind, type):
            if any(key in vars(owner) and vars(owner)[key] is value for key, value in namespace.items()):
                return lambda key, name=owner.__qualname__: (f"attribute `{key}` of class {name}", True)
        elif not issubclass(kind, (dict, FrameType, *_SEQUENCES)) and _attributes(owner) is namespace:
            return lambda key, name=kind.__name__: (f"attribute `{key}` of {name}", False)
    return None


def _attributes(one: object) -> dict | None:
    """An object's own attributes; None where it has none, or hides them."""
    try:
        found = object.__getattribute__(one, "__dict__")
    except Exception:
        return None
    return found if type(found) is dict else None


def _running() -> Iterator[FrameType]:
    """The frames that run now, of all threads, but for those of the search itself. The collector does not see them."""
    for frame in list(sys._current_frames().values()):
        while frame is not None:
            if not _ours(frame):
                yield frame
            frame = frame.f_back


def _ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_HERE)


def _local(frame: FrameType, ids: set[int]) -> tuple[str, int] | None:
    """A frame's local that is an object of `ids`: its name in words, and the object's id."""
    return next(iter(_locals(frame, ids)), None)


def _locals(frame: FrameType, ids: set[int]) -> list[tuple[str, int]]:
    """All of them."""
    namespace, function = frame.f_locals, frame.f_code.co_name
    try:
        found = [(name, id(value)) for name, value in list(namespace.items()) if id(value) in ids]
    finally:
        # Before Python 3.13 a function's f_locals is a copy that its frame keeps, and what is in it with it. Who called
        # locals() has the same copy: then it stays.
        if type(namespace) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(namespace) <= 3:
            namespace.clear()
    if function == "<module>":
        return [(f"global `{name}` of {frame.f_globals.get('__name__')}", value) for name, value in found]
    return [(f"local `{name}` of {function}()", value) for name, value in found]
