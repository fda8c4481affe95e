"""Choose the layers that keep softmax: `--keep-softmax auto:2`. Read choose.py first."""
