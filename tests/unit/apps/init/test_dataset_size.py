import struct

import numpy as np
import pytest

from ctxlm_ds.apps.init.dataset_size import num_rows
from ctxlm_ds.errors import ConfigError


def test_rows_of_a_dataset(tmp_path):
    lengths = np.array([90, 70], np.int32)
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 2)  # version, uint16, sequences, documents + 1
    arrays = (lengths, np.array([0, 180], np.int64), np.array([0, 2], np.int64))
    (tmp_path / "x.idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))
    assert num_rows(str(tmp_path / "x"), 32) == 5
    assert num_rows(str(tmp_path / "x"), 512) == 1


def test_a_missing_dataset_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such dataset"):
        num_rows(str(tmp_path / "x"), 32)
