"""Saved timelines: what comes back is what was written, and nothing else is ever let in."""

import functools
import io
import json
import pickle
import sys

import pytest

from memlab.files import draft_of
from memlab.memory_timeline import Event, Line, Storage, Timeline
from tests.memory_timeline_helpers import Run, metered_run, one_thread  # noqa: F401
from tests.tiers import some

QUESTIONS = ("devices", "device", "workspace", "levels", "storages", "events", "totals", "curves", "phases")


def same(a: Timeline, b: Timeline) -> bool:
    return all(getattr(a, name) == getattr(b, name) for name in QUESTIONS) and a.of_all_devices == b.of_all_devices


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "step.json"
    timeline = metered_run(Run("MLP"), workspace=True).timeline
    timeline.levels = {"reserved": {"before": 0, "peak": 2**40, "after": 7}}
    timeline.save(path)
    return path, timeline


def test_a_timeline_read_back_answers_every_question_alike(saved):
    path, timeline = saved
    again = Timeline.load(path)
    assert same(again, timeline)
    assert again.peak_bytes == timeline.peak_bytes
    assert again.alive(again.peak_event) == timeline.alive(timeline.peak_event)
    assert [again.lifetime(s) for s in again.storages] == [timeline.lifetime(s) for s in timeline.storages]


def test_a_timeline_of_several_devices_and_sizes_comes_back_equal(tmp_path):
    line, there = Line("f", "ü = x[\n]"), Line("<module>", "")

    def storage(id, nbytes, device, phase, category="activation"):
        return Storage(id, nbytes, category, (nbytes, 1), "uint8", device, "op", phase, line, "m", "n", "why")

    storages = [
        storage(0, 2**50, "cuda:1", "before", "parameter"),
        storage(7, 5, "cpu", "forward"),
        storage(14, 0, "cuda:0", "backward"),  # made without bytes, and then resized
        storage(21, 3, "cuda:1", "optimizer"),
        storage(28, 9, "meta", "forward"),  # has no event at all
    ]
    events = [
        Event(0, 2**50, "", "before", there),
        *[Event(7, delta, "add", phase, line) for delta, phase in ((5, "forward"), (4, "recompute"), (-9, "backward"))],
        Event(14, 2**40, "resize_", "backward", there),
        Event(21, 3, "mul", "optimizer", line),
        Event(0, -(2**50), "", "optimizer", there),
    ]
    timeline = Timeline(storages, events, workspace=True)
    timeline.save(tmp_path / "any.json")
    again = Timeline.load(tmp_path / "any.json")
    assert same(again, timeline) and again.devices == ("cpu", "cuda:0", "cuda:1", "meta") and again.device == "cuda:1"
    for device in timeline.devices:
        assert same(again.on(device), timeline.on(device))


def refused(path) -> str:
    """The one sentence with which a file is refused."""
    with pytest.raises(ValueError, match="expected") as caught:
        Timeline.load(path)
    message = str(caught.value)
    assert type(caught.value) is ValueError and "\n" not in message and str(path) in message
    around = sys.exc_info()[1]  # None, but after a test that Ctrl-C has stopped anywhere
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is around
    return message


@some("step", [2000, 200], keep=1)
def test_a_truncated_file_is_refused_wherever_it_ends(saved, tmp_path, step):
    whole = saved[0].read_bytes()
    path = tmp_path / "part.json"
    for end in range(0, len(whole), step):
        path.write_bytes(whole[:end])
        assert "truncated or foreign" in refused(path)


FOREIGN = {
    "empty": b"",
    "object": b"{}",
    "binary": b"\xff\xfe\x00",
    "other": b'{"format": "other", "version": 1}',
    "deep": b"[" * 100_000,
    "pickle": pickle.dumps({"format": "memlab-timeline"}),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_file_that_is_not_ours_is_refused(tmp_path, content):
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    refused(path)


@pytest.fixture
def load_changed(saved, tmp_path):
    """A function that loads the saved document after a change, and gives the words of its refusal (None: let in)."""
    path = tmp_path / "changed.json"
    text = saved[0].read_text()

    def load(change) -> str | None:
        document = json.loads(text)
        change(document)
        path.write_text(json.dumps(document))
        try:
            Timeline.load(path)
        except ValueError:
            return refused(path)
        return None

    return load


@pytest.mark.parametrize("version", [2, None, "1", True, 0])
def test_a_version_that_this_one_does_not_read_is_refused(load_changed, version):
    message = load_changed(lambda document: document.update(version=version))
    assert "version" in message and ("update memlab" in message) == (version == 2)


WRONG = [None, "12", 1.5, True, [], {}, -(10**30), [1], {"a": 1}]


def places(document: dict) -> list[tuple]:
    """A path to one of every kind of field."""
    fields = [("storages", 0, key) for key in document["storages"][0]]
    fields += [("events", 20, column) for column in range(5)]
    fields += [("lines", 0, 0), ("lines", 0, 1), ("lines", 0), ("events", 3), ("storages", 5)]
    fields += [("levels", "reserved"), ("levels", "reserved", "peak")]
    return fields + [(key,) for key in document if key not in ("format", "version")]


MISSING = object()


def put(keys: tuple, value, document: dict):
    """Give a field of the document another value, or take it out. Returns what it was."""
    *way, last = keys
    for key in way:
        document = document[key]
    before = document.pop(last) if value is MISSING else document[last]
    if value is not MISSING:
        document[last] = value
    return before


def test_a_value_of_another_type_is_refused_in_every_field_and_so_is_a_field_that_is_missing(saved, load_changed):
    let_in = []
    for keys in places(json.loads(saved[0].read_text())):
        right = put(keys, None, json.loads(saved[0].read_text()))
        wrong = [one for one in WRONG if type(one) is not type(right) or (isinstance(one, int) and one < 0)]
        wrong += [MISSING] if isinstance(keys[-1], str) and keys[0] != "levels" or keys == ("levels",) else []
        let_in += [(keys, one) for one in wrong if load_changed(functools.partial(put, keys, one)) is None]
    assert let_in == []


HUGE = 10**400
LEVEL = {"before": 0, "peak": 1, "after": 0}


INCONSISTENT = {
    "an unknown storage": lambda d: d["events"][5].__setitem__(0, 10**6),
    "an unknown category": lambda d: d["storages"][0].__setitem__("category", "cache"),
    "an unknown phase of an event": lambda d: d["events"][5].__setitem__(3, "sideways"),
    "an unknown phase of a storage": lambda d: d["storages"][0].__setitem__("phase", "sideways"),
    "a line that is not there": lambda d: d["events"][5].__setitem__(4, 10**6),
    "a line counted from the end": lambda d: d["events"][5].__setitem__(4, -1),
    "two storages of one id": lambda d: d["storages"][1].__setitem__("id", d["storages"][0]["id"]),
    "more freed than held": lambda d: d["events"].append([d["storages"][0]["id"], -(10**9), "", "forward", 0]),
    "a storage of negative size": lambda d: d["storages"][0].__setitem__("nbytes", -1),
    "a negative length": lambda d: d["storages"][0].__setitem__("shape", [-3]),
    "a device that nothing is on": lambda d: d.__setitem__("device", "cuda:3"),
    "an event too short": lambda d: d["events"][5].pop(),
    "a line too long": lambda d: d["lines"][0].append("more"),
    "an event before the first op, and after it": lambda d: d["events"][-1].__setitem__(3, "before"),
    "an endless size": lambda d: d["storages"][0].__setitem__("nbytes", HUGE),
    "an endless length": lambda d: d["storages"][0].__setitem__("shape", [HUGE]),
    "an endless event": lambda d: d["events"].append([d["storages"][0]["id"], HUGE, "", "optimizer", 0]),
    "an endless level": lambda d: d["levels"]["reserved"].__setitem__("peak", HUGE),
    "an unknown level": lambda d: d["levels"].__setitem__("x", LEVEL),
    "a level of nothing": lambda d: d["levels"].__setitem__("reserved", {}),
    "a level with a figure too many": lambda d: d["levels"]["reserved"].__setitem__("x", 0),
    "a level whose peak is not its highest": lambda d: d["levels"]["reserved"].__setitem__("after", 2**41),
    "a storage of another size than it begins with": lambda d: d["storages"][0].__setitem__("nbytes", 1),
    "a storage of another phase than it begins in": lambda d: d["storages"][0].__setitem__("phase", "backward"),
    "an event of no bytes": lambda d: d["events"].append([d["storages"][0]["id"], 0, "", "optimizer", 0]),
    "a field too many": lambda d: d["storages"][0].__setitem__("colour", "red"),
}


@pytest.mark.parametrize("change", INCONSISTENT.values(), ids=INCONSISTENT)
def test_a_timeline_that_contradicts_itself_is_refused(load_changed, change):
    assert load_changed(change)


def test_saving_is_all_or_nothing(saved, tmp_path, monkeypatch):
    path = tmp_path / "kept.json"
    saved[1].save(path)
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError("no space left on device")

    def full_disk(scratch, *_, **__):
        scratch.touch()
        file = io.StringIO()
        file.write = full
        return file

    for place, broken in (("open", full_disk), ("os.replace", full)):
        with monkeypatch.context() as patch:
            patch.setattr(f"memlab.files.{place}", broken, raising=False)
            with pytest.raises(OSError, match="no space"):
                saved[1].save(path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]


def test_two_that_write_to_one_path_at_a_time_both_write_whole_files_and_the_last_one_stays(tmp_path):
    path = tmp_path / "kept.json"
    with draft_of(path) as one:
        one.write_text("one")
        with draft_of(path) as other:
            other.write_text("other")
            assert one.read_text() == "one"
        assert path.read_text() == "other"
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]
