"""Training for long: several models at once (`crowd`), and the same steps as CUDA graphs and not (`alike`)."""
