"""Whatever happens to a monitor, the training goes on, hears of it once, and nothing is left behind."""

import contextlib
import gc
import io
import linecache
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path

import pytest

from memlab.memory_monitoring import (
    Gone,
    MemoryWarning,
    Monitor,
    ProcessMemory,
    StepHistory,
    high_water,
    read_log,
    sources,
)
from memlab.memory_monitoring import monitor as monitor_page
from memlab.memory_monitoring.forecasts import Outlook
from tests.harness import refusals, refused
from tests.test_memory_monitoring import Figures, monitors_threads, run

pytestmark = pytest.mark.skipif(not sources.HAS_PROC, reason="counts threads and files in /proc")
PACKAGE = str(Path(monitor_page.__file__).parent)


@pytest.fixture(autouse=True)
def nothing_left():
    """No thread, no file, no mark of a monitor is there after a test that was not there before."""
    files = len(os.listdir("/proc/self/fd"))
    yield
    assert monitors_threads() == []
    if len(os.listdir("/proc/self/fd")) > files:
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files
    assert not any(table.marks for table in high_water._tables.values())


def kinds(monitor):
    return [alarm.kind for alarm in monitor.alarms]


def wait_until(true, seconds=20):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.002)


class Failing(Figures):
    """A source that raises what it is told to."""

    error = None

    def read(self):
        if self.error is not None:
            raise self.error
        return super().read()


def test_when_all_sources_are_gone_the_loop_still_counts_its_steps(tmp_path):
    source, first = Failing(allocated=1), Failing(driver=1)
    with (
        pytest.warns(MemoryWarning, match="fell off; watching what is left|nothing is left to watch"),
        Monitor(1000, every=0.002, sources=[first, source], log=tmp_path / "log") as monitor,
    ):
        first.error = Gone("gpu 0 fell off")
        wait_until(lambda: monitor.samples[-1].figures == {"allocated": 1})
        monitor.step()
        source.error = Gone("it ended")
        for _ in range(10):
            monitor.step()
    assert monitor.steps == 11 and monitor.history.steps == 1 and kinds(monitor) == ["gone"] * 2
    assert [line["end"] for line in read_log(tmp_path / "log") if line["kind"] == "step"] == [1] + [None] * 10


def test_a_source_that_fails_is_told_once_and_asked_no_more():
    source, other = Failing(allocated=1), Figures(driver=1)
    with (
        pytest.warns(MemoryWarning, match=r"figures failed: OSError\('busy'\); watching what is left"),
        Monitor(every=1000, sources=[source, other]) as monitor,
    ):
        monitor.step()
        source.error = OSError("busy")
        monitor.step()
        source.error = None
        monitor.step()
    assert monitor.steps == 3 and monitor.history.steps == 1 and kinds(monitor) == ["source"]
    assert monitor.samples[-1].figures == {"driver": 1}


def test_a_process_that_ends_is_gone_also_before_its_parent_has_asked_how():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    memory = ProcessMemory(process.pid)
    with (
        pytest.warns(MemoryWarning, match=f"process {process.pid} has ended; nothing is left to watch"),
        Monitor(every=0.002, sources=[ProcessMemory(process.pid)]) as monitor,
    ):
        assert monitor.samples[-1].figures["resident"] > 0
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        wait_until(lambda: monitor.alarms)
        monitor.step()
    with pytest.raises(Gone, match="has ended"):
        memory.read()
    memory.close()
    process.communicate()
    with pytest.raises(Gone, match="has ended, or was never there"):
        ProcessMemory(process.pid)


def test_read_log_leaves_out_whatever_is_no_document_and_a_torn_log_is_continued_on_a_line_of_its_own(tmp_path):
    (tmp_path / "log").write_bytes(b'\xff\xfe\n[1]\n7\n\n{"kind":"end"}\n' + b"[" * 100_000 + b'\n{"kind":')
    assert list(read_log(tmp_path / "log")) == [{"kind": "end"}]
    with Monitor(every=1000, sources=[Figures(allocated=1)], log=tmp_path / "log"):
        pass
    assert [line["kind"] for line in read_log(tmp_path / "log")] == ["end", "start", "sample", "end"]


class Unspeakable(Exception):
    def __repr__(self):
        raise ValueError("no words")


@pytest.mark.parametrize("broken", [False, True])
def test_a_loop_in_which_warnings_are_errors_goes_on_and_the_message_goes_to_stderr(monkeypatch, capsys, broken):
    source = Figures(allocated=1)
    if broken:
        closed = io.StringIO()
        closed.close()
        monkeypatch.setattr(sys, "stderr", closed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Monitor(1000, every=0.002, warn_at=0.5, sources=[source]) as monitor:
            source.figures["allocated"] = 600
            wait_until(lambda: monitor.alarms)
            run(monitor, source, [600, 950, 950])
            looks = len(monitor.samples)
            wait_until(lambda: len(monitor.samples) > looks)
    assert kinds(monitor) == ["threshold"] and monitor.steps == 3
    assert broken or capsys.readouterr().err.count("MemoryWarning: ") == 1


def test_a_warning_from_step_points_at_the_loop():
    source = Figures(allocated=1)
    with pytest.warns(MemoryWarning) as caught, Monitor(1000, every=1000, sources=[source]) as monitor:
        source.figures["allocated"] = 950
        monitor.step()
    assert caught[0].filename == __file__


def test_an_exception_in_the_callback_is_an_alarm_and_the_next_alarm_still_calls_it():
    source, called = Figures(allocated=1), []

    def fails(alarm):
        called.append(alarm.kind)
        raise ZeroDivisionError("callback")

    with (
        pytest.warns(MemoryWarning, match=r"on_alarm raised ZeroDivisionError\('callback'\); the run goes on"),
        Monitor(1000, every=1000, sources=[source], on_alarm=fails) as monitor,
    ):
        run(monitor, source, [950])
        monitor.changed()
        run(monitor, source, [950])
    assert called == ["threshold"] * 2 and kinds(monitor) == ["threshold", "callback"] * 2 and monitor.steps == 2


def test_a_listener_that_raises_is_called_no_more_and_the_thread_looks_on():
    heard = []

    def fails(sample):
        raise ValueError("listener")

    with (
        pytest.warns(MemoryWarning, match="a listener raised"),
        Monitor(every=0.002, sources=[Figures(allocated=1)]) as monitor,
    ):
        monitor.listeners += [fails, heard.append]
        wait_until(lambda: len(heard) > 3)
    assert kinds(monitor) == ["listener"] and monitor.listeners == [heard.append]


@pytest.mark.parametrize(("owner", "name"), [(Outlook, "call"), (StepHistory, "append")])
def test_a_fault_of_the_monitors_own_is_told_once_and_the_loop_goes_on(monkeypatch, owner, name):
    def broken(*arguments):
        raise AssertionError("a bug")

    monkeypatch.setattr(owner, name, broken)
    with (
        pytest.warns(MemoryWarning, match=r"the monitor failed: AssertionError\('a bug'\); the run goes on"),
        Monitor(1000, every=1000, sources=[Figures(allocated=1)]) as monitor,
    ):
        for _ in range(20):
            monitor.step()
    assert monitor.steps == 20 and kinds(monitor) == ["monitor"]


def test_after_a_full_disk_the_torn_line_is_left_out_and_the_end_says_how_many_are_missing(tmp_path):
    path, (_, hard) = tmp_path / "log", resource.getrlimit(resource.RLIMIT_FSIZE)
    source = Figures(allocated=1)
    with pytest.warns(MemoryWarning), Monitor(every=1000, sources=[source], log=path) as monitor:
        monitor.step()
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, hard))  # in the middle of a line
        try:
            for _ in range(5):
                monitor.step()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        monitor.step()
    lines = list(read_log(path))
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 7]
    assert lines[-1]["kind"] == "end" and lines[-1]["lost"] == 5
    assert [len(text.splitlines()) - len(lines) for text in [path.read_text()]] == [1]


def forked(function):
    """Run in a fork; its exit status."""
    pid = os.fork()
    if not pid:
        signal.alarm(20)  # a lock that is held for ever ends the child, and the test fails
        try:
            function()
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forks_copy_is_inert_and_silent_and_the_parent_does_not_notice(tmp_path):
    with Monitor(every=0.001, log=tmp_path / "log", watch="resident") as monitor:
        monitor.step()
        written = [line for line in read_log(tmp_path / "log") if line["kind"] != "sample"]

        def child():
            assert monitors_threads() == [] and not monitor.running
            for _ in range(5):
                monitor.step()
            monitor.changed()
            monitor.__exit__(None, None, None)
            assert monitor.steps == 1

        assert [forked(child) for _ in range(5)] == [0] * 5
        assert [line for line in read_log(tmp_path / "log") if line["kind"] != "sample"] == written
        monitor.step()
        assert len(monitors_threads()) == 1
    assert [line["kind"] for line in read_log(tmp_path / "log") if line["kind"] != "sample"][-2:] == ["step", "end"]


def test_a_fork_while_locks_are_held_can_leave_the_block_and_watch_itself(tmp_path):
    with Monitor(every=1000, watch="resident", log=tmp_path / "log") as monitor:
        table = high_water._tables[os.getpid()]
        held, done = threading.Event(), threading.Event()

        def hold():
            with table.lock, table.marks["VmHWM"]._lock, monitor._log._lock:
                held.set()
                done.wait(30)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()

        def child():
            monitor.step()
            monitor.__exit__(None, None, None)
            with Monitor(every=0.001, watch="resident") as own:
                own.step()
                assert own.exact_peaks and own.samples[-1].figures["resident"] > 0
            gc.collect()

        status = forked(child)
        done.set()
        holder.join()
        assert status == 0
        monitor.step()
    assert monitor.steps == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(2), RuntimeError("out of memory"), Unspeakable()])
def test_whatever_ends_the_loop_goes_on_its_way_and_stands_in_the_end_line(tmp_path, error):
    with pytest.raises(type(error)), Monitor(every=0.01, log=tmp_path / "log") as monitor:
        monitor.step()
        raise error
    said = "Unspeakable" if isinstance(error, Unspeakable) else repr(error)
    end = {"kind": "end", "run": "", "steps": 1, "lost": 0, "error": said}
    assert list(read_log(tmp_path / "log"))[-1] | {"run": ""} == end


@pytest.mark.parametrize("stride", [31, pytest.param(3, marks=pytest.mark.thorough)])
def test_an_interrupt_at_any_line_leaves_no_thread_and_an_ended_log(tmp_path, stride):
    def train():
        source = Figures(allocated=1)
        with Monitor(1000, every=1000, sources=[source, ProcessMemory()], log=tmp_path / "log") as monitor:
            run(monitor, source, [1, 2])

    lines, ended = 1, 0
    while interrupted_at(lines, train):
        lines += stride
        assert monitors_threads() == [], lines
        assert not any(table.marks for table in high_water._tables.values()), lines
        if (tmp_path / "log").exists():
            found = list(read_log(tmp_path / "log"))
            assert not found or found[-1]["kind"] == "end", (lines, found[-1])
            ended += bool(found)
            (tmp_path / "log").unlink()
    assert lines > 100 and ended > 300 / stride


class Waits(Figures):
    """A source that its monitor's thread hangs in until it is released."""

    def __init__(self, seconds):
        super().__init__(allocated=1)
        self.seconds, self.looking, self.release = seconds, threading.Event(), threading.Event()

    def read(self):
        if threading.current_thread() is not threading.main_thread():
            self.looking.set()
            self.release.wait(self.seconds)
        return super().read()


def in_a_finalizer(frame):
    while frame is not None and frame.f_code.co_filename != weakref.__file__:
        frame = frame.f_back
    return frame is not None


def interrupted_at(line, train):
    """Raise KeyboardInterrupt at the n-th line of the package that this thread runs. Returns whether it got there."""
    left = [line]

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE) or in_a_finalizer(frame):
            return None  # what interrupts a finalizer is lost in Python, whoever wrote it
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not text.startswith(("with ", "try:")):  # there a trace comes where no signal does
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        train()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    assert left[0] > 0
    return False


def test_a_source_that_hangs_does_not_hang_the_exit(monkeypatch):
    monkeypatch.setattr(monitor_page, "JOIN_SECONDS", 0.05)
    source = Waits(30)
    with (
        pytest.warns(MemoryWarning, match="hangs, and its thread with it"),
        Monitor(every=0.001, sources=[source]) as monitor,
    ):
        source.looking.wait()
        monitor.step()
    assert kinds(monitor) == ["monitor"]
    source.release.set()
    wait_until(lambda: not monitors_threads())


def without_a_budget():
    with Monitor(every=1000, sources=[Figures(allocated=1)]) as monitor:
        monitor.forecast()


def entered(**arguments):
    def call():
        with Monitor(**{"sources": [Figures(allocated=1)]} | arguments):
            pass

    return call


REFUSALS = {
    "a budget of nothing": (lambda: Monitor(budget=0), ValueError, "a budget above 0 bytes, found 0"),
    "looks without a pause": (lambda: Monitor(every=0), ValueError, "found every=0"),
    "looks at no time": (lambda: Monitor(every=float("nan")), ValueError, "found every=nan"),
    "a threshold of 0": (lambda: Monitor(budget=1, warn_at=0), ValueError, "warn_at in (0, 1]…found 0"),
    "one in percent": (lambda: Monitor(budget=1, warn_at=90), ValueError, "warn_at in (0, 1]…found 90"),
    "one of text": (lambda: Monitor(warn_at="0.9"), ValueError, "warn_at in (0, 1]…found '0.9'"),
    "a level that no source has": (entered(watch="driver"), ValueError, "level 'driver', found allocated; choose"),
    "a source without figures": (entered(sources=[Figures()]), ValueError, "a source with figures, found none"),
    "a log in no folder": (entered(log="/nowhere/log"), FileNotFoundError, "make its folder, or give the log another"),
    "a log that is a folder": (entered(log="/"), IsADirectoryError, "expected a file that can be written to"),
    "a forecast without a budget": (without_a_budget, ValueError, "expected a Monitor with a budget"),
}


@refusals(REFUSALS)
def test_what_makes_no_sense_is_refused(call, error, words):
    refused(call, error, words)


def test_a_monitor_is_for_one_block_and_one_that_cannot_begin_ends_its_log(tmp_path):
    with Monitor(every=1000, sources=[Figures(allocated=1)]) as monitor:
        refused(monitor.__enter__, RuntimeError, "make another one")
        monitor.step()
    refused(monitor.step, RuntimeError, "step() inside the monitor's with block")
    refused(monitor.__enter__, RuntimeError, "make another one")
    assert monitor.steps == 1
    refused(entered(sources=[], log=tmp_path / "log"), ValueError, "a source with figures")
    assert [line["kind"] for line in read_log(tmp_path / "log")] == ["end"]


def test_an_abandoned_loop_that_the_monitors_own_thread_collects_ends_with_its_log(tmp_path):
    def loop():
        with Monitor(every=0.002, sources=[Figures(allocated=1)], log=tmp_path / "log") as monitor:
            monitor.step()
            yield monitor

    class Cycle:
        pass

    abandoned = Cycle()
    abandoned.itself, abandoned.loop = abandoned, loop()
    monitor = next(abandoned.loop)
    gc.disable()  # in whichever thread it happens to run: here, in the monitor's
    try:
        del abandoned
        monitor.listeners.append(lambda sample: gc.collect())
        wait_until(lambda: not monitors_threads())
    finally:
        gc.enable()
    assert kinds(monitor) == [] and not monitor.running
    assert [line["kind"] for line in read_log(tmp_path / "log")][-2:] == ["step", "end"]


def test_a_monitor_that_nobody_holds_ends_its_thread_at_once():
    monitor = Monitor(every=1000, watch="resident")
    monitor.__enter__()
    gone = weakref.ref(monitor)
    (thread,) = monitors_threads()
    del monitor
    gc.collect()
    thread.join(20)
    assert gone() is None and not thread.is_alive()


def test_a_step_that_hangs_is_sampled_and_logged_once_a_second_at_most(tmp_path):
    source = Figures(allocated=1)
    with (
        pytest.warns(MemoryWarning, match="950 B of 1000 B"),
        Monitor(1000, every=0.005, sources=[source], log=tmp_path / "log") as monitor,
    ):
        source.figures["allocated"] = 950
        begin = time.monotonic()
        while len(monitor.samples) < 40 or time.monotonic() < begin + 1.3:
            assert time.monotonic() < begin + 60
            time.sleep(0.05)
    lasted = time.monotonic() - begin
    assert 2 <= len([line for line in read_log(tmp_path / "log") if line["kind"] == "sample"]) <= lasted + 2


LEFT_RUNNING = """
import sys, torch
from memlab.memory_monitoring import Monitor
monitor = Monitor("1 KiB", every=0.0005, log=sys.argv[1], watch="resident")
monitor.__enter__()
monitor.step()
"""


def test_an_interpreter_that_ends_while_a_monitor_runs_ends_without_a_word(tmp_path):
    command = [sys.executable, "-W", "error::UserWarning", "-c", LEFT_RUNNING, str(tmp_path / "log")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr and "Fatal" not in ended.stderr
    assert ended.stderr.count("MemoryWarning") == 1
    assert "step" in [line["kind"] for line in read_log(tmp_path / "log")]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes with a name")
def test_a_log_into_a_pipe_that_nobody_reads_loses_lines_and_does_not_stop_the_training(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.warns(MemoryWarning, match="lines of the log"), Monitor(every=1000, log=tmp_path / "pipe") as monitor:
        training = threading.Thread(target=lambda: [monitor.step() for _ in range(3000)], daemon=True)
        training.start()
        training.join(10)
        stuck = training.is_alive()
        if stuck:  # read the pipe empty, or this test would never end
            reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
            while training.is_alive():
                with contextlib.suppress(BlockingIOError):
                    os.read(reader, 1 << 16)
            os.close(reader)
    assert not stuck and kinds(monitor) == ["log"]


def test_a_figure_that_is_no_number_or_below_zero_is_its_sources_trouble_and_every_step_is_counted():
    source, other = Failing(driver=1), Figures(allocated=5)
    with (
        pytest.warns(MemoryWarning) as told,
        Monitor(1000, every=0.002, sources=[other, source]) as monitor,
    ):
        source.figures["driver"] = None
        wait_until(lambda: monitor.alarms)
        seen = len(monitor.samples)
        wait_until(lambda: len(monitor.samples) > seen + 3)
        assert monitor.samples[-1].figures == {"allocated": 5}
        run(monitor, other, [5, 5, -1, -1, 5])
    words = " ".join(str(one.message) for one in told)
    assert "figures failed: TypeError" in words and "ValueError" in words and "expected bytes of at least 0" in words
    assert monitor.steps == 5 and kinds(monitor) == ["source", "source"]
