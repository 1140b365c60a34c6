"""What an import says where the library that it is about is not installed."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("module", "library"), [("torch", "PyTorch"), ("jax", "JAX")])
def test_the_error_says_what_to_install(module: str, library: str) -> None:
    program = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from headrace.errors import MissingExtraError\n"
        f"try:\n    import headrace.{module}\nexcept MissingExtraError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    remedy = f"pip install 'headrace[{module}]', or pip install -e '.[{module}]' in a clone"
    assert done.stdout == f"headrace.{module} needs {library}: {remedy}\n"
