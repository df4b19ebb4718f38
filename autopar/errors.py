"""The one exception type that a user of autopar meets."""


class AutoparError(Exception):
    """A user's mistake or an impossible request, worded so that the user can act on it.

    The message says what is wrong, with the numbers, and names the nearest thing that works.
    """


class NoPlanFits(AutoparError):
    """Nothing fits into the memory of a device.  `least_bytes`: what the smallest plan needs on its fullest device; None if not known."""

    def __init__(self, message: str, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes
