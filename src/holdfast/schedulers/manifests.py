"""Kubernetes objects that run a job with Holdfast: a Job, a JobSet, or a TrainJob of Kubeflow, and their dependencies.

All functions are pure functions of a :class:`Pods`. In all three forms an Indexed Job runs one pod per node. The index
of a pod is the number of its node. Pods with an index of ``nodes`` or greater are spares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from holdfast.errors import UsageError
from holdfast.exit_codes import Exit
from holdfast.runtime.node.kubernetes_watch import DOWNWARD
from holdfast.schedulers.kubernetes_pod import MARK, MARKED

Kind = Literal["job", "jobset", "trainjob"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Object = dict[str, Any]

PORT = 29500
CONTACTS_MAX = 3  # several contacts, because with one a restarted pod 0 would dial only its own name
NODE = "node"  # name of the container, and of the replicated job
TOKEN_DIR, RUNS_DIR, SHM_DIR = "/etc/holdfast", "/var/lib/holdfast/runs", "/dev/shm"
SECRET_MODE = 0o400
MARGIN_S = 30
LOST_MAX = 16  # number of pods killed (137, ...) without a disruption, after which the Job fails
RIGHTS_GROUP = "rbac.authorization.k8s.io"
NODE_READER = "holdfast-node-reader"
NAME_LENGTH_MAX = 40  # the job's name is a part of the names and host names of its pods
ENDS = (Exit.FAILED, Exit.USAGE, Exit.BAD_INPUT, Exit.INTERNAL, Exit.BUDGET, Exit.INTERRUPTED)
"""Exit codes after which a new pod would end in the same way."""
AGAIN = (Exit.UNMET, Exit.REQUEUE, Exit.UNSAVED, Exit.ORPHANED)
"""Exit codes after which a new pod continues the job."""


@dataclass(frozen=True)
class Pods:
    """The description of a job, from which all objects are made.

    ``nodes`` pods hold ranks; ``spares`` further pods wait. ``flags`` and ``command`` are those of ``holdfast run``.
    ``claim`` names a PersistentVolumeClaim, mounted at ``mount``. ``shm`` is the size of ``/dev/shm``. ``resources``
    are limits of a pod. With ``watches`` the pods may read their Node and Pod, and annotate their Pod.
    """

    name: str
    image: str
    nodes: int
    spares: int
    grace_s: float
    command: tuple[str, ...]
    flags: tuple[str, ...] = ()
    claim: str = ""
    mount: str = "/checkpoints"
    shm: str = ""
    namespace: str = ""
    watches: bool = True
    resources: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The number of all pods, spares included."""
        return self.nodes + self.spares

    @property
    def secret(self) -> str:
        """The name of the Secret with the token of the job."""
        return f"{self.name}-token"


def check(pods: Pods) -> None:
    """Refuse values that Kubernetes or the job cannot work with.

    Raises:
        UsageError: numbers do not fit together, or a name or value is invalid.
    """
    if pods.nodes < 1 or pods.spares < 0:
        raise UsageError(f"--nodes {pods.nodes} --spares {pods.spares}: 1 and 0 are the least",
                         hint="holdfast submit k8s --help")  # fmt: skip
    if pods.spares > pods.nodes:
        raise UsageError(
            f"--spares {pods.spares} with --nodes {pods.nodes}: more nodes would wait than train",
            hint="--nodes counts those that hold ranks, --spares those beside them",
        )
    _match("--name", pods.name, r"[a-z]([a-z0-9-]*[a-z0-9])?", NAME_LENGTH_MAX, "bert-large-2")
    _match("--image", pods.image, r"[!-~]+", 500, "registry.example.org/team/train:1")
    for flag, name in (("--pvc", pods.claim), ("--namespace", pods.namespace)):
        if name:
            _match(flag, name, r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", 63, "training")
    _match("--mount", pods.mount, r"/[^:\0]+", 500, "/checkpoints")
    for key, value in pods.resources.items():
        _match("--resource", key, r"([a-z0-9.-]+/)?[A-Za-z0-9._-]+", 200, "nvidia.com/gpu=8")
        _match(f"--resource {key}", value, r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i|[MGTPE])?", 40, f"{key}=8")
    for key in pods.env:
        _match("--env", key, r"[A-Za-z_][A-Za-z0-9_]*", 200, "NCCL_DEBUG=WARN")
        if key in DOWNWARD:
            raise UsageError(f"--env {key}: the manifest sets it to the name that Kubernetes gives",
                             hint="choose another name for the variable")  # fmt: skip
    if pods.shm:
        _match("--shm-size", pods.shm, r"[1-9][0-9]*([KMGT]i|[kMGT])?", 40, "16Gi")
    for word in (*pods.flags, *pods.command, *pods.env.values()):
        if not _is_text(word):
            raise UsageError(f"{word!a} is not UTF-8: no manifest can hold it", hint="rename it")


def _match(flag: str, text: str, pattern: str, length_max: int, example: str) -> None:
    if len(text) > length_max or re.fullmatch(pattern, text) is None:
        raise UsageError(f"{flag} {text!a} is no valid value (at most {length_max} characters of {pattern})",
                         hint=f"for example {example}")  # fmt: skip


def _is_text(word: str) -> bool:
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in word)


def objects(pods: Pods, kind: Kind) -> list[Object]:
    """Return all objects except those of :func:`secret` and :func:`rights`, in the order in which they must be created.

    Raises:
        UsageError: see :func:`check`.

    Example:
        ``objects(Pods("bert", "train:1", 4, 1, 120.0, ("train.py",)), "jobset")``
    """
    check(pods)
    made = [_service(pods)] if kind == "job" and pods.total > 1 else []
    made += [_budget(pods)] if pods.total > 1 else []
    made += [_object("v1", "ServiceAccount", pods, None)] if pods.watches else []
    if kind == "job":
        return [*made, _object("batch/v1", "Job", pods, _job(pods))]
    if kind == "jobset":
        return [*made, _object("jobset.x-k8s.io/v1alpha2", "JobSet", pods, _jobset(pods))]
    runtime = {"mlPolicy": {"numNodes": pods.total}, "template": {"spec": _jobset(pods)}}
    train = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": pods.name},
        "trainer": {"numNodes": pods.total},
    }
    group = "trainer.kubeflow.org/v1alpha1"
    return [*made, _object(group, "TrainingRuntime", pods, runtime), _object(group, "TrainJob", pods, train)]


def secret(pods: Pods, token: str) -> Object:
    """Return the Secret object with the token of the job. It is immutable, because later pods need the same token."""
    made = _object("v1", "Secret", pods, None, name=pods.secret)
    return {**made, "type": "Opaque", "immutable": True, "stringData": {"token": token}}


def rights(pods: Pods) -> list[Object]:
    """Return the objects that let the pods read Nodes, and read and annotate Pods of their namespace.

    Kubernetes cannot limit these rights to the pod's own Node and Pod, whose names are not known beforehand. Nodes
    belong to no namespace, so a binding for them must name the namespace of the pods. Without ``namespace`` that
    binding is left out.
    """
    if not pods.watches:
        return []
    account: Object = {"kind": "ServiceAccount", "name": pods.name}
    if pods.namespace:
        account["namespace"] = pods.namespace
    made = [
        _role("Role", pods, pods.name, "pods", ["list", "watch", "patch"]),
        _binding("RoleBinding", pods, pods.name, "Role", pods.name, account),
    ]
    if pods.namespace:
        binding = f"{NODE_READER}-{pods.namespace}-{pods.name}"
        made += [
            _role("ClusterRole", pods, NODE_READER, "nodes", ["list", "watch"]),
            _binding("ClusterRoleBinding", pods, binding, "ClusterRole", NODE_READER, account),
        ]
    return made


def _role(kind: str, pods: Pods, name: str, resource: str, verbs: list[str]) -> Object:
    made = _rights_object(kind, pods, name)
    return {**made, "rules": [{"apiGroups": [""], "resources": [resource], "verbs": verbs}]}


def _binding(kind: str, pods: Pods, name: str, role_kind: str, role: str, account: Object) -> Object:
    reference = {"apiGroup": RIGHTS_GROUP, "kind": role_kind, "name": role}
    return {**_rights_object(kind, pods, name), "roleRef": reference, "subjects": [account]}


def _rights_object(kind: str, pods: Pods, name: str) -> Object:
    made = _object(f"{RIGHTS_GROUP}/v1", kind, pods, None, name=name)
    if kind.startswith("Cluster"):
        del made["metadata"]["namespace"]
    if kind == "ClusterRole":  # all jobs share it
        del made["metadata"]["labels"]["app.kubernetes.io/instance"]
    return made


def _object(version: str, kind: str, pods: Pods, spec: Object | None, *, name: str = "") -> Object:
    where = {"namespace": pods.namespace} if pods.namespace else {}
    meta = {"name": name or pods.name, **where, "labels": _labels(pods)}
    made: Object = {"apiVersion": version, "kind": kind, "metadata": meta}
    return made if spec is None else {**made, "spec": spec}


def _labels(pods: Pods) -> dict[str, str]:
    return {"app.kubernetes.io/instance": pods.name, "app.kubernetes.io/managed-by": "holdfast"}


def _service(pods: Pods) -> Object:
    """Return the headless Service, which gives each pod a DNS name, even before the pod is ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"app.kubernetes.io/instance": pods.name},
        "ports": [{"name": "holdfast", "port": PORT}],
    }
    return _object("v1", "Service", pods, spec)


def _budget(pods: Pods) -> Object:
    """Return the disruption budget, which lets nodes be drained one at a time.

    For pods of a Job, a budget can state only how many pods must stay, not how many may leave.
    """
    spec = {
        "minAvailable": pods.total - 1,
        "selector": {"matchLabels": {"app.kubernetes.io/instance": pods.name}},
    }
    return _object("policy/v1", "PodDisruptionBudget", pods, spec)


def _jobset(pods: Pods) -> Object:
    labels = {**_labels(pods), "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = {"metadata": {"labels": labels}, "spec": _job(pods, hosts=f"{pods.name}-{NODE}-0")}
    return {
        "network": {"enableDNSHostnames": True, "subdomain": pods.name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": 0
        },  # the Job replaces lost pods; a failure of the Job must not be repeated
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": job}],
    }


def _job(pods: Pods, hosts: str = "") -> Object:
    """Return the spec of the Indexed Job. ``hosts``: prefix of the pods' names in a JobSet; empty without one."""
    return {
        "completionMode": "Indexed",
        "completions": pods.total,
        "parallelism": pods.total,
        "backoffLimit": LOST_MAX,
        # A run ends with 0 on all nodes at the same time. A pod made at that moment would wait for other pods in vain.
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": _codes(AGAIN)},
                {"action": "FailJob", "onExitCodes": _codes(ENDS)},
            ]
        },
        "template": {"metadata": {"labels": _labels(pods)}, "spec": _pod(pods, hosts)},
    }


def _codes(codes: tuple[Exit, ...]) -> Object:
    return {"containerName": NODE, "operator": "In", "values": sorted(map(int, codes))}


def _pod(pods: Pods, hosts: str) -> Object:
    several = pods.total > 1
    volumes: list[Object] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", **({"sizeLimit": pods.shm} if pods.shm else {})}},
        {"name": "runs", "emptyDir": {}},
    ]
    mounts = [{"name": "shm", "mountPath": SHM_DIR}, {"name": "runs", "mountPath": RUNS_DIR}]
    if several:
        volumes.append({"name": "token", "secret": {"secretName": pods.secret, "defaultMode": SECRET_MODE}})
        mounts.append({"name": "token", "mountPath": TOKEN_DIR})
    if pods.claim:
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": pods.claim}})
        mounts.append({"name": "checkpoints", "mountPath": pods.mount})
    env = {**pods.env, MARK: MARKED}
    container: Object = {
        "name": NODE,
        "image": pods.image,
        "command": [literal(word) for word in _command(pods, hosts or pods.name)],
        "env": [
            *({"name": key, "value": literal(value)} for key, value in env.items()),
            *(
                {"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                for key, path in DOWNWARD.items()
            ),
        ],
        **({"resources": {"limits": dict(pods.resources)}} if pods.resources else {}),
        **({"ports": [{"name": "holdfast", "containerPort": PORT}]} if several else {}),
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",  # the Job decides by the exit code
        "terminationGracePeriodSeconds": int(pods.grace_s) + MARGIN_S,
        **({"serviceAccountName": pods.name} if pods.watches else {}),
        "automountServiceAccountToken": pods.watches,
        **({"subdomain": pods.name} if several and not hosts else {}),
        **({"affinity": _apart(pods)} if several else {}),
        "containers": [container],
        "volumes": volumes,
    }


def _apart(pods: Pods) -> Object:
    """Return a preference for pods on different hosts, so that the loss of one host takes only one node."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": pods.name}},
    }
    return {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]
        }
    }


def _command(pods: Pods, hosts: str) -> list[str]:
    words = ["holdfast", "run", *pods.flags, "--run-id", pods.name, "--grace-s", f"{pods.grace_s:g}"]
    if "--run-dir" not in pods.flags:
        words += ["--run-dir", RUNS_DIR]
    if pods.claim and "--root" not in pods.flags:
        words += ["--root", f"{pods.mount.rstrip('/')}/{pods.name}"]
    if pods.total > 1:
        names = [f"{hosts}-{index}.{pods.name}:{PORT}" for index in range(min(pods.total, CONTACTS_MAX))]
        nnodes = f"{pods.nodes}:{pods.total}" if pods.spares else str(pods.nodes)
        words += [
            "--nnodes",
            nnodes,
            "--rdzv-endpoint",
            ",".join(names),
            "--token-file",
            f"{TOKEN_DIR}/token",
        ]
        if "--rdzv-conf" not in pods.flags:
            words += ["--rdzv-conf", "join_timeout=600"]
    return [*words, *pods.command]


def literal(word: str) -> str:
    """Return the word with each ``$`` doubled, because Kubernetes expands ``$(NAME)`` as a variable."""
    return word.replace("$", "$$")
