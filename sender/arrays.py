"""Arrays as the text that `queries` casts: one prepared plan whatever the size of the numbers."""

from collections.abc import Iterable


def id_array(values: Iterable[object]) -> str:
    """A literal such as `{1,2,3}`."""
    return "{" + ",".join(map(str, values)) + "}"
