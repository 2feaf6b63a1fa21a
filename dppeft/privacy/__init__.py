"""The plan, the accountants, sampling, noise, the ledger and the card. Knows nothing of models."""
