"""Installation: `pip install -e .`, or let scripts/quickstart.sh and scripts/test.sh do it in .venv.

Nothing here is compiled.  NVIDIA's apex, where it is wanted, has to be built from https://github.com/NVIDIA/apex: the
package named apex on PyPI is something else.
"""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).parent / "README.md"

# Further kinds of input: parquet, gzip and zstd; datasets of the hub; a tokenizer; sentences.
DATA = ["pyarrow", "datasets", "tiktoken", "nltk"]
TESTS = ["pytest>=8", "pytest-xdist>=3", "hypothesis"]
# CUDA builds of torch bring Triton; on CPUs it interprets the kernels in the tests, and compiles them for GPUs.
TRITON = "triton>=3.5; platform_system == 'Linux' and platform_machine == 'x86_64'"
# A server of the completions API, and the client that tests it.
SERVE = ["starlette>=0.40", "uvicorn>=0.30"]
# The documentation site: scripts/docs.sh.
DOCS = ["mkdocs-material>=9.6", "mkdocstrings[python]>=1"]

setup(
    name="megatron3d",
    version="0.1.0",
    description="GPT pretraining where a tensor-parallel mode is a table: 1-D, 2-D, 2.5-D, 3-D and grid",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=[*find_packages(include=["megatron3d", "megatron3d.*"]), "megatron3d.programs"],
    package_dir={"megatron3d.programs": "tools"},
    py_modules=["pretrain_gpt"],
    entry_points={"console_scripts": ["megatron3d = megatron3d.__main__:main"]},
    package_data={
        "megatron3d.hardware": ["*.yaml", "clusters/*.yaml"],
        "megatron3d.forecast.time": ["*.yaml"],
        "megatron3d.viz": ["templates/*.html"],
    },
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11,<2.16",
        "numpy",
        "pydantic>=2",
        "PyYAML",
        "rich",
        "filelock>=3.30",
        "jinja2>=3.1",
        "safetensors",
        "xxhash>=3",
        "sentencepiece>=0.2",
        "protobuf",
        "tokenizers",
        "matplotlib",
        "tensorboard",
    ],
    extras_require={
        "dev": [
            *TESTS,
            "ruff",
            "mypy",
            "types-PyYAML",
            "transformers>=5",
            "torchao>=0.17",
            TRITON,
            "wandb",
            *DATA,
            *DOCS,
            *SERVE,
            "openai",
        ],
        "data": DATA,
        "docs": DOCS,
        "serve": SERVE,
        "wandb": ["wandb"],
        "eval": ["lm_eval"],
    },
)
