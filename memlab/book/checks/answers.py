"""What all checks share: an answer is run under limits, and what is wrong with it is said so that it teaches."""

from __future__ import annotations

import contextlib
import functools
import numbers
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch._C._autograd import _pop_saved_tensors_default_hooks, _top_saved_tensors_default_hooks
from torch.nn.modules import module as _module
from torch.overrides import _len_torch_function_stack, _pop_torch_function_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

from memlab.book.checks.limits import CHECK_BYTES, CHECK_SECONDS, TooLong, limited
from memlab.units import format_bytes

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_OURS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
_HOOKS = (
    _module._global_forward_hooks,
    _module._global_forward_pre_hooks,
    _module._global_backward_hooks,
    _module._global_backward_pre_hooks,
)


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
        _leave_autocast()  # here, since inference_mode puts back what it has found
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
        "a function mode switched on": _len_torch_function_stack(),
        "autocast switched on": torch.is_autocast_enabled("cpu"),
        "a hook on every module": sum(map(len, _HOOKS)),
        "hooks on all that is saved for backward": _hooks_on_saved(),
        "a thread running": set(threading.enumerate()),
    }


@contextlib.contextmanager
def _as_new() -> Iterator[None]:
    """Torch as after its import, and afterwards too, but for what it decides by (threads, autograd, dtype, hooks on
    modules): that is put back. Wrong if the block has left something switched on.
    """
    grad, dtype, threads = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    hooks = [dict(each) for each in _HOOKS]
    torch.set_num_threads(1)
    torch.set_default_device(None)
    _pop_function_modes()
    _pop_saved_hooks()
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
        _pop_function_modes()
        _pop_saved_hooks()
        _leave_autocast()
        for each, then in zip(_HOOKS, hooks, strict=True):
            each.clear()
            each.update(then)
    if left := [words for words, value in after.items() if value != before[words]]:
        raise Wrong(f"right so far, but your code left {' and '.join(left)}; put it back when the work is done.")


def _hooks_on_saved() -> bool:
    return _top_saved_tensors_default_hooks(False) is not None


def _pop_saved_hooks() -> None:
    while _hooks_on_saved():
        _pop_saved_tensors_default_hooks()


def _pop_function_modes() -> None:
    while _len_torch_function_stack():
        _pop_torch_function_stack()


def _leave_autocast() -> None:
    torch.set_autocast_enabled("cpu", False)
    while torch.autocast_decrement_nesting() >= 0:  # as long as one is entered, casts of weights are kept
        pass
    torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


_ON_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ON_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_on(model: torch.nn.Module) -> int:
    """How many hooks are on a model: on its modules, forward and backward, and on its parameters."""
    on_modules = sum(len(getattr(module, name)) for module in model.modules() for name in _ON_MODULES)
    return on_modules + sum(len(getattr(p, name, None) or ()) for p in model.parameters() for name in _ON_PARAMETERS)


# ---- answers of the expected kind


def a_function(answer: object, name: str) -> Callable:
    """The answer, if it is a function or a class. Raises Wrong."""
    if not callable(answer):
        raise Wrong(f"expected a function {name}, found {_kind(answer)}.")
    return answer


def a_method(made: object, name: str, by: str) -> Callable:
    """The method of this name that what an answer made has; by: "SplitMasters(…)", say. Raises Wrong."""
    if not callable(method := getattr(made, name, None)):
        raise Wrong(f"expected {by} to have a method {name}(), found {kind_of(made)}.")
    return method


def plain(answer: object) -> object:
    """A number of numpy's as Python's own, an int or a float, since it is one; anything else as it is."""
    if type(answer).__module__ == "numpy" and isinstance(answer, numbers.Real):
        return answer.item()
    return answer


def unchanged(given: list, before: list, where: str) -> None:
    """Raise Wrong if an answer has changed the list that it was given."""
    if given != before:
        raise Wrong(f"{where}: your function has changed the list that it was given.")


def two_floats(returned: object, name: str) -> tuple[float, float]:
    """What a training step returned, if it is (loss, norm), two floats. Raises Wrong: a tensor would keep its graph."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise Wrong(f"{name}(…): expected a pair (loss, norm), found {type(returned).__name__}.")
    if any(isinstance(value, torch.Tensor) for value in returned):
        raise Wrong(f"{name}(…): a tensor keeps its storage, and a loss its whole graph: return floats, by .item().")
    returned = tuple(map(plain, returned))
    if not all(type(value) is float for value in returned):
        raise Wrong(f"{name}(…): expected two floats, found {', '.join(type(v).__name__ for v in returned)}.")
    return returned


def whole_bytes(answer: object, name: str) -> int:
    """The answer, if it is a whole number of bytes. Raises Wrong, and says what to do about fractions and texts."""
    answer = plain(answer)
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


def kind_of(answer: object) -> str:
    """The answer's type in words; of None, which a function without a return gives, with the question for it."""
    return "None (is a return missing?)" if answer is None else type(answer).__name__


def _kind(answer: object) -> str:
    try:
        text = repr(answer)
    except Exception:
        text = "…"
    text = text if len(text) <= 60 else text[:57] + "…"
    return kind_of(answer) if answer is None else f"{kind_of(answer)} {text}"
