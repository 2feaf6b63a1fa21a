"""Build result -> a fresh environment's view: the wheel, from another folder, without the sources.

python tests/check_wheel.py dist
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CODE = """
import dppeft, pathlib
assert pathlib.Path(dppeft.__file__).is_relative_to(pathlib.Path.cwd()), dppeft.__file__
for name in dppeft.__all__:
    getattr(dppeft, name)
plan = dppeft.plan(num_examples=1000, batch_size=100, steps=10, delta=1e-5, noise_multiplier=1.0)
print(f"wheel of dppeft {dppeft.__version__}: all names load, epsilon {plan.epsilon():.2f}")
"""


def main(folder: str) -> None:
    """Unpack the one wheel in ``folder`` elsewhere and use it there."""
    (wheel,) = Path(folder).glob("*.whl")
    with tempfile.TemporaryDirectory() as elsewhere:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            archive.extractall(elsewhere)
        strangers = {name.split("/")[0] for name in names if not name.startswith("dppeft")}
        assert not strangers, f"the wheel would install {sorted(strangers)} beside dppeft"
        assert "dppeft/py.typed" in names, "the wheel does not say that dppeft is typed"
        # The unpacked wheel first on the path, ahead of an editable install of the sources.
        env = {**os.environ, "PYTHONPATH": elsewhere}
        subprocess.run([sys.executable, "-c", CODE], cwd=elsewhere, env=env, check=True)
        command = [sys.executable, "-c", "from dppeft.cli import main; main()", "methods"]
        subprocess.run(command, cwd=elsewhere, env=env, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(sys.argv[1])
