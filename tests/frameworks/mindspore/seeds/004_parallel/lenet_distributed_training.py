"""Seeds 001 and 004: LeNet on MNIST in the document's data parallel mode.

`LeNet5` and `create_dataset` are those of seed 001's script, graceful_exit.py. Lines that differ from the document: the
device is a CPU; `holdfast.mindspore.train` in the place of `model.train`. The last line writes the weights for the
test.
"""

import os

import mindspore as ms
import mindspore.context as context
import mindspore.nn as nn
from graceful_exit import DATASET_PATH, LeNet5, create_dataset
from mindspore.communication import get_rank, init
from mindspore.context import ParallelMode
from mindspore.train import LossMonitor, Model

import holdfast.mindspore

context.set_context(mode=context.GRAPH_MODE, device_target="CPU")
context.set_auto_parallel_context(parallel_mode=ParallelMode.DATA_PARALLEL, gradients_mean=True)
init()
network = LeNet5(10)
ds_train = create_dataset(os.path.join(DATASET_PATH, "train"), 32, 1)
net_loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
net_opt = nn.Momentum(network.trainable_params(), 0.01, 0.9)
model = Model(network, net_loss, net_opt)
holdfast.mindspore.train(model, 3, ds_train, callbacks=[LossMonitor()], checkpoint="checkpoints")
ms.save_checkpoint(network, f"final-{get_rank()}.ckpt")
