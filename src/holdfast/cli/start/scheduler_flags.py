"""Flags of ``holdfast run`` that a scheduler's environment sets: a Slurm step, or the index of a Kubernetes pod."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.cli.start.flag_files import FlagValues
from holdfast.cli.start.node_flags import join_s_of
from holdfast.errors import UsageError
from holdfast.schedulers.job_secret import job_token
from holdfast.schedulers.kubernetes_pod import INDEX, node_rank
from holdfast.schedulers.slurm_step import SlurmStep, read_step

SLURM, POD = "the Slurm step", f"{INDEX} of the pod"
ASK_S = 10.0
ALL_SAID = ({"nnodes", "node_rank", "master_addr"}, {"nnodes", "node_rank", "rdzv_endpoint"})


def scheduled(settled: FlagValues, env: Mapping[str, str]) -> FlagValues:
    """Return the flag values with those of the scheduler's environment added. Flags set by the user have precedence.

    Raises:
        UsageError: a flag contradicts the environment, or the environment is incomplete.
    """
    told, source = _of_step(settled, env), SLURM
    if not told and "node_rank" not in settled.given and (number := node_rank(env)) is not None:
        told, source = {"node_rank": number}, POD
    new = {key: value for key, value in told.items() if key not in settled.given}
    return FlagValues(
        {**settled.values, **new}, {**settled.sources, **dict.fromkeys(new, source)}, settled.over
    )


def _of_step(settled: FlagValues, env: Mapping[str, str]) -> dict[str, Any]:
    values, given = settled.values, settled.given
    alone = values["standalone"] or ("nnodes" in given and str(values["nnodes"]) in ("1", "1:1"))
    if alone or values["rank_table"]:
        return {}
    said = any(keys <= given for keys in ALL_SAID)
    step = None if said and given >= {"token_file", "run_id"} else read_step(env)
    if step is None:
        return {}
    if step.tasks_per_node > 1:
        raise UsageError(
            f"this Slurm step has {step.tasks_per_node} tasks on a host: each of them would start a job of its own",
            hint="srun --ntasks-per-node=1 (Holdfast starts the workers: --nproc-per-node); --nnodes 1 where each "
            "task is a job of its own",
        )
    if step.nodes == 1:
        return {}
    if not said:
        _agree(settled, step)
    told: dict[str, Any] = {
        "nnodes": str(step.nodes),
        "node_rank": step.node,
        "run_id": step.name,
        "token_file": str(token_path(values, step)),
    }
    if "rdzv_endpoint" not in given:
        told |= {"master_port": step.port}
        if "master_addr" not in given:
            told["master_addr"] = _address(step.first_host)
    return told


def token_path(values: Mapping[str, Any], step: SlurmStep) -> Path:
    """Return the path of the file with the secret that the nodes of a Slurm step share."""
    return Path(values["run_dir"]).absolute() / f"{step.name}.token"


def share_token(settled: FlagValues) -> None:
    """Make the file with the secret that the nodes of a Slurm step share. On other nodes than node 0, wait for it.

    If the user has given ``--token-file``, do nothing.

    Raises:
        UsageError: the file cannot be made.
        AuthError: the file belongs to another user.
        NotMet: node 0 has not made the file within the time limit for the nodes to meet.
    """
    if settled.sources["token_file"] != SLURM:
        return
    job_token(
        Path(settled.values["token_file"]),
        makes=settled.values["node_rank"] == 0,
        wait_s=join_s_of(str(settled.values["rdzv_conf"] or "")),
    )


def _agree(settled: FlagValues, step: SlurmStep) -> None:
    """Check that the flags agree with the Slurm step. Raises: UsageError."""
    values, given = settled.values, settled.given
    text = str(values["nnodes"])
    if "nnodes" in given and text.rpartition(":")[2] != str(step.nodes):
        raise UsageError(
            f"--nnodes {text}, but this Slurm step has {step.nodes} nodes",
            hint=f"leave --nnodes out, or --nnodes MIN:{step.nodes} (those beyond MIN wait as spares), or "
            "srun --nodes",
        )
    if "node_rank" in given and values["node_rank"] != step.node:
        raise UsageError(
            f"--node-rank {values['node_rank']}, but this is node {step.node} of the Slurm step",
            hint="leave --node-rank out",
        )


def _address(host: str) -> str:
    """Return ``host`` if the name resolves on this host; otherwise its address in Slurm's configuration."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return host
    except OSError:
        pass
    try:
        asked = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", host],
            capture_output=True, text=True, timeout=ASK_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return host  # the caller looks the name up again later
    found = [word.partition("=")[2] for word in asked.stdout.split() if word.startswith("NodeAddr=")]
    return found[0] if found and found[0] else host
