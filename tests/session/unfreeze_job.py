"""A frozen body joins the optimizer while two ranks train; rank 1 is killed later. Prints the final values of all."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import holdfast

STEPS, UNFREEZE_AT, KILL_AT = 10, 3, 6


class Counting(nn.Linear):
    """A layer whose output depends on how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Count the call."""
        self.calls += 1
        return super().forward(x) * (1 + self.calls / 10)

    def get_extra_state(self) -> Any:
        """Return the state, with a tensor that grows with the first call."""
        return {"calls": self.calls, "seen": torch.ones(min(self.calls, 1))}

    def set_extra_state(self, state: Any) -> None:
        """Take the state back."""
        self.calls = state["calls"]


def main(died: Path) -> None:
    """Train. An existing file ``died`` keeps rank 1 alive."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    body, head = nn.Linear(4, 4), Counting(4, 1)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(body, head))
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01)
    mean = torch.zeros(2)
    data = [torch.full((2, 4), float(n)) for n in range(STEPS)]
    with holdfast.session(model=model, optimizer=optimizer, seed=3, state={"mean": mean}) as s:
        for step in s.steps(data, until=STEPS):
            if step.number == UNFREEZE_AT:
                optimizer.add_param_group({"params": list(body.parameters())})
                optimizer.zero_grad()  # gradients that earlier backward passes have added up there
            with step as x:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                mean.add_(1)
            if step.committed and (dist.get_rank(), step.number) == (1, KILL_AT) and not died.exists():
                died.write_text("")
                os.kill(os.getpid(), signal.SIGKILL)
    ended = b"".join(tensor.detach().numpy().tobytes() for tensor in (*model.parameters(), mean))
    print(
        f"ended with {hashlib.sha256(ended).hexdigest()} {head.calls} {len(optimizer.param_groups)}",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
