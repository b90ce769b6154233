"""One training loop for Hugging Face Accelerate; the parallelism is decided by generated YAML."""

__version__ = "0.1.0"
