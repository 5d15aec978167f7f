"""Weights: which part belongs to a rank, other checkpoints' layouts turned into ours, and the orders that the kernels read."""

from moe_tk.weights.shard import from_checkpoint, shard_weights

__all__ = ["from_checkpoint", "shard_weights"]
