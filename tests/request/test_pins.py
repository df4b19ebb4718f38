"""The table of pins, and the pins of a request."""

from __future__ import annotations

from dataclasses import fields

import pytest

from autopar.errors import AutoparError
from autopar.request.pins import PINS, Pins, parse_pins, pins_help


def test_each_row_of_the_table_is_a_field():
    assert [field.name for field in fields(Pins)] == [*PINS, "given"]
    assert all(PINS[name].name == name for name in PINS)


def test_pins_are_a_mapping_in_the_order_given():
    pins = Pins.of({"zero": 0, "tp": 8, "order": ""})
    assert list(pins) == ["zero", "tp", "order"] and dict(pins) == {"zero": 0, "tp": 8, "order": ""}
    assert pins.tp == 8 and pins.order == "" and pins.pp is None and "pp" not in pins
    assert str(pins) == "{'zero': 0, 'tp': 8, 'order': ''}" and not Pins()
    assert Pins(tp=8, zero=0) == {"tp": 8, "zero": 0}


def test_choices_that_are_pinned_or_free_are_left():
    pins = Pins(tp=8)
    assert pins.leave(tp=8, pp=4) and not pins.leave(tp=4)


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"tq": 2}, "unknown pin 'tq'; pins are tp, pp, dp"),
        ({"tp": 0}, "tp=0 must be a whole number >= 1"),
        ({"tp": None}, "tp=None must be a text, a whole number, True or False"),
        ({"schedule": "fast"}, "schedule='fast' is not known; gpipe, 1f1b"),
        ({"zero": True}, "zero=True is not a ZeRO stage"),
        ({"shard": 1}, "shard=1: a rank alone shares out nothing"),
        ({"order": "dp-dp"}, "order='dp-dp' must name mesh axes"),
        (
            {"context_method": "star"},
            "context_method='star' is not known; gather, ring, ulysses are",
        ),
    ],
)
def test_values_that_no_request_can_have_are_refused(pin, message):
    with pytest.raises(AutoparError) as caught:
        Pins.of(pin)
    assert str(caught.value).startswith(message)


def test_help_has_a_line_for_each_pin():
    assert [line.split()[0] for line in pins_help().splitlines()] == list(PINS)


def test_text_of_the_command_line_becomes_values():
    pins = Pins.of(parse_pins("tp=8,sequence_parallel=true,recompute=every-2"))
    assert pins == {"tp": 8, "sequence_parallel": True, "recompute": "every-2"}
