"""Seed 002: the network and the data set of the document's scripts, small.

The document trains a Transformer on a text that its tutorial prepares; here one encoder layer reads digits row by row.
"""

import os

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn, ops


class Net(nn.Cell):
    """Images, float32 (batch, 1, 28, 28), as 28 tokens of 28 pixels -> logits (batch, 10)."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(28, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Dense(28, 10)

    def construct(self, x):
        x = ops.reshape(x, (-1, 28, 28))
        return self.head(self.encoder(x).mean(1))


def create_dataset(batch_size):
    rank_id, rank_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dataset = ds.MnistDataset(os.environ["DATASET_PATH"], num_shards=rank_size, shard_id=rank_id)
    dataset = dataset.map([ds.vision.Rescale(1.0 / 255.0, 0), ds.vision.HWC2CHW()], "image")
    dataset = dataset.map(ds.transforms.TypeCast(ms.int32), "label")
    return dataset.batch(batch_size)
