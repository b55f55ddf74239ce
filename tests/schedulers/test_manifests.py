"""The objects of ``holdfast submit k8s``: their schemas, and the resulting commands of a pod."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.exit_codes import Exit
from holdfast.schedulers.manifests import (
    AGAIN,
    ENDS,
    KINDS,
    Kind,
    Object,
    Pods,
    literal,
    objects,
    rights,
    secret,
)
from holdfast.schedulers.yaml_output import documents
from tests.schedulers.tools import submitted

GOLDEN = Path(__file__).parent / "golden"
# the first version in which everything used here is stable, and the newest known one
KUBERNETES = ("1.33", "1.37")
PODS = Pods(
    name="bert",
    image="registry.example.org/team/train:1",
    nodes=4,
    spares=1,
    grace_s=120.0,
    command=("/app/train.py", "--lr", "1e-3", "$(HOME) it's"),
    flags=("--nproc-per-node", "8"),
    claim="ckpts",
    shm="64Gi",
    namespace="research",
    resources={"nvidia.com/gpu": "8", "memory": "512Gi"},
    env={"NCCL_DEBUG": "WARN"},
)
ALONE = Pods("one", "train:1", 1, 0, 60.0, ("train.py",), watches=False)
TOKEN = "0123456789abcdef" * 4


def job_specs(made: list[Object]) -> Iterator[Object]:
    """Yield the spec of every Job in the objects, at any depth."""
    for each in made:
        spec = each.get("spec", {})
        for holder in (spec, spec.get("template", {}).get("spec", {})):
            for replicated in holder.get("replicatedJobs", ()):
                yield replicated["template"]["spec"]
        if each["kind"] == "Job":
            yield spec


@pytest.mark.parametrize("kind", KINDS)
def test_golden(kind: Kind) -> None:
    """To write the files again, set HOLDFAST_GOLDEN=1, then read the difference."""
    made = [secret(PODS, TOKEN), *rights(PODS), *objects(PODS, kind)]
    text = documents(made)
    path = GOLDEN / f"{kind}.yaml"
    if os.environ.get("HOLDFAST_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    assert list(yaml.safe_load_all(text)) == made


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pods", [PODS, ALONE, dataclasses.replace(PODS, spares=0, claim="", namespace="")])
def test_kubernetes_takes_them(pods: Pods, kind: Kind, version: str) -> None:
    made = list(yaml.safe_load_all(documents([secret(pods, TOKEN), *rights(pods), *objects(pods, kind)])))
    for each in made:
        if each["apiVersion"].count(".") == 0 or (
            "k8s.io" in each["apiVersion"] and each["kind"] != "JobSet"
        ):
            kubernetes_validate.validate(each, version, strict=True)
    specs = list(job_specs(made))
    assert len(specs) == 1
    meta = {"name": pods.name}
    kubernetes_validate.validate(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": specs[0]}, version, strict=True
    )


def test_the_schemas_refuse_what_is_wrong() -> None:
    (*_, job) = objects(PODS, "job")
    job["spec"]["podFailurePolicy"]["rules"][0]["acton"] = "Ignore"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, KUBERNETES[-1], strict=True)


def test_every_exit_code_has_its_answer() -> None:
    inside = {Exit.OK, Exit.RESTART, Exit.PIPE}  # not a failure; no command has it; only with a terminal
    assert {*AGAIN, *ENDS} == set(Exit) - inside and not {*AGAIN} & {*ENDS}
    (*_, job) = objects(PODS, "job")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore", "FailJob"]
    assert rules[1]["onExitCodes"]["values"] == [69, 75, 76, 77]


@pytest.mark.parametrize(
    ("kind", "first"),
    [("job", "bert-0.bert"), ("jobset", "bert-node-0-0.bert"), ("trainjob", "bert-node-0-0.bert")],
)  # fmt: skip
def test_a_pod_knows_the_others(kind: Kind, first: str) -> None:
    (spec,) = job_specs(objects(PODS, kind))
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (5, 5, "Indexed")
    (container,) = spec["template"]["spec"]["containers"]
    words = container["command"]
    contacts = words[words.index("--rdzv-endpoint") + 1].split(",")
    assert contacts[0] == f"{first}:29500" and len(contacts) == 3
    assert words[words.index("--nnodes") + 1] == "4:5"
    assert {"name": "HOLDFAST_SCHEDULER", "value": "kubernetes"} in container["env"]
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 150
    names = {service["metadata"]["name"] for service in objects(PODS, kind) if service["kind"] == "Service"}
    assert names == ({"bert"} if kind == "job" else set())


def test_one_pod_needs_no_secret_and_no_name() -> None:
    assert [each["kind"] for each in objects(ALONE, "job")] == ["Job"]
    (spec,) = job_specs(objects(ALONE, "job"))
    pod = spec["template"]["spec"]
    assert "--token-file" not in pod["containers"][0]["command"] and "subdomain" not in pod
    assert [volume["name"] for volume in pod["volumes"]] == ["shm", "runs"]


def test_a_pod_may_watch_its_node_and_annotate_itself() -> None:
    role, binding, cluster_role, cluster_binding = rights(PODS)
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "patch"]}]
    assert cluster_role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}]
    for made, of in ((binding, role), (cluster_binding, cluster_role)):
        assert made["roleRef"]["name"] == of["metadata"]["name"] and made["roleRef"]["kind"] == of["kind"]
    assert cluster_binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "bert", "namespace": "research"}
    ]
    assert "namespace" not in {**cluster_role["metadata"], **cluster_binding["metadata"]}
    (spec,) = job_specs(objects(PODS, "job"))
    pod = spec["template"]["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("bert", True)
    names = {
        one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in pod["containers"][0]["env"][-3:]
    }
    assert names == {
        "NODE_NAME": "spec.nodeName", "POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace"
    }  # fmt: skip


def test_without_a_namespace_no_node_is_readable_and_without_watches_nothing_is() -> None:
    anywhere = dataclasses.replace(PODS, namespace="")
    assert [each["kind"] for each in rights(anywhere)] == ["Role", "RoleBinding"]
    still = dataclasses.replace(PODS, watches=False)
    (spec,) = job_specs(objects(still, "job"))
    assert rights(still) == [] and spec["template"]["spec"]["automountServiceAccountToken"] is False
    assert "ServiceAccount" not in {each["kind"] for each in objects(still, "job")}


def expanded(word: str) -> str:
    """Return a word of a command as Kubernetes expands it with no variable known: ``$$`` becomes ``$``."""
    return re.sub(r"\$(\$|\([^)]*\))", lambda found: "$" if found[1] == "$" else "EXPANDED", word)


WORD = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**40), 2**40), WORD),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORD, inner, max_size=3)),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(WORD, min_size=1, max_size=5), WORD)
def test_words_reach_holdfast_as_they_are(command: list[str], value: str) -> None:
    pods = dataclasses.replace(PODS, command=tuple(command), env={"A": value})
    made = list(yaml.safe_load_all(documents(objects(pods, "job"))))
    (spec,) = job_specs(made)
    (container,) = spec["template"]["spec"]["containers"]
    assert [expanded(word) for word in container["command"][-len(command) :]] == command
    assert expanded(container["env"][0]["value"]) == value


@settings(deadline=None)
@given(WORD)
def test_nothing_is_expanded(word: str) -> None:
    assert expanded(literal(word)) == word


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_yaml_says_what_was_meant(value: Any) -> None:
    assert list(yaml.safe_load_all(documents([value]))) == [value]


@pytest.mark.parametrize(
    "word", ["yes", "No", "null", "~", "1e3", "0x1", "2026-11-24", "<<", "=", "- a", "a: b", "#", "1:30"]
)
def test_a_text_stays_a_text(word: str) -> None:
    assert list(yaml.safe_load_all(documents([{word: [word]}]))) == [{word: [word]}]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nodes": 0}, "--nodes 0"),
        ({"spares": 5}, "more nodes would wait than train"),
        ({"name": "Bert"}, "--name 'Bert'"),
        ({"name": "1bert"}, "--name '1bert'"),
        ({"name": "b" * 41}, "at most 40"),
        ({"name": "bert\nkind: X"}, "--name"),
        ({"image": ""}, "--image ''"),
        ({"claim": "a/b"}, "--pvc 'a/b'"),
        ({"namespace": "-x"}, "--namespace '-x'"),
        ({"mount": "ckpts"}, "--mount 'ckpts'"),
        ({"resources": {"nvidia.com/gpu": "many"}}, "--resource nvidia.com/gpu 'many'"),
        ({"env": {"A B": "x"}}, "--env 'A B'"),
        ({"env": {"NODE_NAME": "x"}}, "--env NODE_NAME"),
        ({"shm": "big"}, "--shm-size 'big'"),
        ({"command": ("\udce9",)}, "is not UTF-8"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        objects(dataclasses.replace(PODS, **changes), "job")
    assert says in raised.value.message and raised.value.hint


KUBECTL = """#!/bin/bash
echo "$*" >> calls
case "$*" in *get*) printf "$FOUND" ;; *) cat > applied; echo job.batch/bert created ;; esac
exit "${CODE-0}"
"""
GIVEN = ("--name", "bert", "--image", "i:1", "--nodes", "2", "--nproc-per-node", "2")


def submit(tmp_path: Path, *args: str, kubectl: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``holdfast submit k8s`` with a fake kubectl, or without one."""
    return submitted(tmp_path, "k8s", args, "kubectl", KUBECTL if kubectl else None, env)


def test_the_token_is_shown_only_when_asked_for(tmp_path: Path) -> None:
    plain = submit(tmp_path, *GIVEN, "train.py")
    assert plain.returncode == 0 and "kind: Secret" not in plain.stdout
    assert "the Secret bert-token is not printed" in plain.stderr
    shown = list(yaml.safe_load_all(submit(tmp_path, *GIVEN, "--show-secret", "train.py").stdout))
    assert re.fullmatch("[0-9a-f]{64}", shown[0]["stringData"]["token"])
    assert shown[1:] == list(yaml.safe_load_all(plain.stdout)) and not (tmp_path / "calls").exists()


def test_apply_keeps_a_secret_that_is_there(tmp_path: Path) -> None:
    done = submit(tmp_path, *GIVEN, "--apply", "--namespace", "x", "train.py", FOUND="")
    assert (done.returncode, done.stdout) == (0, "job.batch/bert created\n" * 2), done.stderr
    kinds = [each["kind"] for each in yaml.safe_load_all((tmp_path / "applied").read_text())]
    assert kinds == ["Secret", "Service", "PodDisruptionBudget", "ServiceAccount", "Job"]
    submit(tmp_path, *GIVEN, "--apply", "train.py", FOUND="secret/bert-token\\n")
    kinds = [each["kind"] for each in yaml.safe_load_all((tmp_path / "applied").read_text())]
    assert kinds == ["Service", "PodDisruptionBudget", "ServiceAccount", "Job"]
    assert (tmp_path / "calls").read_text().splitlines()[0] == (
        "--namespace x get secret bert-token --ignore-not-found --output=name"
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (GIVEN, "no training script given"),
        ((*GIVEN[2:], "train.py"), "--name"),
        ((*GIVEN, "--kind", "pod", "train.py"), "trainjob"),
        ((*GIVEN, "--token-file", "t", "train.py"), "--token-file is a file of this host"),
        ((*GIVEN, "--env", "A", "train.py"), "--env needs KEY=VALUE"),
        ((*GIVEN, "--spares", "3", "train.py"), "more nodes would wait than train"),
        ((*GIVEN, "--nnodes", "3", "train.py"), "has no flag --nnodes"),
    ],
)  # fmt: skip
def test_bad_input_is_one_error(tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    done = submit(tmp_path, *args)
    assert (done.returncode, done.stdout) == (2, "") and says in done.stderr and "next: " in done.stderr
    assert "Traceback" not in done.stderr


def test_rights_that_kubectl_refuses_are_a_warning_and_the_job_is_made(tmp_path: Path) -> None:
    refusing = KUBECTL.replace("*) cat", '*) cat > given; grep -q "kind: Role" given && exit 1; cat given')
    done = submitted(
        tmp_path,
        "k8s",
        (*GIVEN, "--apply", "--namespace", "x", "train.py"),
        "kubectl",
        refusing,
        {"FOUND": ""},
    )
    assert (done.returncode, done.stdout) == (0, "job.batch/bert created\n"), done.stderr
    assert "warning: kubectl refused" in done.stderr and "kind: ClusterRoleBinding" in done.stderr
    assert "kind: Job" in (tmp_path / "applied").read_text()


def test_without_a_namespace_a_note_says_what_is_missing(tmp_path: Path) -> None:
    note = "without --namespace the pods get no right to read their node"
    assert note in submit(tmp_path, *GIVEN, "train.py").stderr
    named = submit(tmp_path, *GIVEN, "--namespace", "x", "train.py")
    assert note not in named.stderr and "kind: ClusterRoleBinding" in named.stdout
    still = submit(tmp_path, *GIVEN, "--no-watch", "train.py")
    assert note not in still.stderr and "kind: Role" not in still.stdout


def test_no_kubectl_and_a_refusal(tmp_path: Path) -> None:
    none = submit(tmp_path, *GIVEN, "--apply", "train.py", kubectl=False)
    assert none.returncode == 2 and "there is no kubectl on PATH" in none.stderr
    refused = submit(tmp_path, *GIVEN, "--apply", "train.py", CODE="1")
    assert refused.returncode == 2 and "kubectl refused" in refused.stderr
