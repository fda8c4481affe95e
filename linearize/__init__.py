"""linearize: replace softmax attention in pretrained Transformers by linear-time mechanisms."""

__version__ = "0.3.0"
