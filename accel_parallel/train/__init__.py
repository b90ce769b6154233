"""What runs inside a launched process. torch, accelerate, transformers and datasets are imported here and nowhere else."""
