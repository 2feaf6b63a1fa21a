"""Images: CIFAR-10 in its safe format, the network without batch statistics, one digits run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import dppeft
from tasks import cifar10, digits
from tasks.vision import Images, VisionRecipe, WideResNet, collate, losses
from tests import oracle


def write_cifar(folder: Path, rows: int = 12) -> Path:
    generator = np.random.default_rng(0)
    for name in (*cifar10.TRAINING, *cifar10.TEST):
        records = generator.integers(0, 256, (rows, cifar10.RECORD), dtype=np.uint8)
        records[:, 0] = np.arange(rows) % 10
        records.tofile(folder / name)
    return folder


def test_the_binary_version_is_read_as_it_is_written(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    images, labels = cifar10.read_binary(tmp_path, cifar10.TRAINING)
    assert images.shape == (60, 3, 32, 32)
    assert labels[:11].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    raw = np.fromfile(tmp_path / "data_batch_1.bin", dtype=np.uint8)
    assert float(images[0, 1, 0, 2]) == pytest.approx(raw[1 + 1024 + 2] / 127.5 - 1)
    assert float(images.min()) >= -1
    assert float(images.max()) <= 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected records of 3073"),
        (b"\x00" * 3000, "expected records of 3073"),
        (b"\x0b" + b"\x00" * 3072, "labels above 9"),
        (None, "the Python version is pickles"),
    ],
)
def test_other_files_are_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "test_batch.bin").write_bytes(content)
    with pytest.raises(dppeft.DppeftError, match=message):
        cifar10.read_binary(tmp_path, cifar10.TEST)


def test_cifar10_runs_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write_cifar(tmp_path)
    result = tmp_path / "result.json"
    command = ["--data", str(tmp_path), "--depth", "10", "--width", "1", "--steps", "1"]
    done = CliRunner().invoke(cifar10.app, [*command, "--epsilon", "50", "--result", str(result)])
    assert done.exit_code == 0, done.output
    assert "accuracy: " in done.output
    (row,) = json.loads(result.read_text())
    assert row["private_rows"] == 60
    assert CliRunner().invoke(cifar10.app, ["--data", str(tmp_path / "none")]).exit_code == 2


@pytest.mark.parametrize("method", ["rgp", "full"])
def test_the_network_is_exact(method: str) -> None:
    torch.manual_seed(0)
    model = dppeft.wrap(digits.network(), method)
    rows = Images(torch.randn(3, 1, 8, 8), torch.tensor([0, 1, 2]))
    batch = collate([rows[i] for i in range(3)])
    truth = oracle.per_example(
        model, [collate([rows[i]]) for i in range(3)], loss=lambda m, b: losses(m, b)
    )
    found = dppeft.per_example_grads(model, batch, loss=losses)
    assert oracle.worst_error(found, truth) < 1e-3


def test_depths_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="depth=12"):
        WideResNet(depth=12, width=1, num_labels=10)


def test_the_rate_falls_at_the_papers_shares() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer, schedule = VisionRecipe(lr=1.0).make([parameter], 100)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert [rates[i] for i in (29, 30, 59, 60, 79, 80)] == pytest.approx([
        1,
        0.2,
        0.2,
        0.04,
        0.04,
        0.008,
    ])


def test_digits_are_split_once_and_scaled_by_what_is_public() -> None:
    rows, images, labels = digits.digits()
    assert len(rows) == 1437
    assert len(images) == len(labels) == 360
    again = digits.digits()[1]
    assert torch.equal(images, again)
    assert -1 <= float(images.min()) <= float(images.max()) <= 1
