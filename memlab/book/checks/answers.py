"""What all checks share: an answer is run under limits, and what is wrong with it is said so that it teaches."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn.modules.module import _global_forward_hooks as _hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

from memlab.book.checks.limits import CHECK_BYTES, CHECK_SECONDS, TooLong, limited
from memlab.units import format_bytes

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_OURS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))


class Wrong(AssertionError):
    """An answer that is not right yet. A notebook shows its sentence, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"Not yet: {self}"]


def exercise(check: Callable[..., str]) -> Callable[..., None]:
    """Make a check of a function that looks at an answer, raises Wrong, or returns what there is to say of a right one.

    It runs under limits of time and memory, on one thread (where cores are shared, many wait for each other), on the
    CPU, in FP32 and with autograd on, whatever ran before. What the answer raises becomes Wrong, with the line that
    raised it, and so does what it leaves behind: a dispatch mode, a hook, a thread. Warnings cost nothing.
    """

    @functools.wraps(check)
    def run(*answers) -> None:
        with (
            _wrong(),
            torch.inference_mode(False),
            _as_new(),
            warnings.catch_warnings(),
            contextlib.redirect_stderr(sys.stdout),
        ):
            warnings.simplefilter("ignore")
            with limited(CHECK_SECONDS, CHECK_BYTES):
                praise = check(*answers)
        print(f"Right. {praise}")

    return run


@contextlib.contextmanager
def _wrong() -> Iterator[None]:
    try:
        yield
    except (Wrong, KeyboardInterrupt):
        raise
    except NotImplementedError as error:
        if str(error):  # torch's own, of a module without a forward, says something
            raise Wrong(f"your code raised NotImplementedError: {error}") from None
        raise Wrong("there is no answer yet: put yours in place of `raise NotImplementedError`.") from None
    except TooLong:
        raise Wrong(f"your code was still running after {CHECK_SECONDS} s; does a loop in it ever end?") from None
    except BaseException as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise Wrong(f"your code asked for more than {format_bytes(CHECK_BYTES)} of memory.") from None
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise Wrong(f"your code raised {what}{_where(error)}") from None


def _where(error: BaseException) -> str:
    """The innermost line of the answer's own code that an error went through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OURS)]
    return f"\n    in {frames[-1].name}: {frames[-1].line}" if frames and frames[-1].line else ""


def _surroundings() -> dict[str, object]:
    """What code can change for all that runs after it, by the words for having left it so."""
    return {
        "a dispatch mode switched on": len(_get_current_dispatch_mode_stack()),
        "autograd switched off": torch.is_grad_enabled(),
        "another default dtype": torch.get_default_dtype(),
        "a hook on every module": len(_hooks),
        "a thread running": set(threading.enumerate()),
    }


@contextlib.contextmanager
def _as_new() -> Iterator[None]:
    """Torch as after its import; afterwards as before, and Wrong if the block has left something switched on."""
    grad, dtype, threads = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    hooks = dict(_hooks)
    torch.set_num_threads(1)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    before = _surroundings()
    try:
        yield
        after = _surroundings()
        after["a thread running"] |= before["a thread running"]  # one that ended meanwhile is not left
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        while (count := len(modes := _get_current_dispatch_mode_stack())) > before["a dispatch mode switched on"]:
            with contextlib.suppress(Exception):
                modes[-1].__exit__(None, None, None)  # a Meter has hooks and a patch to take off as well
            if len(_get_current_dispatch_mode_stack()) == count:
                _pop_mode()
        _hooks.clear()
        _hooks.update(hooks)
    if left := [words for words, value in after.items() if value != before[words]]:
        raise Wrong(f"right so far, but your code left {' and '.join(left)}; put it back when the work is done.")


# ---- answers of the expected kind


def a_function(answer: object, name: str) -> Callable:
    """The answer, if it is a function or a class. Raises Wrong."""
    if not callable(answer):
        raise Wrong(f"expected a function {name}, found {_kind(answer)}.")
    return answer


def two_floats(returned: object, name: str) -> tuple[float, float]:
    """What a training step returned, if it is (loss, norm), two floats. Raises Wrong: a tensor would keep its graph."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise Wrong(f"{name}(…): expected a pair (loss, norm), found {type(returned).__name__}.")
    if any(isinstance(value, torch.Tensor) for value in returned):
        raise Wrong(f"{name}(…): a tensor keeps its storage, and a loss its whole graph: return floats, by .item().")
    if not all(type(value) is float for value in returned):
        raise Wrong(f"{name}(…): expected two floats, found {', '.join(type(v).__name__ for v in returned)}.")
    return returned


def whole_bytes(answer: object, name: str) -> int:
    """The answer, if it is a whole number of bytes. Raises Wrong, and says what to do about fractions and texts."""
    if type(answer) is float and answer.is_integer():
        raise Wrong(f"{name}: bytes are whole numbers (int), found the float {answer!r}; divide with //.")
    if type(answer) is not int:
        raise Wrong(f"{name}: expected a whole number of bytes (int), found {_kind(answer)}.")
    return answer


def same_bytes(answer: object, expected: int, name: str, hint: str = "", *, secret: bool = False) -> None:
    """Raise Wrong unless the answer is exactly `expected` bytes; common slips are named.

    secret: the number itself is the answer, so the message does not give it away.
    """
    found = whole_bytes(answer, name)
    if found == expected:
        return
    if secret and found == 0:
        raise Wrong(f"there is no answer yet: {name} is 0.")
    slip = _slip(found, expected)
    many = "too many" if found > expected else "too few"
    if secret:
        raise Wrong(f"{name}: {found:,} B are {slip or many}. {hint}".rstrip())
    slip = slip or f"{abs(found - expected):,} B {many}"
    raise Wrong(f"{name} is {expected:,} B, you have {found:,} B: {slip}. {hint}".rstrip())


def _slip(found: int, expected: int) -> str:
    """What an answer looks like that is wrong by a well-known factor; "" if it looks like none."""
    if found <= 0 or expected <= 0:
        return ""
    more = {2: "twice as much as it should be", 4: "four times as much as it should be"}
    more[8] = "eight times as much as it should be: bits, not bytes?"
    less = {2: "half of what it should be", 8: "an eighth of what it should be"}
    less[4] = "a quarter of what it should be: elements of 4 bytes, not bytes?"
    if found % expected == 0 and found // expected in more:
        return more[found // expected]
    if expected % found == 0 and expected // found in less:
        return less[expected // found]
    return next((f"{u}, not bytes" for u, size in UNITS.items() if found == expected // size), "")


def a_mapping(answer: object, name: str) -> dict:
    """The answer, if it is a dict (or a kind of dict, such as a Counter). Raises Wrong."""
    if not isinstance(answer, dict):
        raise Wrong(f"{name}: expected a dict, found {_kind(answer)}.")
    return dict(answer)


def _kind(answer: object) -> str:
    try:
        text = repr(answer)
    except Exception:
        text = "…"
    text = text if len(text) <= 60 else text[:57] + "…"
    return "None (is a return missing?)" if answer is None else f"{type(answer).__name__} {text}"
