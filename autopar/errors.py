"""The one exception type that a user of autopar meets."""


class AutoparError(Exception):
    """A user's mistake or an impossible request, worded so that the user can act on it.

    The message says what is wrong, with the numbers, and names the nearest thing that works.
    """
