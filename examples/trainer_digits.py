"""The digits of digits.py under Hugging Face's Trainer: a callback of one line.

    gradsum launch --standalone --nproc-per-node 2 -- python examples/trainer_digits.py
    GRADSUM_COORDINATOR=10.0.0.1:7700 torchrun --nproc-per-node 2 examples/trainer_digits.py
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import torch
from digits import Data, accuracy_of, build_model
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import gradsum.torch


class Model(nn.Module):
    """What Trainer asks of a model: the loss among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model(seed=1)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.model(images), labels)}


class Attach(TrainerCallback):
    """Trainer has wrapped the model in DistributedDataParallel when training begins."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        gradsum.torch.attach(self.trainer.model_wrapped)


def main() -> None:
    torch.set_num_threads(1)
    data, model, attach = Data(), Model(), Attach()
    rows = [
        {"images": image, "labels": label}
        for image, label in zip(data.images, data.labels, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, per_device_train_batch_size=16, num_train_epochs=4,
            learning_rate=0.005, report_to=[], save_strategy="no", disable_tqdm=True,
            remove_unused_columns=False, logging_strategy="no",
        )  # fmt: skip
        attach.trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[attach])
        attach.trainer.train()
    gradsum.assert_in_sync(model)
    if attach.trainer.is_world_process_zero():
        print(json.dumps({"accuracy": accuracy_of(model.model, data)}), flush=True)


if __name__ == "__main__":
    main()
