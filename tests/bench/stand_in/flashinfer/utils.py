"""The real one raises ValueError for a device that is not CUDA."""


def get_compute_capability(device):
    return 9, 0
