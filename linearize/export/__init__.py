"""Export: a converted model in the format of another runtime."""
