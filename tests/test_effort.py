"""Property tests draw the same examples in every run, and others with `--explore`."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import RUNSLOW, every, examples, explore, tried


def property_test() -> SimpleNamespace:
    """A new item with a property test, and the numbers that it has drawn."""
    drawn: list[int] = []

    @settings(max_examples=6)
    @given(st.integers(0, 10**9))
    def test(number):
        drawn.append(number)

    return SimpleNamespace(obj=test, drawn=drawn, add_marker=lambda mark: None)


def test_examples_are_the_same_in_every_run_and_new_ones_where_one_explores(monkeypatch, tmp_path):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.chdir(tmp_path)
    first, again, exploring = property_test(), property_test(), property_test()
    explore(exploring, 40)
    for item in (first, again, exploring):
        item.obj()
    assert first.drawn == again.drawn and len(first.drawn) == 6
    assert len(exploring.drawn) == 40 and exploring.drawn[:6] != first.drawn


def test_other_tests_stay_as_they_are_where_one_explores():
    item = SimpleNamespace(obj=lambda: None)
    explore(item, 40)
    assert not vars(item.obj)


def test_few_parameters_are_quick():
    marked = [*every(2, "abc"), *every(2, [("a", 1), ("b", 2)], unpacked=True)]
    assert [(each.values, bool(each.marks)) for each in marked] == [
        *((("a",), False), (("b",), True), (("c",), False)),
        *((("a", 1), False), (("b", 2), True)),
    ]


def test_few_are_tried_and_many_under_runslow(monkeypatch):
    monkeypatch.delenv(RUNSLOW, raising=False)
    assert (tried("few", "many"), examples(1, 9)) == ("few", 1)
    monkeypatch.setenv(RUNSLOW, "1")
    assert (tried("few", "many"), examples(1, 9)) == ("many", 9)
