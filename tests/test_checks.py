"""The machinery behind the check cells: limits that hold and go, errors that teach, patches that do not count."""

import contextlib
import multiprocessing
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from memlab.book import checks
from memlab.book.checks import answers
from memlab.book.checks.answers import Wrong, a_mapping, exercise, same_bytes, whole_bytes
from memlab.book.checks.limits import TooLong, limited
from memlab.memory_timeline import Meter
from memlab.units import GiB, MiB

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's data")
in_subprocess = {"capture_output": True, "text": True, "timeout": 60, "cwd": Path(__file__).parents[1]}


def ask(answer):
    """A check of nothing: call the answer."""
    exercise(lambda function: function() or "Fine.")(answer)


def test_what_never_ends_is_ended_and_no_alarm_is_left():
    with pytest.raises(TooLong, match="after 0.2 s"), limited(0.2, GiB):
        while True:
            pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0) and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


@on_linux
@pytest.mark.parametrize("hoard", [lambda: bytearray(2 * GiB), lambda: torch.empty(2 * GiB)])
def test_a_request_beyond_the_limit_fails_and_the_limit_goes(hoard):
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises((MemoryError, RuntimeError)), limited(10, 512 * MiB):
        hoard()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with limited(10, 512 * MiB):
        assert len(bytearray(64 * MiB)) == 64 * MiB


@on_linux
def test_off_the_main_thread_memory_is_limited_and_time_is_not():
    said = []

    def off_the_main_thread():
        with limited(0.05, 64 * MiB):
            threading.Event().wait(0.2)
            try:
                bytearray(GiB)
            except MemoryError as error:
                said.append(type(error))

    thread = threading.Thread(target=off_the_main_thread)
    thread.start()
    thread.join()
    assert said == [MemoryError]


@on_linux
def test_a_guarded_process_cannot_hoard_nor_end_itself_by_chance_and_cells_after_exit_run():
    code = """
import os
from IPython.core.interactiveshell import InteractiveShell

class Shell(InteractiveShell):
    def ask_exit(self):
        print("the kernel ends")

shell = Shell.instance()
from memlab.book.checks.limits import guard
guard(256 * 2**20)
for attempt in (lambda: os._exit(3), os.abort, lambda: bytearray(2**30)):
    try:
        attempt()
    except (SystemExit, MemoryError) as error:
        print(type(error).__name__, error)
print(len(bytearray(2**20)))
for cell in ("exit()", "quit()", "1"):
    print(repr(shell.run_cell(cell).error_in_exec))
"""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], **in_subprocess)
    assert ended.returncode == 0, ended.stderr
    said = "would have ended the kernel, and the grading with it"
    for line in (f"SystemExit os._exit() {said}", f"SystemExit os.abort() {said}", "MemoryError ", str(2**20)):
        assert line in ended.stdout.splitlines()
    assert "the kernel ends" not in ended.stdout, ended.stderr
    assert ended.stdout.count(f"SystemExit('exit() {said}')") == 2
    assert ended.stdout.splitlines()[-1] == "None"


def raises(error):
    raise error


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: raises(NotImplementedError), "there is no answer yet"),
        (lambda: torch.nn.Module()(1), "your code raised NotImplementedError: Module \\[Module\\] is missing"),
        (lambda: 1 / 0, r"ZeroDivisionError: division by zero\n    in <lambda>: .*1 / 0"),
        (lambda: raises(MemoryError), "more than 1.0 GiB"),
        (lambda: raises(AssertionError("mine")), "AssertionError: mine"),
        (lambda: torch.set_grad_enabled(False) and "", "left autograd switched off"),
        (lambda: torch.set_default_dtype(torch.float64), "left another default dtype"),
        (lambda: TorchDispatchMode().__enter__() and "", "left a dispatch mode switched on"),
    ],
)
def test_whatever_goes_wrong_is_said_and_nothing_is_left(answer, said):
    with pytest.raises(Wrong, match=said) as found:
        ask(answer)
    assert found.value._render_traceback_() == [f"Not yet: {found.value}"]
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    assert len(_get_current_dispatch_mode_stack()) == 0


def test_a_thread_left_running_is_told():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    with pytest.raises(Wrong, match="left a thread running"):
        ask(thread.start)
    stop.set()
    thread.join()  # or the next check sees it end


def test_warnings_and_noise_cost_nothing_and_a_check_begins_with_autograd_on(capfd):
    def noisy():
        assert torch.is_grad_enabled()
        warnings.warn("look out", stacklevel=1)
        print("something", file=sys.stderr)

    with torch.no_grad():
        ask(noisy)
        assert not torch.is_grad_enabled()
    printed, complained = capfd.readouterr()
    assert printed == "something\nRight. Fine.\n" and complained == ""


NUMBERS = [
    (2000, "twice"),
    (250, "elements of 4 bytes"),
    (8000, "bits"),
    (125, "an eighth"),
    (1001, "1 B too many"),
    (-1000, "2,000 B too few"),
    (1000.0, "divide with //"),
    (1000.5, "expected a whole number"),
    (True, "bool"),
    (None, "is a return missing"),
]


@pytest.mark.parametrize(("found", "said"), NUMBERS)
def test_a_wrong_number_of_bytes_is_named_by_what_it_looks_like(found, said):
    with pytest.raises(Wrong, match=said):
        same_bytes(found, 1000, "it")


def test_a_number_in_another_unit_is_recognised_and_a_secret_is_kept():
    with pytest.raises(Wrong, match="MiB, not bytes"):
        same_bytes(7, 7 * MiB + 5, "it")
    with pytest.raises(Wrong) as found:
        same_bytes(1001, 1000, "it", "Look again.", secret=True)
    assert str(found.value) == "it: 1,001 B are too many. Look again."


def test_an_object_equal_to_everything_is_no_number_and_a_list_no_mapping():
    class Anything(int):
        __eq__ = lambda self, other: True  # noqa: E731
        __hash__ = int.__hash__

    with pytest.raises(Wrong, match="expected a whole number"):
        whole_bytes(Anything(), "it")
    with pytest.raises(Wrong, match="expected a dict"):
        a_mapping([], "it")


def test_what_an_answer_has_set_for_all_of_torch_does_not_reach_a_check():
    torch.set_default_device("meta")
    try:
        ask(lambda: raises(RuntimeError("meta")) if torch.empty(1).is_meta else None)
    finally:
        torch.set_default_device(None)
    with torch.inference_mode():
        ask(lambda: raises(RuntimeError("inference")) if torch.is_inference_mode_enabled() else None)


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16).__enter__(), "autocast switched on"),
        (lambda: torch.device("meta").__enter__(), "a function mode switched on"),
        (lambda: saved_tensors_hooks(torch.Tensor.double, torch.Tensor.float).__enter__(), "all that is saved"),
        (lambda: module.register_module_forward_pre_hook(lambda *_: None), "a hook on every module"),
    ],
)
def test_a_context_that_an_answer_enters_and_never_leaves_is_told_and_reaches_no_later_check(leave, said):
    def trained():
        layer = torch.nn.Linear(2, 2)
        y = layer(torch.ones(1, 2)).exp()
        y.sum().backward()
        assert y.dtype == torch.float32 and not y.is_meta and torch.isfinite(layer.weight.grad).all()

    before = [dict(hooks) for hooks in answers._HOOKS]
    with pytest.raises(Wrong, match=said):
        ask(lambda: leave() and "")
    assert [dict(hooks) for hooks in answers._HOOKS] == before
    assert (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()) == (1, 0)
    ask(trained)
    try:
        leave()  # in a cell, before a check
        ask(trained)
    finally:
        for hooks, then in zip(answers._HOOKS, before, strict=True):
            hooks.clear()
            hooks.update(then)
    trained()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="nothing ends it without an alarm")
def test_ranks_of_an_answer_that_nothing_stops_are_gone_when_its_time_is_over(monkeypatch):
    from memlab.book.checks.data_parallelism import averaged
    from tests.exercises_data_parallelism import WRONG

    space = {"__name__": "__main__", "contextmanager": contextlib.contextmanager}
    exec(WRONG["averaged-answer"]["an endless loop that nothing stops"], space)
    monkeypatch.setattr(answers, "CHECK_SECONDS", 0.5)
    with pytest.raises(Wrong, match="still running after 0.[345] s"):
        averaged(space["averaged"])
    assert multiprocessing.active_children() == []


def test_patched_checks_and_a_patched_meter_do_not_count():
    """In a process of its own, since memlab is taken from disk anew."""
    code = """
from importlib import reload
import memlab.memory_timeline
from memlab.book import checks

mine = checks.of("memory_timeline")
mine.leaks = lambda answer: print("Right.")
checks.of = lambda chapter: mine
memlab.memory_timeline.Meter = memlab.memory_timeline.meter.Meter = None
again = reload(checks).of("memory_timeline")
assert again is not mine and again.Meter is not None
try:
    again.leaks(lambda step: {})
except AssertionError as error:
    print("Not yet:", str(error).splitlines()[0])
"""
    ended = subprocess.run([sys.executable, "-c", code], **in_subprocess)
    assert ended.stdout == "Not yet: leaks(step) called step 0 times; expected 1 to 10.\n", ended.stderr


def test_a_first_import_takes_nothing_from_disk_anew():
    loaded = {name: module for name, module in sys.modules.items() if name.startswith("memlab.")}
    del sys.modules["memlab.book.checks"]
    try:
        __import__("memlab.book.checks")
        assert all(sys.modules[name] is module for name, module in loaded.items() if name != "memlab.book.checks")
    finally:
        sys.modules["memlab.book.checks"] = checks


def test_a_meter_that_an_answer_left_on_takes_its_patch_and_hooks_off():
    @exercise
    def check(answer):
        answer()
        return "right"

    def left():
        resize_ = vars(torch.UntypedStorage).get("resize_")  # PyTorch's own memory tracker leaves one here
        return len(module._global_forward_pre_hooks), len(module._global_forward_hooks), resize_

    before = left()
    with pytest.raises(Wrong, match="left a dispatch mode switched on"):
        check(lambda: Meter().__enter__())
    assert left() == before
