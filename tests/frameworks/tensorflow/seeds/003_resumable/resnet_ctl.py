"""Seed 003, TensorFlow chapter: the training that uses the document's controller.

The document takes ResNet50_ID0360 for it. Here: the device is a CPU; one residual block on small random classes; 40
steps; seeds are set. The last line writes the weights for the test.
"""

import logging
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import tensorflow as tf
from controller import Controller

STEPS = 40
logging.basicConfig(level=logging.INFO)


def build():
    layers = tf.keras.layers
    inputs = layers.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    y = layers.Conv2D(8, 3, padding="same")(x)
    x = layers.ReLU()(layers.Add()([x, y]))
    return tf.keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def create_dataset():
    rng = np.random.default_rng(0)
    labels = np.arange(STEPS * 16) % 10
    classes = rng.standard_normal((10, 8, 8, 3)).astype("float32")
    images = classes[labels] + rng.standard_normal((len(labels), 8, 8, 3)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(16)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return data.with_options(options)


def main():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tf.keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
        optimizer = tf.keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)
        loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        global_step = tf.Variable(0, dtype=tf.int64, trainable=False)

    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_fn(labels, model(images, training=True))) / 16
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(batch):
        losses = strategy.run(replica_step, args=batch)
        global_step.assign_add(1)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    rank = strategy.cluster_resolver.task_id or 0
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(model=model, optimizer=optimizer, step=global_step),
        f"models/device{rank}", max_to_keep=3, step_counter=global_step, checkpoint_interval=10,
    )  # fmt: skip
    controller = Controller(train_step, global_step, manager)
    controller.train(
        strategy.experimental_distribute_dataset(create_dataset().skip(int(global_step.numpy()))), STEPS
    )
    np.savez(f"final-{rank}.npz", *[variable.numpy() for variable in model.variables])


if __name__ == "__main__":
    main()
