"""Seed 001, graceful exit: the document's script.

Lines that differ from the document: the device is a CPU; 2 devices in the place of 8; data parallel, because a CPU has
no semi-automatic mode; `ms.set_seed(1)`; `DATASET_PATH` comes from the environment. Three lines are added after the
callback: the next start reads the data from where the callback's checkpoint was written. The last line writes the
weights for the test.
"""

import os

import mindspore as ms
import mindspore.context as context
import mindspore.dataset as ds
import mindspore.dataset.transforms as C
import mindspore.dataset.vision as CV
import mindspore.nn as nn
from mindspore.common import dtype as mstype
from mindspore.common.initializer import TruncatedNormal
from mindspore.communication.management import get_rank, init
from mindspore.context import ParallelMode
from mindspore.dataset.vision import Inter
from mindspore.train import Accuracy, LossMonitor, Model
from mindspore.train.callback import OnRequestExit

context.set_context(mode=context.GRAPH_MODE)
ms.set_seed(1)

DATASET_PATH = os.environ["DATASET_PATH"]


def create_dataset(data_path, batch_size=32, repeat_size=1, num_parallel_workers=1):
    """create dataset for train or test"""
    # define dataset
    mnist_ds = ds.MnistDataset(data_path)
    resize_height, resize_width = 32, 32
    rescale = 1.0 / 255.0
    shift = 0.0
    rescale_nml = 1 / 0.3081
    shift_nml = -1 * 0.1307 / 0.3081
    # define map operations
    resize_op = CV.Resize((resize_height, resize_width), interpolation=Inter.LINEAR)  # Bilinear mode
    rescale_nml_op = CV.Rescale(rescale_nml, shift_nml)
    rescale_op = CV.Rescale(rescale, shift)
    hwc2chw_op = CV.HWC2CHW()
    type_cast_op = C.TypeCast(mstype.int32)
    # apply map operations on images
    mnist_ds = mnist_ds.map(type_cast_op, input_columns="label", num_parallel_workers=num_parallel_workers)
    for operation in (resize_op, rescale_op, rescale_nml_op, hwc2chw_op):
        mnist_ds = mnist_ds.map(operation, input_columns="image", num_parallel_workers=num_parallel_workers)
    # apply DatasetOps
    buffer_size = 10000
    mnist_ds = mnist_ds.shuffle(buffer_size=buffer_size)  # 10000 as in LeNet train script
    mnist_ds = mnist_ds.batch(batch_size, drop_remainder=True)
    return mnist_ds.repeat(repeat_size)


def conv(in_channels, out_channels, kernel_size, stride=1, padding=0):
    """weight initial for conv layer"""
    weight = weight_variable()
    return nn.Conv2d(in_channels, out_channels, kernel_size=kernel_size, stride=stride, padding=padding,
                     weight_init=weight, has_bias=False, pad_mode="valid")  # fmt: skip


def fc_with_initialize(input_channels, out_channels):
    """weight initial for fc layer"""
    weight = weight_variable()
    bias = weight_variable()
    return nn.Dense(input_channels, out_channels, weight, bias)


def weight_variable():
    """weight initial"""
    return TruncatedNormal(0.02)


class LeNet5(nn.Cell):
    def __init__(self, num_class=10, channel=1):
        super().__init__()
        self.num_class = num_class
        self.conv1 = conv(channel, 6, 5)
        self.conv2 = conv(6, 16, 5)
        self.fc1 = fc_with_initialize(16 * 5 * 5, 120)
        self.fc2 = fc_with_initialize(120, 84)
        self.fc3 = fc_with_initialize(84, self.num_class)
        self.relu = nn.ReLU()
        self.max_pool2d = nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = nn.Flatten()

    def construct(self, x):
        x = self.conv1(x)
        x = self.relu(x)
        x = self.max_pool2d(x)
        x = self.conv2(x)
        x = self.relu(x)
        x = self.max_pool2d(x)
        x = self.flatten(x)
        x = self.fc1(x)
        x = self.relu(x)
        x = self.fc2(x)
        x = self.relu(x)
        return self.fc3(x)


def graceful_exit_case():
    # init
    device_num = 2
    context.set_context(mode=context.GRAPH_MODE)
    ms.set_device("CPU")
    context.set_auto_parallel_context(parallel_mode=ParallelMode.DATA_PARALLEL, device_num=device_num)
    init()
    # build
    network = LeNet5(10)
    ds_train = create_dataset(os.path.join(DATASET_PATH, "train"), 32, 1)
    net_loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    net_opt = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    model = Model(network, net_loss, net_opt, metrics={"Accuracy": Accuracy()})
    # graceful exit json file:{"GracefulExit": 1}
    reset_json = r"./graceful_exit.json"
    # callback
    cb = OnRequestExit(file_name="LeNet", config_file=reset_json)
    written = f"./rank_{get_rank()}/LeNet_train.ckpt"
    if os.path.exists(written):
        ds_train.set_init_step(int(ms.load_checkpoint(written)["step_num"]))
    # train
    model.train(1, ds_train, callbacks=[cb, LossMonitor()], dataset_sink_mode=False)
    ms.save_checkpoint(network, f"final-{get_rank()}.ckpt")


if __name__ == "__main__":
    graceful_exit_case()
