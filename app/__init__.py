"""The mlx-spec command and its terminal chat."""
