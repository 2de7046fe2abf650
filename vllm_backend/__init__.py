"""Where the model runs: vLLM, reached through its plugin hook, one runner mixin and one scheduler subclass."""
