"""The stages of the ablation: what each one turns on, and a server that runs with only some of them."""
