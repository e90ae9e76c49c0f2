"""Host memory: whole pages, the heap of the C library, and the layout of weights in a slab."""
