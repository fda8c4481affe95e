"""What runs in the clean process, where linearize is not installed."""
