"""llama.cpp's own server, built here for the CPU at hand from the sources in the sdist of `llama-cpp-python`."""

from __future__ import annotations

import http.client
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import gguf_files
from benchmarks.peers.environment import FOLDER, call, make_environment, python_of
from benchmarks.peers.http_engine import HttpEngine
from benchmarks.peers.processes import Child, environment_of
from benchmarks.peers.seam import BASE, MAX_MODEL_LEN, POPULARITIES, Checkpoints, PeerError
from benchmarks.workload import Load
from lora_serve.commands.bench.workload import Target
from lora_serve.commands.server_process import HOST, free_port

ENVIRONMENT = "llama_cpp"
SDIST = "llama-cpp-python==0.3.36"
SOURCES = FOLDER / ENVIRONMENT / "sources"
BUILD = FOLDER / ENVIRONMENT / "build"
SERVER = BUILD / "bin" / "llama-server"
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release", "GGML_NATIVE": "ON", "BUILD_SHARED_LIBS": "OFF", "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_UI": "OFF", "LLAMA_USE_PREBUILT_UI": "OFF", "LLAMA_BUILD_APP": "OFF",
    "LLAMA_OPENSSL": "OFF",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """Weights and adapters as `dtype`: f32, f16 or bf16. K and V are f16, its default, but for f32 all is."""

    dtype: str
    family: str = "llama_cpp"
    popularities: Sequence[str] = POPULARITIES

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}"

    def install(self) -> None:
        """One compiler process of least priority at a time: it takes about half an hour on a busy core."""
        python = make_environment(ENVIRONMENT)
        if SERVER.exists():
            return
        if shutil.which("g++") is None:
            raise PeerError("g++ is not on this machine")
        root, tools = _sources(python), python.parent
        settings = [f"-D{name}={value}" for name, value in OPTIONS.items()]
        ninja = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
        call([str(tools / "cmake"), "-S", str(root), "-B", str(BUILD), *ninja, *settings])
        call(["nice", "-n", "19", str(tools / "ninja"), "-j1", "-C", str(BUILD), "llama-server"])

    def versions(self) -> Mapping[str, str]:
        if not SERVER.exists():
            raise PeerError(f"not built: python -m benchmarks.peers install {ENVIRONMENT}")
        name, _, version = SDIST.partition("==")
        lines = (_sources_root() / "CMakeLists.txt").read_text().splitlines()
        numbers = [line.rstrip(")").split()[-1] for line in lines if line.strip().startswith("set(LLAMA_VERSION_")]
        return {f"sdist of {name}": version, "llama.cpp": ".".join(numbers[:3]) or "of that sdist"}

    def start(self, checkpoints: Checkpoints, load: Load, num_threads: int) -> HttpEngine:
        python, port = python_of(ENVIRONMENT), free_port()
        if not SERVER.exists():
            raise PeerError(f"not built: python -m benchmarks.peers install {ENVIRONMENT}")
        model, adapters = self._convert(python, checkpoints)
        command = [str(SERVER), *self._arguments(model, list(adapters), load, port, num_threads)]
        child = Child(command, checkpoints.scratch / f"{self.name}.log", environment_of(num_threads))
        seconds = child.wait_until_answers(port, "/health")
        try:
            turn_adapters_off(port)
        except PeerError:
            child.stop()
            raise
        ids = {name: index for index, name in enumerate(checkpoints.adapters)}
        target = Target(
            f"http://{HOST}:{port}",
            BASE,
            adapter_field="llama-cpp",
            adapter_ids=ids,
            extra_body={"cache_prompt": False},
            headers={"Connection": "close"},  # it hangs up after a stream, at times only when the next request comes
        )
        return HttpEngine(child, target, seconds)

    def _convert(self, python: Path, checkpoints: Checkpoints) -> tuple[Path, list[Path]]:
        """The model's file and the adapters', in their order."""
        folder = checkpoints.scratch / self.name
        folder.mkdir()
        script = [str(python), str(Path(gguf_files.__file__))]
        model = folder / "model.gguf"
        call([*script, "model", str(checkpoints.model), str(model), "--dtype", self.dtype])
        files = [folder / f"adapter{index}.gguf" for index in range(len(checkpoints.adapters))]
        for source, file in zip(checkpoints.adapters.values(), files, strict=True):
            base = ["--model", str(checkpoints.model)]
            call([*script, "adapter", str(source), str(file), "--dtype", self.dtype, *base])
        return model, files

    def _arguments(self, model: Path, adapters: Sequence[Path], load: Load, port: int, num_threads: int) -> list[str]:
        arguments = [
            "--host", HOST, "--port", str(port), "--model", str(model), "--alias", BASE,
            "--ctx-size", str(load.concurrency * MAX_MODEL_LEN), "--parallel", str(load.concurrency),
            "--threads", str(num_threads), "--threads-batch", str(num_threads),
            "--no-cache-prompt", "--cache-ram", "0", "--no-webui", "--offline", "--fit", "off",
        ]  # fmt: skip
        if self.dtype == "f32":
            arguments += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
        if not adapters:
            return arguments
        return [*arguments, "--lora", ",".join(map(str, adapters)), "--lora-init-without-apply"]


def turn_adapters_off(port: int) -> None:
    """For requests that name none: they get those of the command line, in full, in spite of its name.

    `--lora-init-without-apply` keeps their scale of 1, and an empty list in a request means this default. Raises
    PeerError.
    """
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    try:
        connection.request("POST", "/lora-adapters", b"[]", {"Content-Type": "application/json"})
        status = connection.getresponse().status
    except OSError as error:
        raise PeerError(f"/lora-adapters: {error}") from error
    finally:
        connection.close()
    if status != 200:
        raise PeerError(f"/lora-adapters answered {status}")


def _sources(python: Path) -> Path:
    """llama.cpp's folder, downloaded and unpacked once. Raises PeerError."""
    if not SOURCES.exists():
        downloads = FOLDER / ENVIRONMENT / "sdist"
        wanted = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(downloads), SDIST]
        call([str(python), "-m", "pip", "download", "--quiet", *wanted])
        (archive,) = downloads.glob("*.tar.gz")
        beside = SOURCES.with_name("sources.partial")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        call(["tar", "-xzf", str(archive), "-C", str(beside), "--strip-components=1"])
        beside.rename(SOURCES)
    return _sources_root()


def _sources_root() -> Path:
    return SOURCES / "vendor" / "llama.cpp"
