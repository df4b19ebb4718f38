"""Fusion: subgraphs of a traced model that compute what an op of `autopar_kernels` computes become that op."""
