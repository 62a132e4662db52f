"""The Ray cluster of a fleet: one of this server's own, on this machine alone, or one that is joined. No Serve here."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_serve.core.config import FleetConfig
from lora_serve.core.errors import ConfigError, how_to_install
from lora_serve.engine_host.fleet.node import (
    LOOPBACK,
    SELDOM_METRICS,
    Node,
    check_own_capacity,
    explained,
    joining_node,
    own_head,
)
from lora_serve.engine_host.fleet.output import drop_bytes_of_grpc, forward_replica_logs, plain_records, take_words_of

DRIVER_SECONDS = 20.0  # for this process to be one of the cluster's
_DRIVER = {"RAY_USAGE_STATS_ENABLED": "0", **SELDOM_METRICS}
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_SIGACTION_BYTES = 512  # more than C's `struct sigaction` has anywhere
_log = logging.getLogger(__name__)
CONNECT_SECONDS = 3.0  # for a TCP connection to a cluster's GCS
ANSWER_SECONDS = 5.0  # for its answer
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")  # noqa: S108  where `ray start` notes the address
_QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_ASKS_FOR_A_TOKEN = ("UNAUTHENTICATED", "PERMISSION_DENIED")
_REASONS = {
    "DEADLINE_EXCEEDED": "it does not answer",
    "UNAVAILABLE": "it speaks another protocol, or TLS: RAY_USE_TLS",
    "UNIMPLEMENTED": "it is another gRPC service",
}
_WANTED = "what is wanted is the port of its GCS, which `ray start --head` prints"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster to which this process is connected: `ray` may be used."""

    address: str  # HOST:PORT of its GCS
    is_own: bool  # started by this process, and ended with it
    node: Node | None  # the processes that this server started; None: it uses a node that was there

    def ended(self) -> str | None:
        """The reason why the connection is lost for good, as words; None while this server's own node runs."""
        return None if self.node is None else self.node.ended()


@contextmanager
def open_cluster(config: FleetConfig, halted: threading.Event | None = None) -> Iterator[Cluster]:
    """Starts or joins a cluster, and connects this process to it as long as the block lasts. Takes seconds: call it
    on a thread; once `halted` is set a start is given up. Raises ConfigError in words where Ray is not installed, or no
    cluster can be reached.
    """
    with plain_records():
        check_installed()
        importlib.import_module("ray")
    take_words_of("ray")
    drop_bytes_of_grpc()
    with ExitStack() as stack:
        if config.address is None:
            check_own_capacity(config)
            node, variables = stack.enter_context(own_head(config, halted))
            cluster = Cluster(node.address, True, node)
            stack.enter_context(_environment({**variables, **_DRIVER}))
        else:
            address = config.address if config.address != "auto" else running_address()
            variables = token_variables(os.environ)
            stack.enter_context(_environment({**variables, **_DRIVER}))
            check_reachable(address)
            _warn_without_tokens(address, variables)
            node_of_ours = None if config.address == "auto" else stack.enter_context(joining_node(address, halted))
            cluster = Cluster(address, False, node_of_ours)
        stack.enter_context(_connected(cluster))
        if not cluster.is_own:
            _warn_of_waiting_replicas(config)
        yield cluster
        if cluster.node is not None:
            _log.info("ending Ray's processes on this machine")


def check_installed() -> None:
    """Raises ConfigError in words if there is no Ray here. Imports nothing of it."""
    if not all(importlib.util.find_spec(name) for name in ("ray", "starlette")):  # the second comes with ray[serve]
        raise ConfigError(f"--engine ray needs the package ray: {how_to_install('ray')}")


def token_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that make Ray show a token: as RAY_AUTH_MODE says, else if there is one."""
    if mode := environment.get("RAY_AUTH_MODE"):
        return {"RAY_AUTH_MODE": mode}
    file = environment.get("RAY_AUTH_TOKEN_PATH") or Path(environment.get("HOME", "/"), ".ray", "auth_token")
    return {"RAY_AUTH_MODE": "token"} if environment.get("RAY_AUTH_TOKEN") or Path(file).is_file() else {}


def _warn_without_tokens(address: str, variables: Mapping[str, str]) -> None:
    host = address.rpartition(":")[0].strip("[]")
    if variables.get("RAY_AUTH_MODE", "").lower() != "token" and host not in (LOOPBACK, "localhost", "::1"):
        _log.warning(
            "the Ray cluster at %s is joined without tokens: whoever reaches its ports can run code on its machines. "
            "RAY_AUTH_MODE=token and a token make it ask (docs/deploy.md)",
            address,
        )


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Ray's variables in this process, whose libraries read them when they are first imported, or here again."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    _read_environment_again()
    try:
        yield
    finally:
        for name, text in before.items():
            os.environ.pop(name) if text is None else os.environ.__setitem__(name, text)
        _read_environment_again()


def _read_environment_again() -> None:
    raylet = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _connected(cluster: Cluster) -> Iterator[None]:
    """This process as a driver of the cluster. Ray's own words about it go nowhere; its errors are ours to tell."""
    ray = importlib.import_module("ray")
    temp_dir = None if cluster.node is None else str(cluster.node.temp_dir)

    def connect() -> None:
        with _as_a_driver_of(cluster), _kept_signals(), _without_console(), _quiet(logging.getLogger("ray")):
            ray.init(
                address=cluster.address,
                configure_logging=False,
                log_to_driver=True,  # what replicas write comes to `forward_replica_logs`
                _temp_dir=temp_dir,
            )

    _within(DRIVER_SECONDS, connect, cluster.address)
    try:
        with forward_replica_logs():
            yield
    finally:
        ray.shutdown()


def _within(seconds: float, work: Callable[[], None], address: str) -> None:
    """Runs `work` on a thread of its own: on the main thread Ray would take the signal handlers. Raises ConfigError."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="ray.init", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise ConfigError(f"--engine ray: the Ray cluster at {address} did not answer within {seconds:.0f} s")
    if failures:
        error = failures[0]
        reason = explained(str(error.__cause__ or error))
        raise ConfigError(f"--engine ray: the Ray cluster at {address} was not joined: {reason}") from error


@contextmanager
def _as_a_driver_of(cluster: Cluster) -> Iterator[None]:
    """Two things that `ray.init` has no argument for: a loopback address that stays one, and a name of the job in
    place of this process's command line, which may hold secrets and would be shown to the cluster's users.
    """
    constants = importlib.import_module("ray._private.ray_constants")
    utils = importlib.import_module("ray._private.utils")
    with _altered(utils, "get_entrypoint_name", lambda: "lora-serve"):
        if cluster.is_own:
            with _altered(constants, "ENABLE_RAY_CLUSTER", False):
                yield
        else:
            yield


@contextmanager
def _kept_signals() -> Iterator[None]:
    """Gives signals back to this server: Ray's library takes SIGTERM, and writes its stack on standard error."""
    libc = ctypes.CDLL(None)
    actions = {number: ctypes.create_string_buffer(_SIGACTION_BYTES) for number in _SIGNALS}
    for number, action in actions.items():
        libc.sigaction(number, None, action)
    try:
        yield
    finally:
        for number, action in actions.items():
            libc.sigaction(number, action, None)


@contextmanager
def _without_console() -> Iterator[None]:
    """What Ray's library takes for C's `stderr` while it connects leads nowhere: by itself it writes errors there, past
    this server's log. They stay in Ray's own files; its last words, a stack, go to the descriptor.
    """
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p.in_dll(libc, "stderr")
    before, stream.value = stream.value, libc.fopen(os.devnull.encode(), b"w")  # never closed: Ray keeps it
    try:
        yield
    finally:
        stream.value = before


@contextmanager
def _altered(module: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _warn_of_waiting_replicas(config: FleetConfig) -> None:
    """Warns if the cluster has too few processors for all replicas now; nodes may come later."""
    has = importlib.import_module("ray").cluster_resources()
    least = config.min_replicas
    for kind, each in (("CPU", config.num_cpus), ("GPU", config.num_gpus)):
        if each * least > has.get(kind, 0):
            words = (
                "%d replicas with %g %ss each, and the Ray cluster has %g: those without room wait until there is more"
            )
            _log.warning(words, least, each, kind, has.get(kind, 0))


def running_address() -> str:
    """The address of the cluster of which a node runs on this machine. Raises ConfigError."""
    try:
        address = os.environ.get("RAY_ADDRESS") or CURRENT_CLUSTER.read_text().strip()
    except OSError:
        address = ""
    if not address:
        raise ConfigError(
            "--ray-address auto: no Ray runs on this machine: start a node (`ray start --address=HOST:PORT`), or give "
            "--ray-address HOST:PORT"
        )
    return address


def check_reachable(address: str) -> None:
    """Raises ConfigError within seconds if no GCS answers at HOST:PORT; Ray itself would wait for minutes. Ray is
    imported, and has its variables.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "no answer"
        raise ConfigError(
            f"--ray-address {address}: no Ray cluster can be reached there ({reason}); {_WANTED}"
        ) from None
    if reason := _ask(address):
        raise ConfigError(f"--ray-address {address}: what listens there is no Ray cluster ({reason}); {_WANTED}")


def _ask(address: str) -> str:
    """Why the answer is none of a GCS; empty if it is one, or asks for a token."""
    grpc = importlib.import_module("grpc")
    options = importlib.import_module("ray._private.ray_constants").GLOBAL_GRPC_OPTIONS
    with importlib.import_module("ray._private.grpc_utils").init_grpc_channel(address, options) as channel:
        try:
            channel.unary_unary(_QUESTION)(b"", timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            status = error.code().name
            return "" if status in _ASKS_FOR_A_TOKEN else _REASONS.get(status, status)
    return ""
