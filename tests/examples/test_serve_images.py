"""The example with servers that augment images: the same batches as without, at a fraction of the processor time."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_same_images(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "serve_images.py"), "--batches", "4"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert "all 4 batches are the same" in ran.stdout
    local, remote = (
        float(each)
        for each in re.findall(r"^\| a [\w ]+\| +[\d.]+ \| +([\d.]+) \|$", ran.stdout, re.MULTILINE)
    )
    assert remote < local
