"""Deploy files against the schemas of those who read them: Ray's launcher, Ray Serve, KubeRay."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from pydantic import BaseModel
from ray._private.authentication.authentication_token_setup import AUTH_MODE_ENV_VAR
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    LoggingConfig,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from tests.deployments.conftest import ROOT

RAY = Path(ray.__file__).parent
DEPLOY = ROOT / "deployments"
CLUSTERS = (ROOT / "cluster.yaml", DEPLOY / "cluster-local.yaml")
NAMING_ENVIRONMENT = (
    *CLUSTERS,
    DEPLOY / "node.sh",
    DEPLOY / "node_setup.sh",
    DEPLOY / "rayservice.yaml",
    ROOT / "Dockerfile",
    ROOT / "docs" / "operations.md",
)
VARIABLE = re.compile(r"\bRAY_\w+")
LAUNCHERS_OWN = {"RAY_HEAD_IP"}
"""Set by the launcher for a worker's commands; the token of `authOptions` by KubeRay."""


def loaded(path: Path) -> Any:
    """A file's YAML."""
    return yaml.safe_load(path.read_text())


@cache
def strings_of_ray() -> frozenset[str]:
    """Every string that Ray's own modules of environment variables name."""
    folders = ("_private", "_common/usage", "serve/_private", "autoscaler/_private")
    files = [p for folder in folders for p in sorted((RAY / folder).glob("*.py"))]
    files += sorted((RAY / "_private" / "authentication").glob("*.py"))
    found = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


def exported() -> dict[str, str]:
    """What `node.sh` exports to a shell that had none of it."""
    script = f". {shlex.quote(str(DEPLOY / 'node.sh'))} && {sys.executable} -c {shlex.quote(DUMP)}"
    bare = {"HOME": "/nowhere", "PATH": os.environ["PATH"]}
    done = subprocess.run(["sh", "-c", script], env=bare, capture_output=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return {k: v for k, v in found.items() if k.startswith("RAY_")}


DUMP = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.stem)
def test_the_launcher_takes_it(path: Path) -> None:
    """As written by its schema, and as it is filled with a provider's defaults."""
    config = loaded(path)
    jsonschema.validate(config, json.loads((RAY / "autoscaler" / "ray-schema.json").read_text()))
    validate_config(prepare_config(config))
    for own in ("serve_config", "replicas"):
        with pytest.raises(jsonschema.ValidationError):
            validate_config(prepare_config({**config, own: {}}))


def test_workers_are_as_many_as_replicas_may_be() -> None:
    """On one GPU each; the head node has none and takes no worker's place."""
    config = loaded(ROOT / "cluster.yaml")
    types = config["available_node_types"]
    args = loaded(DEPLOY / "serve.yaml")["applications"][0]["args"]
    assert types["gpu"]["resources"]["GPU"] == args["gpus_per_replica"] == 1
    assert types["gpu"]["max_workers"] == config["max_workers"] == args["max_replicas"]
    assert types["gpu"]["min_workers"] == args["min_replicas"]
    assert types[config["head_node_type"]]["resources"]["GPU"] == 0
    groups = loaded(DEPLOY / "rayservice.yaml")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert [g["maxReplicas"] for g in groups] == [args["max_replicas"]]


def test_both_clusters_run_the_same_commands() -> None:
    """Each node has the environment before it starts Ray, and what is named is there."""
    aws, local = map(loaded, CLUSTERS)
    for key in ("setup_commands", "file_mounts", "rsync_exclude", "rsync_filter"):
        assert aws[key] == local[key], key
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        older = [c.replace("ray start", "RAY_enable_autoscaler_v2=0 ray start") for c in aws[key]]
        assert local[key] == older, key
        assert all(c.startswith(". ~/flide-serve/deployments/node.sh && ") for c in aws[key])
    assert aws["file_mounts"]["~/flide-serve"] == "."
    text = "".join(path.read_text() for path in (*CLUSTERS, DEPLOY / "node_setup.sh"))
    for name in set(re.findall(r"deployments/[\w-]+\.\w+", text)):
        assert (ROOT / name).is_file(), name
    assert os.access(DEPLOY / "node_setup.sh", os.X_OK)


@pytest.mark.parametrize("path", NAMING_ENVIRONMENT, ids=lambda p: p.name)
def test_ray_knows_every_variable(path: Path) -> None:
    """A misspelt flag would be silently without effect."""
    for name in set(VARIABLE.findall(path.read_text())) - LAUNCHERS_OWN:
        assert name in strings_of_ray() or hasattr(ray._config, name.removeprefix("RAY_")), name


def test_the_check_of_variables_can_fail() -> None:
    """It takes whole names only."""
    assert AUTH_MODE_ENV_VAR in strings_of_ray()
    assert not {"RAY_SERVE_ENABLE_HAPROXY", "RAY_SERVE_HAPROXY"} & strings_of_ray()
    assert hasattr(ray._config, "enable_autoscaler_v2")
    assert not hasattr(ray._config, "enable_autoscaler_v3")


def test_serve_reads_the_environment_as_it_is_meant() -> None:
    """In a process of its own, as Serve reads it once, when it is imported."""
    code = """
import json
from ray.serve._private import constants as c
print(json.dumps([c.RAY_SERVE_ENABLE_HA_PROXY, c.RAY_SERVE_USE_GRPC_BY_DEFAULT,
    c.RAY_SERVE_HAPROXY_RETRY_ON, c.RAY_SERVE_HAPROXY_TUNE_BUFSIZE,
    c.PROXY_HEALTH_CHECK_PERIOD_S]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | exported(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [
        True,
        True,
        "conn-failure empty-response",
        1048576,
        1.0,
    ]
    assert exported()[AUTH_MODE_ENV_VAR] == "token"


def unknown_keys(config: dict[str, Any]) -> set[str]:
    """Keys that Serve would ignore without a word; `build` refuses those of `args` itself."""
    parts: list[tuple[dict[str, Any], type[BaseModel]]] = [
        (config, ServeDeploySchema),
        (config["http_options"], HTTPOptionsSchema),
        (config["logging_config"], LoggingConfig),
    ]
    for app in config["applications"]:
        parts.append((app, ServeApplicationSchema))
        parts += [(deployment, DeploymentSchema) for deployment in app.get("deployments", [])]
    return {key for part, model in parts for key in set(part) - set(model.model_fields)}


def test_serve_takes_it_and_the_app_is_there() -> None:
    """The named builder is imported and called with the file's arguments, as Serve would."""
    config = loaded(DEPLOY / "serve.yaml")
    schema = ServeDeploySchema.model_validate(config)
    assert unknown_keys(config) == set()
    assert unknown_keys({**config, "applicatons": [], "http_options": {"prot": 1}}) == {
        "applicatons",
        "prot",
    }
    (app,) = schema.applications
    built = app_of(app.import_path, app.args)
    deployments = {built._bound_deployment.name: built._bound_deployment}
    engine = built._bound_deployment.init_args[0]._bound_deployment
    deployments[engine.name] = engine
    assert set(deployments) == {"Gateway", "Engine"}
    assert engine.ray_actor_options["num_gpus"] == 1
    assert deployments["Gateway"].num_replicas == 2
    assert engine._deployment_config.autoscaling_config.max_replicas == 8
    with pytest.raises(Exception, match="no such option"):
        app_of(app.import_path, {**app.args, "max_replica": 8})


def test_an_image_is_not_sent_what_git_ignores() -> None:
    """Nor git's own folder: the environment alone has more than a gigabyte."""
    left_out = set((ROOT / ".dockerignore").read_text().split())
    ignored = {line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()}
    assert {".git", ".venv"} | {f"**/{name}" for name in ignored - {".venv"}} <= left_out


def app_of(import_path: str, args: dict[str, Any]) -> Application:
    """The application of an import path and its arguments."""
    builder = ray._common.utils.import_attr(import_path)
    built: Application = call_user_app_builder_with_args_if_necessary(builder, args)
    return built


FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"serveConfigV2", "rayClusterConfig"},
    "spec.rayClusterConfig": {
        "rayVersion",
        "authOptions",
        "enableInTreeAutoscaling",
        "autoscalerOptions",
        "headGroupSpec",
        "workerGroupSpecs",
    },
    "spec.rayClusterConfig.authOptions": {"mode"},
    "spec.rayClusterConfig.autoscalerOptions": {"idleTimeoutSeconds"},
    "spec.rayClusterConfig.headGroupSpec": {"rayStartParams", "template"},
}
"""Those of KubeRay's RayService (ray.io/v1) that the manifest has; others are ignored."""
WORKER_FIELDS = {
    "groupName",
    "replicas",
    "minReplicas",
    "maxReplicas",
    "rayStartParams",
    "template",
}


def test_the_rayservice_is_the_same_app_with_the_same_environment() -> None:
    """Its fields are KubeRay's, its versions ours; ports as KubeRay's services look for them."""
    manifest = loaded(DEPLOY / "rayservice.yaml")
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    for path, fields in FIELDS.items():
        part = manifest
        for name in filter(None, path.split(".")):
            part = part[name]
        assert set(part) == fields, path
    assert yaml.safe_load(manifest["spec"]["serveConfigV2"]) == loaded(DEPLOY / "serve.yaml")
    cluster = manifest["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["authOptions"] == {"mode": "token"}
    groups = cluster["workerGroupSpecs"]
    assert all(set(group) == WORKER_FIELDS for group in groups)
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *groups)]
    for pod in pods:
        (container,) = pod["containers"]
        # KubeRay sets the mode and the token by itself
        env = {v["name"]: v["value"] for v in container["env"]} | {AUTH_MODE_ENV_VAR: "token"}
        assert env == exported()
        mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounts == {volume["name"] for volume in pod.get("volumes", [])}
    ports = {p["name"]: p["containerPort"] for p in pods[0]["containers"][0]["ports"]}
    serve_port = loaded(DEPLOY / "serve.yaml")["http_options"]["port"]
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "serve": serve_port}


def test_the_image_has_every_package() -> None:
    """Each that is installed is copied, and each that is copied exists."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    for name in copied:
        assert (ROOT / name).exists(), name
    project = (ROOT / "pyproject.toml").read_text()
    (found,) = re.findall(r"packages = \{ find = \{ include = (\[.*?\])", project)
    assert {name.removesuffix("*") for name in json.loads(found)} <= set(copied)
    assert {"pyproject.toml", "README.md", "LICENSE"} <= set(copied)


def test_a_node_is_set_up_twice_without_harm(tmp_path: Path) -> None:
    """The script, with a stand-in for pip: one environment, one line in the shell's start."""
    home = tmp_path / "home"
    tools = home / ".flide" / "bin"
    tools.mkdir(parents=True)
    (tools / "pip").write_text(f'#!/bin/sh\necho "$@" >>{home}/asked\n')
    (tools / "pip").chmod(0o755)
    env = os.environ | {"HOME": str(home)}
    for _ in range(2):
        subprocess.run([str(DEPLOY / "node_setup.sh")], env=env, cwd=tmp_path, check=True)
    assert (home / "asked").read_text().splitlines() == [
        "install --quiet --disable-pip-version-check --editable ."
    ] * 2
    assert (home / ".bashrc").read_text() == f". {DEPLOY}/node.sh\n"
