"""The shared `httpx.AsyncClient`, without what must not happen to a mail."""

from typing import final, override

import httpx


@final
class PlainClient(httpx.AsyncClient):
    """The shared client: `send` goes to the transport and nowhere else.

    What httpx's own `send` adds (sign-in flows, redirects, a cookie jar, hooks, a log line with the
    URL) must not happen here, and costs more than the rest of httpx together.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        """Take the transport over; `aclose` closes it."""
        super().__init__(transport=transport, trust_env=False)
        self._plain_transport = transport

    @override
    async def send(
        self,
        request: httpx.Request,
        *,
        stream: bool = False,
        auth: object = None,
        follow_redirects: object = False,
    ) -> httpx.Response:
        response = await self._plain_transport.handle_async_request(request)
        response.request = request
        if not stream:
            _ = await response.aread()
        return response
