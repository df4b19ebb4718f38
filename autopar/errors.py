"""The exception types of autopar."""

from __future__ import annotations

from autopar_cost_models.echo import shortened_message, shown

__all__ = ["AutoparError", "NoLayout", "NoPlanFits", "one_line", "shown"]


def one_line(error: BaseException) -> str:
    """The first 300 characters of an error's message, with line breaks and runs of blanks as single
    blanks.
    """
    return " ".join(str(error).split())[:300]


class AutoparError(Exception):
    """A user's mistake or an impossible request, worded so that the user can act.

    The message says what is wrong, with numbers, and names the nearest thing that works. Long
    values in it are shortened here. Messages insert values with `shown`, which works for any value.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened_message(message))


class NoLayout(AutoparError):
    """There is no layout that the model, the devices, the pins and, where one is asked for, the
    framework allow. Nothing was searched.
    """


class NoPlanFits(AutoparError):
    """No plan was found that fits into the memory of a device and of its host.

    Attributes:
        least_bytes: bytes of the smallest plan on its fullest device, or None if they are not known.
        proven: whether it is proved that no plan fits.
        is_cut: whether the time was over before anything was known, so that a plan may fit.
    """

    def __init__(
        self,
        message: str,
        least_bytes: int | None = None,
        proven: bool = True,
        is_cut: bool = False,
    ) -> None:
        super().__init__(message)
        self.least_bytes, self.proven, self.is_cut = least_bytes, proven, is_cut
