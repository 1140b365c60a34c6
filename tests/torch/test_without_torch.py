"""What the import says where PyTorch is not installed."""

import subprocess
import sys


def test_without_torch_the_import_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from penstock.errors import MissingExtraError\n"
        "try:\n    import penstock.torch\nexcept MissingExtraError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "penstock.torch needs PyTorch: pip install penstock[torch]"
