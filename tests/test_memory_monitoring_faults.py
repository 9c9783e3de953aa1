"""Whatever happens to a monitor, the training goes on, hears of it once, and nothing is left behind."""

import contextlib
import gc
import io
import linecache
import multiprocessing
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
import torch

from memlab.memory_monitoring import Gone, MemoryWarning, Monitor, ProcessMemory, high_water, read_log, sources
from memlab.memory_monitoring import monitor as monitor_page
from memlab.memory_monitoring.sampler import Sampler
from memlab.memory_monitoring.steps import StepHistory
from memlab.memory_monitoring.thresholds import Outlook
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


# ---- sources in trouble


class Failing(Figures):
    """A source that raises what it is told to."""

    error = None

    def read(self):
        if self.error is not None:
            raise self.error
        return super().read()


def test_a_source_that_is_gone_is_told_once_and_the_rest_is_watched():
    ending, staying = Failing(driver=1), Figures(allocated=2)
    with (
        pytest.warns(MemoryWarning, match="gpu 0 fell off; watching what is left"),
        Monitor(every=0.002, sources=[ending, staying]) as monitor,
    ):
        ending.error = Gone("gpu 0 fell off")
        wait_until(lambda: monitor.samples[-1].figures == {"allocated": 2})
        run(monitor, staying, [3, 4, 5])
    assert kinds(monitor) == ["gone"] and list(monitor.history.ends) == [3, 4, 5]


def test_when_all_sources_are_gone_the_loop_still_counts_its_steps(tmp_path):
    source = Failing(allocated=1)
    with (
        pytest.warns(MemoryWarning, match="nothing is left to watch"),
        Monitor(1000, every=0.002, sources=[source], log=tmp_path / "log") as monitor,
    ):
        monitor.step()
        source.error = Gone("it ended")
        for _ in range(10):
            monitor.step()
    assert monitor.steps == 11 and monitor.history.steps == 1 and kinds(monitor) == ["gone"]
    assert [line["end"] for line in read_log(tmp_path / "log") if line["kind"] == "step"] == [1] + [None] * 10


def test_a_figure_that_is_no_number_is_its_sources_trouble_and_the_others_are_sampled():
    source, other = Failing(driver=1), Figures(allocated=1)
    with (
        pytest.warns(MemoryWarning, match="figures failed: TypeError"),
        Monitor(every=0.002, sources=[other, source]) as monitor,
    ):
        source.figures["driver"] = None
        wait_until(lambda: monitor.alarms)
        seen = len(monitor.samples)
        wait_until(lambda: len(monitor.samples) > seen + 5)
    assert monitor.samples[-1].figures == {"allocated": 1} and kinds(monitor) == ["source"]


def test_a_figure_below_zero_is_its_sources_trouble_and_every_step_is_counted():
    source = Figures(allocated=5)
    with (
        pytest.warns(MemoryWarning, match="figures failed: ValueError.*expected bytes of at least 0, found.*-1"),
        Monitor(1000, every=1000, sources=[source]) as monitor,
    ):
        run(monitor, source, [5, 5, -1, -1, 5])
    assert monitor.steps == 5 and kinds(monitor) == ["source"]


def test_a_driver_that_stumbles_is_left_alone_for_a_while_and_asked_again(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    source, other = Failing(allocated=1), Figures(driver=1)
    with (
        pytest.warns(MemoryWarning, match=r"figures failed: OSError\('busy'\); it is asked again later"),
        Monitor(every=1000, sources=[source, other]) as monitor,
    ):
        source.error = OSError("busy")
        monitor.step()
        source.error = None
        monitor.step()
        assert monitor.history.steps == 0
        now[0] += 1.1
        monitor.step()
        assert monitor.history.steps == monitor.steps == 3  # those without figures have their places
        source.error = OSError("busy")
        monitor.step()
        source.error = None
        now[0] += 1.1  # the second time it is left alone for twice as long
        monitor.step()
        assert monitor.history.steps == 3
        now[0] += 1.1
        monitor.step()
    assert monitor.history.steps == monitor.steps == 6 and kinds(monitor) == ["source"]


def test_a_process_that_ends_is_gone_also_before_its_parent_has_asked_how():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with (
        pytest.warns(MemoryWarning, match=f"process {process.pid} has ended; nothing is left to watch"),
        Monitor(every=0.002, sources=[ProcessMemory(process.pid)]) as monitor,
    ):
        assert monitor.samples[-1].figures["resident"] > 0
        process.communicate(b"\n")
        wait_until(lambda: monitor.alarms)
        monitor.step()
    with pytest.raises(Gone, match="has ended, or was never there"):
        ProcessMemory(process.pid)


def test_a_process_that_was_killed_and_not_yet_waited_for_is_gone():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    memory = ProcessMemory(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    with pytest.raises(Gone, match="has ended"):
        memory.read()
    memory.close()
    process.communicate()


# ---- warnings that are errors, and a closed stderr


@pytest.mark.parametrize("broken", [False, True])
def test_a_loop_in_which_warnings_are_errors_goes_on_and_the_message_goes_to_stderr(monkeypatch, capsys, broken):
    source = Figures(allocated=1)
    if broken:
        closed = io.StringIO()
        closed.close()
        monkeypatch.setattr(sys, "stderr", closed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Monitor(1000, every=0.002, warn_at=(0.5, 0.9), sources=[source]) as monitor:
            source.figures["allocated"] = 600
            wait_until(lambda: monitor.alarms)
            run(monitor, source, [600, 950, 950])
            looks = len(monitor.samples)
            wait_until(lambda: len(monitor.samples) > looks)
    assert kinds(monitor) == ["threshold"] * 2 and monitor.steps == 3
    assert broken or capsys.readouterr().err.count("MemoryWarning: ") == 2


def test_a_warning_from_step_points_at_the_loop():
    source = Figures(allocated=1)
    with pytest.warns(MemoryWarning) as caught, Monitor(1000, every=1000, sources=[source]) as monitor:
        source.figures["allocated"] = 950
        monitor.step()
    assert caught[0].filename == __file__


def test_python_shows_a_memory_warning_unasked():
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category, append=True)  # Python's own filters
        warnings.warn("told", MemoryWarning, stacklevel=1)
    assert len(shown) == 1


# ---- what the user's own functions raise


def test_an_exception_in_the_callback_is_an_alarm_and_the_next_alarm_still_calls_it():
    source, called = Figures(allocated=1), []

    def fails(alarm):
        called.append(alarm.kind)
        raise ZeroDivisionError("callback")

    with (
        pytest.warns(MemoryWarning, match=r"on_alarm raised ZeroDivisionError\('callback'\); the run goes on"),
        Monitor(1000, every=1000, warn_at=(0.5, 0.9), sources=[source], on_alarm=fails) as monitor,
    ):
        run(monitor, source, [600, 950])
    assert called == ["threshold"] * 2 and kinds(monitor) == ["threshold", "callback"] * 2 and monitor.steps == 2


@pytest.mark.parametrize("error", [ValueError("listener"), SystemExit(3)])
def test_a_listener_that_raises_is_called_no_more_and_the_thread_looks_on(error):
    heard = []

    def fails(sample):
        raise error

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


# ---- the log


def test_a_log_that_cannot_be_written_says_so_before_the_training_begins(tmp_path):
    with pytest.raises(FileNotFoundError, match="make its folder, or give the log another path.*nowhere"):
        Monitor(sources=[Figures(allocated=1)], log=tmp_path / "nowhere" / "run.jsonl").__enter__()
    with pytest.raises(IsADirectoryError, match="expected a file that can be written to"):
        Monitor(sources=[Figures(allocated=1)], log=tmp_path).__enter__()


def test_a_full_disk_stops_the_log_and_not_the_loop(monkeypatch):
    with (
        pytest.warns(MemoryWarning, match="lines of the log /dev/full are lost: .*No space left.*; the run goes on"),
        Monitor(every=1000, sources=[Figures(allocated=1)], log="/dev/full") as monitor,
    ):
        for _ in range(10):
            monitor.step()
    assert monitor.steps == 10 and kinds(monitor) == ["log"]


def test_after_a_full_disk_the_torn_line_is_left_out_and_a_gap_says_how_many_are_missing(tmp_path):
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
    assert [line["lost"] for line in lines if line["kind"] == "gap"] == [5] and lines[-1]["lost"] == 5
    assert [len(text.splitlines()) - len(lines) for text in [path.read_text()]] == [1]


def test_a_log_whose_folder_is_deleted_is_told_and_begun_again_when_the_folder_is_back(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor_page, "LOG_SECONDS", 0.0)
    folder = tmp_path / "runs"
    folder.mkdir()
    with (
        pytest.warns(MemoryWarning, match="log was deleted"),
        Monitor(every=0.002, sources=[Figures(allocated=1)], log=folder / "log") as monitor,
    ):
        monitor.step()
        (folder / "log").unlink()
        folder.rmdir()
        wait_until(lambda: "log" in kinds(monitor))
        monitor.step()
        folder.mkdir()
        wait_until(lambda: (folder / "log").exists())
        monitor.step()
    lines = list(read_log(folder / "log"))
    assert "gap" in [line["kind"] for line in lines] and lines[-1]["kind"] == "end"
    assert [line["step"] for line in lines if line["kind"] == "step"][-1] == 3


def test_a_log_that_a_killed_run_left_torn_is_continued_on_a_line_of_its_own(tmp_path):
    (tmp_path / "log").write_text('{"kind":"step","run":"dead')
    with Monitor(every=1000, sources=[Figures(allocated=1)], log=tmp_path / "log"):
        pass
    assert [line["kind"] for line in read_log(tmp_path / "log")] == ["start", "sample", "end"]


def test_read_log_leaves_out_whatever_is_no_document(tmp_path):
    (tmp_path / "log").write_bytes(b'\xff\xfe\n[1]\n7\n\n{"kind":"end"}\n' + b"[" * 100_000 + b'\n{"kind":')
    assert list(read_log(tmp_path / "log")) == [{"kind": "end"}]


def test_lines_of_monitors_that_share_a_file_do_not_mix(tmp_path):
    def train(source):
        with Monitor(every=0.001, sources=[source], log=tmp_path / "log") as monitor:
            run(monitor, source, range(300))

    threads = [threading.Thread(target=train, args=(Figures(allocated=1),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = list(read_log(tmp_path / "log"))
    assert len(lines) == len((tmp_path / "log").read_text().splitlines())
    by_run = {name: [line for line in lines if line["run"] == name] for name in {line["run"] for line in lines}}
    assert len(by_run) == 3
    for found in by_run.values():
        assert [line["step"] for line in found if line["kind"] == "step"] == list(range(1, 301))


def test_a_killed_run_leaves_every_line_that_was_written(tmp_path):
    pid = os.fork()
    if not pid:
        source = Figures(allocated=1)
        monitor = Monitor(every=1000, sources=[source], log=tmp_path / "log").__enter__()
        run(monitor, source, range(50))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    lines = list(read_log(tmp_path / "log"))
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 51))


# ---- forks


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
    with Monitor(1000, every=0.001, log=tmp_path / "log", watch="resident", warn_at=[]) as monitor:
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
            with table.lock, table.marks["VmHWM"]._lock, monitor._log._lock, monitor._thresholds._lock:
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


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_of_a_data_loader_are_forked_inside_the_block(tmp_path):
    with Monitor(every=0.001, log=tmp_path / "log") as monitor:
        loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork")
        for _ in loader:
            monitor.step()
        process = multiprocessing.get_context("fork").Process(target=monitor.step)
        process.start()
        process.join()
        assert process.exitcode == 0
    lines = [line for line in read_log(tmp_path / "log") if line["kind"] != "sample"]
    assert [line["kind"] for line in lines] == ["start"] + ["step"] * 8 + ["end"]


# ---- interrupts and other ways out


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(2), RuntimeError("out of memory"), GeneratorExit()])
def test_whatever_ends_the_loop_goes_on_its_way_and_stands_in_the_end_line(tmp_path, error):
    with pytest.raises(type(error)), Monitor(every=0.01, log=tmp_path / "log") as monitor:
        monitor.step()
        raise error
    assert list(read_log(tmp_path / "log"))[-1] | {"run": ""} == {
        "kind": "end",
        "run": "",
        "steps": 1,
        "lost": 0,
        "error": repr(error),
    }


def test_an_error_that_cannot_be_shown_is_named_in_the_end_line(tmp_path):
    class Broken(Exception):
        def __repr__(self):
            raise ValueError("no words")

    with pytest.raises(Broken), Monitor(every=1000, sources=[Figures(allocated=1)], log=tmp_path / "log"):
        raise Broken
    assert list(read_log(tmp_path / "log"))[-1]["error"] == "Broken"


STRIDE = 7  # 1 tries every line, and takes seven times as long


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


def test_an_interrupt_at_any_line_leaves_no_thread_and_an_ended_log(tmp_path):
    def train():
        source = Figures(allocated=1)
        with Monitor(1000, every=1000, sources=[source, ProcessMemory()], log=tmp_path / "log") as monitor:
            run(monitor, source, [1, 2])

    lines, ended = 1, 0
    while interrupted_at(lines, train):
        lines += STRIDE
        assert monitors_threads() == [], lines
        assert not any(table.marks for table in high_water._tables.values()), lines
        if (tmp_path / "log").exists():
            found = list(read_log(tmp_path / "log"))
            assert not found or found[-1]["kind"] == "end", (lines, found[-1])
            ended += bool(found)
            (tmp_path / "log").unlink()
    assert lines > 100 and ended > 50


def test_an_interrupt_while_the_thread_is_waited_for_ends_it_all_the_same(tmp_path):
    class Slow(Figures):
        def read(self):
            if threading.current_thread() is not threading.main_thread():
                looking.set()
                time.sleep(0.3)
            return super().read()

    looking, source = threading.Event(), Slow(allocated=1)
    monitor = Monitor(every=0.001, sources=[source], log=tmp_path / "log")
    with pytest.raises(KeyboardInterrupt), monitor:
        looking.wait()
        main = threading.main_thread().ident
        threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT)).start()
    assert monitors_threads() == [] and list(read_log(tmp_path / "log"))[-1]["kind"] == "end"


def test_a_source_that_hangs_does_not_hang_the_exit(monkeypatch):
    monkeypatch.setattr(monitor_page, "JOIN_SECONDS", 0.05)
    release, hangs = threading.Event(), threading.Event()

    class Hanging(Figures):
        def read(self):
            if threading.current_thread() is not threading.main_thread():
                hangs.set()
                release.wait(30)
            return super().read()

    with (
        pytest.warns(MemoryWarning, match="hangs, and its thread with it"),
        Monitor(every=0.001, sources=[Hanging(allocated=1)]) as monitor,
    ):
        hangs.wait()
        monitor.step()
    assert kinds(monitor) == ["monitor"]
    release.set()
    wait_until(lambda: not monitors_threads())


def test_a_sampler_that_is_stopped_in_its_own_thread_does_not_wait_for_itself():
    owner, stopped = Figures(), []

    def look(owner):
        stopped.append(sampler.stop(2))  # False, if it waits for itself in vain
        return 0.0

    sampler = Sampler(owner, look, 0.001)
    sampler.start()
    wait_until(lambda: not monitors_threads())
    assert stopped == [True]


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


# ---- misuse


def test_a_monitor_is_for_one_block():
    monitor = Monitor(every=1000, sources=[Figures(allocated=1)])
    with pytest.raises(RuntimeError, match=r"step\(\) inside the monitor's with block"):
        monitor.step()
    with monitor:
        with pytest.raises(RuntimeError, match="make another one"), monitor:
            pass
        monitor.step()
    with pytest.raises(RuntimeError, match=r"step\(\) inside the monitor's with block"):
        monitor.step()
    with pytest.raises(RuntimeError, match="make another one"):
        monitor.__enter__()
    assert monitor.steps == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"budget": 0}, "a budget above 0 bytes, found 0"),
        ({"budget": -1}, "at least 0 bytes, found -1"),
        ({"budget": "16 gigs"}, "found '16 gigs'"),
        ({"every": 0}, "found every=0"),
        ({"every": -1.0}, "found every=-1.0"),
        ({"every": float("nan")}, "found every=nan"),
        ({"budget": 1, "warn_at": 0}, r"warn_at in \(0, 1\].*found 0"),
        ({"budget": 1, "warn_at": (0.5, 90)}, r"warn_at in \(0, 1\].*found 90"),
        ({"warn_at": 1.1}, r"warn_at in \(0, 1\].*found 1.1"),
        ({"warn_at": "0.9"}, r"warn_at in \(0, 1\].*found '0.9'"),
        ({"warn_at": None}, r"warn_at in \(0, 1\].*found None"),
    ],
)
def test_arguments_without_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Monitor(**arguments)


@pytest.mark.parametrize(
    "found, arguments, message",
    [
        ([Figures(allocated=1)], {"watch": "driver"}, "level 'driver', found allocated; choose"),
        ([Figures()], {}, "a source with figures, found none"),
        ([], {}, "a source with figures, found none"),
    ],
)
def test_a_level_that_no_source_has_is_refused_at_the_start(tmp_path, found, arguments, message):
    with pytest.raises(ValueError, match=message), Monitor(sources=found, log=tmp_path / "log", **arguments):
        pass
    assert [line["kind"] for line in read_log(tmp_path / "log")] == ["end"]


def test_a_forecast_needs_a_budget():
    with Monitor(every=1000, sources=[Figures(allocated=1)]) as monitor:
        monitor.step()
        with pytest.raises(ValueError, match="expected a Monitor with a budget"):
            monitor.forecast()


def test_a_block_without_a_step_is_fine():
    with Monitor(1000, sources=[Figures(allocated=1)]) as monitor:
        assert monitor.running
    assert not monitor.running and monitor.steps == 0 and not monitor.forecast().runs_out and "step 0" in repr(monitor)


# ---- left alone


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
