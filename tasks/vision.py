"""Images under privacy: a residual network without batch statistics, and one way to train it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers.modeling_outputs import ImageClassifierOutput

import dppeft
from tasks.training import Fit, Progress, all_updates

Batch = dict[str, Tensor]


class Block(nn.Module):
    """Norm, activation, convolution, twice, beside an identity or a 1 x 1 convolution."""

    def __init__(self, channels: int, out: int, *, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels, affine=False)
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, out, affine=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.beside = (
            nn.Identity()
            if stride == 1 and channels == out
            else nn.Conv2d(channels, out, 1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) -> (B, out, H / stride, W / stride)."""
        inner = F.relu(self.norm1(x))
        y = self.conv2(F.relu(self.norm2(self.conv1(inner))))
        return y + self.beside(x if isinstance(self.beside, nn.Identity) else inner)


class WideResNet(nn.Module):
    """WRN-depth-width (Zagoruyko and Komodakis 2016) with group norms: one example at a time.

    Batch norm would mix the examples of a batch. Without affine parameters, without biases, as in
    Yu et al. (2021).
    """

    def __init__(
        self, *, depth: int, width: int, num_labels: int, channels: int = 3, groups: int = 4
    ) -> None:
        super().__init__()
        if (depth - 4) % 6:
            raise ValueError(f"depth={depth}; expected 6 n + 4, as in 10, 16 or 28.")
        sizes = [16, 16 * width, 32 * width, 64 * width]
        self.stem = nn.Conv2d(channels, sizes[0], 3, padding=1, bias=False)
        self.blocks = nn.ModuleList()
        for stage, (before, after) in enumerate(zip(sizes, sizes[1:], strict=False)):
            for number in range((depth - 4) // 6):
                stride = 2 if stage and not number else 1
                start = before if not number else after
                self.blocks.append(Block(start, after, stride=stride, groups=groups))
        self.norm = nn.GroupNorm(groups, sizes[-1], affine=False)
        self.classifier = nn.Linear(sizes[-1], num_labels, bias=False)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """Logits (B, num_labels) of images (B, channels, H, W)."""
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        logits = self.classifier(F.relu(self.norm(x)).mean((2, 3)))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


def losses(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy of each image, (B,)."""
    logits = model(pixel_values=batch["pixel_values"]).logits
    return F.cross_entropy(logits, batch["labels"], reduction="none")


class Images(TensorDataset):
    """Images (N, channels, H, W) and labels (N,), as rows by name."""

    def __getitem__(self, index: int) -> Batch:
        """One row."""
        pixels, label = super().__getitem__(index)
        return {"pixel_values": pixels, "labels": label}


def collate(rows: list[Batch]) -> Batch:
    """Images of one size, stacked."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@dataclass(frozen=True, kw_only=True)
class VisionRecipe:
    """SGD with momentum; the rate falls to 1/5, 1/25 and 1/125 at 30, 60 and 80 % of the steps."""

    lr: float
    momentum: float = 0.9
    weight_decay: float = 1e-4
    physical_batch_size: int = 250

    def make(
        self, parameters: list[nn.Parameter], steps: int
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """Optimizer and schedule."""
        optimizer = torch.optim.SGD(
            parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )
        milestones = [int(steps * share) for share in (0.3, 0.6, 0.8)]
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.2)


def fit(
    model: nn.Module,
    rows: Images,
    plan: Any,
    recipe: VisionRecipe,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Fit:
    """Train a wrapped model privately; ``options`` go to ``dppeft.make_private``."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, schedule = recipe.make(trained, plan.steps)
    run = dppeft.make_private(
        model.train(),
        optimizer,
        rows,
        plan,
        loss=losses,
        collate_fn=collate,
        physical_batch_size=recipe.physical_batch_size,
        **options,
    )
    return all_updates(run, schedule, progress)


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images whose largest logit is the label's."""
    model.eval()
    found = [model(pixel_values=part).logits.argmax(1) for part in images.split(500)]
    return float((torch.cat(found) == labels).float().mean())
