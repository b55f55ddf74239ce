"""The Trainer of ``examples/hf_trainer.py`` without dropout, protected or not, with an injected fault.

``hf_job.py --output DIR [--plain] [--cut RANK@CALL] [--leave RANK@CALL] [--kill RANK@CALL]``:
CALL counts micro-batches, without their repetitions by a check or a rehearsal.
``--evaluate steps|epoch``: every three steps, or after each epoch. ``--save``: every three steps.
``--kill-in evaluation|save``: CALL counts evaluated batches, or half-written saves.
``--resume``: start from a checkpoint of the Trainer. ``--plateau``: the scores of evaluations decide on the learning
rate.
``--average own|session``: a callback averages the weights; with ``session`` the session has the average.
``--cooling``: the model divides its embeddings by a temperature, which falls at each third pass.
``--other-data``: a process that starts when DIR/other exists, or after a kill, has its samples in another order.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from holdfast.frameworks.torch.comm.comm_state import fabric
from holdfast.integrations.huggingface import protect

EPOCH_STEPS = 4
ACCUMULATED = 2
STEPS = 9
TIMES = ("train_runtime", "train_tokens_per_second")


class Pieces(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A dataset of tokens that depend on their index only; the number of counted tokens differs per sample."""

    def __init__(self, shift: int = 0) -> None:
        self._shift = shift

    def __len__(self) -> int:
        return EPOCH_STEPS * 4 * 2 * 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        index = (index + self._shift) % len(self)
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: index % 7] = -100
        return {"input_ids": tokens, "labels": labels, "attention_mask": (labels >= 0).long()}


class Cooling(torch.nn.Module):
    """An embedding with a temperature in an attribute, which falls at each third pass."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.passes = 0
        self.temperature = 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of ``tokens``."""
        self.passes += 1
        if self.passes % 3 == 0:
            self.temperature *= 0.9
        embedded: torch.Tensor = self.embedding(tokens) / self.temperature
        return embedded


class Average(TrainerCallback):  # type: ignore[misc]
    """An average of the weights after each step."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_begin(self, *given: Any, model: Any, **others: Any) -> None:
        """Begin with the weights."""
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def on_step_end(self, *given: Any, model: Any, **others: Any) -> None:
        """Replace the tensors of the average."""
        for name, p in getattr(model, "module", model).named_parameters():
            self.weights[name] = 0.9 * self.weights[name] + 0.1 * p.detach()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the average."""
        return self.weights

    def load_state_dict(self, weights: dict[str, torch.Tensor]) -> None:
        """Take over the average."""
        self.weights = {name: tensor.clone() for name, tensor in weights.items()}


class Job(Trainer):  # type: ignore[misc]
    """A Trainer with one fault in the middle of a micro-batch."""

    def arm(self, given: argparse.Namespace) -> None:
        """Read which fault comes at which call of ``training_step``."""
        # Of this process: an object, as plain attributes that a step changes belong to the job.
        self.process = SimpleNamespace(calls=0, first=sys.maxsize)
        self.elsewhere = self.rows = 0
        self.collected = {"train": defaultdict[str, list[float]](list)}
        self.killed = given.output / "killed"
        self.kill_in = given.kill_in
        self.faults = {}
        for kind in ("cut", "leave", "kill"):
            rank, _, call = getattr(given, kind).partition("@")
            if rank == os.environ.get("RANK"):
                self.faults[int(call)] = kind

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training step with its fault."""
        self.process.calls += 1
        number = self.state.global_step * ACCUMULATED + 1 + self.accelerator.sync_gradients
        self.process.first = min(self.process.first, number)
        kind = self.faults.pop(number - self.process.first + 1, "") if self.kill_in == "step" else ""
        if kind == "leave":
            os.kill(os.getpid(), signal.SIGUSR2)
        if kind == "kill":
            self.kill()
        if kind == "cut":
            for inner in fabric()._inners():
                inner.sever()
        return super().training_step(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss, and count its samples in attributes of this class, as TRL's trainers do."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            self.rows += len(inputs["input_ids"])
            losses = self.accelerator.gather(loss.detach().reshape(1))
            self.collected["train"]["mean_loss"].append(losses.mean().item())
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what was counted since the last line."""
        if "loss" in logs:
            logs["rows"] = self.rows
            logs |= {name: sum(values) / len(values) for name, values in self.collected["train"].items()}
            self.collected["train"].clear()
        super().log(logs, *args, **kwargs)

    def kill(self) -> None:
        """Kill this process, once in the run."""
        if not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def meet(self, where: str) -> None:
        """Count a call between two steps, and kill this process at its fault."""
        if self.kill_in == where:
            self.elsewhere += 1
            if self.elsewhere in self.faults:
                self.kill()

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a prediction step with its fault."""
        self.meet("evaluation")
        return super().prediction_step(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        self.meet("save")
        return super()._save_optimizer_and_scheduler(*args, **kwargs)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--cut", default="")
    parser.add_argument("--leave", default="")
    parser.add_argument("--kill", default="")
    parser.add_argument("--kill-in", default="step")
    parser.add_argument("--evaluate", default="no")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--resume", default=None)
    parser.add_argument("--plateau", action="store_true")
    parser.add_argument("--average", default="")
    parser.add_argument("--cooling", action="store_true")
    parser.add_argument("--other-data", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**size, **no_dropout, bos_token_id=0, eos_token_id=0))
    if given.cooling:
        model.transformer.wpe = Cooling(model.transformer.wpe)
    schedule: dict[str, Any] = {}
    if given.plateau:  # the rate halves with each loss that is not greater than the last one
        schedule = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"}
        schedule["lr_scheduler_kwargs"] = {"mode": "max", "patience": 0, "factor": 0.5}
    args = TrainingArguments(
        output_dir=str(given.output), max_steps=STEPS, per_device_train_batch_size=2,
        gradient_accumulation_steps=ACCUMULATED, learning_rate=1e-2, logging_steps=3, report_to=[],
        use_cpu=True, disable_tqdm=True,
        average_tokens_across_devices=True, include_num_input_tokens_seen="non_padding",
        eval_strategy=given.evaluate, eval_steps=3,
        save_strategy="steps" if given.save else "no", save_steps=3, **schedule,
    )  # fmt: skip
    other = given.other_data and any((given.output / name).exists() for name in ("other", "killed"))
    trainer = Job(model=model, args=args, train_dataset=Pieces(int(other)), eval_dataset=Pieces())
    trainer.arm(given)
    average = Average()
    if given.average:
        trainer.add_callback(average)
    if not given.plain:
        protect(trainer, state={"average": average} if given.average == "session" else {})
    result = trainer.train(resume_from_checkpoint=given.resume)
    if trainer.is_world_process_zero():
        state = trainer.state
        seen = {"step": state.global_step, "epoch": state.epoch, "calls": trainer.process.calls}
        seen["rate"] = trainer.lr_scheduler.get_last_lr()[0]
        seen["logged"] = [
            {key: value for key, value in line.items() if key not in TIMES}
            for line in state.log_history
            if "loss" in line
        ]
        seen["trained"] = [result.training_loss, state.total_flos, state.num_input_tokens_seen]
        seen["evaluated"] = [
            [line["step"], line["eval_loss"]] for line in state.log_history if "eval_loss" in line
        ]
        seen["average"] = sum(tensor.double().sum().item() for tensor in average.weights.values())
        (given.output / "seen.json").write_text(json.dumps(seen))
        trainer.save_model(given.output)


if __name__ == "__main__":
    main()
