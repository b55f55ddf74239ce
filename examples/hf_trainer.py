"""Hugging Face's Trainer, protected: a small GPT-2 learns the Python sources of this machine's standard library.

    pip install 'holdfast[hf]'
    holdfast run --nproc-per-node 4 --preload transformers.trainer examples/hf_trainer.py        # then kill -9 any

Holdfast adds: from holdfast.integrations.huggingface import protect; protect(trainer). No resume flag, no checkpoint
path.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from holdfast.integrations.huggingface import protect  # + Holdfast

CONTEXT = 64


class Sources(torch.utils.data.Dataset):
    """A dataset of the bytes of real text, in pieces of ``CONTEXT``."""

    def __init__(self, pieces: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[: pieces * CONTEXT]
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", default="hf_output")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=64,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    args = TrainingArguments(
        output_dir=given.output,
        max_steps=given.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=5,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Sources(pieces=512))
    protect(trainer)  # + Holdfast
    result = trainer.train()
    trainer.save_model(given.output)
    if trainer.is_world_process_zero():
        print(
            f"step {trainer.state.global_step}, epoch {trainer.state.epoch:g}, loss {result.training_loss:.3f}"
        )


if __name__ == "__main__":
    main()
