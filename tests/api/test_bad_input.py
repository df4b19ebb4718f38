"""Bad arguments, models, batches and files through Python: one paragraph that names the argument, never another error, never a part of a
file in the place of a whole one."""

from __future__ import annotations

import os
import resource
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar import ClusterSpec, Plan
from autopar.api import trace
from autopar.errors import AutoparError, shown
from autopar.models import parse_model
from autopar.request.pins import PINS
from autopar.runtime.ranks.launch import run_workers


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, y):
        return (self.linear(x) - y).pow(2).mean()


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


X = torch.ones(4, 6)
BATCH = {"x": X, "y": X}
LONG = "x" * 100_000
ODD = [None, -1, 2.5, float("nan"), 10**5000, -(10**400), True, "", "a\0b", LONG, "x " * 50_000, b"abc", [], {}, {3: 4}, [[1]] * 9,
       object(), Unprintable(), torch.ones(3), torch.zeros(0), nn.Linear(2, 2), int, "\ud800", "9" * 5000]  # fmt: skip
IDS = [f"{number}" for number in range(len(ODD))]


@cache
def traced():
    return trace(Model(), BATCH)


@cache
def plan() -> Plan:
    return autopar.plan(Model(), "cpu:1", BATCH)


def refusal(call, *args, **kwargs) -> str:
    """The AutoparError's paragraph; '' if there is none."""
    try:
        call(*args, **kwargs)
    except AutoparError as error:
        assert 0 < len(str(error)) <= 4100 and "\n" not in str(error)
        return str(error)
    return ""


@pytest.mark.parametrize("value", ODD, ids=IDS)
def test_what_a_message_repeats_is_short_and_always_there(value):
    assert 0 < len(shown(value)) <= 200 and "\n" not in shown(value)
    assert len(str(AutoparError(f"{'word ' * 10_000}{LONG} end"))) <= 4100


@pytest.mark.parametrize("value", ODD, ids=IDS)
def test_odd_arguments_of_plan_are_refused(value):
    asked = {"model": Model(), "cluster": "cpu:1", "example_inputs": BATCH, "time_limit_s": 1.0}
    for name in (
        "model",
        "cluster",
        "example_inputs",
        "pin",
        "loss_fn",
        "precision",
        "objective",
        "software",
    ):
        if value is None and name in ("pin", "loss_fn", "precision", "software"):
            continue
        if name == "model" and isinstance(value, nn.Module):
            continue
        if (callable(value) and name == "loss_fn") or (
            name in ("pin", "precision") and isinstance(value, dict | str) and not value
        ):
            continue  # nothing is asked for
        assert refusal(autopar.plan, **asked | {name: value}), name


@pytest.mark.parametrize("value", ODD, ids=IDS)
def test_odd_pins_are_refused(value):
    asked = {
        "model": Model(),
        "cluster": "cpu:1",
        "example_inputs": BATCH,
        "time_limit_s": 1.0,
        "traced": traced(),
    }
    for name in PINS:
        if (name == "sequence_parallel" and value is True) or (
            name == "order" and isinstance(value, str) and value == ""
        ):
            continue
        found = refusal(autopar.plan, **asked, pin={name: value})
        assert f"{name}=" in found, (name, found)


@pytest.mark.parametrize("value", ODD, ids=IDS)
def test_paths_that_are_none_are_told(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = engine_of()
    calls = {"plan": Plan.load, "cluster file": ClusterSpec.from_yaml, "checkpoint": engine.load}
    calls["weights"] = lambda path: autopar.parallelize(Model(), "cpu:1", BATCH, weights=path)
    for what, call in calls.items():
        if not (what == "weights" and value is None):
            assert refusal(call, value), what
    if not isinstance(value, str) or value in ("", "a\0b", LONG):
        for call in (
            plan().save,
            engine.save,
            engine.export,
            lambda path: engine.profile(path).__enter__(),
        ):
            assert refusal(call, value), call


@cache
def engine_of():
    return autopar.parallelize(Model(), "cpu:1", BATCH)


@pytest.mark.parametrize(("name", "content", "words"), [
    ("empty", b"", "is empty|not valid JSON|lacks the columns"), ("binary", b"\xff\xfe\x81\x00", "not a UTF-8 text"),
    ("truncated", b'{"format_version": 4, "mesh": {', "not valid|lacks the column"),
    ("list", b"[1, 2]", "format_version|holds list|lacks the column|no .model_type"),
    ("deep", b"[" * 10_000, "recursion|nested too deep|lacks the column"), ("number", b"9" * 5000, "digits|limit|lacks the column"),
])  # fmt: skip
def test_files_that_hold_something_else(tmp_path, name, content, words):
    from autopar.foreign.published.runs import read_runs

    path = tmp_path / f"{name}.json"
    path.write_bytes(content)
    for call in (
        Plan.load,
        ClusterSpec.from_yaml,
        read_runs,
        lambda file: parse_model(f"hf:{file}"),
    ):
        with pytest.raises(AutoparError, match=f"(?s){name}.json.*({words})"):
            call(path)


def test_directories_and_links_in_a_circle(tmp_path):
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    for path in (tmp_path, loop):
        for call in (Plan.load, ClusterSpec.from_yaml, plan().save):
            assert str(path) in refusal(call, path)


NAMES = "abcdefghi"
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{b}: &{b} [{f'*{a}, ' * 9}]\n" for a, b in pairwise(NAMES)
)


@pytest.mark.parametrize(("text", "words"), [
    (BOMB, "its aliases make it more than 1,000,000 values"), ("a: &a [*a]\n", "its aliases"), ("{a: " * 10_000, "nested too deep"),
    ("device: h100\nnodes: 2020-01-01\ndevices_per_node: 8\n", r"datetime.date\(2020, 1, 1\)"),
    ("device: h100\nnodes: .nan\ndevices_per_node: 8\n", "nodes=nan must be a whole number"),
    ("device: h100\nnodes: .inf\ndevices_per_node: 8\n", "nodes=inf must be"),
    (f"device: h100\nnodes: {'9' * 5000}\ndevices_per_node: 8\n", "is not valid YAML"),
    (f"device: h100\nnodes: {'9' * 300}\ndevices_per_node: 8\n", "whole number of at most 1,000,000,000,000,000,000"),
    ("device: h100\nnodes: 1\ndevices_per_node: 8\nintra_bandwidth_Bps: .inf\n", "finite"), ("3: 4\n", "unknown key 3"),
    (f"device: {LONG}\nnodes: 1\ndevices_per_node: 8\n", "unknown device 'xxx"), ("? [1, 2]\n: 3\n", "unhashable|not valid"),
    (f"? {LONG}\n: 1\n", "unknown key 'xxx"), ("!!python/object/apply:os.system ['true']", "not valid YAML"),
    ("device: h100\ndevice: h200\n", "'device' is given twice"),
])  # fmt: skip
def test_cluster_files_that_are_none(tmp_path, text, words):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(AutoparError, match=words) as caught:
        ClusterSpec.from_yaml(path)
    assert len(str(caught.value)) < 1500 and "cluster.yaml" in str(caught.value)


class NoParameters(nn.Module):
    def forward(self, x, y):
        return (x * y).mean()


class EmptyParameters(NoParameters):
    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))


class Lazy(Model):
    def __init__(self):
        super().__init__()
        self.linear = nn.LazyLinear(6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (NoParameters, "NoParameters has no parameters"),
        (EmptyParameters, "EmptyParameters has no parameters"),
        (Lazy, "has no shape yet"),
    ],
)
def test_models_with_nothing_to_train(make, words):
    for call in (autopar.plan, autopar.parallelize):
        with pytest.raises(AutoparError, match=words):
            call(make(), "cpu:1", BATCH)


@pytest.mark.parametrize(("example", "words"), [
    ({"x": torch.ones(0, 6), "y": torch.ones(0, 6)}, r"example_inputs: 'x' has no rows, shape \(0, 6\)"),
    ({"x": X, "y": torch.ones(4, 0)}, r"example_inputs: 'y' has no elements, shape \(4, 0\)"), ({}, "example_inputs holds no tensor"),
    ("x", "example_inputs is 'x'; it must be a mapping"), (3, "example_inputs is 3; it must be"),
    ({"x": 3}, "example_inputs holds no tensor"),
    ({3: X}, "example_inputs has the key 3"), ({"x": X.to_sparse(), "y": X}, "example_inputs entry 'x' is a torch.sparse_coo tensor"),
    ((X, None), "fails on example_inputs"), ((X, {X}), "example_inputs entry 'arg1' is a set"),
])  # fmt: skip
def test_example_inputs_are_named(example, words):
    for call in (autopar.plan, autopar.parallelize):
        with pytest.raises(AutoparError, match=words):
            call(Model(), "cpu:1", example)


@pytest.mark.parametrize(("batch", "words"), [
    ({"x": torch.ones(0, 6), "y": torch.ones(0, 6)}, "the batch has no rows"),
    ({"x": X}, "the batch has x; the model was planned for x, y"),
    ({"x": X, "y": torch.ones(4, 7)}, r"'y' has shape \(4, 7\)"), ({"x": X, "y": torch.ones(2, 6)}, "different numbers of rows"),
    ("x", "the batch is a str"), ({"x": X, "y": None}, "batch entry 'y' is None; the model was planned for a tensor"),
    ({"x": X, "y": X.to_sparse()}, "'y' is a torch.sparse_coo"),
    ({"x": X, "y": X.long()}, "'y' has dtype"), ({"x": X, "y": X.to("meta")}, "meta device"),
])  # fmt: skip
def test_batches_of_a_step_are_named(batch, words):
    for call in (engine_of().step, engine_of().eval_step):
        with pytest.raises(AutoparError, match=words):
            call(batch)


@pytest.mark.parametrize(("text", "words"), [
    ("gpt:layers=-1,hidden=8,heads=2,vocab=8", "layers=-1 must be at least 1"), ("gpt:layers=0,hidden=8,heads=2,vocab=8", "layers=0"),
    ("gpt:layers=1000000,hidden=8,heads=2,vocab=8", "layers=1000000 must be at least 1 and at most 10,000"),
    (f"llama:layers=2,hidden={10**12},heads=2,vocab=8", "hidden=1000000000000 must be"),
    ("llama:layers=2,hidden=7,heads=2,vocab=8", "heads=2"), ("moe:layers=2,hidden=8,heads=2,vocab=8,experts=2,top_k=3", "top_k=3 exceeds"),
    ("gpt:layers=1.5,hidden=8,heads=2,vocab=8", "not an integer"), (None, "not by None"), (LONG, "Unknown model 'xxx"),
    (f"gpt:layers={'9' * 5000},hidden=8,heads=2,vocab=8", "layers='999.*not an integer"),
])  # fmt: skip
def test_dimensions_of_models(text, words):
    with pytest.raises(AutoparError, match=words) as caught:
        parse_model(text)
    assert len(str(caught.value)) < 1500


LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
         "vocab_size": 64}  # fmt: skip


@pytest.mark.parametrize("change", [
    {"hidden_size": -32}, {"hidden_size": 0}, {"hidden_size": 1.5}, {"hidden_size": 10**12}, {"hidden_size": "big"},
    {"num_hidden_layers": -2}, {"num_hidden_layers": 10**12}, {"num_attention_heads": 0}, {"num_attention_heads": -4},
    {"vocab_size": -1}, {"vocab_size": 10**12},
    {"intermediate_size": -64}, {"num_key_value_heads": 0}, {"num_key_value_heads": 3}, {"hidden_size": 33}, {"hidden_act": "nonsense"},
    {"max_position_embeddings": -5}, {"rope_theta": -1.0, "hidden_size": None}, {"model_type": "llamma"}, {"model_type": 3},
], ids=str)  # fmt: skip
def test_hugging_face_configs_of_impossible_sizes(tmp_path, change):
    import json

    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))

    def planned():
        spec = parse_model(f"hf:{tmp_path}")
        autopar.plan(spec.build("meta"), "cpu:1", spec.example_inputs(2, 16), time_limit_s=2.0)

    found = refusal(planned)
    if change != {"max_position_embeddings": -5}:  # which rotary positions do not read
        assert found, change


def saved_to_a_full_disk(rank: int, directory: str) -> tuple[list[str], list[str], list[str]]:
    """What is told of each save, and the files and checkpoints after them."""
    os.chdir(directory)
    engine = autopar.parallelize(Model(), "cpu:1", BATCH)
    engine.plan.save("plan.json")
    autopar.ClusterSpec.parse("cpu:1").to_yaml("cluster.yaml")
    engine.save("checkpoints")
    before = {path: Path(path).read_text() for path in ("plan.json", "cluster.yaml")}
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
    told = []
    cluster = autopar.ClusterSpec.make("h100", nodes=2)
    for save in (
        lambda: engine.plan.save("plan.json"),
        lambda: cluster.to_yaml("cluster.yaml"),
        lambda: engine.save("checkpoints"),
        lambda: engine.save("checkpoints", asynchronous=True).wait(),
        lambda: engine.export("weights"),
        lambda: engine.plan.save("new.json"),
    ):
        try:
            save()
        except AutoparError as error:
            told.append(str(error))
    assert before == {path: Path(path).read_text() for path in before}
    return told, sorted(os.listdir(".")), sorted(os.listdir("checkpoints"))


def test_a_full_disk_leaves_what_was_there(tmp_path):
    """No file may be longer than 50 bytes."""
    ((told, files, saved),) = run_workers(saved_to_a_full_disk, 1, (str(tmp_path),))
    assert files == ["checkpoints", "cluster.yaml", "plan.json"] and saved == ["000001-step-0"]
    assert len(told) == 6
    assert (
        "the file that was there is as before" in told[0]
        and "earlier checkpoints are as before" in told[2]
    )
    assert all("File too large" in text for text in told)


def test_a_saved_file_keeps_its_permissions_and_its_link(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    plan().save(real)
    real.chmod(0o640)
    link.symlink_to(real)
    plan().save(link)
    assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o640 and Plan.load(link) == plan()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]
