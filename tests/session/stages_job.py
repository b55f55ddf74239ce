"""A pipeline of two stages without copies, with a state in memory every third step and a log of the gradients since."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import holdfast
from tests.others.beat import beat, end

STEPS = 9


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    stages = [nn.Sequential(nn.Linear(6, 16), nn.ReLU()), nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 1))]
    model = stages[rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    first, middle, last = torch.zeros(2, 6), torch.zeros(2, 16, requires_grad=True), torch.zeros(2, 1)
    ends = ((middle,), (last,)) if rank else ((first,), (middle,))
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), input_args=ends[0], output_args=ends[1])
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.MSELoss())
    batches = torch.randn(STEPS, 8, 6, generator=torch.Generator().manual_seed(1))
    with holdfast.session(
        model={f"stage{rank}": model}, optimizer=optimizer, scheduler=scheduler, memory=3, checkpoint="ckpt"
    ) as s:
        for step in s.steps(until=STEPS):
            with step:
                beat(step.number)
                x = batches[step.number]
                if rank == 0:
                    schedule.step(x)
                else:
                    schedule.step(target=x.sum(1, keepdim=True))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    end(model, lr=scheduler.get_last_lr())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
