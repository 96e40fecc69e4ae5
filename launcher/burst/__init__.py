"""burst: train a LoRA adapter where it makes sense."""

__version__ = "0.1.0"
