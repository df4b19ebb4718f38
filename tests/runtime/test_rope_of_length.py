"""Rotary embeddings of transformers that choose their frequencies by the length of the batch."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import sys

import pytest
import torch
import transformers
from support.eager_runs import paragraph
from support.effort import slow_but
from support.exactness import moved, run_steps, sgd, train_in_place, update_error
from torch import Tensor, nn

import autopar
from autopar.models.hf_rope import _plain_forward, prepare_rope

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
LONGROPE = FACTORS | {"rope_type": "longrope", "original_max_position_embeddings": 16}
MODELS = {
    "dynamic llama": ("Llama", {"rope_type": "dynamic", "factor": 2.0}, 16),
    "dynamic qwen2": ("Qwen2", {"rope_type": "dynamic", "factor": 4.0}, 16),
    "longrope phi3": ("Phi3", LONGROPE, 32),
    "longrope llama": ("Llama", LONGROPE | {"factor": 2.0}, 32),
    "yarn llama": (
        "Llama",
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
        32,
    ),
}
LENGTHS = (8, 16, 17, 24)
"""Below, at and above the 16 positions up to which frequencies are the first ones."""
PINS = {
    "dp=2": {"dp": 2, "tp": 1, "micro_batch": 1, "zero": 3},
    "tp=2": {"dp": 1, "tp": 2, "micro_batch": 2},
    "pp=2": {"pp": 2, "dp": 1, "tp": 1, "micro_batch": 2},
}


def build(name: str) -> nn.Module:
    kind, rope, longest = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(
        **SHAPE,
        max_position_embeddings=longest,
        rope_scaling=dict(rope),
        use_cache=False,
        **({"original_max_position_embeddings": 16} if kind == "Phi3" else {}),
    )
    assert (
        rope["rope_type"] == "dynamic"
        or config.rope_parameters["original_max_position_embeddings"] == 16
    )
    transformers.set_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def batches(length: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(length)
    ids = [torch.randint(1, 40, (4, length), generator=generator) for _ in range(3)]
    return [{"input_ids": each, "labels": each.clone()} for each in ids]


def error(name: str, length: int, pin: dict, cluster: str) -> float:
    """The largest error of three steps over the tolerance."""
    data = batches(length)
    expected = train_in_place(build(name), data, call=lambda model, batch: model(**batch).loss)
    assert moved(expected) > 1e-3
    engine = autopar.parallelize(
        build(name), cluster, data[0], optimizer=sgd, pin=pin, precision="fp64"
    )
    return update_error(expected, run_steps(engine, data)[1])


def error_on_rank(rank: int, name: str, length: int, pin: dict) -> float:
    return error(name, length, pin, "cpu:2")


CASES = [(name, length) for name in MODELS for length in LENGTHS]
QUICK = [("dynamic llama", 24), ("longrope phi3", 17)]


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_each_length_trains_as_on_one_device(case):
    assert error(*case, {"micro_batch": 2}, "cpu:1") <= 1


@pytest.mark.slow
@pytest.mark.parametrize("pin", PINS)
@pytest.mark.parametrize(("name", "length"), [("dynamic qwen2", 24), ("longrope phi3", 24)])
def test_two_ranks(pool2, name, length, pin):
    run = functools.partial(error_on_rank, name=name, length=length, pin=PINS[pin])
    assert max(pool2.run(run)) <= 1


def packed() -> list[dict[str, Tensor]]:
    """Batches with positions that begin again within rows; the first row alone passes 16."""
    found = batches(24)
    for batch in found:
        positions = torch.cat([torch.arange(10), torch.arange(14)]).repeat(4, 1)
        positions[0] = torch.arange(24)
        batch["position_ids"] = positions
    return found


def test_longrope_chooses_by_the_positions_of_the_whole_batch():
    data = packed()
    expected = train_in_place(
        build("longrope phi3"), data, call=lambda model, batch: model(**batch).loss
    )
    engine = autopar.parallelize(
        build("longrope phi3"), "cpu:1", data[0], sgd, pin={"micro_batch": 1}, precision="fp64"
    )
    assert update_error(expected, run_steps(engine, data)[1]) <= 1


def test_dynamic_by_given_positions_is_refused_with_advice_that_works():
    batch = batches(24)[0]
    more = batch | {"position_ids": torch.arange(24).expand(4, -1).contiguous()}
    with pytest.raises(autopar.AutoparError, match="a mapping without position_ids") as refused:
        autopar.plan(build("dynamic llama"), "cpu:1", more)
    paragraph(refused.value)
    autopar.plan(build("dynamic llama"), "cpu:1", batch)


def trained_in_buckets(name: str, lengths: tuple[int, ...], buckets: tuple[int, ...]) -> float:
    """The error over the tolerance of steps on batches of `lengths`, the longest first."""
    data = [batches(length)[0] for length in lengths]
    expected = train_in_place(build(name), data, call=lambda model, batch: model(**batch).loss)
    engine = autopar.parallelize(
        build(name),
        "cpu:1",
        data[0],
        sgd,
        pin={"micro_batch": 2},
        precision="fp64",
        buckets=buckets,
    )
    return update_error(expected, run_steps(engine, data)[1])


@pytest.mark.slow
def test_lengths_that_change_between_steps():
    assert trained_in_buckets("longrope phi3", (24, 9, 20), (16,)) <= 1
    assert trained_in_buckets("dynamic llama", (16, 9, 12), (12,)) <= 1


@pytest.mark.parametrize(
    ("name", "buckets", "advice"),
    [
        ("longrope phi3", (8,), "add 16 to buckets"),
        ("dynamic llama", (8, 20), r"leave buckets out.*at most 16 positions and buckets=\(8,\)"),
    ],
)
def test_buckets_in_which_frequencies_differ_are_refused(name, buckets, advice):
    with pytest.raises(autopar.AutoparError, match=advice) as refused:
        trained_in_buckets(name, (24, 9, 20), buckets)
    paragraph(refused.value)


def rotary_classes(families: list[str]) -> list[type]:
    """The rotary embeddings of transformers' models that may follow the length."""
    found = []
    for family in families:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        for kind in vars(module).values():
            own = isinstance(kind, type) and kind.__module__ == module.__name__
            if own and issubclass(kind, nn.Module) and _plain_forward(kind.__new__(kind)):
                found.append(kind)
    return found


def rotary(kind: type, rope_type: str) -> nn.Module:
    """An embedding with 16 first positions, of the default sizes of its model."""
    module = sys.modules[kind.__module__]
    annotation = list(inspect.signature(kind.__init__).parameters.values())[1].annotation
    config = annotation if isinstance(annotation, type) else vars(module)[annotation.strip('"')]
    config = config()
    config.max_position_embeddings = 16 if rope_type == "dynamic" else 32

    def parameters(own: dict) -> dict:
        head = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        pairs = int(head * own.get("partial_rotary_factor", 1.0)) // 2
        return {k: v for k, v in own.items() if k in ("rope_theta", "partial_rotary_factor")} | {
            "rope_type": rope_type,
            "factor": 2.0,
            "short_factor": [1 + 0.01 * k for k in range(pairs)],
            "long_factor": [2 + 0.1 * k for k in range(pairs)],
            "short_mscale": 1.1,
            "long_mscale": 1.3,
            "original_max_position_embeddings": 16,
        }

    own = config.rope_parameters
    layered = any(isinstance(each, dict) for each in own.values())
    config.rope_parameters = (
        {key: parameters(each) for key, each in own.items()} if layered else parameters(own)
    )
    return kind(config)


FAMILIES = ["llama", "phi3", "phimoe", "gemma3", "deepseek_v2", "modernbert"]


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
@pytest.mark.parametrize("family", slow_but(["gemma3", "phimoe"], FAMILIES))
def test_embeddings_are_those_of_transformers_at_every_length(family, rope_type):
    """Each length after the others, since transformers keep what they chose."""
    for kind in rotary_classes([family]):
        eager = rotary(kind, rope_type)
        types = list(eager.rope_type) if isinstance(eager.rope_type, dict) else [None]
        for length in (8, 16, 17, 24, 24, 20, 12, 16, 18):
            positions, x = torch.arange(length).expand(2, -1), torch.zeros(2, length, 4)
            for layer_type in types:
                more = {} if layer_type is None else {"layer_type": layer_type}
                for given in (False, True)[: 1 if rope_type == "dynamic" else 2]:
                    prepared = copy.deepcopy(eager)
                    prepare_rope(prepared, given)
                    found = prepared(x, positions, **more)
                    wanted = copy.deepcopy(eager)(x, positions, **more)
                    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
                eager(x, positions, **more)
