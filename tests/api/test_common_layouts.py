"""The layouts that a search of many cells tries first."""

from __future__ import annotations

from math import prod

from autopar import api
from autopar.ir.cluster import ClusterSpec
from autopar.models import parse_model
from autopar.planning.candidates import candidates_for, common_layouts
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest


def test_common_layouts_keep_to_a_node_and_fill_it_with_experts():
    spec = parse_model("moe:layers=8,hidden=64,heads=8,ffn=64,vocab=64,seq=64,experts=16,top_k=2")
    request = PlanRequest(ClusterSpec.parse("dgx-h100:4"), 64, Pins(), "bf16", "moe", tolerance=0.0)
    candidates = candidates_for(request, api.trace_spec(spec, 64))
    found = [candidates[n] for n in common_layouts(candidates, 8)]
    flat = {(c.mesh.tp, c.mesh.ep) for c in found if c.mesh.pp == 1}
    assert flat == {(1, 8), (2, 4), (4, 2), (8, 1)}
    assert all(c.mesh.ep == min(8 // c.mesh.tp, c.mesh.dp) for c in found)
    assert {c.mesh.pp for c in found} == {c.mesh.pp for c in candidates}
    assert all(c.micro_batch == 1 and prod((c.mesh.tp, c.mesh.cp)) <= 8 for c in found)
    assert [c.mesh.tp for c in found] == sorted(c.mesh.tp for c in found)
