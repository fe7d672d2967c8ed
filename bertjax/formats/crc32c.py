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
    crc, n = np.uint32(0xFFFFFFFF), len(data)
    for begin in range(0, n - 7, 8):
        before, crc = np.uint64(crc), np.uint32(0)
        for k in range(8):
            crc ^= _TABLES[7 - k, data[begin + k] ^ (before >> np.uint64(8 * k)) & np.uint64(255)]
    for i in range(n // 8 * 8, n):
        crc = _TABLES[0, (crc ^ data[i]) & np.uint32(255)] ^ (crc >> np.uint32(8))
    crc = np.uint32(crc ^ np.uint32(0xFFFFFFFF))
    rotated = np.uint32(crc >> np.uint32(15)) | np.uint32(crc << np.uint32(17))
    return np.uint64(np.uint32(rotated + np.uint32(0xA282EAD8)))


def masked_crc32c(data: bytes | np.ndarray) -> int:
    """The checksum, rotated and shifted (tensorflow/core/lib/hash/crc32c.h)."""
    return int(masked_crc32c_of_array(np.frombuffer(data, np.uint8)))
