"""register, upload, delete and residency, against the real application."""

from __future__ import annotations

import io
import json
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.commands import admin_client
from lora_serve.core.messages import SmokeTestResult
from tests.commands.conftest import Adapters
from tests.commands.stub_server import StubServer

NAMES = ("adapter_config.json", "adapter_model.safetensors")


async def test_defaults_in_force_are_told_and_misplaced_ones_are_warned_of(ask: Adapters, house: Any) -> None:
    folder = str(house.make_adapter("a", 1))
    metadata = '{"sampling": {"top_p": 0.5}, "max_tokens": 9, "guided_json": {}, "tool_parser": "hermes"}'
    ended = await ask("register", "acme/a", folder, "--metadata", metadata)
    assert ended.out.splitlines()[1:] == ["defaults of requests:", '  sampling: {"top_p": 0.5}']
    places = [("max_tokens", "sampling"), ("guided_json", "response_format"), ("tool_parser", "tool_call_parser")]
    said = "warning: `{}` in its metadata is a note: defaults stand in `{}`."
    assert ended.err.splitlines() == [said.format(*place) for place in places]


async def test_warning_of_a_version_that_is_not_served_yet_is_told(ask: Adapters, house: Any) -> None:
    await ask("register", "acme/a", str(house.make_adapter("a", 1)))
    folder = house.make_adapter("b", 2)
    (folder / "adapter_config.json").write_text(
        json.dumps({**json.loads((folder / "adapter_config.json").read_text()), "base_model_name_or_path": "no/other"})
    )
    ended = await ask("register", "acme/a", str(folder), "--no-activate")
    assert (ended.code, ended.err.count("warning: ")) == (0, 1), ended.err


async def test_register_says_version_and_digest_and_again_that_it_was_there(ask: Adapters, house: Any) -> None:
    folder = str(house.make_adapter("a", 1))
    flags = ("--tenant", "globex", "--pin", "--metadata", '{"run": 17}')
    ended = await ask("register", "acme/a", folder, *flags)
    ref = house.services.catalog.resolve("acme/a").ref
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("acme/a@1 registered: rank 2, ")
    assert ended.out.endswith(f"{ref.digest}\ndefaults of requests: none\n")
    entry = house.services.catalog.entry("acme/a")
    assert (entry.tenant, entry.pinned, entry.metadata) == ("globex", True, {"run": 17})
    again = await ask("register", "acme/a", folder)
    assert again.out == "acme/a: this content was there already; version 1 is served\n"


async def test_what_the_server_warns_of_goes_to_standard_error(ask: Adapters, house: Any) -> None:
    folder = str(house.make_adapter("a", 1, base_model_name_or_path="another/base"))
    taken = await ask("register", "acme/a", folder)
    assert taken.code == 0
    assert taken.err.startswith("warning: ")
    assert "names the base model 'base'" in taken.err
    assert "warning: " not in taken.out


async def test_what_changes_nothing_is_refused_unless_asked_for(ask: Adapters, house: Any) -> None:
    house.verifier.result = SmokeTestResult(0.0, 0.0, 1.0)
    folder = str(house.make_adapter("a", 1))
    refused = await ask("register", "acme/a", folder)
    assert (refused.code, refused.out) == (1, "")
    assert (await ask("register", "acme/a", folder, "--allow-noop")).code == 0


async def test_an_adapters_reasons_come_one_per_line(ask: Adapters, house: Any) -> None:
    folder = house.make_adapter("a", 1, target_modules=["q_proj"], rank=2)
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    ended = await ask("register", "acme/a", str(folder))
    assert (ended.code, ended.out) == (1, "")
    first, *reasons = ended.err.splitlines()
    assert first == f"lora-serve: error: {house.url}: The adapter cannot be served:"
    assert len(reasons) > 1
    assert all(reason.startswith("- ") for reason in reasons)


async def test_upload_of_a_folder_takes_its_files_and_the_form(ask: Adapters, house: Any) -> None:
    folder = house.make_adapter("a", 1)
    (folder / "README.md").write_text("not sent")
    flags = ("--tenant", "globex", "--pin", "--metadata", '{"note": "über"}', "--json")
    ended = await ask("upload", "acme/a", str(folder), *flags)
    assert (ended.code, ended.err) == (0, "")
    card = ended.document
    facts = (card["id"], card["tenant"], card["pinned"], card["metadata"])
    assert facts == ("acme/a", "globex", True, {"note": "über"})
    assert card["source"] == "upload"


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz", ".tar", ".download"])
async def test_upload_of_an_archive_needs_no_right_name(ask: Adapters, house: Any, tmp_path: Path, ending: str) -> None:
    folder, archive = house.make_adapter("a", 1), tmp_path / f"mine{ending}"
    with tarfile.open(archive, "w:gz" if "gz" in ending else "w") as file:
        for name in NAMES:
            file.add(folder / name, arcname=name)
    assert (await ask("upload", "acme/a", str(archive))).code == 0
    assert house.services.catalog.resolve("acme/a").ref.version == 1


async def test_a_second_upload_is_a_second_version(ask: Adapters, house: Any) -> None:
    await ask("upload", "acme/a", str(house.make_adapter("a", 1)))
    ended = await ask("upload", "acme/a", str(house.make_adapter("a", 2)))
    assert ended.out.startswith("acme/a@2 registered")


async def test_too_large_an_upload_is_refused_in_the_servers_words(ask: Adapters, house: Any) -> None:
    """While it is still being sent: the answer must be heard all the same."""
    folder = house.make_adapter("a", 1)
    (folder / NAMES[1]).write_bytes(bytes(30_000_000))
    ended = await ask("upload", "acme/a", str(folder))
    assert ended.code == 1
    assert "--max-upload-size" in ended.err


async def test_an_upload_without_the_key_is_refused_in_the_servers_words(
    ask: Adapters, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = house.make_adapter("a", 1)
    (folder / NAMES[1]).write_bytes(bytes(30_000_000))
    monkeypatch.setenv("LORA_SERVE_ADMIN_KEY", "another-key")
    ended = await ask("upload", "acme/a", str(folder))
    assert ended.code == 1
    assert "--admin-key" in ended.err


class Reads:
    """Of files that are being sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []

        class Counted(admin_client.CountedFile):
            def read(counted, size: int | None = -1, /) -> bytes:  # noqa: N805
                taken = super().read(size)
                self.sizes.append(len(taken))
                return taken

        monkeypatch.setattr(admin_client, "CountedFile", Counted)


async def test_thirty_megabytes_go_out_in_pieces_no_faster_than_the_server_takes_them(
    ask_stub: Adapters, stub: StubServer, make_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_adapter("a", 1)
    with (folder / NAMES[1]).open("wb") as file:
        file.truncate(30_000_000)
    reads = Reads(monkeypatch)
    ahead: list[int] = []  # bytes read from the file that the server has not got yet
    size = sum((folder / name).stat().st_size for name in NAMES)  # read once before, for the digest
    stub.on_chunk = lambda: ahead.append(sum(reads.sizes) - size - stub.upload_bytes)
    tracemalloc.start()
    try:
        assert (await ask_stub("upload", "acme/a", str(folder))).code == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert stub.upload_bytes > 30_000_000
    assert max(ahead) < 20_000_000  # both sides' socket buffers
    assert max(reads.sizes) <= 2**20
    assert peak < 15_000_000


async def test_an_upload_says_its_digest_and_one_that_is_changed_on_its_way_is_refused(
    ask: Adapters, house: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changing(admin_client.CountedFile):
        """Other bytes when they are sent than when they were hashed."""

        num_reads = 0

        def read(self, size: int | None = -1, /) -> bytes:
            taken = super().read(size)
            Changing.num_reads += bool(taken)
            return taken if Changing.num_reads <= 2 else taken[:-1] + bytes([taken[-1] ^ 1])

    with monkeypatch.context() as patched:
        patched.setattr(admin_client, "CountedFile", Changing)
        ended = await ask("upload", "acme/a", str(house.make_adapter("a", 1)))
    assert (ended.code, "Content-Digest" in ended.err) == (1, True), ended.err
    assert "acme/a" not in house.services.catalog.snapshot.entries
    assert (await ask("upload", "acme/a", str(house.make_adapter("a", 1)))).code == 0


async def test_digest_that_is_asked_for_is_sent_along(ask: Adapters, house: Any) -> None:
    folder = house.make_adapter("a", 1)
    digest = adapter_digest(folder)
    for verb in ("upload", "register"):
        refused = await ask(verb, "acme/a", str(folder), "--digest", "sha256:" + "0" * 64)
        assert (refused.code, digest in refused.err) == (1, True), refused.err
        assert (await ask(verb, "acme/a", str(folder), "--digest", digest)).code == 0


async def test_the_bar_shows_bytes_on_a_terminal_and_stays_away_with_json(
    ask: Adapters, house: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lora_serve.commands.output.Console.is_terminal", True)
    monkeypatch.setenv("TERM", "xterm")
    ended = await ask("upload", "acme/a", str(house.make_adapter("a", 1)))
    assert "kB" in ended.err or "bytes" in ended.err, ended.err
    quiet = await ask("upload", "acme/a", str(house.make_adapter("a", 2)), "--json")
    assert quiet.err == ""
    assert quiet.document["version"] == 2


async def test_delete_of_a_version_and_of_all(ask: Adapters, house: Any) -> None:
    await house.register("acme/a", seed=1)
    await house.register("acme/a", seed=2)
    assert (await ask("delete", "acme/a", "--version", "1", "--yes")).out == "acme/a@1 deleted\n"
    assert [version.version for version in house.services.catalog.entry("acme/a").versions] == [2]
    ended = await ask("delete", "acme/a", "--yes", "--wait", "--json")
    assert ended.document["deleted"] is True
    assert (await ask("delete", "acme/a", "--yes")).code == 4


async def test_adapter_is_not_deleted_by_what_comes_from_a_pipe(
    ask: Adapters, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.register("acme/a")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    ended = await ask("delete", "acme/a")
    assert (ended.code, ended.out, "--yes" in ended.err) == (1, "", True)
    assert "acme/a" in house.services.catalog.snapshot.entries


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("", 1)])
async def test_somebody_at_a_terminal_is_asked_before_a_delete(
    ask: Adapters, house: Any, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    class Terminal:
        isatty = staticmethod(lambda: True)
        readline = staticmethod(lambda: answer)

    await house.register("acme/a")
    monkeypatch.setattr("sys.stdin", Terminal())
    ended = await ask("delete", "acme/a")
    assert ended.code == code
    assert ended.err.startswith(f"Delete all versions of the adapter acme/a at {house.url}? [y/N] ")
    assert ("acme/a" in house.services.catalog.snapshot.entries) == (code == 1)


async def test_residency_says_where_it_is_now(ask: Adapters, house: Any) -> None:
    await house.register("acme/a")
    assert (await ask("pin", "acme/a")).out == "acme/a@1: on disk, host, device, pinned\n"
    refused = await ask("evict", "acme/a")
    said = f"lora-serve: error: {house.url}: The adapter `acme/a` is pinned: unpin it first.\n"
    assert (refused.code, refused.err) == (1, said)
    assert "pinned" not in (await ask("unpin", "acme/a")).out
    assert "device" not in (await ask("evict", "acme/a")).out
    assert "device" in (await ask("prefetch", "acme/a")).out
    assert (await ask("prefetch", "acme/a", "--json")).document["tiers"] == ["disk", "host", "device"]
