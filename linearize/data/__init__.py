"""Training data: documents and images, made into batches."""
