"""Programs with ops of our own train as programs without them, and as one device does, in fp64 on two ranks.

Each case counts the ops of ours that the rank's program calls: a program that fused nothing proves nothing.
"""

from __future__ import annotations

import copy
from collections import Counter
from itertools import chain

import pytest
import torch
from support.captures import captured_once
from support.effort import tried
from support.exactness import case, reference, run_steps, sgd, update_error

import autopar
from autopar.ir.calls import op_name
from autopar.runtime.engine import Engine
from autopar.verify.verify import free_network

MESHES = {
    "dp=2": {"dp": 2, "tp": 1},
    "tp=2": {"dp": 1, "tp": 2},
    "cp=2": {"dp": 1, "tp": 1, "cp": 2},
    "pp=2": {"dp": 1, "tp": 1, "pp": 2, "micro_batch": 4},
}
LOSSES = {
    "all": ("autopar::cross_entropy", "vocab_parallel_statistics"),
    "head": ("autopar::linear_cross_entropy", "vocab_parallel_linear_loss"),
}
"""By mode, the loss of whole rows and that of a sharded vocabulary."""
SHARDED = {sharded for _, sharded in LOSSES.values()}
OURS = {
    "llama-tiny": {
        "autopar::rms_norm",
        "autopar::add_rms_norm",
        "autopar::glu",
        "autopar::rotary",
    },
    "gpt-tiny": {"autopar::layer_norm", "autopar::add_layer_norm"},
}


def own_ops(engine: Engine) -> Counter[str]:
    """How often the graphs of a rank call each op of ours."""
    modules = {id(m): m for stage in engine.program.stages for m in stage.module.modules()}
    graphs = [m.graph for m in modules.values() if isinstance(m, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    names = [op_name(node) for node in nodes] + [
        getattr(node.target, "__name__", "") for node in nodes
    ]
    return Counter(name for name in names if name.startswith("autopar::") or name in SHARDED)


@captured_once()
def trained(
    rank: int, name: str, meshes: list[dict], mode: str
) -> list[tuple[list[float], float, Counter]]:
    """On one rank, for each mesh: losses, the error of the update over its tolerance, and the ops of ours."""
    found, results = case(name), []
    for pins in meshes:
        engine = autopar.parallelize(
            copy.deepcopy(found.model),
            free_network(2),
            found.batches[0],
            optimizer=sgd,
            pin=pins | {"fuse": mode},
            precision="fp64",
        )
        losses, state = run_steps(engine, found.batches)
        results.append((losses, update_error(reference(name), state), own_ops(engine)))
    return results


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("llama-tiny", "all"),
        pytest.param("gpt-tiny", "all", marks=pytest.mark.slow),
        pytest.param("llama-tiny", "head", marks=pytest.mark.slow),
        ("gpt-tiny", "head"),
    ],
)
def test_fused_programs_train_as_one_device_does(pool2, name, mode):
    """Over tp=2 the vocabulary is sharded; gpt-tiny's head is its embedding."""
    meshes = tried(["tp=2", "pp=2"], [*MESHES])
    found = pool2.run(trained, name, [MESHES[mesh] for mesh in meshes], mode)
    whole, sharded = LOSSES[mode]
    for number, mesh in enumerate(meshes):
        called: Counter[str] = Counter()
        for losses, error, ops in (of_rank[number] for of_rank in found):
            assert losses[0] == pytest.approx(reference(name).losses[0], rel=1e-12), mesh
            assert losses == pytest.approx(reference(name).losses, rel=1e-9), mesh
            assert error <= 1, mesh
            called += ops
        loss = sharded if mesh == "tp=2" else whole
        assert set(called) == OURS[name] | {loss}, mesh


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_programs_without_fusion_train_alike(pool2, name):
    meshes = [*MESHES.values()]
    ours, theirs = (pool2.run(trained, name, meshes, mode) for mode in ("norms", "off"))
    assert all(name.endswith("norm") for _, _, ops in chain(*ours) for name in ops)
    for fused, plain in zip(chain(*ours), chain(*theirs), strict=True):
        assert fused[0][0] == pytest.approx(plain[0][0], rel=1e-12)
        assert fused[0] == pytest.approx(plain[0], rel=1e-9)
        assert max(fused[1], plain[1]) <= 1 and not plain[2]
