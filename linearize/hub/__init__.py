"""The Hugging Face Hub: downloads, pushes, and messages for its errors."""
