"""Target models in torch over packed tokens, their loaders, tokenizers and the registry of names."""
