"""Seed 004, ResNet-50 on CIFAR-10, data parallel: the document's script.

Lines that differ from the document: the device is a CPU, so `init()`, which makes HCCL's group, is left out, and
`get_rank` and `get_group_size` read the variables of run.sh or mpirun; `c_transforms` has its name of MindSpore 2,
and `scalar_to_array` is a constant; 128 images per rank, 32 pixels wide in the place of 224; 4 epochs in the place of
10; data parallel without a mode of MindSpore's; `ms.set_seed(1)`; `holdfast.mindspore.train` in the place of
`model.train`. The last line writes the weights for the test.
"""

import os

import mindspore as ms
import mindspore.dataset as ds
import mindspore.dataset.transforms as C
import mindspore.dataset.vision as vision
import mindspore.nn as nn
import mindspore.ops as ops
from mindspore import Model, Tensor, context
from mindspore import dtype as mstype
from mindspore.nn import Momentum
from mindspore.train.callback import CheckpointConfig, LossMonitor, ModelCheckpoint
from resnet import resnet50

import holdfast.mindspore

context.set_context(mode=context.GRAPH_MODE, device_target="CPU")
ms.set_seed(1)
data_path = os.environ["DATA_PATH"]
execute_path = os.environ["EXECUTE_PATH"]


def get_rank():
    return int(os.environ.get("RANK_ID") or os.environ["OMPI_COMM_WORLD_RANK"])


def get_group_size():
    return int(os.environ.get("RANK_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])


def create_dataset(data_path, repeat_num=1, batch_size=32, rank_id=0, rank_size=1):
    resize_height = 32
    resize_width = 32
    rescale = 1.0 / 255.0
    shift = 0.0
    # get rank_id and rank_size
    rank_id = get_rank()
    rank_size = get_group_size()
    data_set = ds.Cifar10Dataset(data_path, num_samples=128, num_shards=rank_size, shard_id=rank_id)
    # define map operations
    random_crop_op = vision.RandomCrop((32, 32), (4, 4, 4, 4))
    random_horizontal_op = vision.RandomHorizontalFlip()
    resize_op = vision.Resize((resize_height, resize_width))
    rescale_op = vision.Rescale(rescale, shift)
    normalize_op = vision.Normalize((0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023))
    changeswap_op = vision.HWC2CHW()
    type_cast_op = C.TypeCast(mstype.int32)
    c_trans = [random_crop_op, random_horizontal_op]
    c_trans += [resize_op, rescale_op, normalize_op, changeswap_op]
    # apply map operations on images
    data_set = data_set.map(operations=type_cast_op, input_columns="label")
    data_set = data_set.map(operations=c_trans, input_columns="image")
    # apply shuffle operations
    data_set = data_set.shuffle(buffer_size=10)
    # apply batch operations
    data_set = data_set.batch(batch_size=batch_size, drop_remainder=True)
    # apply repeat operations
    return data_set.repeat(repeat_num)


class SoftmaxCrossEntropyExpand(nn.Cell):
    def __init__(self, sparse=False):
        super().__init__()
        self.exp = ops.Exp()
        self.sum = ops.ReduceSum(keep_dims=True)
        self.onehot = ops.OneHot()
        self.on_value = Tensor(1.0, mstype.float32)
        self.off_value = Tensor(0.0, mstype.float32)
        self.div = ops.Div()
        self.log = ops.Log()
        self.sum_cross_entropy = ops.ReduceSum(keep_dims=False)
        self.mul = ops.Mul()
        self.mul2 = ops.Mul()
        self.mean = ops.ReduceMean(keep_dims=False)
        self.sparse = sparse
        self.max = ops.ReduceMax(keep_dims=True)
        self.sub = ops.Sub()

    def construct(self, logit, label):
        logit_max = self.max(logit, -1)
        exp = self.exp(self.sub(logit, logit_max))
        exp_sum = self.sum(exp, -1)
        softmax_result = self.div(exp, exp_sum)
        if self.sparse:
            label = self.onehot(label, ops.shape(logit)[1], self.on_value, self.off_value)
        softmax_result_log = self.log(softmax_result)
        loss = self.sum_cross_entropy((self.mul(softmax_result_log, label)), -1)
        loss = self.mul2(Tensor(-1.0, mstype.float32), loss)
        return self.mean(loss, -1)


def test_train_cifar(epoch_size=4):
    loss_cb = LossMonitor()
    dataset = create_dataset(data_path)
    batch_size = 32
    num_classes = 10
    net = resnet50(batch_size, num_classes)
    loss = SoftmaxCrossEntropyExpand(sparse=True)
    opt = Momentum(filter(lambda x: x.requires_grad, net.get_parameters()), 0.01, 0.9)
    ckpt_config = CheckpointConfig(keep_checkpoint_max=1, integrated_save=False)
    ckpt_callback = ModelCheckpoint(
        prefix="data_parallel", directory=f"{execute_path}/ckpt_" + str(get_rank()) + "/", config=ckpt_config
    )
    model = Model(net, loss_fn=loss, optimizer=opt)
    holdfast.mindspore.train(
        model,
        epoch_size,
        dataset,
        callbacks=[loss_cb, ckpt_callback],
        checkpoint=f"{execute_path}/checkpoints",
    )
    ms.save_checkpoint(net, f"{execute_path}/final-{get_rank()}.ckpt")


if __name__ == "__main__":
    test_train_cifar()
