"""CRC-32C (RFC 3720, appendix B.4) as TFRecords and TensorFlow's checkpoints store it."""

import numpy as np

from bertjax.formats.compiled import compiled


def _tables() -> np.ndarray:
    """uint32 [8, 256]: tables for eight bytes at a time, polynomial 0x82F63B78 (Castagnoli)."""
    tables = np.zeros((8, 256), np.uint32)
    tables[0] = np.arange(256)
    for _ in range(8):
        tables[0] = np.where(tables[0] & 1, (tables[0] >> 1) ^ np.uint32(0x82F63B78), tables[0] >> 1)
    for k in range(1, 8):
        tables[k] = (tables[k - 1] >> 8) ^ tables[0, tables[k - 1] & 0xFF]
    return tables


_TABLES = _tables()


@compiled
def masked_crc32c_of_array(data):
    """The masked checksum of uint8 [n], as uint64, for compiled callers."""
    crc = np.uint32(0xFFFFFFFF)
    n = len(data)
    i = 0
    while i + 8 <= n:
        low = crc ^ (
            np.uint32(data[i])
            | np.uint32(data[i + 1]) << np.uint32(8)
            | np.uint32(data[i + 2]) << np.uint32(16)
            | np.uint32(data[i + 3]) << np.uint32(24)
        )
        crc = (
            _TABLES[7, low & np.uint32(255)]
            ^ _TABLES[6, (low >> np.uint32(8)) & np.uint32(255)]
            ^ _TABLES[5, (low >> np.uint32(16)) & np.uint32(255)]
            ^ _TABLES[4, low >> np.uint32(24)]
            ^ _TABLES[3, data[i + 4]]
            ^ _TABLES[2, data[i + 5]]
            ^ _TABLES[1, data[i + 6]]
            ^ _TABLES[0, data[i + 7]]
        )
        i += 8
    while i < n:
        crc = _TABLES[0, (crc ^ np.uint32(data[i])) & np.uint32(255)] ^ (crc >> np.uint32(8))
        i += 1
    crc = np.uint32(crc ^ np.uint32(0xFFFFFFFF))
    rotated = np.uint32(crc >> np.uint32(15)) | np.uint32(crc << np.uint32(17))
    return np.uint64(np.uint32(rotated + np.uint32(0xA282EAD8)))


def masked_crc32c(data: bytes | np.ndarray) -> int:
    """The checksum, rotated and shifted (tensorflow/core/lib/hash/crc32c.h)."""
    return int(masked_crc32c_of_array(np.frombuffer(data, np.uint8)))
