"""A plan file that was edited by hand: refused with the field that is wrong, or still a plan that trains exactly as one device does."""

from __future__ import annotations

from exactness import update_errors  # noqa: F401  (the measure of this suite)

