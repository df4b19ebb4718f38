"""What tests share of captures, and when ranks are forked anew."""

from __future__ import annotations

import os

import torch
from support.captures import Counted, Ranks, captured_once, kept
from torch import nn

from autopar import api
from autopar.models import parse_model


def pid(rank: int) -> int:
    return os.getpid()


def test_ranks_are_forked_anew_after_a_capture():
    captures = Counted(lambda: "a capture")
    with Ranks(2, captures) as ranks:
        before = ranks.run(pid)
        assert ranks.run(pid) == before
        assert captures.wrapped()() == "a capture" and captures.number == 1
        after = ranks.run(pid)
        assert not {*after} & {*before} and ranks.run(pid) == after


def test_a_model_is_captured_once_for_its_class_and_shapes(monkeypatch):
    made: list[nn.Module] = []

    def trace(model, example_inputs, loss_fn=None, precision=None, kept_buffers=None):
        made.append(model)
        return model

    monkeypatch.setattr(api, "trace", trace)
    with captured_once():
        one, other, sequential = nn.Linear(2, 2), nn.Linear(2, 2), nn.Sequential()
        four, five = ({"x": torch.ones(rows, 2)} for rows in (4, 5))
        assert api.trace(one, four) is one and api.trace(other, four) is one
        assert api.trace(other, five) is other and api.trace(sequential, four) is sequential
        assert api.trace(other, four, precision="fp64") is other
        assert api.trace(one, four, None, "fp64") is other
    assert made == [one, other, sequential, other] and api.trace(other, four) is other


def test_native_models_are_captured_once_a_length_and_a_precision():
    made: list[tuple] = []
    trace_spec = kept(lambda *asked: made.append(asked) or len(made))
    spec, other = parse_model("llama-tiny"), parse_model("gpt-tiny")
    found = [trace_spec(spec, 8), trace_spec(parse_model("llama-tiny"), 8), trace_spec(spec, 9)]
    found += [trace_spec(spec, 8, "fp64"), trace_spec(other, 8)]
    assert found == [1, 1, 2, 3, 4]
