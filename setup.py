"""The one thing that pyproject.toml cannot say: the compiled kernel, for any CPython from 3.11 on."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "headrace.rows._kernel",
            [
                "src/headrace/rows/" + name
                for name in ("kernel.c", "kernel_find.c", "kernel_order.c", "kernel_pack.c", "kernel_fill.c")
            ],
            depends=["src/headrace/rows/kernel.h", "src/headrace/rows/kernel_spaces.h"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            # Without a compiler the package still installs, and loads with NumPy: slower on short documents.
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
