"""The repository keeps its promises: named files exist, pins cover the ranges, images name what is there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import lora_serve

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = (
    "scripts/install",
    "scripts/demo",
    "scripts/test",
    "scripts/check",
    "scripts/adapters_table",
    "scripts/models_table",
    "scripts/step_guard",
    "scripts/reliability",
    "scripts/fuzz",
    "scripts/mutate",
    "scripts/gpu_check",
    ".ci/run",
)


def read(path: str) -> str:
    return (ROOT / path).read_text()


def project() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))["project"]


def requirements() -> Iterator[Requirement]:
    groups = [project()["dependencies"], *project()["optional-dependencies"].values()]
    for group in groups:
        yield from map(Requirement, group)


def pins() -> dict[str, Version]:
    lines = (line for line in read("constraints.txt").splitlines() if line and not line.startswith("#"))
    found = (re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines)
    return {canonicalize_name(match[1]): Version(match[2]) for match in found if match or pytest.fail("not a pin")}


def python_files() -> list[Path]:
    return sorted([*(ROOT / "lora_serve").rglob("*.py"), *(ROOT / "scripts").glob("*.py")])


def test_pins_cover_every_requirement_within_its_range() -> None:
    found = pins()
    for requirement in requirements():
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)]), requirement


def test_pins_carry_no_local_version() -> None:
    assert not [name for name, version in pins().items() if version.local]


def test_torch_is_pinned_and_ranged_as_the_contract_says() -> None:
    assert str(pins()["torch"]) == "2.13.0"
    (torch,) = (item for item in requirements() if item.name == "torch")
    assert torch.specifier.contains("2.11")


def test_version_is_the_packages_own_and_has_a_changelog_entry() -> None:
    dynamic = tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]["dynamic"]
    assert "version" in project()["dynamic"]
    assert dynamic["version"] == {"attr": "lora_serve.__version__"}
    assert f"## {lora_serve.__version__}" in read("CHANGELOG.md")
    assert set(re.findall(r"/lora-serve:([\d.]+)", read("docs/deploy.md"))) == {lora_serve.__version__}


def test_every_import_of_the_package_is_a_declared_requirement() -> None:
    imported = {name for file in (ROOT / "lora_serve").rglob("*.py") for name in _top_level_imports(file)}
    modules = {
        "google-re2": "re2",
        "http-sf": "http_sf",
        "huggingface-hub": "huggingface_hub",
        "prometheus-client": "prometheus_client",
        "pyyaml": "yaml",
    }
    plain = [Requirement(item).name for item in project()["dependencies"]]
    allowed = {modules.get(name, name) for name in plain} | {
        "matplotlib",
        "opentelemetry",
        "ray",
        "redis",
        "torchao",
        "triton",
        "pydantic_core",
        "lora_serve",
    }
    assert imported - allowed == set()


def _top_level_imports(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    import sys

    return names - set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/DESIGN.md",
        "docs/reference/adapters.md",
        "docs/reference/models.md",
        "docs/explanation/performance.md",
        "docs/explanation/reliability.md",
        "docs/explanation/security.md",
        "docs/explanation/simulation.md",
        "CHANGELOG.md",
    ],
)
def test_links_and_paths_named_in_documents_exist(document: str) -> None:
    text, folder = read(document), (ROOT / document).parent
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
    for link in links:
        assert (folder / link).exists(), f"{document} links to {link}"
    paths = set(re.findall(r"(?:\./)?((?:scripts|docs|docker|benchmarks|tests|lora_serve)/[\w./-]*\w)", text))
    for path in paths:
        assert (ROOT / path).exists(), f"{document} names {path}"


def test_folders_of_the_architectures_tree_exist() -> None:
    """An indented folder is below the one before; one that stands beside another may be below that one, too."""
    (tree,) = re.findall(r"^    lora_serve/\n((?:      .*\n)+)", read("docs/DESIGN.md"), re.M)
    above, gone, num_folders = "", [], 0
    for line in re.findall(r"^      ( *(?:\w+/ ?)+)", tree, re.M):
        folders = line.split()
        if not line.startswith(" "):
            above = folders[0]
        places = [{above + folder} if line.startswith(" ") else {folder, above + folder} for folder in folders]
        gone += [
            places_of for places_of in places if not any((ROOT / "lora_serve" / one).is_dir() for one in places_of)
        ]
        num_folders += len(folders)
    assert num_folders > 50
    assert gone == []


def test_every_flag_in_the_readme_is_a_setting() -> None:
    from lora_serve.core.settings import Settings
    from lora_serve.core.tenant import Quota

    commands = {
        "--port",
        "--once",
        "--traffic",
        "--help",
        "--model",
        "--build",
        "--quick",
        "--build-arg",
        "--gpus",
        "--version",
    }
    commands |= {
        "--json",
        "--wait",
        "--url",
        "--no-activate",
        "--from",
        "--to",
        "--with",
    }  # of `adapters` and `registry`
    commands |= {"--label", "--by"}  # of `keys` and `usage`
    commands |= {"--" + field.name.replace("_", "-") for field in fields(Quota)}  # of `tenants`
    known = {"--" + name.replace("_", "-") for name in Settings.model_fields} | commands
    known |= set(re.findall(r"--[a-z][a-z-]+", read("lora_serve/commands/bench/flags.py")))
    known |= {"--no-" + n.replace("_", "-") for n, field in Settings.model_fields.items() if field.annotation is bool}
    text = read("README.md")
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known


def test_readme_asks_adapters_that_are_bundled_or_registered_there() -> None:
    text = read("README.md")
    models = re.findall(r'"model": "([\w/-]+)", "temperature"|ask\("([\w/-]+)"', text)
    registered = dict(re.findall(r'"id": "([\w/-]+)", "source": "lora_serve/demo_data/adapters/([\w/-]+)"', text))
    asked = {first or second for first, second in models}
    names = {registered.get(name, name) for name in asked}
    assert len(names) == 3
    assert "acme/support" in asked.intersection(registered)
    for name in names:
        assert (ROOT / "lora_serve" / "demo_data" / "adapters" / name).is_dir(), name


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_executable_bash_that_parses(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    assert read(script).startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in read(script)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True, timeout=20)


def test_continuous_integration_runs_the_test_script() -> None:
    assert "./scripts/test" in read(".ci/run")


def test_step_guard_runs_after_the_tests_and_not_beside_them() -> None:
    script = read("scripts/test")
    assert script.index("-m pytest") < script.index("\n  run ./scripts/step_guard")
    assert "exec .venv/bin/python -m pytest" not in script


def compose() -> dict[str, Any]:
    return yaml.safe_load(read("docker/compose.yaml"))


def test_compose_has_the_server_and_redis_with_health_checks_and_volumes() -> None:
    services = compose()["services"]
    assert set(services) == {"server", "redis"}
    assert all(service["healthcheck"]["test"] for service in services.values())
    assert services["server"]["depends_on"]["redis"]["condition"] == "service_healthy"
    assert "redis://redis:6379/0" in services["server"]["command"]
    named = {volume.partition(":")[0] for service in services.values() for volume in service["volumes"]}
    assert set(compose()["volumes"]) <= named


def test_compose_command_is_understood_by_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lora_serve.core.settings import load_settings

    server = compose()["services"]["server"]
    monkeypatch.setenv("LORA_SERVE_ADMIN_KEY", "a long enough secret")
    program, *arguments = server["command"]
    assert program == "serve"
    (tmp_path / "config.json").write_text("{}")
    arguments[arguments.index("/model")] = str(tmp_path)
    assert load_settings(arguments).redis_url == "redis://redis:6379/0"
    assert (ROOT / "docker" / server["build"]["context"] / server["build"]["dockerfile"]).exists()


@pytest.mark.parametrize("name", ["server", "redis"])
def test_composed_services_may_do_no_more_than_they_need(name: str) -> None:
    service = compose()["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"]
    assert service["pids_limit"] > 0
    assert not {"privileged", "cap_add", "network_mode", "pid", "devices"} & set(service)
    assert not any("docker.sock" in volume for volume in service["volumes"])
    assert service.get("user", "") not in ("root", "0", "0:0")


def test_composed_redis_is_reached_by_the_server_alone() -> None:
    whole = compose()
    assert "ports" not in whole["services"]["redis"]
    assert whole["services"]["redis"]["networks"] == ["registry"]
    assert whole["networks"]["registry"]["internal"] is True
    assert all(port.startswith("127.0.0.1:") for port in whole["services"]["server"]["ports"])


@pytest.mark.parametrize("dockerfile", ["docker/Dockerfile", "docker/Dockerfile.cuda"])
def test_image_runs_as_its_own_user_with_a_health_check_and_copies_what_exists(dockerfile: str) -> None:
    text = read(dockerfile).replace("\\\n", " ")
    instructions = [line.split(maxsplit=1) for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    instructions = [item for item in instructions if not item[1].startswith("--from=")]  # of a stage before
    names = [name for name, _ in instructions]
    assert "HEALTHCHECK" in names
    assert names.index("USER") > names.index("RUN")
    (user,) = (rest for name, rest in instructions if name == "USER")
    assert user not in ("root", "0")
    assert not [rest for name, rest in instructions if name == "ADD"]
    assert not re.search(r"(?i)(key|token|password|secret)\s*=\s*\S", text)
    for _, sources in (item for item in instructions if item[0] == "COPY"):
        for source in sources.split()[:-1]:
            assert (ROOT / source).exists(), source
    sources = [name for kind, rest in instructions if kind == "COPY" for name in rest.split()[:-1]]
    assert {name.removeprefix("./") for name in sources} <= set(re.findall(r"^!(\S+)", read(".dockerignore"), re.M))


@pytest.mark.parametrize("dockerfile", ["docker/Dockerfile", "docker/Dockerfile.cuda"])
def test_image_environment_names_real_settings(dockerfile: str) -> None:
    from lora_serve.core.settings import Settings

    names = {name.lower() for name in re.findall(r"LORA_SERVE_([A-Z_]+)=", read(dockerfile))}
    assert names
    assert names <= set(Settings.model_fields)


def test_files_stay_small() -> None:
    sizes = {file.relative_to(ROOT): len(file.read_text().splitlines()) for file in python_files()}
    assert {str(file): size for file, size in sizes.items() if size > 350} == {}


def test_license_is_the_full_apache_text() -> None:
    assert "Apache License" in read("LICENSE")
    assert "END OF TERMS AND CONDITIONS" in read("LICENSE")
    assert project()["license"] == "Apache-2.0"


def test_package_data_is_declared_and_present() -> None:
    assert (ROOT / "lora_serve" / "py.typed").exists()
    assert list((ROOT / "lora_serve" / "model" / "native").glob("*.[ch]"))
    assert (ROOT / "lora_serve" / "demo_data" / "prompts.json").exists()
