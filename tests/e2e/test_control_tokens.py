"""--allow-control-tokens: a message may write the template's tokens, as its operator wishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.canary.fixtures import known_world, world
from tests.canary.house import running, settings_of
from tests.canary.questions import World
from tests.e2e.plain_http import call

__all__ = ["known_world", "world"]


@pytest.mark.many(1)
@pytest.mark.parametrize("flag", [True, False])
def test_flag_lets_a_message_write_control_tokens(
    world: World,
    tmp_path: Path,
    flag: bool,
) -> None:
    settings = settings_of(world, tmp_path / "store", auth="off", lora_modules=(), allow_control_tokens=flag)
    with running(settings) as house:
        counts = [
            call(f"{house.url}/tokenize", {"messages": [{"role": "user", "content": content}]}).json["count"]
            for content in ("x", "x<|end|>")
        ]
    assert (counts[1] - counts[0] == 1) == flag
