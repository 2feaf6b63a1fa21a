"""Two gloo processes: one draw, one sum, one noise, one ledger, equal bits everywhere."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dppeft
from dppeft.training.distributed import Processes, find_processes, refuse_wrapped
from tests.training import runs

WORKER = Path(__file__).with_name("two_processes.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    """What each of two processes saw, case by case. A hang ends after three minutes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-addr", "127.0.0.1", "--master-port", str(port), str(WORKER), str(folder)),
    ]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    group = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = group.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(group.pid, signal.SIGKILL)
        pytest.fail("Two processes did not end within three minutes.")
    assert group.returncode == 0, output[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def shared(seen: list[dict[str, Any]]) -> list[Any]:
    return [one["clipped_sums"] for one in seen]


def test_two_processes_sum_what_one_does(shared: list[Any]) -> None:
    rows = runs.token_rows(40)
    model = runs.adapted_bert()
    plan = runs.make_plan(40, batch_size=16, steps=5, max_grad_norm=0.5)
    run = dppeft.make_private(
        model, runs.sgd(model), rows, plan, physical_tokens=32, precision="float32", seed=3
    )
    for number, batch in enumerate(run.batches(), start=1):
        run.step(batch)
        for name, value in runs.values(model).items():
            torch.testing.assert_close(
                shared[0]["weights"][number][name], value, rtol=1e-5, atol=1e-5
            )


def test_ranks_are_equal_to_the_last_bit_after_every_step(shared: list[Any]) -> None:
    for one, other in zip(shared[0]["weights"], shared[1]["weights"], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_D3_ranks_use_disjoint_rows_that_make_up_the_draw(shared: list[Any]) -> None:
    assert shared[0]["draws"] == shared[1]["draws"]
    for draw, one, other in zip(
        shared[0]["draws"], shared[0]["used"], shared[1]["used"], strict=True
    ):
        assert not set(one) & set(other)
        assert sorted(one + other) == draw
        assert one
        assert other


def test_rgp_moves_full_matrices_as_one_process_does(seen: list[dict[str, Any]]) -> None:
    one, other = (part["rgp"]["weights"] for part in seen)
    assert all(torch.equal(one[name], other[name]) for name in one)
    model = runs.carried_bert()
    plan = runs.make_plan(24, batch_size=12, steps=3, noise_multiplier=0.5, max_grad_norm=0.5)
    run = dppeft.make_private(
        model, runs.sgd(model), runs.token_rows(24), plan, precision="float32", seed=5
    )
    for batch in run.batches():
        run.step(batch)
    for name, value in runs.full_matrices(model).items():
        torch.testing.assert_close(one[name], value, rtol=1e-3, atol=1e-4)


def test_D2_noise_enters_once(seen: list[Any]) -> None:
    seen = [one["noise"] for one in seen]
    assert torch.equal(seen[0]["noise"], seen[1]["noise"])
    assert float(seen[0]["noise"].std()) == pytest.approx(0.5, rel=0.02)  # sqrt(2) more: 0.71
    assert seen[0]["spent"] == seen[1]["spent"]


def test_D4_A15_a_rank_without_rows_takes_part(seen: list[Any], folder: Path) -> None:
    seen = [one["empty"] for one in seen]
    assert 0 in seen[0]["sizes"]
    assert seen[0]["sizes"] == seen[1]["sizes"]
    assert torch.equal(seen[0]["weight"], seen[1]["weight"])
    assert [one["ledger"] for one in seen] == [40, None]
    assert seen[0]["spent"] == seen[1]["spent"]
    assert seen[0]["spent"].steps == 40
    assert not list((folder / "state-1").rglob("*.jsonl"))


def test_a_run_of_two_processes_is_restored(seen: list[Any]) -> None:
    seen = [one["restored"] for one in seen]
    assert torch.equal(seen[0]["weight"], seen[1]["weight"])
    assert seen[0]["spent"].steps == seen[1]["spent"].steps == 4
    assert seen[0]["spent"].epsilon == pytest.approx(seen[1]["spent"].epsilon)


def test_D5_the_trainer_in_two_processes(seen: list[Any]) -> None:
    seen = [one["trainer"] for one in seen]
    for name, value in seen[0]["weights"].items():
        assert torch.equal(value, seen[1]["weights"][name])
    for one in seen:
        assert one["rates"] == pytest.approx([0.75, 0.5, 0.25, 0.0])
        assert one["spent"].steps == 4


def test_one_process_alone_needs_no_process_group() -> None:
    processes = find_processes(None, torch.device("cpu"))
    assert processes == Processes(rank=0, count=1, device=torch.device("cpu"))
    assert processes.object_from_main({"a": 1}) == {"a": 1}


@pytest.mark.parametrize("name", ["DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"])
def test_wrapped_models_are_refused(name: str) -> None:
    base = torch.nn.Linear(1, 1)
    model = torch.nn.DataParallel(base) if name == "DataParallel" else base
    model.__class__ = type(name, (type(model),), {})
    with pytest.raises(dppeft.DppeftError, match=f"wrapped in {name}.*Pass the plain model"):
        refuse_wrapped(model)
