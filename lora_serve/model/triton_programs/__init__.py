"""GPU kernels in Triton, compiled where they run; without a GPU its interpreter runs them in tests."""
