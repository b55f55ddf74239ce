"""Seed 003, TensorFlow chapter: the document's addition to controller.py, and what it needs around it.

`__init__` has the document's lines after "Restore Model if needed". Lines that differ from the document: the word
"checkpoins" is spelled right; the triggers of the evaluation are left out; training is one method.
"""

import logging


class Controller:
    """Class that facilitates training and evaluation of models."""

    def __init__(self, train_step, global_step, checkpoint_manager=None):
        self.train_step = train_step
        self.global_step = global_step
        self.checkpoint_manager = checkpoint_manager
        # Restore Model if needed.
        if self.checkpoint_manager is not None:
            model_restored = self._restore_model()
            logging.info("loading checkpoint %s", model_restored)
            if not model_restored and self.checkpoint_manager.checkpoint_interval:
                # If the model is not restored from a checkpoint, save an initial
                # checkpoint.
                ckpt_path = self.checkpoint_manager.save(checkpoint_number=self.global_step)
                logging.info("Saved checkpoints in %s", ckpt_path)

    def _restore_model(self):
        """The path of the newest checkpoint, None without one."""
        return self.checkpoint_manager.restore_or_initialize()

    def train(self, dataset, steps):
        """Train until ``steps`` updates are done; ``dataset``: what follows the restored step."""
        for batch in dataset:
            if int(self.global_step.numpy()) >= steps:
                break
            loss = self.train_step(batch)
            print(f"step {int(self.global_step.numpy())} loss {float(loss):.4f}", flush=True)
            self.checkpoint_manager.save(checkpoint_number=self.global_step, check_interval=True)
