"""PyTorch's attention on its math path, which materializes the weights."""

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def scaled_dot_product_attention(query, key, value, mask=None):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, mask)
