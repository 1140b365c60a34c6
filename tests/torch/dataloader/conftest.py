"""Failures of the comparison with PyTorch are explained as those of tests are."""

import pytest

pytest.register_assert_rewrite("tests.torch.dataloader.parity")
