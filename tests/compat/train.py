"""A script as the Megatron chapter writes it: data parallel over gloo, its own save and rename handlers.

The calls are in the chapter's order. The update and its two reports are inside the optimizer's ``step()``. The
schedule, the count of iterations and ``ttp_set_ckpt_args`` come after it, in the loop.

train.py STEPS PORT FOLDER [RANK@STEP:HOW]
HOW is one of these:

- kill, raise, torn, term;
- late: the rank is killed when it has given its part of the step, and the others continue when the dying checkpoint has
   begun;
- given: as late, but the others do not wait;
- between: the rank is killed after ttp_end_updating_os, before ttp_set_ckpt_args.

CHAPTER=1: use the chapter's own handlers. SAVE_TAKES_S: seconds that a save takes. ASKED_IN_SAVE=1: send SIGTERM to
each writer while it writes. BETWEEN_S: seconds from ttp_end_updating_os to ttp_set_ckpt_args at the step of the
victim's death ("ever": no end). ARGS_FIRST=1: give the arguments inside the update, before ttp_end_updating_os.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import holdfast.compat.install  # noqa: F401  # the one added line; none after `holdfast compat install`

import mindio_ttp.framework_ttp as ttp  # isort: skip
import mindio_ttp.megatron_ttp as mega  # isort: skip

steps, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
victim, _, at = (sys.argv[4] if len(sys.argv) > 4 else "-1@0:none").partition("@")
when, how = int(at.split(":")[0]), at.split(":")[1]
torch.set_num_threads(1)


def save(
    step: int, plan: list[dict[str, object]], args: tuple[int, torch.nn.Module, torch.optim.Optimizer, Any]
) -> None:
    """Save the state. Only the ranks of the plan call this."""
    iteration, model, optimizer, schedule = args
    arrays = {name: p.detach().numpy() for name, p in model.named_parameters()}
    moments = {
        f"momentum.{i}": optimizer.state[p]["momentum_buffer"].numpy()
        for i, p in enumerate(model.parameters())
    }
    os.makedirs(f"{folder}/step_{step}_tmp", exist_ok=True)
    if "ASKED_IN_SAVE" in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(float(os.environ.get("SAVE_TAKES_S", "0")))
    counted = {"step": np.array(iteration), "schedule": np.array(schedule.last_epoch)}
    values: dict[str, Any] = {**counted, **arrays, **moments}
    np.savez(f"{folder}/step_{step}_tmp/rank_{dist_rank}.npz", **values)


def rename(step: int) -> None:
    os.rename(f"{folder}/step_{step}_tmp", f"{folder}/step_{step}")


def resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> int:
    found = sorted(
        name for name in os.listdir(folder) if name.startswith("step_") and not name.endswith("_tmp")
    )
    if not found:
        return 0
    path = f"{folder}/{found[-1]}"
    data = np.load(f"{path}/{sorted(os.listdir(path))[0]}")
    for i, (name, parameter) in enumerate(model.named_parameters()):
        parameter.data.copy_(torch.from_numpy(data[name]))
        optimizer.state[parameter]["momentum_buffer"] = torch.from_numpy(data[f"momentum.{i}"].copy())
    while schedule.last_epoch < int(data["schedule"]):
        schedule.step()
    return int(data["step"])


class Reporting:
    """An optimizer like Megatron's around torch's own: the chapter puts its reports into ``step()``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.current_step = 0

    def increase_step(self) -> None:
        self.current_step += 1

    def step(self, torn: bool, arguments: Any) -> None:
        ttp.ttp_start_updating_os(-1)
        if torn:
            self.optimizer.param_groups[0]["params"][0].data.zero_()
            raise ValueError("in the middle of the update")
        self.optimizer.step()
        self.increase_step()
        if arguments is not None:
            ttp.ttp_set_ckpt_args(arguments)
        ttp.ttp_end_updating_os(self.current_step)


def await_plan() -> None:
    deadline_s = time.monotonic() + 60
    while '"plan"' not in Path(os.environ["HOLDFAST_TTP_LOG"]).read_text() and time.monotonic() < deadline_s:
        time.sleep(0.01)


def between(iteration: int) -> None:
    """Wait between the two calls, at the step of the victim's death."""
    if iteration != when or how not in ("between", "given"):
        return
    if how == "between" and dist_rank == int(victim):
        os.kill(os.getpid(), signal.SIGKILL)
    wait = os.environ.get("BETWEEN_S", "0")
    if wait == "ever":
        while True:
            time.sleep(1)
    time.sleep(float(wait))


def start_ttp(chapter: bool) -> None:
    world = dist.get_world_size()
    if dist_rank == 0:
        ttp.ttp_init_controller(dist_rank, world, world // 2, False)
        ttp.ttp_start_controller("127.0.0.1", port)
    ttp.ttp_init_processor(dist_rank, list(range(world)), world, world, world // 2, False)
    ttp.ttp_start_processor("127.0.0.1", port)
    ttp.ttp_register_save_ckpt_handler(mega.ttp_save_checkpoint if chapter else save)
    ttp.ttp_register_rename_handler(mega.rename_save_result if chapter else rename)


@ttp.ttp_to_persist  # type: ignore[untyped-decorator]
def train(model: torch.nn.Module, inner: torch.optim.Optimizer) -> None:
    chapter = "CHAPTER" in os.environ
    start_ttp(chapter)
    schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
    iteration = (mega.load_checkpoint if chapter else resume)(model, inner, schedule)
    optimizer = Reporting(inner)
    optimizer.current_step = iteration
    while iteration < steps:
        generator = torch.Generator().manual_seed(iteration * 100 + dist_rank)
        ((model(torch.randn(8, 16, generator=generator)) - 1) ** 2).mean().backward()
        struck = dist_rank == int(victim) and iteration == when
        if struck and how in ("kill", "term"):
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)
        if struck and how == "raise":
            raise ValueError("the script fell over")
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if struck and how in ("late", "given"):
            os.kill(os.getpid(), signal.SIGKILL)
        following = (iteration + 1, model, inner, schedule)
        optimizer.step(struck and how == "torn", following if "ARGS_FIRST" in os.environ else None)
        between(iteration)
        inner.zero_grad(set_to_none=False)
        schedule.step()
        iteration += 1
        if "ARGS_FIRST" not in os.environ:
            ttp.ttp_set_ckpt_args((iteration, model, inner, schedule))
        if how == "late" and iteration == when + 1:
            await_plan()
        time.sleep(0.01)


dist.init_process_group("gloo")
dist_rank = dist.get_rank()
torch.manual_seed(7)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
train(net, torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9))
weights = torch.cat([p.detach().flatten() for p in net.parameters()]).numpy()
np.save(f"{folder}/final-{dist_rank}.npy", weights)
dist.destroy_process_group()
