"Without a GPU, Triton interprets kernels. It reads its switch when it is imported, so the switch is set before any test imports it."
import os

import torch

if not torch.cuda.is_available(): os.environ["TRITON_INTERPRET"] = "1"
