"""Megatron-core's GPT under its own DistributedDataParallel: a lost worker costs no step.

    pip install holdfast megatron-core
    holdfast run --nproc-per-node 4 examples/megatron_gpt.py        # then kill -9 any of the workers

Holdfast adds: one import, declare(gpt) (which rank holds what), the session, its loop, the block around a step.
"""

import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

import holdfast.integrations.megatron  # + Holdfast

CONTEXT, BATCH = 64, 4


class CpuAttention(torch.nn.Module):
    """An attention in place of Megatron's, for a machine without a GPU. Tensors: (sequence, batch, heads, width)."""

    def __init__(self, **arguments: object) -> None:
        super().__init__()

    def forward(self, *states: torch.Tensor, **masks: object) -> torch.Tensor:
        heads = [state.permute(1, 2, 0, 3) for state in states[:3]]
        return scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def build() -> GPTModel:
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, hidden_dropout=0, attention_dropout=0,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # where Megatron's DDP puts its buffers
        spec.submodules.self_attention.submodules.core_attention = CpuAttention
    torch.manual_seed(0)
    return GPTModel(config, spec, vocab_size=256, max_sequence_length=CONTEXT)


def main() -> None:
    steps = int(sys.argv[1]) if sys.argv[1:] else 200
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel()
    gpt = build()
    ddp = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt)
    holdfast.integrations.megatron.declare(gpt)  # + Holdfast
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    text = (Path(sysconfig.get_paths()["stdlib"]) / "typing.py").read_bytes()
    windows = torch.tensor(list(text)).unfold(0, CONTEXT + 1, 1)
    with holdfast.session(model=gpt, optimizer=optimizer, checkpoint="megatron_ckpts") as s:  # + Holdfast
        for step in s.steps(until=steps):  # + Holdfast
            with step:  # + Holdfast
                ddp.zero_grad_buffer()
                tokens = windows[torch.randint(len(windows), (BATCH,))]
                loss = ddp(tokens[:, :-1], torch.arange(CONTEXT)[None], None, labels=tokens[:, 1:]).mean()
                loss.backward()
                ddp.finish_grad_sync()
                for parameter in gpt.parameters():
                    parameter.grad = parameter.main_grad
                optimizer.step()
                optimizer.zero_grad()
            if step.committed and step.number % 20 == 0 and dist.get_rank() == 0:
                print(f"step {step.number}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
