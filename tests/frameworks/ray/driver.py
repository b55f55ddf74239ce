"""The driver of a job, as a user of Ray writes it: ``python driver.py NAME SETTINGS``, settings as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train with DDP and dropout. Return the digest of the final weights. A file ``hurry`` makes the steps short."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import holdfast

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    data = torch.utils.data.TensorDataset(torch.arange(4096.0).reshape(-1, 16).sin())
    loader = torch.utils.data.DataLoader(data, 8, sampler=torch.utils.data.DistributedSampler(data, seed=7))
    with holdfast.session(model=model, optimizer=optimizer, seed=7) as s:
        for step in s.steps(loader, until=config["steps"]):
            with step as batch:
                time.sleep(0.0 if os.path.exists(config["hurry"]) else config["pause_s"])
                ((model(batch[0]) - 1) ** 2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if step.committed and step.number % 10 == 0:
                print("at step", step.number, flush=True)
    weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    return {"digest": hashlib.sha256(weights).hexdigest(), "pid": os.getpid()}


def main() -> int:
    """Run the job; the last line of stdout is its result as JSON."""
    from holdfast.errors import HoldfastError, JobError
    from holdfast.integrations.ray import run

    settings = json.loads(sys.argv[2])
    script = settings.pop("script", None)
    try:
        result = run(script or train, name=sys.argv[1], **settings)
    except HoldfastError as error:
        code = error.code if isinstance(error, JobError) else 0
        print(json.dumps({"error": type(error).__name__, "code": code, "text": str(error)}), flush=True)
        return code or 1
    print(json.dumps({"returned": {str(rank): value for rank, value in result.returned.items()}}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
