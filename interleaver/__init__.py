"""How a block meets a running model: mediators, windows, hooks, values, and the backend for modules in this process."""
