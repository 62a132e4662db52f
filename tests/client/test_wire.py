"""Messages cross whole: the other side gets what was sent, and takes nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.client.process import configure_of
from lora_serve.client.wire import MAX_FRAME_BYTES, FrameSplitter, frame_of, from_engine, to_engine
from lora_serve.core import blob_messages, errors, messages
from lora_serve.core.adapter import AdapterRef, AdapterTraits, AddedToken
from lora_serve.core.blob_messages import (
    BlobFiles,
    BlobFolder,
    CloseBlob,
    FilePiece,
    KeepBeside,
    OpenBlob,
    OpenStaged,
    ReadPiece,
    WritePiece,
)
from lora_serve.core.figures import EvictionReason
from lora_serve.core.live import (
    Call,
    EngineView,
    LiveAdapter,
    LiveCount,
    LiveLimits,
    LiveLoad,
    LiveMove,
    LiveRequest,
    LiveSettings,
    LiveSlot,
    LiveStep,
    LiveTargets,
    LiveTier,
    Message,
)
from lora_serve.core.messages import (
    Abort,
    AdapterSize,
    Command,
    Convert,
    Converted,
    ErrorEvent,
    Evict,
    FinishEvent,
    ForgetStaged,
    FromEngine,
    GetStats,
    Greeting,
    LoadRefused,
    LostEvent,
    Pin,
    Ping,
    PooledEvent,
    Prefetch,
    PromptEvent,
    Ready,
    Reply,
    Reported,
    Resize,
    SetTenantBudgets,
    SmokeTest,
    SmokeTestResult,
    StartedEvent,
    Stop,
    Submit,
    Timings,
    ToEngine,
    TokenEvent,
    TokenLogprobs,
    Tune,
    Unpin,
    Validate,
    WarmUpDone,
    Watch,
)
from lora_serve.core.model_spec import EmbeddingShape, LinearShape, LongRope, ModelSpec, PoolingSpec
from lora_serve.core.request import (
    AdapterUse,
    FinishReason,
    InferenceRequest,
    OnCold,
    PoolingParams,
    SamplingParams,
    Task,
    TokenGrammar,
)
from lora_serve.core.settings import Settings
from lora_serve.core.stats import AdapterCounters, EngineStats, ReplicaReport
from lora_serve.core.tenant import TenantBudget
from tests.engine.world import World, adapter

TRAITS = AdapterTraits(False, (4, 5), "sha256:b", 77, (AddedToken(76, "<x>", is_special=True),), 3)
REF = AdapterRef("acme", "acme/a", 3, "sha256:a", 8, 10, TRAITS)
USES = (AdapterUse(REF, 0.5, 2), AdapterUse(adapter("b")))
SAMPLING = SamplingParams(
    max_tokens=7,
    temperature=0.3,
    logit_bias=((1, -0.5),),
    seed=2**63,
    stop_token_ids=(9,),
    logprobs=2,
    prompt_logprobs=0,
)
REQUEST = InferenceRequest(
    "r",
    (1, 2, 3),
    SAMPLING,
    USES,
    "acme",
    "acme since 7",
    "key-1",
    -3,
    12.5,
    13.5,
    OnCold.PREVIOUS,
    0.25,
    (),
    PoolingParams((0, 1)),
    TokenGrammar('{"grammars": []}', TRAITS.added_tokens),
    "x",
    True,
    (7,),
)
SPEC = ModelSpec(
    "m", "Llama", 9, 99, (1, 2), 3, {"q": LinearShape(2, 3)}, 5, "float32", "cpu", {"e": EmbeddingShape(9, 2)},
    {"n": {"weight": (2,), "bias": ()}}, "e", "h", PoolingSpec(Task.CLASSIFY, 0, ("yes", "no")), True,
    long_rope=LongRope(4096, True),
)  # fmt: skip
LOGPROBS = TokenLogprobs(5, -0.25, 1, ((5, -0.25), (6, -math.inf)))
COMMANDS = (
    Prefetch(REF, "host"), Pin(REF), Unpin("sha256:a"), Evict("sha256:a", forget=True), Resize(1, None, 3, 4),
    SmokeTest(REF, (1, 2)), Tune(1, 2, 0.5, 0, 0.1, None), SetTenantBudgets((TenantBudget("acme", 1, None),)),
)  # fmt: skip
SETTINGS = Settings(model="m", store=Path("/s"), redis_url="redis://:password@h/0", tenant_weight=("a=2",))
LOOK = EngineView(
    7,
    (LiveStep(3, 1.5, 2.5, True, (("r", "decode", 1, 1), ("s", "prefill", 9, 0))),),
    (LiveRequest("r", "acme", (LiveAdapter("acme/a", 3, "sha256:a", 0.5),), "running", 9, 9, 1, 0, 1.5, 2.5),),
    (LiveRequest("s", "acme", (), "finished", 9, 9, 0, 0, 1.5, None, "abort"),),
    (LiveMove("sha256:a", "acme/a", "acme", "disk", "host", 3.5),),
    {"acme": LiveCount(2, 1)},
    (LiveSlot(1, "acme/a", "acme", "sha256:a", 2**40, 1, True),),
    4,
    (LiveLoad("sha256:b", "acme", "acme/b"),),
    num_blocks=9,
    settings=LiveSettings(
        LiveLimits(8, 64, 0.5, "no target"),
        LiveTargets(None, 50.0),
        8,
        16,
        {"device": LiveTier(1, 2, 3, 4, 5, 6, 7), "redis": LiveTier(None, 0, None, 0, 0, 0, 0)},
    ),
    replica="a1",
)


TO_ENGINE: tuple[ToEngine, ...] = (
    configure_of(SETTINGS), Submit(REQUEST), Abort("r"), GetStats(1), Ping(2), ForgetStaged("d"), WarmUpDone(), Stop(),
    Convert(3, Path("/f"), "sha256:a", None, 1.5), Validate(4, Path("/f"), "sha256:a", 8, True, 2.0),
    Convert(5, None, "sha256:a", None, 1.5), Reply(1, BlobFolder(Path("/b"), "redis", 0.5, 0.25, Path("/t"))), Reply(2),
    Reply(3, BlobFiles({"a": 2**40}, "sha256:a", "redis", 0.5, 0.25)), Reply(4, FilePiece(b"\x00\xff")),
    *(Command(5, command) for command in COMMANDS), Watch(6, 2**40, ("acme",), True),
)  # fmt: skip
FROM_ENGINE: tuple[FromEngine, ...] = (
    Ready(SPEC),
    Greeting("r", "machine", "files", "node", 1.5, "1.0", "settings", b"\x00\xff", 2.5),
    Reported(ReplicaReport("a1", 2.5, ("sha256:a",), ("sha256:b",), prefix_roots=(2**63,)), 2),
    StartedEvent("r"),
    PromptEvent("r", Timings(1.0, 2.0, 3.0), (None, LOGPROBS), 4, fell_back=True),
    TokenEvent("r", 5, LOGPROBS),
    TokenEvent("r", 5, None),
    PooledEvent("r", b"\x00\xff"),
    FinishEvent("r", FinishReason.STOP, 7),
    Reply(1),
    Reply(2, SmokeTestResult(1.0, 0.5, 2.0)),
    Reply(3, AdapterSize(8, 2**40)),
    OpenBlob(1, "sha256:a", True),
    CloseBlob(1),
    KeepBeside(2, "sha256:a", Path("/f")),
    OpenStaged(3, 7),
    ReadPiece(4, 3, "f", 2**40),
    WritePiece(5, 7, "f", 2**40, b"\x00\xff"),
    Reply(4, Converted("sha256:b")),
    Reply(5, LOOK),
)
ERROR = errors.QueueFullError("full", 7.0, "queue_tokens")


def sent(*sent: Message) -> bytes:
    """The frame in which these cross."""
    (frame,) = FrameSplitter().feed(frame_of(sent))
    return frame


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(getattr(message, "command", message)).__name__)
def test_what_the_engine_is_told_arrives_as_it_was(message: Message) -> None:
    assert to_engine(sent(message)) == [message]


def test_what_the_engine_says_in_a_step_arrives_as_it_was_in_one_frame() -> None:
    assert from_engine(sent(*FROM_ENGINE)) == list(FROM_ENGINE)


def test_every_message_has_crossed_here() -> None:
    errors_too = (
        ErrorEvent("r", ERROR),
        LostEvent("r", ERROR),
        Reply(1, error=ERROR),
        LoadRefused(ERROR),
        Reply(9, stats_of_an_engine()),
    )
    crossed = {type(message) for message in (*TO_ENGINE, *FROM_ENGINE, *errors_too, *COMMANDS)}
    crossed |= {type(message.value) for message in (*TO_ENGINE, *FROM_ENGINE) if isinstance(message, Reply)}
    named = {**vars(messages), **vars(blob_messages)}.values()
    known = {kind for kind in named if isinstance(kind, type) and issubclass(kind, Message)}
    assert known - crossed == {Message, Call, messages.RequestEvent}


def test_a_message_for_the_other_side_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        to_engine(sent(TokenEvent("r", 5, None)))
    with pytest.raises(msgspec.DecodeError):
        from_engine(sent(Submit(REQUEST)))


def test_a_probe_without_numbers_is_one_without_numbers() -> None:
    (found,) = from_engine(sent(Reply(1, SmokeTestResult(math.nan, 0.0, 1.0))))
    assert isinstance(found, Reply)
    assert isinstance(found.value, SmokeTestResult)
    assert math.isnan(found.value.logit_change)


def stats_of_an_engine() -> EngineStats:
    """Of one that worked."""
    world = World(swap_space=0)
    for name in "ab":
        world.add(name, [1, 2, 3], adapter(name))
    world.run()
    counters = AdapterCounters({"c": 1}, {"c": 1, "d": 1}, 3, 4, 0.5, {EvictionReason.ADMIN: 4}, EvictionReason.ADMIN)
    stats = world.engine.stats()
    return replace(stats, adapters={**stats.adapters, "sha256:c": counters})


def test_figures_of_an_engine_that_worked_arrive_as_they_were() -> None:
    stats = stats_of_an_engine()
    assert from_engine(sent(Reply(9, stats))) == [Reply(9, stats)]


def test_the_engines_settings_hold_no_secret() -> None:
    frame = sent(configure_of(Settings(model="m", admin_key="a long enough key", redis_url="redis://:password@h/0")))
    assert b"password" not in frame
    assert b"long enough" not in frame


ERRORS = [
    errors.InvalidRequestError("no", "prompt", "too_long"),
    errors.AdapterNotFoundError("acme/x"),
    errors.InvalidAdapterError(["one", "two"]),
    errors.QueueFullError("full", 7.0, "queue_tokens"),
    errors.TenantQueueFullError("full", 7.0, "tenant_tokens", requests=(3, 0), tokens=None),
    errors.AdapterUnavailableError("away", 12.0),
    errors.NumericalError("not a number"),
    errors.RequestTimeoutError("late"),
    errors.EngineLostError("gone", 5.0),
    errors.ModelError("a picture"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_on_the_other_side(error: errors.LoraServeError) -> None:
    found: list[Any] = from_engine(sent(ErrorEvent("r", error), Reply(1, error=error), LoadRefused(error)))
    for arrived in (message.error for message in found):
        assert type(arrived) is type(error)
        assert (str(arrived), vars(arrived)) == (str(error), vars(error))


def crossed(error: Exception) -> Exception:
    """The error that a caller gets on the other side."""
    (found,) = from_engine(sent(Reply(1, error=error)))
    assert isinstance(found, Reply)
    assert found.error is not None
    return found.error


def test_an_error_of_the_system_keeps_its_number_and_loses_its_path() -> None:
    found = crossed(FileNotFoundError(2, "No such file or directory", "/home/somebody/secret"))
    assert isinstance(found, FileNotFoundError)
    assert "somebody" not in str(found)


def test_a_bug_crosses_without_its_words() -> None:
    found = crossed(KeyError("another tenant's prompt"))
    assert type(found) is errors.InternalError
    assert "prompt" not in str(found)


def test_an_error_of_a_kind_unknown_here_is_an_internal_one() -> None:
    body = msgspec.msgpack.encode([["Reply", 1, None, ["NeverHeardOf", "x", {}]]])
    (found,) = from_engine(body)
    assert isinstance(found, Reply)
    assert type(found.error) is errors.InternalError


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(1, 9), min_size=1))
def test_frames_are_found_however_the_bytes_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    splitter, found, position = FrameSplitter(), [], 0
    while position < len(stream):
        step = cuts[position % len(cuts)]
        found += splitter.feed(stream[position : position + step])
        position += step
    assert found == bodies


def test_a_length_beyond_sense_is_refused_before_its_bytes_are_waited_for() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        list(FrameSplitter().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big")))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91\x90",
        b"\x91\x91\xa1\xff",  # a tag that is not UTF-8
        b"\x91\x94\xa5Reply\x01\xc0" + b"\x91" * 2000,
        *map(
            msgspec.msgpack.encode,
            (
                [["Submit", {"request_id": 3}]],
                [["Never"]],
                [["Reply", 1, None, ["OSError", "x", []]]],
                [["Reply", 1, None, ["InternalError", "x", 7]]],
                [["Reply", 1, None, ["InternalError", 7, {}]]],
            ),
        ),
    ],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    for read in (to_engine, from_engine):
        with pytest.raises(msgspec.DecodeError):
            read(body)
