"""Feed-forward layers: dense, and latent mixture of experts with packed MXFP4 weights."""
