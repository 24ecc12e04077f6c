"""Rounds a weight in blocks column by column; the columns not rounded yet make up for the error of each.

After E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
(arXiv 2210.17323): columns in their order, the range of a block chosen when its first column is reached.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from layerline.calib.scales import Stored, block_multiples, scale_parts, stored_scales, to_type, whole_scale

# Part of the mean power of an input that is added to the power of each: the paper's bound on the condition.
DAMPING = 0.01


def round_weight(rows: npt.NDArray[Any], moments: npt.NDArray[Any], block: int, dtype: str) -> Stored:
    """A weight on its steps, with its blocks along axis 1.

    Args:
        rows: the weight, (outputs, inputs).
        moments: sum or mean of x xᵀ over what the layer reads, (inputs, inputs), not all zeros.
        block: inputs that share a scale.
    """
    outputs, inputs = rows.shape
    # Corrections change the weights little, so the range of the whole is that of the weights as they come.
    whole = whole_scale(rows, dtype)
    power = np.diagonal(moments).astype(np.float64)
    damped = moments + np.diag(np.full(inputs, DAMPING * power.mean()))
    # Row k of the upper factor is that of the inverse over the columns from k on, over the root of its own element.
    upper = np.linalg.cholesky(np.linalg.inv(damped.astype(np.float64))).T
    work = rows.astype(np.float64)
    # Codes as float32: int4 and float4 have no arithmetic in numpy.
    codes = np.zeros(rows.shape, np.float32)
    multiples = np.zeros((outputs, inputs // block), np.float32)
    for start in range(0, inputs, block):
        end = start + block
        columns = work[:, start:end].astype(rows.dtype)
        multiples[:, start // block] = block_multiples(columns, whole, dtype, power[start:end])
        scales = stored_scales(multiples[:, start // block], whole, rows.dtype)
        errors = np.zeros((outputs, block))
        for k in range(start, end):
            codes[:, k] = to_type(work[:, k] / scales, dtype).astype(np.float32)
            errors[:, k - start] = (work[:, k] - codes[:, k] * scales) / upper[k, k]
            work[:, k + 1 : end] -= np.outer(errors[:, k - start], upper[k, k + 1 : end])
        # What lies behind the block is corrected once a block: one matrix product.
        work[:, end:] -= errors @ upper[start:end, end:]
    scales = stored_scales(multiples, whole, rows.dtype)
    return Stored(to_type(codes, dtype), scales, 1, block, scale_parts(multiples, whole, dtype))
