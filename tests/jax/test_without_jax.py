"""What the import says where JAX is not installed."""

import subprocess
import sys


def test_without_jax_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['jax'] = None\n"
        "from penstock.errors import MissingExtraError\n"
        "try:\n    import penstock.jax\nexcept MissingExtraError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "penstock.jax needs JAX: pip install penstock[jax]\n"
