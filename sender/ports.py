"""The seams where I/O happens: Protocols that the pipeline is written against."""

from typing import Protocol

from sender.domain import Answer, Target
from sender.events import Event


class Provider(Protocol):
    """Sends one mail as one request. Touches no database.

    `send` never raises for anything the network or the provider does: each becomes an `Answer`.
    """

    async def send(self, target: Target, gate: "Gate") -> Answer | None:
        """Send the mail of `target` once.

        Args:
            target: the row; its address has been checked.
            gate: asked once more when a connection is in hand and before the first byte leaves.

        Returns:
            The answer, or None if the gate closed and nothing was sent.
        """
        ...

    async def aclose(self) -> None:
        """Close idle connections."""
        ...


class Gate(Protocol):
    """Says whether a request may still begin: the last look is young and the lease held."""

    def __call__(self) -> bool:
        """True while the request may begin. Cheap and synchronous."""
        ...


class Observer(Protocol):
    """Receives every event after the fact it tells is durable."""

    def __call__(self, event: Event) -> None:
        """Take the event; must neither block nor raise."""
        ...
