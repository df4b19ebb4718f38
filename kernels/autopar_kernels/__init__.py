"""Triton kernels with torch.library ops and eager references.  Empty until the fusion pass has a kernel to substitute."""
