"""Named models that transformers builds are traced from a few layers: the same as tracing all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar import api
from autopar.errors import AutoparError
from autopar.models import parse_model
from autopar.models.published import published_models

OF_KIND = {
    model.kind: name for name, model in published_models().items() if model.is_hf and model.repeats
}
"""The last model of each kind that says what repeats."""
QUICK = ("qwen2",)


def traced_both_ways(name: str) -> tuple[str, str, int]:
    """(hash of the deepened model, hash of the model traced whole, layers that were added) of a
    model with the shapes of `name` and two periods more than its shallow one.
    """
    spec = parse_model(name)
    key = "n_layer" if "n_layer" in spec.config_dict else "num_hidden_layers"
    layers = spec.shallow().num_layers + 2 * spec.period
    spec = replace(spec, num_layers=layers, config_dict=spec.config_dict | {key: layers})
    shallow = spec.shallow()
    whole = replace(spec, repeats=0)
    assert whole.shallow() is whole
    deepened = api.trace_shallow(spec, 64).model_hash
    return deepened, api.trace_spec(whole, 64).model_hash, layers - shallow.num_layers


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in OF_KIND],
)
def test_layers_that_are_added_are_those_that_tracing_finds(kind):
    deepened, whole, more = traced_both_ways(OF_KIND[kind])
    assert more > 0 and deepened == whole


@pytest.mark.slow
def test_layers_that_do_not_repeat_as_said_are_traced_whole():
    spec = parse_model("modernbert-base")  # its first layer has a norm less
    few = replace(spec, num_layers=10, config_dict=spec.config_dict | {"num_hidden_layers": 10})
    wrong = replace(few, different=0)
    with pytest.raises(AutoparError, match="not two equal periods"):
        api.trace_shallow(wrong, 64)
    whole = api.trace_spec(replace(few, repeats=0), 64).model_hash
    assert api.trace_spec(wrong, 64).model_hash == whole
