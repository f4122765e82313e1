"""The quantization settings that old programs write to a file of their own, beside config.json.

AutoGPTQ before 0.7 has quantize_config.json, and AutoAWQ before 0.2 has quant_config.json. The tensors of these AutoAWQ
versions have the layout of newer ones (`gemm`), and always zero points.

Source: awq/models/base.py, awq/models/_config.py and awq/modules/linear.py of AutoAWQ 0.0.1 to 0.1.8.
"""

from __future__ import annotations

import os

from .files import has_file, read_json_object
from .settings import Settings, quote


def read_older_quantization(folder: str) -> Settings | None:
    """The settings, with the keys of `quantization_config` in config.json. None without such a file.

    Raises ValueError for a file that is not a JSON object, and for settings that AutoAWQ does not write.
    """
    path = os.path.join(folder, "quantize_config.json")
    if has_file(path):
        found = read_json_object(path)
        return Settings(path, {**found, "quant_method": found.get("quant_method") or "gptq"})
    path = os.path.join(folder, "quant_config.json")
    return _of_autoawq(Settings(path, read_json_object(path))) if has_file(path) else None


def _of_autoawq(given: Settings) -> Settings:
    if given.get("quant_method"):  # AutoAWQ writes none
        return given
    bits, group_size = given.integer("w_bit"), given.get("q_group_size")
    if bits != 4:
        raise given.unsupported_value("w_bit", "4", bits)
    if group_size != -1:
        group_size = given.integer("q_group_size")
    if not given.flag("zero_point", True):
        raise given.unsupported_value("zero_point", "true", False)
    same = {key: given.get(key) for key in ("version", "modules_to_not_convert")}
    if rest := given.unused():
        raise given.unsupported(f"{quote(rest)} is not supported")
    return Settings(given.source, {"quant_method": "awq", "bits": bits, "group_size": group_size, **same})
