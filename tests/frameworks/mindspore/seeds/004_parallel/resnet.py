"""Seed 004: `resnet50`, which the document takes from its sample code; one block per stage, an eighth of the width."""

from mindspore import nn

EXPANSION = 4


class Bottleneck(nn.Cell):
    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = EXPANSION * width
        self.body = nn.SequentialCell(
            nn.Conv2d(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.skip = nn.SequentialCell(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU()

    def construct(self, x):
        return self.relu(self.body(x) + self.skip(x))


def resnet50(batch_size, num_classes):
    """Images, float32 (batch, 3, height, width), -> logits (batch, num_classes)."""
    width = 8
    stages = []
    inputs = width
    for stage in range(4):
        stages.append(Bottleneck(inputs, width << stage, 1 if stage == 0 else 2))
        inputs = EXPANSION * (width << stage)
    return nn.SequentialCell(
        nn.Conv2d(3, width, 7, 2), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, pad_mode="same"),
        *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dense(inputs, num_classes),
    )  # fmt: skip
