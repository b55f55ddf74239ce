"""Kills of random ranks at random moments, and stops with a resume, over the samples of the documents.

``python -m tests.soak.samples mindspore|megatron [--faults 125] [--faults-each 30] [--seed 1] [--sample lenet]``

It runs in the environment of the framework (``make samples``). Each sample is copied into a separate directory. Only
sizes are changed, so that a training lasts long enough to be hit. Five of six victims are ranks. The sixth is the
launcher, which gets SIGTERM: the run saves and leaves, and the same command is started again. The exit code is 0 only
if every training ended with the bits of the undisturbed training: the tensors of its final checkpoint and the files of
weights that its script writes.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from holdfast.drill.exercise import Exercise
from tests.soak.chaos import Chaos, Tally, chaos

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = ROOT / "tests" / "frameworks"
SEEDS = FRAMEWORKS / "mindspore" / "seeds"
MNIST_IMAGES = 1600
KINDS = ("worker", "worker", "worker", "worker", "worker", "terminated launcher")
PAIRED = 0.5


@dataclass(frozen=True)
class DocumentSample(Exercise):
    """A sample script from a document.

    Attributes:
        folders: directories whose files are copied into the working directory.
        sizes: for each file, texts and their replacements: numbers of epochs and images, nothing else.
        environment: environment variables of the script.
        finals: pattern of the files of weights, one per rank, that the script leaves in the working directory; empty:
            it leaves none.
    """

    folders: tuple[Path, ...] = ()
    sizes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    finals: str = ""

    def write(self, folder: Path) -> None:
        """Make the working directory ``folder``."""
        folder.mkdir(parents=True)
        for each in self.folders:
            shutil.copytree(each, folder, dirs_exist_ok=True)
        for name, changes in self.sizes.items():
            text = (folder / name).read_text()
            for old, new in changes.items():
                assert text.count(old) == 1, (name, old)
                text = text.replace(old, new)
            (folder / name).write_text(text)


class SampleChaos(Chaos):
    """Faults of one training of a sample, in a separate working directory.

    Args:
        base, draw, tally: see :class:`Chaos`.
        exercise: a :class:`DocumentSample`.
    """

    kinds = KINDS
    paired = PAIRED

    def __init__(self, base: Path, exercise: Exercise, draw: random.Random, tally: Tally) -> None:
        assert isinstance(exercise, DocumentSample)
        self._sample = exercise
        exercise.write(base / "work")
        os.environ.update(exercise.environment)
        super().__init__(base, exercise, draw, tally)

    @property
    def cwd(self) -> Path:
        """The directory with the files of the sample."""
        return self.base / "work"

    def bits(self) -> str:
        """Return the digest of the final checkpoint and of the files of weights; empty if a rank wrote no file."""
        files = sorted(self.cwd.glob(self._sample.finals)) if self._sample.finals else []
        if self._sample.finals and len(files) != self.nproc:
            return ""
        total = xxhash.xxh3_128(super().bits().encode())
        for file in files:
            total.update(file.name.encode() + file.read_bytes())
        return total.hexdigest()


def mindspore(data: Path) -> dict[str, DocumentSample]:
    """Return the samples that MindSpore trains in a session. Write their data sets to ``data``."""
    from tests.frameworks.mindspore.seeds.data import write_cifar10, write_mnist

    cifar10, mnist = data / "cifar-10", data / "MNIST_Data"
    cifar10.mkdir(parents=True)
    write_cifar10(cifar10)
    write_mnist(mnist, MNIST_IMAGES)
    images = {"DATA_PATH": str(cifar10), "EXECUTE_PATH": "."}
    more = {"num_samples=128": "num_samples=640"}
    parallel, resumable, shards = (
        SEEDS / name for name in ("004_parallel", "003_resumable", "002_redundant_shards")
    )

    def sample(
        script: str,
        folders: tuple[Path, ...],
        sizes: Mapping[str, Mapping[str, str]],
        environment: Mapping[str, str],
        finals: str = "final-*.ckpt",
    ) -> DocumentSample:
        return DocumentSample(
            ("--framework", "mindspore", script), 3, results=False,
            folders=folders, sizes=sizes, environment=environment, finals=finals,
        )  # fmt: skip

    lenet, resnet = "lenet_distributed_training.py", "resnet50_distributed_training.py"
    return {
        "shards": sample(
            "parallel_save_ckpt_train.py", (shards,),
            {"parallel_save_ckpt_train.py": {"train(model, 2,": "train(model, 16,"}},
            {"DATASET_PATH": str(mnist / "train")}, finals="",
        ),
        "lenet": sample(
            lenet, (SEEDS / "001_graceful_exit", parallel),
            {lenet: {"train(model, 3,": "train(model, 10,"}}, {"DATASET_PATH": str(mnist)},
        ),
        "resnet": sample(resnet, (parallel,), {resnet: more | {"epoch_size=4": "epoch_size=8"}}, images),
        "resumable": sample(
            "train.py", (parallel, resumable), {resnet: more, "train.py": {"epoch_size=4": "epoch_size=8"}}, images
        ),
    }  # fmt: skip


def megatron(_data: Path) -> dict[str, DocumentSample]:
    """Return the jobs that use Megatron-core."""
    job, example = FRAMEWORKS / "faces" / "megatron_job.py", ROOT / "examples" / "megatron_gpt.py"
    commands = {
        "tensor": (str(job), "--mode", "tensor", "--steps", "240"),
        "zero": (str(job), "--mode", "zero", "--steps", "240"),
    }
    samples = {
        name: DocumentSample(command, 4, results=False, finals="rank-*.json")
        for name, command in commands.items()
    }
    return {**samples, "gpt": DocumentSample((str(example), "240"), 4, results=False, finals="")}


SAMPLES = {"mindspore": mindspore, "megatron": megatron}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(description="kills and stops over the samples of the documents")
    parser.add_argument("framework", choices=SAMPLES)
    parser.add_argument("--faults", type=int, default=125)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults-each", type=int, default=30, help="in one training")
    parser.add_argument("--sample", action="append", help="only this one; may be repeated")
    parser.add_argument("--run-dir", type=Path, default=Path("runs"))
    given = parser.parse_args(argv)
    base, started_s = given.run_dir.absolute() / time.strftime("samples-%Y%m%d-%H%M%S"), time.monotonic()
    samples = SAMPLES[given.framework](base / "data")
    chosen = {name: samples[name] for name in given.sample or samples}
    tally = chaos(base / "trainings", given.faults, given.seed, chosen, SampleChaos, given.faults_each)
    print("\n".join(tally.rows()))
    for failure in tally.failures:
        print(f"FAILED: {failure}")
    took_s = time.monotonic() - started_s
    struck = ", ".join(f"{kind} {number}" for kind, number in sorted(tally.struck.items()))
    print(f"{tally.faults} faults ({struck}) in {tally.runs} trainings, {took_s:.0f} s, logs in {base}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
