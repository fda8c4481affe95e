"""Speed: kernels beside their peers, and converted models beside their originals."""
