"""Which operations are a layer, and what stands between the layers."""
