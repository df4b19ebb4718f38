"""Programs that measure autopar: `search`, `exactness`, `speed` and `fidelity`."""
