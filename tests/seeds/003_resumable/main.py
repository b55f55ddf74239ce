"""Seed 003, PyTorch chapter: the document's changes to the ResNet-50's main.py, and what they need around them.

Lines that differ from the document: the device is a CPU (no `loc`, gloo); the network has three blocks in the place of
ResNet-50; the data set is made of random classes; `torch.manual_seed(0)`; the last line writes the weights for the
test.
"""

import argparse
import glob
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument("--resume", default="", help="path to latest checkpoint (default: none)")
parser.add_argument("--epochs", default=5, type=int)


class Block(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.skip = nn.Conv2d(inputs, width, 1, stride)

    def forward(self, x):
        return nn.functional.relu(self.body(x) + self.skip(x))


def images():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(256) % 10
    classes = torch.randn(10, 3, 16, 16, generator=generator)
    return TensorDataset(classes[labels] + 2 * torch.randn(256, 3, 16, 16, generator=generator), labels)


def validate(loader, model):
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    model.train()
    return 100 * right / len(loader.dataset)


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar", save_path="./"):
    if is_best:
        target_path = os.path.join(save_path, "model_best.pth.tar")
        torch.save(state, target_path)
        print(f"save ckpt to {target_path} done. Best epoch for now is :{state['epoch']}")


def main():
    args = parser.parse_args()
    args.start_epoch, args.arch = 0, "resnet"
    os.environ["MASTER_ADDR"] = os.getenv("MASTER_ADDR")
    os.environ["MASTER_PORT"] = os.getenv("MASTER_PORT")
    args.gpu = int(os.getenv("LOCAL_RANK"))
    args.world_size = int(os.getenv("WORLD_SIZE"))
    args.rank = int(os.getenv("RANK"))
    ngpus_per_node = int(os.getenv("LOCAL_WORLD_SIZE"))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(3, 8, 1), Block(8, 16, 2), Block(16, 16, 2))
    net = nn.Sequential(blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()
    best_acc1 = 0.0
    if args.resume:
        candidate_ckpt_path = ""
        for p in glob.glob("./rank*"):
            best_ckpt_path = os.path.join(p, "model_best.pth.tar")
            if os.path.exists(best_ckpt_path):
                candidate_ckpt_path = best_ckpt_path
                break
        if candidate_ckpt_path:
            print("[gpu id:", args.gpu, "]", f"=> loading checkpoint '{candidate_ckpt_path}'")
            checkpoint = torch.load(candidate_ckpt_path)
            args.start_epoch = checkpoint["epoch"]
            best_acc1 = checkpoint["best_acc1"]
            model.load_state_dict(checkpoint["state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            print("[gpu id:", args.gpu, "]", f"=> loaded checkpoint '{candidate_ckpt_path}'"
                  f" (epoch {checkpoint['epoch']})")  # fmt: skip
        else:
            print("no valid ckpt found to resume.")
    data = images()
    sampler = DistributedSampler(data)
    train_loader, val_loader = DataLoader(data, 8, sampler=sampler), DataLoader(data, 64)
    for epoch in range(args.start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(train_loader):
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"Epoch: [{epoch}][{i + 1}/{len(train_loader)}] Loss {loss.item():.4e}", flush=True)
        acc1 = validate(val_loader, net)
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if args.rank % ngpus_per_node == 0:
            save_path = f"./rank_{args.rank}"
            if not os.path.exists(save_path):
                os.makedirs(save_path, exist_ok=True)
            save_checkpoint({
                "epoch": epoch + 1,
                "arch": args.arch,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
            }, is_best, save_path=save_path)  # fmt: skip
    torch.save(model.state_dict(), f"final-{args.rank}.pt")


if __name__ == "__main__":
    main()
