"""Saved timelines: what comes back is what was written, and nothing else is ever let in."""

import copy
import io
import json
import pickle
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memlab.memory_timeline import CATEGORIES, Event, Line, Storage, Timeline
from memlab.memory_timeline.documents import draft_of
from memlab.memory_timeline.events import PHASES
from tests.memory_timeline_helpers import (
    Run,
    metered_run,
    one_thread,  # noqa: F401
)

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
    assert again.peak_bytes == timeline.peak_bytes and again.alive(again.peak_event) == timeline.alive(
        timeline.peak_event
    )
    assert [again.lifetime(s) for s in again.storages] == [timeline.lifetime(s) for s in timeline.storages]


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
LINES = st.builds(Line, TEXT, TEXT)


@st.composite
def timelines(draw):
    """Timelines of storages that are born, resized and freed in any order, on several devices."""
    count = draw(st.integers(0, 6))
    storages = [
        Storage(
            id=number * 7,
            nbytes=draw(st.integers(0, 2**50)),
            category=draw(st.sampled_from(CATEGORIES)),
            shape=tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
            dtype=draw(TEXT),
            device=draw(st.sampled_from(["cpu", "cuda:0", "cuda:1"])),
            op=draw(TEXT),
            phase=draw(st.sampled_from(PHASES)),
            line=draw(LINES),
            module=draw(TEXT),
            name=draw(TEXT),
            reason=draw(TEXT),
        )
        for number in range(count)
    ]
    held = dict.fromkeys((s.id for s in storages), 0)
    events = []
    for _ in range(draw(st.integers(0, 12)) if storages else 0):
        storage = draw(st.sampled_from(storages)).id
        delta = draw(st.integers(-held[storage], 2**50).filter(bool))
        held[storage] += delta
        events.append(Event(storage, delta, draw(TEXT), draw(st.sampled_from(PHASES[1:])), draw(LINES)))
    first = draw(st.integers(0, len(events)))
    events[:first] = [event._replace(phase="before") for event in events[:first]]
    births = {event.storage: event for event in reversed(events)}
    for place, storage in enumerate(storages):
        if birth := births.get(storage.id):
            nbytes = draw(st.sampled_from([birth.delta, 0]))  # made with bytes, or without and then resized
            storages[place] = replace(storage, nbytes=nbytes, phase=birth.phase)
    return Timeline(storages, events, workspace=draw(st.booleans()))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(timeline=timelines())
def test_any_timeline_comes_back_equal(tmp_path, timeline):
    path = tmp_path / "any.json"
    timeline.save(path)
    again = Timeline.load(path)
    assert same(again, timeline)
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


def test_a_truncated_file_is_refused_wherever_it_ends(saved, tmp_path):
    whole = saved[0].read_bytes()
    path = tmp_path / "part.json"
    for end in range(0, len(whole), 200):
        path.write_bytes(whole[:end])
        assert "truncated or foreign" in refused(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'"memlab-timeline"',
        b"\xff\xfe\x00",
        b'{"format": "memlab-timeline"}',
        b'{"format": "other", "version": 1}',
        b"[" * 100_000,
        pickle.dumps({"format": "memlab-timeline"}),
    ],
    ids=["empty", "null", "list", "object", "text", "binary", "bare", "other", "deep", "pickle"],
)
def test_a_file_that_is_not_ours_is_refused(tmp_path, content):
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    refused(path)


@pytest.mark.parametrize("version", [2, 99, None, "1", 1.5, True, 0, -1])
def test_a_version_that_this_one_does_not_read_is_refused(saved, tmp_path, version):
    document = json.loads(saved[0].read_text())
    document["version"] = version
    path = tmp_path / "version.json"
    path.write_text(json.dumps(document))
    message = refused(path)
    assert "version" in message and ("update memlab" in message) == (version in (2, 99))


WRONG = [None, "12", 1.5, True, [], {}, -(10**30), [1], {"a": 1}]


def changed(document: dict, keys: tuple, value) -> dict:
    document = copy.deepcopy(document)
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return document


def kind(value) -> type | tuple:
    return type(value)


def places(document: dict) -> list[tuple]:
    """A path to one of every kind of field."""
    fields = [("storages", 0, key) for key in document["storages"][0]]
    fields += [("events", 20, column) for column in range(5)]
    fields += [("lines", 0, 0), ("lines", 0, 1), ("lines", 0), ("events", 3), ("storages", 5)]
    fields += [("levels", "reserved"), ("levels", "reserved", "peak")]
    return fields + [(key,) for key in document if key not in ("format", "version")]


def test_a_value_of_another_type_is_refused_in_every_field(saved, tmp_path):
    document = json.loads(saved[0].read_text())
    path = tmp_path / "wrong.json"
    let_in = []
    for keys in places(document):
        right = document
        for key in keys:
            right = right[key]
        for value in WRONG:
            if type(value) is type(right) and not (isinstance(value, int) and value < 0):
                continue
            path.write_text(json.dumps(changed(document, keys, value)))
            try:
                Timeline.load(path)
            except ValueError:
                refused(path)
            else:
                let_in.append((keys, value))
    assert let_in == []


def test_a_missing_field_is_refused(saved, tmp_path):
    document = json.loads(saved[0].read_text())
    path = tmp_path / "missing.json"
    for key in document:
        path.write_text(json.dumps({k: v for k, v in document.items() if k != key}))
        refused(path)
    for key in document["storages"][0]:
        short = copy.deepcopy(document)
        del short["storages"][0][key]
        path.write_text(json.dumps(short))
        refused(path)


HUGE = 10**400
LEVEL = {"before": 0, "peak": 1, "after": 0}


def inconsistent() -> dict:
    return {
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


@pytest.mark.parametrize("case", inconsistent())
def test_a_timeline_that_contradicts_itself_is_refused(saved, tmp_path, case):
    document = json.loads(saved[0].read_text())
    inconsistent()[case](document)
    path = tmp_path / "inconsistent.json"
    path.write_text(json.dumps(document))
    refused(path)


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
            patch.setattr(f"memlab.memory_timeline.documents.{place}", broken, raising=False)
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


def test_a_saved_timeline_is_as_readable_as_any_other_new_file(saved, tmp_path):
    saved[1].save(tmp_path / "ours.json")
    (tmp_path / "other.json").write_text("{}")
    assert (tmp_path / "ours.json").stat().st_mode == (tmp_path / "other.json").stat().st_mode
