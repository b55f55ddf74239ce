"""A pipeline of two stages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from tests.others.beat import beat, end, long

MAX_ITERS = long(12)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
halves = [nn.Sequential(nn.Linear(6, 16), nn.ReLU()), nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 1))]
model = halves[rank]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
inputs, middle, outputs = torch.zeros(2, 6), torch.zeros(2, 16, requires_grad=True), torch.zeros(2, 1)
stage = PipelineStage(
    model,
    rank,
    2,
    torch.device("cpu"),
    input_args=(middle if rank else inputs,),
    output_args=(outputs if rank else middle,),
)
schedule = ScheduleGPipe(stage, 4, loss_fn=nn.MSELoss())
batches = torch.randn(MAX_ITERS, 8, 6, generator=torch.Generator().manual_seed(1))

for iteration in range(MAX_ITERS):
    beat(iteration)
    x = batches[iteration]
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x.sum(1, keepdim=True))
    optimizer.step()

end(model)
dist.destroy_process_group()
