"""Commands of ``octavo`` for benchmarks and simulations."""
