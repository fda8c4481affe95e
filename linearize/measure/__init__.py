"""Quality: perplexity, fidelity, recall and generated text."""
