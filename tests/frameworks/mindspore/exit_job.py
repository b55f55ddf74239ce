"""MindSpore's own OnRequestExit in two processes: only rank 1 finds the exit file, after its third step."""

import json
import os
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, train
from mindspore.communication import get_rank, init
from mindspore.train.callback import OnRequestExit

FOLDER = Path(os.environ["JOB_FOLDER"])
os.chdir(FOLDER)
ms.set_device("CPU")
ms.set_context(mode=ms.GRAPH_MODE)
ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
init()
rank = get_rank()
ms.set_seed(1)


class Ask(train.Callback):  # type: ignore[misc]
    """A callback that writes the request for rank 1, and prints where the training was left."""

    def on_train_step_end(self, run_context: train.RunContext) -> None:
        self.step = run_context.original_args().cur_step_num
        if rank == 1 and self.step == 3:
            Path(f"exit-{rank}.json").write_text(json.dumps({"GracefulExit": 1}))


X = np.random.default_rng(0).standard_normal((160, 8)).astype(np.float32)
dataset = ds.GeneratorDataset([(x, x[:1]) for x in X], ["x", "y"], shuffle=False).batch(8)
net = nn.SequentialCell(nn.Dense(8, 16), nn.ReLU(), nn.Dense(16, 1))
model = train.Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.05, 0.9))
ask = Ask()
leave = OnRequestExit(directory=str(FOLDER), file_name="Net", config_file=f"exit-{rank}.json")
model.train(1, dataset, callbacks=[leave, ask], dataset_sink_mode=False)
print("left after step", ask.step, flush=True)
