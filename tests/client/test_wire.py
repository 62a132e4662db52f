"""Records cross whole: what goes in on one side comes out on the other, and nothing else is taken."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.client import wire
from lora_serve.client.faults import error_of, fault_of
from lora_serve.client.frames import MAX_FRAME_BYTES, FrameSplitter, frame_of, from_engine, to_engine
from lora_serve.client.orders import order_of
from lora_serve.core import errors
from lora_serve.core.adapter import AdapterRef, AdapterTraits, AddedToken
from lora_serve.core.messages import (
    Evict,
    FinishEvent,
    Pin,
    PooledEvent,
    Prefetch,
    PromptEvent,
    Resize,
    SmokeTest,
    SmokeTestResult,
    StartedEvent,
    Timings,
    TokenEvent,
    TokenLogprobs,
    Tune,
    Unpin,
)
from lora_serve.core.model_spec import EmbeddingShape, LinearShape, ModelSpec, PoolingSpec
from lora_serve.core.request import (
    AdapterUse,
    FinishReason,
    InferenceRequest,
    OnCold,
    PoolingParams,
    SamplingParams,
    Task,
)
from lora_serve.core.settings import Settings
from lora_serve.core.stats import AdapterCounters, EvictionReason
from lora_serve.engine_host.process import configure_of
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
    "x",
)
SPEC = ModelSpec(
    "m", "Llama", 9, 99, (1, 2), 3, {"q": LinearShape(2, 3)}, 5, "float32", "cpu", {"e": EmbeddingShape(9, 2)},
    {"n": {"weight": (2,), "bias": ()}}, "e", "h", PoolingSpec(Task.CLASSIFY, 0, ("yes", "no")), True,
)  # fmt: skip
LOGPROBS = TokenLogprobs(5, -0.25, 1, ((5, -0.25), (6, -math.inf)))
COMMANDS = (
    Prefetch(REF, "host"), Pin(REF), Unpin("sha256:a"), Evict("sha256:a", forget=True), Resize(1, None, 3, 4),
    SmokeTest(REF, (1, 2)), Tune(1, 2, 0.5, 0, 0.1, None),
)  # fmt: skip
EVENTS = [
    wire.Started(StartedEvent("r")),
    wire.Prompt(PromptEvent("r", Timings(1.0, 2.0, 3.0), (None, LOGPROBS), 4, fell_back=True)),
    wire.Token(TokenEvent("r", 5, LOGPROBS)),
    wire.Token(TokenEvent("r", 5, None)),
    wire.Pooled(PooledEvent("r", b"\x00\xff")),
    wire.Finish(FinishEvent("r", FinishReason.STOP, 7)),
]
SETTINGS = Settings(model="m", store=Path("/s"), redis_url="redis://:password@h/0", tenant_weight=("a=2",))


@pytest.mark.parametrize(
    "record",
    [
        configure_of(SETTINGS), wire.Submit(REQUEST), wire.Abort("r"), wire.Stats(1), wire.Ping(2), wire.Forget(),
        wire.Convert(3, "/f", "sha256:a", None, 1.5), wire.Validate(4, "/f", "sha256:a", 8, True, 2.0),
        wire.Settle(), wire.Stop(),
        wire.BlobGiven(1, "/b", "redis", 0.5, 0.25), wire.ErrandDone(2),
        *(wire.Order(5, order_of(command)) for command in COMMANDS),
    ],
    ids=lambda record: type(getattr(record, "what", record)).__name__,
)  # fmt: skip
def test_what_the_engine_is_told_arrives_as_it_was(record: Any) -> None:
    (frame,) = FrameSplitter().feed(frame_of(record))
    assert to_engine(frame) == record


@pytest.mark.parametrize(
    "record",
    [
        wire.Ready(SPEC), wire.Events(EVENTS), wire.Nothing(1), wire.SmokeTested(2, SmokeTestResult(1.0, 0.5, 2.0)),
        wire.Validated(3, 8, 2**40), wire.OpenBlob(1, "sha256:a", True), wire.CloseBlob(1),
        wire.KeepBeside(2, "sha256:a", "/f"),
    ],
    ids=lambda record: type(record).__name__,
)  # fmt: skip
def test_what_the_engine_says_arrives_as_it_was(record: Any) -> None:
    (frame,) = FrameSplitter().feed(frame_of(record))
    assert from_engine(frame) == record


def test_a_probe_without_numbers_is_one_without_numbers() -> None:
    (frame,) = FrameSplitter().feed(frame_of(wire.SmokeTested(1, SmokeTestResult(math.nan, 0.0, 1.0))))
    found = from_engine(frame)
    assert isinstance(found, wire.SmokeTested)
    assert math.isnan(found.value.logit_change)


def test_figures_of_an_engine_that_worked_arrive_as_they_were() -> None:
    world = World(swap_space=0)
    for name in "ab":
        world.add(name, [1, 2, 3], adapter(name))
    world.run()
    counters = AdapterCounters(1, 2, 3, 4, 0.5, {EvictionReason.ADMIN: 4}, EvictionReason.ADMIN)
    stats = world.engine.stats()
    stats = replace(stats, adapters={**stats.adapters, "sha256:c": counters})
    (frame,) = FrameSplitter().feed(frame_of(wire.Figures(9, stats)))
    assert from_engine(frame) == wire.Figures(9, stats)


def test_the_engines_settings_hold_no_secret() -> None:
    frame = frame_of(
        configure_of(Settings(model="m", admin_key="a long enough key", redis_url="redis://:password@h/0"))
    )
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
    (frame,) = FrameSplitter().feed(frame_of(wire.Events([wire.Failed("r", fault_of(error))])))
    record: Any = from_engine(frame)
    arrived = error_of(record.events[0].fault)
    assert type(arrived) is type(error)
    assert (str(arrived), vars(arrived)) == (str(error), vars(error))


def test_an_error_of_the_system_keeps_its_number_and_loses_its_path() -> None:
    found = error_of(fault_of(FileNotFoundError(2, "No such file or directory", "/home/somebody/secret")))
    assert isinstance(found, FileNotFoundError)
    assert "somebody" not in str(found)


def test_a_bug_crosses_without_its_words() -> None:
    found = error_of(fault_of(KeyError("another tenant's prompt")))
    assert type(found) is errors.InternalError
    assert "prompt" not in str(found)


def test_an_error_of_a_kind_unknown_here_is_an_internal_one() -> None:
    fault = msgspec.structs.replace(fault_of(errors.ModelError("x")), kind="NeverHeardOf")
    assert type(error_of(fault)) is errors.InternalError


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


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x90", msgspec.msgpack.encode(["Submit", {"request_id": 3}])])
def test_what_is_no_record_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        to_engine(body)
