"""Ops of our own, registered with torch.library, and their kernels.  Imports torch alone; each module registers what it defines."""
