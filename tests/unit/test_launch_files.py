"""Tests of launch/kubernetes.yaml and launch/skypilot.yaml (published schemas, shell parts at work), and of launch/README.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from llmtrain.config import Recipe
from llmtrain.errors import BAD_USAGE, FAILED, STOPPED_EARLY
from llmtrain.recipe_loader import load_recipe

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = ROOT / "tests" / "schemas"
README = (ROOT / "launch" / "README.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^#+ (.+)$", README, flags=re.MULTILINE)
STUB = """#!/bin/bash
printf 'argument: %s\\n' "$@"
for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT NPROC_PER_NODE VIRTUAL_ENV; do echo "$name=${!name-unset}"; done
kill -TERM $$
"""
"""Stand-in for launch/train.sh. It prints its arguments and variables and kills itself, which shows whether a shell in between
catches the signal."""


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "launch" / name).read_text(encoding="utf-8")))


def definitions(name: str) -> dict[str, Any]:
    schema = json.loads((SCHEMAS / name).read_text(encoding="utf-8"))
    assert "Apache-2.0" in schema["license"] and schema["source"]
    return schema


def kubernetes(kind: str) -> jsonschema.Draft202012Validator:
    schema = {"$ref": f"#/$defs/{kind}", "$defs": definitions("kubernetes-1.37.json")["$defs"]}
    return jsonschema.Draft202012Validator(schema)


def in_any_case(validator: Any, allowed: list[str], given: str, schema: Any):
    """Yield an error if `given` is not allowed by SkyPilot's own keyword: an enum in upper or lower case."""
    if given.lower() not in [one.lower() for one in allowed]:
        yield jsonschema.ValidationError(f"{given!r} is not one of {allowed!r}")


def skypilot(part: str) -> jsonschema.protocols.Validator:
    schema = definitions("skypilot-0.14.1.json")["$defs"][part]
    base = jsonschema.validators.validator_for(schema)
    keywords = {"case_insensitive_enum": in_any_case}
    return jsonschema.validators.extend(base, keywords)(schema)


def complaints(validator: jsonschema.protocols.Validator, instance: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(instance)]


@pytest.fixture
def job() -> dict[str, Any]:
    return next(document for document in read("kubernetes.yaml") if document["kind"] == "Job")


@pytest.fixture
def container(job) -> dict[str, Any]:
    (only,) = job["spec"]["template"]["spec"]["containers"]
    return only


@pytest.fixture
def task() -> dict[str, Any]:
    (only,) = read("skypilot.yaml")
    return only


@pytest.fixture
def run_shell(tmp_path: Path):
    """Provide a function that runs a command in a folder whose launch/train.sh is the stub. It returns (exit code, output lines)."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "train.sh").write_text(STUB)

    def run(command: list[str], **variables: str) -> tuple[int, list[str]]:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout.splitlines()

    return run


@pytest.mark.parametrize("kind", ["Service", "PersistentVolumeClaim", "Job"])
def test_kubernetes_objects_match_the_schema(kind):
    found = [document for document in read("kubernetes.yaml") if document["kind"] == kind]
    assert len(found) == 1
    assert complaints(kubernetes(kind), found[0]) == []


def test_the_kubernetes_schema_notices_a_wrong_key(job):
    job["spec"]["template"]["spec"]["terminationGracePeriod"] = 600
    (complaint,) = complaints(kubernetes("Job"), job)
    assert complaint.startswith("$.spec.template.spec: ") and "'terminationGracePeriod' was unexpected" in complaint


def test_skypilot_matches_the_schema(task):
    assert complaints(skypilot("task"), task) == []
    assert complaints(skypilot("resources"), task["resources"]) == []


def test_the_skypilot_schema_notices_a_wrong_key(task):
    task["resources"]["job_recovery"]["recover_on_exit_codes"] = [300]
    task["nodes"] = task.pop("num_nodes")
    assert complaints(skypilot("resources"), task["resources"])
    assert complaints(skypilot("task"), task) == ["$: Additional properties are not allowed ('nodes' was unexpected)"]


def test_pods_find_pod_0_by_the_name_that_the_service_gives_it(job, container):
    service = next(document for document in read("kubernetes.yaml") if document["kind"] == "Service")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    # An Indexed Job calls its pods <job>-<index>, and a headless Service adds its own name.
    assert spec["completionMode"] == "Indexed" and pod["subdomain"] == service["metadata"]["name"]
    assert environment["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert int(environment["NNODES"]) == spec["completions"] == spec["parallelism"]


def test_python_is_not_the_first_process_of_a_container(job):
    """The kernel drops signals to PID 1 that it does not handle, so that a stop while Python starts would be lost."""
    assert job["spec"]["template"]["spec"]["shareProcessNamespace"] is True
    text = README + (ROOT / "Dockerfile").read_text(encoding="utf-8")
    commands = re.findall(r"^#? +docker run .*", text, flags=re.MULTILINE)
    assert len(commands) == 4 and all("--init" in command for command in commands)


def test_what_ends_a_pod_decides_whether_it_is_started_again(job, container):
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_code = {code: r["action"] for r in rules if "onExitCodes" in r for code in r["onExitCodes"]["values"]}
    assert by_code == {BAD_USAGE: "FailJob", STOPPED_EARLY: "Ignore"} and FAILED not in by_code
    assert {r["onExitCodes"]["containerName"] for r in rules if "onExitCodes" in r} == {container["name"]}
    assert [r["action"] for r in rules if "onPodConditions" in r] == ["Ignore"]
    # The API refuses a podFailurePolicy with anything else.
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert job["spec"]["podReplacementPolicy"] == "Failed"


def test_pods_keep_runs_and_data_and_have_shared_memory(job, container):
    claim = next(document for document in read("kubernetes.yaml") if document["kind"] == "PersistentVolumeClaim")
    volumes = {volume["name"]: volume for volume in job["spec"]["template"]["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    recipe = load_recipe(ROOT / container["env"][0]["value"])
    for folder in (recipe.run.out_dir, recipe.data.cache_dir):
        volume = mounts[f"{container['workingDir']}/{folder}"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_the_user_of_the_image_owns_the_folders_of_the_volume(job, container, tmp_path):
    """The kubelet makes the folder of a subPath as root, and fsGroup does nothing on many network file systems."""
    pod = job["spec"]["template"]["spec"]
    user = int(re.findall(r"^USER (\d+)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[-1])
    security = pod["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (user, user, user)
    assert security["fsGroupChangePolicy"] == "OnRootMismatch", "else each start walks through all checkpoints"
    (owner,) = pod["initContainers"]
    assert owner["image"] == container["image"] and owner["securityContext"] == {"runAsUser": 0, "runAsGroup": 0}
    mounted = {mount["subPath"]: mount["mountPath"] for mount in owner["volumeMounts"]}
    assert mounted == {m["subPath"]: f"/state/{m['subPath']}" for m in container["volumeMounts"] if "subPath" in m}
    (tmp_path / "chown").write_text('#!/bin/sh\necho "$*"\necho "not permitted" >&2\nexit 1\n')
    (tmp_path / "chown").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = [*owner["command"], *owner["args"]]
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{user}:{user} /state/runs /state/data\n"), "chown is not recursive"


def test_pods_run_on_tainted_nodes_with_gpus(job, container):
    (gpu,) = (name for name in container["resources"]["limits"] if name.endswith("/gpu"))
    assert job["spec"]["template"]["spec"]["tolerations"] == [
        {"key": gpu, "operator": "Exists", "effect": "NoSchedule"}
    ]


def test_lost_nodes_do_not_use_up_the_failures_of_a_job(job):
    """Each lost node makes all other pods fail."""
    assert job["spec"]["backoffLimit"] >= 100 * job["spec"]["completions"]


def test_the_log_is_that_of_pod_0(job):
    text = (ROOT / "launch/kubernetes.yaml").read_text(encoding="utf-8")
    (command,) = re.findall(r"kubectl logs .*", text)
    labels = dict(one.split("=") for one in command.split(" -l ")[1].split()[0].split(","))
    expected = {
        "batch.kubernetes.io/job-name": job["metadata"]["name"],
        "batch.kubernetes.io/job-completion-index": "0",
    }
    assert labels == expected and {"-f", "--tail=-1"} <= set(command.split())


def test_the_file_warns_that_deleting_it_deletes_the_checkpoints():
    kinds = {document["kind"] for document in read("kubernetes.yaml")}
    head = (ROOT / "launch/kubernetes.yaml").read_text(encoding="utf-8").partition("apiVersion")[0]
    assert "PersistentVolumeClaim" not in kinds or re.search(r"kubectl delete -f .*checkpoints", head)


@pytest.mark.parametrize("index", [0, 1])
def test_a_pod_runs_train_sh_as_its_number(container, run_shell, index):
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    environment["RECIPE_OVERRIDES"] = "optim.lr=2e-4 run.name=pod"
    code, lines = run_shell([*container["command"], *container["args"]], **environment, JOB_COMPLETION_INDEX=str(index))
    assert lines == [
        "argument: recipes/edit_1b.yaml",
        "argument: optim.lr=2e-4",
        "argument: run.name=pod",
        "NNODES=2",
        f"NODE_RANK={index}",
        "MASTER_ADDR=llmtrain-0.llmtrain",
        "MASTER_PORT=29400",
        "NPROC_PER_NODE=unset",
        "VIRTUAL_ENV=unset",
    ]
    assert code == -15, "a shell in between would have caught the signal and given 143"


@pytest.mark.parametrize(("rank", "gpus"), [(0, 8), (1, 8), (1, 0)])
def test_skypilot_runs_train_sh_on_each_node(task, run_shell, tmp_path, rank, gpus):
    script = tmp_path / "run.sh"
    script.write_text('mountpoint() { [ "$*" = "-q /mnt/llmtrain" ]; }\n' + task["run"])
    code, lines = run_shell(
        ["bash", str(script)],
        **task["envs"],
        SKYPILOT_NODE_RANK=str(rank),
        SKYPILOT_NODE_IPS="10.0.0.5\n10.0.0.6",
        SKYPILOT_NUM_NODES="2",
        SKYPILOT_NUM_GPUS_PER_NODE=str(gpus),
        VIRTUAL_ENV="/opt/sky-user-env",
    )
    assert lines == [
        "argument: recipes/edit_1b.yaml",
        "argument: run.out_dir=/mnt/llmtrain/runs",
        "argument: data.cache_dir=/mnt/llmtrain/data",
        "NNODES=2",
        f"NODE_RANK={rank}",
        "MASTER_ADDR=10.0.0.5",
        "MASTER_PORT=29400",
        f"NPROC_PER_NODE={gpus}",
        "VIRTUAL_ENV=unset",  # else train.sh would take its python3 instead of that of .venv
    ]
    assert code == -15
    assert task["envs"]["STATE"] in task["volumes"]


def test_skypilot_does_not_train_beside_the_folder_that_nodes_share(task, run_shell, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("exec 2>&1\n" + task["run"])
    (tmp_path / "not_mounted").mkdir()
    code, lines = run_shell(["bash", str(script)], **task["envs"] | {"STATE": str(tmp_path / "not_mounted")})
    assert (code, lines) == (1, [f"error: no file system is mounted at {tmp_path}/not_mounted"])


def test_skypilot_starts_again_what_stopped_with_a_checkpoint(task):
    recovery = task["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [STOPPED_EARLY]
    assert recovery["max_restarts_on_errors"] > 0


def test_skypilot_sets_up_the_tested_versions(task, tmp_path):
    oldest = re.search(r'requires-python = ">=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    uv = tmp_path / ".local/bin/uv"
    uv.parent.mkdir(parents=True)
    uv.write_text('#!/bin/bash\nmkdir -p "${@: -1}/bin"; cp "$PWD/pip" "${@: -1}/bin/pip"; echo "uv $*"\n')
    (tmp_path / "pip").write_text('#!/bin/bash\necho "pip $*"\n')
    for program in (uv, tmp_path / "pip"):
        program.chmod(0o755)
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", task["setup"]], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"uv venv --seed --allow-existing --python {oldest} .venv",
        "pip install --quiet -r requirements.txt -c constraints.txt",
    ]


def test_skypilot_asks_for_no_spot_instances_where_its_volume_is(task):
    """Volumes for several nodes are on Kubernetes, where only GKE has spot instances."""
    assert task["num_nodes"] > 1 and task["volumes"] and not task["resources"]["use_spot"]
    text = (ROOT / "launch/skypilot.yaml").read_text(encoding="utf-8")
    volume = yaml.safe_load("\n".join(re.findall(r"^#       (.*)$", text, flags=re.MULTILINE)))
    assert volume["name"] in task["volumes"].values() and volume["config"]["access_mode"] == "ReadWriteMany"


@pytest.mark.parametrize("name", ["kubernetes.yaml", "skypilot.yaml"])
def test_lines_to_edit_are_marked(name):
    text = (ROOT / "launch" / name).read_text(encoding="utf-8")
    header, _, body = text.partition("\n\n") if "\n\n" in text else text.partition("#\n# Exit code")
    listed = [line.split()[1] for line in header.splitlines() if line.startswith("#   ") and line.split()[1].isdigit()]
    assert 3 <= len(listed) <= 5
    for number in listed:
        assert f" # {number}" in body or f"# {number};" in body, f"line {number} is not marked"


def test_docker_leaves_a_run_as_much_time_to_stop_as_kubernetes(job):
    seconds = job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    for text in (README, (ROOT / "Dockerfile").read_text(encoding="utf-8")):
        commands = [line for line in text.splitlines() if "docker run --rm" in line]
        assert len(commands) == 2 and all(f" --stop-timeout {seconds} " in command for command in commands)


def test_messages_in_the_readme_are_those_of_the_program():
    """The table of failures quotes the program's messages in parts, with `…` between the parts. All parts of a message are in one
    source file."""
    rows = re.findall(r"^\| (`.+?`) \|", README.partition("## What each failure looks like")[2], flags=re.MULTILINE)
    assert len(rows) >= 12
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "llmtrain").rglob("*.py")]
    sources = [re.sub(r'"\s*\n\s*f?"', "", source) for source in sources]  # literals that go on in the next line
    messages = [re.findall(r"`([^`]+)`", row) for row in rows]
    assert [parts for parts in messages if not any(all(part in source for part in parts) for source in sources)] == []


def test_the_readme_names_files_recipes_and_keys_that_exist():
    for target in re.findall(r"launch/[\w.]+\.\w+|recipes/\w+\.yaml", README):
        assert target == "launch/hostfile" or (ROOT / target).exists(), target
    anchors = {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in HEADINGS}
    for anchor in re.findall(r"\]\(#([\w-]+)\)", README):
        assert anchor in anchors
    for section, key in re.findall(r"`(run|parallel|checkpoint|log|data)\.(\w+)", README):
        assert key in Recipe.model_fields[section].annotation.model_fields, f"{section}.{key}"
