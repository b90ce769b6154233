"""What runs inside a launched process: torch, accelerate, transformers and datasets are imported only here."""
