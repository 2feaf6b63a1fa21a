"""Which small tensors train: parametrizations of a pretrained model. Knows nothing of privacy."""
