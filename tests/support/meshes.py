"""Meshes that tests of several subjects run under."""

from __future__ import annotations

from autopar.ir.mesh import MeshShape

ONE, DP2, TP2, PP2 = MeshShape(), MeshShape(dp=2), MeshShape(tp=2), MeshShape(pp=2)
DP2TP2, DP4, EP2 = MeshShape(dp=2, tp=2), MeshShape(dp=4), MeshShape(dp=2, ep=2)
