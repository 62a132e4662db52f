"""--allow-control-tokens on a real server: a message may write the template's tokens, as its operator wishes."""

from __future__ import annotations

import aiohttp

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import Site


async def test_flag_lets_a_message_write_control_tokens(site: Site) -> None:
    with ServerProcess(
        site.arguments("allowing", "--allow-control-tokens", "--warmup", "off"), site.root / "log"
    ) as process:
        process.wait_until_ready(90)
        async with aiohttp.ClientSession(process.url) as http:
            counts = []
            for content in ("x", "x<|end|>"):
                body = {"messages": [{"role": "user", "content": content}]}
                async with http.post("/tokenize", json=body) as answer:
                    counts.append((await answer.json())["count"])
    assert counts[1] == counts[0] + 1
