"""An aiohttp application on a real loopback socket, on a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def serving(app: web.Application, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """`http://127.0.0.1:PORT`, for as long as the block lasts; with `tls` https."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        return int(runner.addresses[0][1])

    async def end() -> None:
        await runner.cleanup()
        for _ in range(5):  # turns of the loop: one that was accepted last has its transport some turns later
            for transport in list(loop._transports.values()):  # type: ignore[attr-defined]
                transport.abort()  # it may still have bytes for a client that left, or aiohttp may not know it yet
            await asyncio.sleep(0)

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def break_off(request: web.Request, content: bytes, headers: dict[str, str] | None = None) -> web.StreamResponse:
    """Promise all of `content`, send half, hang up."""
    answer = web.StreamResponse(headers=headers)
    answer.content_length = len(content)
    await answer.prepare(request)
    await answer.write(content[: len(content) // 2])
    assert request.transport is not None
    request.transport.close()
    return answer
