"""An answer that is laid out once: its text, its JSON and its page have the same rows."""

from __future__ import annotations

import json
from html import unescape

import pytest
from support.explain_tasks import text_of

from autopar.report.page import page_of
from autopar.text.numbers import Number
from autopar.text.replies import (
    ABSENT,
    Field,
    Reply,
    Spot,
    Spots,
    StepBar,
    Styled,
    doubted,
    field_table,
    records,
)
from autopar.text.tables import Table
from autopar.text.units import gib, ms

ROWS = [{"name": "[one]", "step_s": 0.25, "held": 2**30}, {"name": "other", "step_s": None}]
FIELDS = (
    Field("name", lambda row: row["name"], "plan"),
    Field("step_s", lambda row: row["step_s"], "step", ms),
    Field("held_bytes", lambda row: row.get("held", ABSENT), "memory", gib),
    Field("plan.tokens", lambda row: 7, "tokens", "{:d} tok".format, wide=True),
    Field("hidden", lambda row: [1.0, float("nan")]),
    Field("", lambda row: "*", ""),
)


def reply(**more) -> Reply:
    data = doubted("Not sure.", {"rows": records(FIELDS, ROWS)})
    parts = ["first", "", field_table(FIELDS, ROWS, "Plans", at="rows"), Styled("last", "yellow")]
    return Reply(parts, data, "a title", "Not sure.", command="ask", **more)


def test_text_has_the_columns_with_headings():
    text = str(reply())
    assert text.splitlines()[:4] == ["Not sure.", "a title", "first", "Plans"]
    assert text.splitlines()[-1] == "last" and "tok" not in text and "hidden" not in text
    cells = [line.split() for line in text.splitlines() if "*" in line]
    assert cells == [["[one]", "250", "ms", "1.00", "GiB", "*"], ["other", "-", "-", "*"]]


def test_json_has_the_fields_with_keys():
    data = json.loads(reply().json())
    assert list(data) == ["not_proved", "rows"] and doubted("", {"rows": 1}) == {"rows": 1}
    whole = {"name": "[one]", "step_s": 0.25, "held_bytes": 2**30, "hidden": [1.0, None]}
    assert data["rows"] == [whole, {"name": "other", "step_s": None, "hidden": [1.0, None]}]


def test_a_page_has_the_rows_of_the_text_with_paths_into_the_json():
    page = unescape(page_of(reply()).html())
    for words in ("a title", "Not sure. first", "<h3>Plans</h3>", "<li>last</li>", "[one]"):
        assert words in page
    assert '<data data-path="rows.0.step_s" data-value="0.25">250 ms</data>' in page
    assert '<data data-path="rows.1.plan.tokens" data-value="7">7 tok</data>' in page


@pytest.mark.parametrize(
    ("drawn", "name"),
    [
        ([StepBar("one", {"forward": 1.0}, Number("1 s", 1.0, "s"))], "steps"),
        (
            Spots("spots", [Spot("one", Number("1 s", 1.0, "s"), Number("2", 2, "n"))], "step"),
            "pareto",
        ),
    ],
)
def test_a_page_draws_steps_and_points(drawn, name):
    page = page_of(reply(figure=(drawn, "How to read it.")))
    assert [figure.name for figure in page.figures] == [name] and "How to read it." in page.html()


@pytest.mark.parametrize(("width", "tables"), [(80, 2), (120, 1), (45, 4), (20, 4)])
def test_columns_that_are_alike_stand_side_by_side_as_far_as_there_is_room(width, tables):
    rows = [["row", *map(str, range(4))]]
    table = Table(("", *"abcd"), rows, range(1, 5), alike=True)
    assert text_of(table, width).count("row") == tables


def test_columns_that_do_not_fit_are_in_a_table_below():
    columns = ("name", *(f"column{k}" for k in range(6)))
    table = Table(columns, [["row", *["1234567"] * 6]], title="Title", caption="below")
    text = text_of(table, 40)
    assert text.count("row") == 2 and text.count("Title") == 1 and text.count("1234567") == 6
    assert text.endswith("below\n") and text_of(table, 120).count("row") == 1
