"""Plants faults that would break the guarantee, one by one, and shows what catches each.

    python -m tests.faults            # all: writes tests/faults.md
    python -m tests.faults divisor    # those whose name contains a word

Each fault is a small change of one file in a copy of the project. It counts as caught only if the
named tests pass without it and fail with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    right: str
    wrong: str
    tests: str  # a pytest node, or a file with -k


FAULTS = (
    Fault(
        "divides by the drawn batch size",
        "dppeft/training/step.py",
        "self._move(noisy, rates.expected_batch_size, scales)",
        "self._move(noisy, max(len(draw), 1), scales)",
        "tests/training/test_step.py -k B17",
    ),
    Fault(
        "noise on every physical batch",
        "dppeft/training/step.py",
        "                # Without the norms, which grow with the draw.",
        "                noisy = self.noise.add(part, noise_multiplier=1.0, step=draw.step)\n"
        "                total.grads.update(noisy)\n"
        "                part = replace(part, grads=total.grads)",
        "tests/training/test_step.py -k 'B16 or B18'",
    ),
    Fault(
        "noise of two thirds of its scale",
        "dppeft/privacy/noise.py",
        "std = noise_multiplier * clipped.l2_bound",
        "std = noise_multiplier * clipped.l2_bound * 2 / 3",
        "tests/privacy/test_noise.py -k B16",
    ),
    Fault(
        "noise variance in place of its standard deviation",
        "dppeft/privacy/noise.py",
        "std = noise_multiplier * clipped.l2_bound",
        "std = (noise_multiplier * clipped.l2_bound) ** 2",
        "tests/privacy/test_noise.py -k B16",
    ),
    Fault(
        "the same noise at every step",
        "dppeft/privacy/noise.py",
        "draw = _Normal(self._secret, step)",
        "draw = _Normal(self._secret, 0)",
        "tests/privacy/test_noise.py -k H2",
    ),
    Fault(
        "noise from torch's global generator",
        "dppeft/privacy/noise.py",
        "return torch.from_numpy(self._host.standard_normal(tuple(tensor.shape), np.float32))",
        "return torch.randn(tensor.shape)",
        "tests/privacy/test_noise.py -k H2",
    ),
    Fault(
        "a fixed-size draw in place of a Poisson one",
        "dppeft/privacy/sampling.py",
        "        drawn = generator.random(self._plan.num_examples)"
        " < self._plan.sample_rate_at(step)",
        "        rate, rows = self._plan.sample_rate_at(step), self._plan.num_examples\n"
        "        drawn = generator.permutation(rows) < round(rate * rows)",
        "tests/privacy/test_sampling.py",
    ),
    Fault(
        "the sampler's rate is not the accountant's",
        "dppeft/privacy/plan.py",
        "        return self.expected_batch_size_at(step) / self.num_examples",
        "        return 1.1 * self.expected_batch_size_at(step) / self.num_examples",
        "tests/privacy/test_sampling.py tests/privacy/test_plan.py",
    ),
    Fault(
        "epochs taken for steps",
        "dppeft/privacy/plan.py",
        "return math.ceil(exact * rows / batch)",
        "return math.ceil(exact)",
        "tests/privacy/test_plan.py -k A1",
    ),
    Fault(
        "the epoch length rounded in floating point",
        "dppeft/privacy/plan.py",
        "return math.ceil(exact * rows / batch)",
        "return int(float(exact) * int(1 / (batch / rows)))",
        "tests/privacy/test_plan.py -k A7",
    ),
    Fault(
        "the ledger is written after the update",
        "dppeft/training/step.py",
        "        self.record.release(draw.step, rates, total.l2_bound)"
        "  # on disk before anyone can use it\n"
        "        noisy = self.processes.from_main(noisy)  # released\n"
        "        self._move(noisy, rates.expected_batch_size, scales)  # released",
        "        noisy = self.processes.from_main(noisy)\n"
        "        self._move(noisy, rates.expected_batch_size, scales)\n"
        "        self.record.release(draw.step, rates, total.l2_bound)",
        "tests/training/test_step.py tests/training/test_run.py",
    ),
    Fault(
        "a step past the plan is made",
        "dppeft/training/run.py",
        "        return self._record.steps",
        "        return max(self._record.steps - 1, 0)",
        "tests/training/test_run.py -k A1",
    ),
    Fault(
        "a draw may be left out",
        "dppeft/training/run.py",
        "if self._pending is not None and number > 0:",
        "if False:",
        "tests/training/test_run.py",
    ),
    Fault(
        "empty draws are not released",
        "dppeft/training/step.py",
        "        total = self._clipped_sum(draw, scales)  # private",
        "        if len(draw) == 0:\n            return\n"
        "        total = self._clipped_sum(draw, scales)  # private",
        "tests/training/test_step.py -k A15",
    ),
    Fault(
        "gradients are scaled after their norms were taken",
        "dppeft/clipping/scaling.py",
        "return norms_by_chunks(self.instantiate, self.batch, self.scale.numel())",
        "return self.term.norms_sq()",
        "tests/optimizers/test_adam.py -k clipped_as_scaled",
    ),
    Fault(
        "the optimizer is told the noise of the sum, not of the mean",
        "dppeft/training/step.py",
        "self.optimizer.noise_std = sum_std / rates.expected_batch_size",
        "self.optimizer.noise_std = sum_std",
        "tests/optimizers/test_adam.py -k says_how_large",
    ),
    Fault(
        "a row's masks depend on what was read before it",
        "dppeft/text/masking.py",
        'f"{index}:{read}".encode()',
        'f"{self._reads.sum()}".encode()',
        "tests/test_masking.py",
    ),
    Fault(
        "the loss of many rates is mixed from below",
        "dppeft/privacy/_losses.py",
        "        lower = one_step(float(rates[above - 1]), noise, interval)",
        "        upper = lower = one_step(float(rates[above - 1]), noise, interval)",
        "tests/privacy/test_schedules.py tests/privacy/test_accounting.py",
    ),
    Fault(
        "infilling reads another place than the mask",
        "dppeft/infilling.py",
        "hidden[rows, batch[POSITION]]",
        "hidden[rows, 0 * batch[POSITION]]",
        "tests/test_infilling.py -k own_logits",
    ),
    Fault(
        "a row with fewer targets than another is averaged over those of the other",
        "dppeft/masked_tokens.py",
        "counts = (targets != IGNORED).sum(dim=1).clamp_min(1)",
        "counts = targets.shape[1]",
        "tests/test_masked_tokens.py",
    ),
    Fault(
        "gradients that are made to be measured get no margin for what cancels",
        "dppeft/clipping/terms.py",
        "return torch.where(norms_sq < _CANCELS * lengths.square(), covered, norms_sq)",
        "return norms_sq",
        "tests/clipping/test_attacks.py -k however_it_is_measured",
    ),
    Fault(
        "rows are dealt to processes by the lengths that each of them read",
        "dppeft/training/packing.py",
        "        drawn = indices.cpu().numpy()\n        return [drawn[rank",
        "        drawn = indices.cpu().numpy()\n"
        '        drawn = drawn[np.argsort(self.source.lengths(drawn), kind="stable")]\n'
        "        return [drawn[rank",
        "tests/training/test_packing.py -k D3",
    ),
    Fault(
        "each tensor is clipped to the whole bound",
        "dppeft/clipping/factors.py",
        "threshold = max_grad_norm / math.sqrt(len(norms_sq))",
        "threshold = max_grad_norm",
        "tests/clipping/test_factors.py",
    ),
    Fault(
        "the bound is stated as half of what it is",
        "dppeft/clipping/engine.py",
        "ClippedSum(grads=grads, norms=norms, l2_bound=bound, count=size, within=counts)",
        "ClippedSum(grads=grads, norms=norms, l2_bound=bound / 2, count=size, within=counts)",
        "tests/test_conformance.py -k 'removing and lora and bert'",
    ),
    Fault(
        "counts for an adaptive threshold are released outside the bound",
        "dppeft/training/thresholds.py",
        "        bound = joint_bound(total.l2_bound, scale, len(self.values))",
        "        bound = total.l2_bound",
        "tests/privacy/test_adaptive.py -k bound",
    ),
    Fault(
        "a tensor is left out of the norm",
        "dppeft/clipping/factors.py",
        "    norms = stacked.sum(0).sqrt()",
        "    norms = stacked[1:].sum(0).sqrt()",
        "tests/test_conformance.py -k 'equal_the_definition and lora and bert'",
    ),
    Fault(
        "norms of a shared parameter's uses taken apart",
        "dppeft/clipping/terms.py",
        "        return a + b + 2 * cross, lengths_a + lengths_b",
        "        return a + b, lengths_a + lengths_b",
        "tests/clipping/test_engine.py -k B5",
    ),
    Fault(
        "positions summed over the batch are given to the first row",
        "dppeft/clipping/capture.py",
        "            return self._expanded(args, kwargs) if unit.expands else None",
        "            return None",
        "tests/clipping/test_engine.py -k B2",
    ),
    Fault(
        "positions that only some rows reach are left out",
        "dppeft/clipping/rules.py",
        "reached = (grad.amax((0, 2)) != 0) | (grad.amin((0, 2)) != 0)",
        "reached = (grad != 0).any(dim=2).all(dim=0)",
        "tests/clipping/test_rules.py -k left_out",
    ),
    Fault(
        "a neighbour decides whether a bad row counts",
        "dppeft/clipping/rules.py",
        "    if not bool(torch.maximum(highest, -lowest) < _CANNOT_OVERFLOW):\n"
        "        return grad, x\n",
        "",
        "tests/clipping/test_rules.py -k neighbours",
    ),
    Fault(
        "matrices with one input share their norms, too",
        "dppeft/clipping/terms.py",
        "gram_products([t.left for t in group.values()], right)",
        "gram_products([next(iter(group.values())).left for _ in group], right)",
        "tests/clipping/test_rules.py -k share",
    ),
    Fault(
        "padding gets a gradient",
        "dppeft/clipping/rules.py",
        "    if layer.padding_idx is not None:",
        "    if False:",
        "tests/clipping/test_rules.py -k padding",
    ),
    Fault(
        "a row that is not finite is scaled by zero instead of removed",
        "dppeft/clipping/engine.py",
        "                if bool(broken.any()):",
        "                if False:",
        "tests/clipping/test_engine_edges.py -k not_finite",
    ),
    Fault(
        "uses outside the unit are not looked for",
        "dppeft/clipping/units.py",
        "                outside = (leftover & sums.keys()) | _differing(\n"
        "                    terms, sums, computes_exactly(self.model)\n                )",
        "                outside = set()",
        "tests/clipping/test_engine.py -k B13",
    ),
    Fault(
        "mixed examples are not looked for",
        "dppeft/clipping/units.py",
        "            self._refuse_mixed_rows(plan, three, trial)\n",
        "",
        "tests/clipping/test_engine_edges.py -k 'mixes or router'",
    ),
    Fault(
        "the user's own gradients enter the release",
        "dppeft/training/step.py",
        "        self.optimizer.zero_grad(set_to_none=True)\n        lifted",
        "        lifted",
        "tests/training/test_step.py -k A4",
    ),
    Fault(
        "RGP adds the overlap of its carriers, as its released code does",
        "dppeft/tuners/carriers.py",
        "        return left - basis @ (basis.T @ left)",
        "        return left + basis @ (basis.T @ left)",
        "tests/tuners/test_carriers.py -k 'tangent or noise'",
    ),
    Fault(
        "RGP's carriers stay what they were",
        "dppeft/training/step.py",
        "        self.lift.before_step(draw.step)  # from released weights alone\n",
        "",
        "tests/tuners/test_rgp.py -k recover",
    ),
    Fault(
        "RGP's carriers come from a random draw of each process",
        "dppeft/tuners/rgp.py",
        "generator=torch.Generator().manual_seed(seed)",
        "generator=torch.Generator().manual_seed(torch.seed() % 2**31)",
        "tests/tuners/test_rgp.py -k 'depend_on_the_rows'",
    ),
    Fault(
        "the optimizer moves RGP's carriers",
        "dppeft/training/run.py",
        "        lift.exchange(optimizer)  # after all that can be refused\n",
        "",
        "tests/tuners/test_rgp.py -k optimizer_moves",
    ),
    Fault(
        "Opacus counts a shared module once for each path to it",
        "dppeft/clipping/opacus.py",
        "        yield from dict.fromkeys(super().iterate_submodules(module))",
        "        yield from super().iterate_submodules(module)",
        "tests/test_conformance.py -k 'B11 and compacter-bert'",
    ),
    Fault(
        "the ledger's chain is not checked",
        "dppeft/privacy/ledger.py",
        '        right = record.get("hash") == _digest(body) and record.get("prev") == prev',
        "        right = True",
        "tests/privacy/test_ledger.py -k H1",
    ),
    Fault(
        "calibration may overshoot",
        "dppeft/privacy/accounting.py",
        "        if high_spent >= target * (1 - _WITHIN) or high / low - 1 < 1e-9:\n"
        "            return high",
        "        if high_spent >= target * (1 - _WITHIN) or high / low - 1 < 1e-9:\n"
        "            return low",
        "tests/privacy/test_calibration.py -k A11",
    ),
)


def _run(folder: Path, tests: str) -> bool:
    """Whether the named tests pass in this copy."""
    command = f"{sys.executable} -m pytest -q -x -p no:cacheprovider {tests}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    done = subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: tests failed; anything else is not a verdict
        raise RuntimeError(f"{tests}: pytest exits {done.returncode}\n{done.stdout[-2000:]}")
    return done.returncode == 0


def _plant(fault: Fault) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "project"
        ignored = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT, folder, ignore=ignored)
        if not _run(folder, fault.tests):
            return "the tests fail without it"
        path = folder / fault.file
        text = path.read_text()
        if text.count(fault.right) != 1:
            return f"its place was found {text.count(fault.right)} times"
        path.write_text(text.replace(fault.right, fault.wrong))
        return "SURVIVED" if _run(folder, fault.tests) else "caught"


def main() -> int:
    words = sys.argv[1:]
    chosen = [f for f in FAULTS if not words or any(word in f.name for word in words)]
    with ThreadPoolExecutor(2) as pool:
        verdicts = list(pool.map(_plant, chosen))
    rows = ["| fault | planted in | tests | verdict |", "|---|---|---|---|"]
    for fault, verdict in zip(chosen, verdicts, strict=True):
        rows.append(f"| {fault.name} | `{fault.file}` | `{fault.tests}` | {verdict} |")
        print(rows[-1])
    if not words:
        head = "# Faults planted on purpose\n\nMade by `python -m tests.faults`.\n\n"
        (ROOT / "tests" / "faults.md").write_text(head + "\n".join(rows) + "\n")
    return 0 if set(verdicts) == {"caught"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
